"""What passes cost, in one-token passes of the target: c is the drafter's one-token pass, v the verify pass.

Shapes: B batch, T step.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import buffers, noise
from jaxspec.base import Cache, Keys, LanguageModel, Model, Params, Prompt
from jaxspec.decode import loop, request
from jaxspec.decode.request import Job
from jaxspec.decode.verify import widths

REPEATS = 25  # of what passes cost: plans and policies are no better than these numbers
TRIED = 4  # passes, to learn how long one takes
LASTING = 0.03  # seconds of each: the shorter, the more alike is the machine's other work for those that are compared


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds per pass, one entry per repeat; the three were measured in turn.

    Attributes:
        gamma, batch: the verify pass feeds gamma + 1 tokens to each of `batch` rows.
        target: one-token passes of the target.
        verify: (gamma + 1)-token passes of the target.
        draft: one-token passes of the drafter.

    >>> cost = Cost(4, 1, np.array([10.0, 12.0]), verify=np.array([12.0, 14.4]), draft=np.array([1.0, 1.2]))
    >>> cost.target_ms, round(cost.c, 2), round(cost.v, 2)
    (11.0, 0.1, 1.2)
    """

    gamma: int
    batch: int
    target: np.ndarray
    verify: np.ndarray
    draft: np.ndarray

    @property
    def target_ms(self) -> float:
        """Median of a one-token pass of the target."""
        return float(np.median(self.target))

    @property
    def verify_ms(self) -> float:
        """Median of the verify pass."""
        return float(np.median(self.verify))

    @property
    def draft_ms(self) -> float:
        """Median of a one-token pass of the drafter."""
        return float(np.median(self.draft))

    @property
    def c_each(self) -> np.ndarray:
        """draft / target, repeat by repeat (neighbours in time share the load): 1.2 / 12 is 0.1."""
        return self.draft / self.target

    @property
    def v_each(self) -> np.ndarray:
        """verify / target, repeat by repeat: 14.4 / 12 is 1.2."""
        return self.verify / self.target

    @property
    def c(self) -> float:
        """Median of `c_each`."""
        return float(np.median(self.c_each))

    @property
    def v(self) -> float:
        """Median of `v_each`."""
        return float(np.median(self.v_each))


def measure(
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    gamma: int,
    repeats: int = REPEATS,
    inner: int | None = None,
    max_new_tokens: int = 64,
    sampled: bool = False,
) -> Cost:
    """Measures c and v on the device, at the batch of the prompts, at the length that prefill leaves.

    Each figure is the time of one jitted loop of `inner` passes, divided by `inner`: nothing is dispatched
    between passes, the cache is carried in place as in decoding, and each pass feeds the argmax of the last,
    as greedy decoding does, or a draw. Compiled and warmed up first; the loops take turns, and short ones, so that
    what else the machine does falls on all of them alike.

    Args:
        target, drafter: two models with one vocabulary.
        prompts: text, or token ids [batch, prompt].
        gamma: guesses a round.
        repeats: measurements of each pass, of which the medians count.
        inner: passes per measurement; as many as take some 30 ms unless told.
        max_new_tokens: sizes the caches, as in `jaxspec.generate`: a pass reads all of its cache.
        sampled: whether each pass also draws a token, as decoding does above temperature 0: noise for a whole
            vocabulary is a good part of a small drafter's pass.

    Raises:
        TypeError: the drafter is no Model.
        ValueError: as `jaxspec.generate`; or repeats or inner < 1.

    Example:
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> cost = measure(model, model, prompt, gamma=4, repeats=2, inner=3)
        >>> cost.batch, cost.c > 0, len(cost.verify)
        (1, True, 2)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Definition 3.7.
    """
    options: dict[str, Any] = dict(inner=inner, max_new_tokens=max_new_tokens, sampled=sampled)
    (found,) = measure_all(target, drafter, prompts, gammas=(gamma,), repeats=repeats, **options)
    return found


def measure_all(
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    gammas: Sequence[int],
    repeats: int = REPEATS,
    inner: int | None = None,
    max_new_tokens: int = 64,
    sampled: bool = False,
    advance: Callable[[int], object] = lambda gamma: None,
) -> list[Cost]:
    """As `measure`, for several gammas, whose passes all take turns: they are compared with each other.

    Args:
        target, drafter, prompts, repeats, inner, max_new_tokens, sampled: as in `measure`; there is one cache, for the
            largest gamma.
        gammas: guesses a round.
        advance: called with each gamma when its pass is compiled, which takes longest; timing follows.

    Returns:
        A Cost for each gamma, in their order; those of one-token passes are the same in all of them.

    Raises:
        TypeError, ValueError: as `measure`.

    Example:
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> [cost.gamma for cost in measure_all(model, model, prompt, gammas=(1, 3), repeats=2, inner=3)]
        [1, 3]

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Definition 3.7.
    """
    if repeats < 1 or (inner is not None and inner < 1):
        raise ValueError(f"repeats is {repeats} and inner is {inner}: expected at least 1 of each")
    if not isinstance(drafter, Model):
        raise TypeError(f"drafter is a {type(drafter).__name__}: expected a jaxspec.Model, which has passes")
    if not gammas:
        return []
    if min(gammas) < 0:
        raise ValueError(f"gamma is {min(gammas)}: expected 0 or more guesses a round")
    greedy: dict[str, Any] = dict(accept=None, temperature=0.0, top_k=None, top_p=None, key=None, eos_ids=None)
    prompt = request.encode(target, prompts)
    job = request.prepare(target, prompt, drafter=drafter, gamma=1, max_new_tokens=max_new_tokens, **greedy)
    room = buffers.room(job.max_new_tokens, max(gammas))
    big, small = (looping(model, prompt, room, inner, sampled) for model in (target, drafter))
    loops = [big(1), small(1)]
    for gamma in gammas:
        loops.append(big(gamma + 1))
        advance(gamma)
    seconds = take_turns([loop.call for loop in loops], repeats)
    one, draft, *verify = seconds / np.array([[loop.passes] for loop in loops]) * 1e3
    return [Cost(gamma, len(prompt.length), one, each, draft) for gamma, each in zip(gammas, verify, strict=True)]


def verify_costs(
    target: Model, prompts: Sequence[str] | str | Prompt, *, gamma: int, repeats: int = REPEATS, **options: Any
) -> np.ndarray:
    """What judging 0, 1, .. gamma guesses costs, in one-token passes [gamma + 1]: `policies.estimated` takes it as v.

    Measured at the widths that a policy's passes have (`decode.verify.widths`), and never falling.

    Args:
        target, prompts: as `measure`.
        gamma: most guesses.
        repeats, options: as `measure`.

    Example:
        >>> from jaxspec.testing import table_model
        >>> prompt = Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> v = verify_costs(table_model(jax.random.key(1), vocab=5), prompt, gamma=4, repeats=2, inner=3)
        >>> v.shape, float(v[0]), bool(v[2] == v[3])
        ((5,), 1.0, True)
    """
    found = measure_all(target, target, prompts, gammas=judged(gamma), repeats=repeats, **options)
    return stepped(gamma, {one.gamma: one.v for one in found})


def judged(gamma: int) -> tuple[int, ...]:
    """How many guesses the passes of a policy can judge that makes `gamma` at most, but for none (`decode.verify`).

    >>> judged(7), judged(5)
    ((1, 3, 7), (1, 3, 5))
    """
    return tuple(width - 1 for width in widths(gamma, chosen=True, abstains=False)[1:])


def stepped(gamma: int, v: dict[int, float]) -> np.ndarray:
    """What judging 0, 1, .. gamma guesses costs a policy, in one-token passes [gamma + 1]: never falling.

    Args:
        gamma: most guesses.
        v: the cost of the pass that judges n guesses, for each n of `judged(gamma)`.

    >>> stepped(5, {1: 1.25, 3: 1.5, 5: 1.4}).tolist(), stepped(1, {1: 0.9}).tolist(), stepped(0, {}).tolist()
    ([1.0, 1.25, 1.5, 1.5, 1.5, 1.5], [1.0, 1.0], [1.0])
    """
    guesses = judged(gamma)
    costs = np.maximum.accumulate([1.0, *(v[n] for n in guesses)])  # noise makes some pass cheaper than a shorter one
    return costs[np.searchsorted((0, *guesses), np.arange(gamma + 1))]


def take_turns(calls: Sequence[Callable[[], object]], repeats: int) -> np.ndarray:
    """Seconds of each call [calls, repeats], in turn: a, b, c, a, b, c, ...; each waits for its result."""
    seconds = np.zeros((len(calls), repeats))
    for repeat in range(repeats):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            seconds[index, repeat] = time.perf_counter() - start
    return seconds


def decode_in_turn(ways: Sequence[Sequence[Job]], repeats: int) -> np.ndarray:
    """Seconds of several ways to decode [ways, repeats], each of whole generations, as many as the others have.

    The ways take turns generation by generation: a stretch in which the machine is busy falls on all of them alike.
    """
    calls = [functools.partial(run_all, (job,)) for group in zip(*ways, strict=True) for job in group]
    return take_turns(calls, repeats).reshape(len(ways[0]), len(ways), repeats).sum(axis=0)


def run_all(jobs: Iterable[Job]) -> None:
    """Whole generations, one after the other, left on the device: what is timed."""
    for job in jobs:
        loop.run(*job).tokens.block_until_ready()


def start_all(jobs: Iterable[Job]) -> None:
    """Of each, prefill and the first token, left on the device."""
    for job in jobs:
        loop.start(*job).tokens.block_until_ready()


@functools.partial(jax.jit, static_argnames=("lm",), donate_argnames=("cache",))
def passes(
    lm: LanguageModel,
    params: Params,
    cache: Cache,
    length: Int[Array, " B"],
    tokens: Int[Array, "B T"],
    inner: Int[Array, ""],
    keys: Keys | None = None,
) -> tuple[Int[Array, "B T"], Cache]:
    """`inner` passes over T tokens, each at `length`: extend, argmax of all logits, rewind.

    With keys, one per row, the argmax is of the laws plus the noise of one position: what a draw takes, or a rule that
    looks at T laws and draws one token. The number of passes is traced, so that to the compiler, too, this is a loop.
    The cache given is consumed.
    """

    def one(index, carry):
        tokens, cache = carry
        forward, cache = lm.extend(params, cache, tokens)
        values = forward.logits
        if keys is not None:
            here = noise.at(keys, jnp.full_like(length, index), noise.Purpose.TOKEN)
            values = jax.nn.log_softmax(values) + noise.gumbel(here, lm.vocab_size)[:, None]
        return noise.first_largest(values), lm.rewind(cache, length)

    return jax.lax.fori_loop(0, inner, one, (tokens, lm.rewind(cache, length)))


class Loop(NamedTuple):
    """A call that makes so many passes, and waits for them."""

    call: Callable[[], None]
    passes: int


def looping(model: Model, prompt: Prompt, room: int, inner: int | None, sampled: bool) -> Callable[[int], Loop]:
    """Of a number of tokens, the Loop of passes over so many; all of them share a cache, and are warm.

    Args:
        model, prompt, room: what reads, and how much there is to read.
        inner: passes of a loop; as many as take `LASTING` seconds if None.
        sampled: as in `measure`.
    """
    lm = model.lm
    forward, cache = _prefill(lm, model.params, prompt, buffers.row_width(lm, prompt) + room)
    length = prompt.length if lm.start_token is None else jnp.ones_like(prompt.length)
    first = jnp.argmax(forward.logits, axis=-1).astype(jnp.int32)
    keys = noise.row_keys(jax.random.key(0), len(prompt.length)) if sampled else None

    def over(step: int) -> Loop:
        tokens = jnp.repeat(first, step, axis=1)

        def call(count: int) -> None:
            nonlocal cache
            last, cache = passes(lm, model.params, cache, length, tokens, jnp.asarray(count, jnp.int32), keys)
            last.block_until_ready()

        call(inner or TRIED)  # compiles
        count = inner or _lasting(functools.partial(call, TRIED))
        return Loop(functools.partial(call, count), count)

    return over


def _lasting(call: Callable[[], object]) -> int:
    """How many passes take `LASTING` seconds, of a call that makes `TRIED` of them."""
    each = float(np.median(take_turns([call], 3))) / TRIED
    return int(np.clip(round(LASTING / each), 1, 1000))


@functools.partial(jax.jit, static_argnames=("lm", "capacity"))
def _prefill(lm: LanguageModel, params: Params, prompt: Prompt, capacity: int):
    return lm.prefill(params, prompt, capacity)
