"""Which gamma to take, what it promises, and when not to speculate: theory with a pair's own numbers in it.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.5.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec import accept
from jaxspec.analysis import cost, replay, theory
from jaxspec.analysis.roofline import load_of
from jaxspec.base import Model, Prompt
from jaxspec.decode import request
from jaxspec.drafters.ngram import NGramConfig
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import int8

# Gammas whose verify pass is timed: those over 2, 3, 4, 5, 6, 8, 12, 16, ... tokens, where v has its steps. It is taken
# to be linear between them.
PROBES = (1, 2, 3, 4, 5, 7, 11, 15, 23, 31, 47, 63)


class Plan(NamedTuple):
    """What to do at one batch size.

    Attributes:
        batch: rows.
        gamma: the best number of guesses a round; 0 says not to speculate.
        tokens_per_round: expected; 1 at gamma 0.
        improvement: speed over plain decoding.
        operations: arithmetic operations over those of plain decoding.
        alpha, c: as in `theory`.
        v: the verify pass, at gamma or, if that is 0, at gamma = 1.
        break_even: the alpha above which speculation would pay.
        obstacles: why not, if gamma is 0: as in `theory.obstacles`, or "clustered guesses" where measured tokens per
            round fall short of Equation 1.
    """

    batch: int
    gamma: int
    tokens_per_round: float
    improvement: float
    operations: float
    alpha: float
    c: float
    v: float
    break_even: float
    obstacles: tuple[str, ...]


def plan(
    alpha: float,
    c: float,
    v: Sequence[float] | np.ndarray,
    *,
    c_hat: float | None = None,
    batch: int = 1,
    tokens: Sequence[float] | np.ndarray | None = None,
) -> Plan:
    """The best gamma and what it promises.

    Args:
        alpha, c: as in `theory`.
        v: v(gamma) at index gamma; the gammas that are tried end with it.
        c_hat: operations of the drafter over the target's; c unless told.
        batch: rows, for the record.
        tokens: measured tokens per round at index gamma, which need no independence; Equation 1 unless given.

    Raises:
        ValueError: a number out of range, or `tokens` and `v` of different lengths.

    Example, then a machine with no compute to spare:
        >>> found = plan(0.75, 0.02, [1.0] * 17)
        >>> found.gamma, round(found.improvement, 2), round(found.operations, 2)
        (9, 3.2, 2.7)
        >>> plan(0.75, 0.02, [1 + gamma for gamma in range(17)]).obstacles
        ('no spare compute',)
    """
    costs, gammas = np.array(v, np.float64), np.arange(len(v))
    if tokens is not None and len(tokens) != len(costs):
        raise ValueError(f"got tokens per round for {len(tokens)} gammas and v for {len(costs)}: expected as many")
    expected = theory.expected_tokens(alpha, gammas) if tokens is None else np.array(tokens, np.float64)
    costs[0] = expected[0] = 1.0
    obstacles: tuple[str, ...] = ()
    speed = expected / (gammas * c + costs)
    gamma = int(np.argmax(speed >= speed.max() * (1 - theory.TIE)))
    if gamma == 0:
        obstacles = theory.obstacles(alpha, c, costs) or ("clustered guesses",)
    work = (gamma * (c if c_hat is None else c_hat) + gamma + 1) / expected[gamma]
    numbers = (float(expected[gamma]), float(speed[gamma]), float(work), float(alpha), float(c))
    verify = float(costs[gamma or min(1, len(costs) - 1)])
    return Plan(batch, gamma, *numbers, verify, theory.break_even(c, costs), obstacles)


def of_pair(
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    temperature: float,
    key: Any,
    batches: Sequence[int] = (1,),
    most: int = 16,
    max_new_tokens: int = 64,
    repeats: int = cost.REPEATS,
    advance: Callable[[str], object] = lambda doing: None,
) -> Iterator[Plan]:
    """Plans for a pair of models, from what is measured on prompts.

    Tokens per round are those of replaying the rejection rule along the target's own texts (`replay`), for each gamma;
    c and v are timed at each batch size, v at some gammas.

    Args:
        target, drafter: two models with one vocabulary.
        prompts: text or token ids; taken in turn where a batch needs more.
        temperature, key, max_new_tokens: as in `jaxspec.generate`.
        batches: batch sizes.
        most: the largest gamma to consider.
        repeats: of each timing.
        advance: called with what was done, `steps` times.

    Raises:
        TypeError, ValueError: as `cost.measure`; or most < 1.

    Example:
        >>> import jax
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = Prompt(jax.numpy.array([[3, 1], [2, 0]]), jax.numpy.array([2, 1]))
        >>> options = dict(temperature=0.0, key=None, most=1, max_new_tokens=8, repeats=1)
        >>> [found.alpha for found in of_pair(model, model, prompt, **options)]
        [1.0]
    """
    if most < 1:
        raise ValueError(f"most is {most}: expected at least 1 guess a round")
    prompt = request.encode(target, prompts)
    options: dict[str, Any] = dict(temperature=temperature, key=key, max_new_tokens=max_new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        store = replay.record(Path(folder) / "store", target, drafter, prompt, **options)
        alpha, tokens = replay.evaluate(store, accept.rejection(), gamma=1).alpha.value, tokens_by_gamma(store, most)
    advance("alpha")
    ratio = operations_ratio(target, drafter)
    for batch in batches:
        rows = np.arange(batch) % len(prompt.length)
        group = prompt._replace(tokens=prompt.tokens[rows], length=prompt.length[rows])

        def timed(gamma: int, batch: int = batch) -> None:
            advance(f"batch {batch}, passes of gamma {gamma}")

        timing: dict[str, Any] = dict(repeats=repeats, max_new_tokens=max_new_tokens, advance=timed)
        timing["sampled"] = temperature > 0
        c, v = costs(target, drafter, group, most, **timing)
        advance(f"batch {batch}")
        yield plan(min(alpha, 1.0), c, v, c_hat=ratio, batch=batch, tokens=tokens)


def tokens_by_gamma(store: replay.Store, most: int) -> list[float]:
    """Tokens per round of the rejection rule at gamma = 0, 1, ..., most, replayed along the texts of a store."""
    found = (replay.evaluate(store, accept.rejection(), gamma=gamma) for gamma in range(1, most + 1))
    return [1.0, *(one.tokens_per_round.value for one in found)]


def costs(
    target: Model,
    drafter: Model,
    prompt: Prompt,
    most: int,
    *,
    repeats: int,
    max_new_tokens: int,
    sampled: bool = False,
    advance: Callable[[int], object] = lambda gamma: None,
) -> tuple[float, np.ndarray]:
    """c, and v(gamma) at index gamma = 0, 1, ..., most; timed at `probes(most)`, and linear between them.

    Args:
        target, drafter: two models with one vocabulary.
        prompt: the batch that passes are timed on.
        most: the largest gamma.
        repeats, max_new_tokens, sampled: as in `cost.measure`.
        advance: called with each gamma when its pass is compiled; timing follows.
    """
    options: dict[str, Any] = dict(repeats=repeats, max_new_tokens=max_new_tokens, sampled=sampled)
    found = cost.measure_all(target, drafter, prompt, gammas=probes(most), advance=advance, **options)
    return found[0].c, between({one.gamma: one.v for one in found}, most)


def between(v: dict[int, float], most: int) -> np.ndarray:
    """v(gamma) at index gamma = 0, 1, ..., most: as it was timed at some gammas, linear between them.

    >>> between({1: 1.5, 3: 2.0}, 4).tolist()
    [1.0, 1.5, 1.75, 2.0, 2.0]
    """
    timed = sorted(v)
    return np.interp(np.arange(most + 1), [0, *timed], [1.0, *(v[gamma] for gamma in timed)])


def probes(most: int) -> tuple[int, ...]:
    """Gammas at which v is timed, up to `most`.

    >>> probes(9)
    (1, 2, 3, 4, 5, 7, 9)
    """
    return (*(gamma for gamma in PROBES if gamma < most), most)


def steps(batches: Sequence[int], most: int) -> int:
    """How often `of_pair` calls `advance`."""
    return 1 + len(batches) * (len(probes(most)) + 1)


def sentence(found: Plan) -> str:
    """What a plan comes to, in plain words.

    >>> sentence(plan(0.75, 0.02, [1.0] * 17))
    'Take γ = 9: a round yields 3.77 tokens in the time of 1.18 passes, 3.20 times the speed of plain decoding.'
    >>> print(sentence(plan(0.75, 0.02, [1 + gamma for gamma in range(17)])))
    Do not speculate: no compute is idle (to check one guess, a pass takes 2.00 times as long). No α pays.
    """
    if found.gamma:
        cost = found.gamma * found.c + found.v
        return (
            f"Take γ = {found.gamma}: a round yields {found.tokens_per_round:.2f} tokens in the time of {cost:.2f} "
            f"passes, {found.improvement:.2f} times the speed of plain decoding."
        )
    words = {
        "low alpha": f"guesses are right too rarely (α = {found.alpha:.2f})",
        "expensive draft": f"the drafter takes too long (c = {found.c:.2f})",
        "no spare compute": f"no compute is idle (to check one guess, a pass takes {found.v:.2f} times as long)",
        "clustered guesses": f"right guesses cluster, so that rounds yield less than α = {found.alpha:.2f} promises",
    }
    said = f"Do not speculate: {'; '.join(words[name] for name in found.obstacles)}."
    if "clustered guesses" in found.obstacles:
        return said
    return f"{said} It would pay from α = {found.break_even:.2f} on." if found.break_even < 1 else f"{said} No α pays."


def operations_ratio(target: Model, drafter: Model) -> float:
    """Operations per token of the drafter over the target's (c_hat of Theorem 3.11), by their weights."""
    return _weights(drafter) / _weights(target)


def _weights(model: Model) -> float:
    """How many weights each token is multiplied with."""
    if isinstance(model.config, NGramConfig):
        return 0.0  # look-ups
    if isinstance(model.config, T5Config | GPTConfig | DecoderConfig):
        return load_of(model.config).parameters
    return int8.count(model.params)
