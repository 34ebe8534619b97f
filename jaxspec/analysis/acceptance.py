"""The acceptance rate alpha = E[sum_x min(p(x), q(x))] of a pair, measured on text that the target generates.

Not the share of guesses that a run of speculative decoding accepted: within a round, guesses after the first
rejection never get their trial, so that share is censored. In `measure` every position counts, and counts once.
`censored` is the other rate, by its name: of the guesses of a run that had a trial, how many were kept.

Shapes: B batch, P prompt, N new tokens, V vocabulary, G gamma.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import buffers, noise
from jaxspec import warp as warps
from jaxspec.analysis.estimate import Ratio
from jaxspec.base import LanguageModel, Model, Params, Prefix, Prompt, Warp
from jaxspec.decode import generate, loop, request, rounds
from jaxspec.decode.warping import Warping, plan


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The acceptance rate of a pair.

    Attributes:
        overlaps: sum_x min(p(x), q(x)) at each position of each row's text [rows, new]; what is behind its end is 0.
        counts: how many positions each row has [rows].

    >>> overlaps = np.array([[1.0, 0.5, 0.5, 1.0], [0.5, 0.5, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0]])
    >>> measured = Acceptance(overlaps, np.array([4, 2, 2]))
    >>> measured.alpha, round(measured.stderr, 3), measured.positions
    (0.6875, 0.072, 8)
    >>> [round(end, 3) for end in measured.interval], [round(each.value, 2) for each in measured.by_position]
    ([0.379, 0.996], [0.67, 0.67, 0.5, 1.0])
    """

    overlaps: Float[np.ndarray, "rows N"]
    counts: Int[np.ndarray, " rows"]

    @property
    def sums(self) -> Float[np.ndarray, " rows"]:
        """The overlaps of each row together."""
        return self.overlaps.sum(axis=1)

    @property
    def rate(self) -> Ratio:
        """Alpha and its error: rows are independent, positions in one are not."""
        return Ratio(self.sums, self.counts, probability=True)

    @property
    def alpha(self) -> float:
        """The mean over all positions: 5.5 of 8 is 0.6875."""
        return self.rate.value

    @property
    def stderr(self) -> float:
        """Standard error of alpha, over prompts; NaN for a single row."""
        return self.rate.stderr

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of alpha, over prompts; NaN for a single row."""
        return self.rate.interval

    @property
    def by_position(self) -> list[Ratio]:
        """Alpha at each position of the text, over the rows that reach it."""
        reached = [self.overlaps[self.counts > t, t] for t in range(int(self.counts.max(initial=0)))]
        return [Ratio(some, np.ones(len(some)), probability=True) for some in reached]

    @property
    def positions(self) -> int:
        """Positions measured, over all rows."""
        return int(self.counts.sum())

    def to_dict(self) -> dict[str, float | None]:
        """For JSON: alpha, its error and interval (None where a single row does not say), and how many positions.

        >>> Acceptance(np.array([[1.0, 0.5]]), np.array([2])).to_dict()
        {'alpha': 0.75, 'stderr': None, 'low': None, 'high': None, 'positions': 2}
        """
        rate = self.rate.to_dict()
        return {"alpha": rate.pop("value"), **rate, "positions": self.positions}


@dataclasses.dataclass(frozen=True)
class Censored:
    """How often guesses were kept that had a trial: those before them in their round were kept, and no text had ended.

    Nothing follows a round's first rejection, so of the later guesses only those of the better rounds are here.

    Attributes:
        kept: how many were kept, by row and place in the round [rows, gamma].
        tried: how many had a trial.

    Two texts with two guesses a round. The first keeps 2 of 2, then none; the second keeps the first of 2:

    >>> found = Censored(kept=np.array([[1, 1], [1, 0]]), tried=np.array([[2, 1], [1, 1]]))
    >>> found.overall.value, [round(each.value, 2) for each in found.by_guess]
    (0.6, [0.67, 0.5])
    """

    kept: Int[np.ndarray, "rows G"]
    tried: Int[np.ndarray, "rows G"]

    @property
    def overall(self) -> Ratio:
        """Kept over tried; its interval is over prompts."""
        return Ratio(self.kept.sum(axis=1), self.tried.sum(axis=1), probability=True)

    @property
    def by_guess(self) -> list[Ratio]:
        """How often the first guess of a round is kept, the second if the first was, and so on; NaN if never tried."""
        return [Ratio(kept, tried, probability=True) for kept, tried in zip(self.kept.T, self.tried.T, strict=True)]

    def first(self, rows: int) -> Censored:
        """Of the first rows alone: those behind may be of the same prompts, and intervals want independent texts."""
        return Censored(self.kept[:rows], self.tried[:rows])


class Group(NamedTuple):
    """A batch of prompts, the rows of the whole that they are, and how many are not there just to fill it."""

    prompt: Prompt
    rows: np.ndarray
    real: int


class Text(NamedTuple):
    """What the target says to a group of prompts.

    Attributes:
        group: the prompts.
        tokens: the new tokens, padded to the limit [batch, new].
        lengths: how many of them are real [batch].
        warp, controls: what makes laws of logits; of the target's and of the drafter's own, for these rows.
    """

    group: Group
    tokens: Int[Array, "B N"]
    lengths: Int[np.ndarray, " B"]
    warp: Warp
    controls: tuple[warps.Controls, warps.Controls | None]


def measure(
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    max_new_tokens: int = 64,
    key: Any = None,
    batch: int = 16,
    advance: Callable[[int], object] = lambda rows: None,
    **warping: Unpack[Warping],
) -> Acceptance:
    """Measures alpha over every position of the text that the target, decoding plainly, generates.

    The text is then fed to both models, one teacher-forced pass each, and both are warped as the decoder does
    it. At temperature 0 both laws are point masses: alpha is the share of positions where the drafter's
    argmax is the target's. The position of an end token counts, those behind it do not.

    Args:
        target, drafter: two models with one vocabulary.
        prompts: text, or token ids [rows, prompt]; rows are the unit of the standard error.
        max_new_tokens: most tokens to generate per row.
        key: as in `jaxspec.generate`.
        batch: rows at a time; all batches share one compiled program. The result does not depend on it.
        advance: called with the number of rows done, for a progress bar.
        **warping: as in `jaxspec.generate`; one value for all rows.

    Raises:
        TypeError: the drafter is no Model: others have no law at positions where they were not asked.
        ValueError: as `jaxspec.generate`; or batch < 1.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> options = dict(temperature=1.0, key=jax.random.key(0), max_new_tokens=8)
        >>> round(measure(target, target, prompt, **options).alpha, 5)
        1.0
        >>> measure(target, draft, prompt).positions
        128

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Corollary 3.6 and section 4.2.
    """
    overlaps, counts = [], []
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, key=key, batch=batch)
    for text in texts(target, drafter, prompts, **options, **warping):
        parties = (target.lm, drafter.lm, text.warp, target.params, drafter.params)
        shared = np.asarray(overlap(*parties, text.controls, text.group.prompt, text.tokens), np.float64)
        real = np.arange(shared.shape[1])[None, :] < text.lengths[:, None]
        room = (0, max_new_tokens - shared.shape[1])  # a batch is as wide as its longest text
        overlaps.append(np.pad(shared * real, ((0, 0), room))[: text.group.real])
        counts.append(text.lengths[: text.group.real])
        advance(text.group.real)
    return Acceptance(np.concatenate(overlaps), np.concatenate(counts))


def censored(*traces: loop.Trace) -> Censored:
    """What became of the guesses of a run that had a trial, in the order of their rounds.

    Accepted over drafted (`Stats.acceptance_rate`) is less, since it counts guesses behind a rejection as well. At
    gamma = 1 this estimates alpha; beyond, it differs from alpha where right guesses cluster. Of rules that judge
    a round's guesses together it says how far rounds get.

    Args:
        *traces: `Generation.trace` of one run or several, all with one gamma; their rows are put one after the other.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> options = dict(gamma=3, max_new_tokens=20, temperature=1.0, key=jax.random.key(0))
        >>> out = generate(target, prompt, drafter=draft, **options)
        >>> found = censored(out.trace)
        >>> int(found.kept.sum()) == int(out.stats.accepted.sum()), len(found.by_guess)
        (True, 3)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Algorithm 1: the guesses before n + 1 are kept.
    """
    kept, tried = [], []
    for trace in traces:
        place = np.arange(trace.draft.shape[2])
        length, accepted, emitted = (np.asarray(x)[..., None] for x in trace[1:])
        # A round emits what was kept and one token more, unless it is cut: what is behind its end is not text.
        kept.append((place < np.minimum(accepted, emitted)).sum(axis=1))
        tried.append((place < np.minimum(length, emitted)).sum(axis=1))
    return Censored(np.concatenate(kept), np.concatenate(tried))


def texts(
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    max_new_tokens: int,
    key: Any,
    batch: int,
    **warping: Unpack[Warping],
) -> Iterator[Text]:
    """What the target, decoding plainly, says to the prompts, in batches of one shape.

    Args:
        target, drafter: two models with one vocabulary.
        prompts: text, or token ids.
        max_new_tokens, key: as in `jaxspec.generate`.
        batch: rows at a time.
        **warping: as in `jaxspec.generate`; one value for all rows.

    Raises:
        TypeError, ValueError: as `measure`.
    """
    if not isinstance(drafter, Model):
        kind = type(drafter).__name__
        raise TypeError(f"drafter is a {kind}: expected a jaxspec.Model, whose law is known")
    prompt = request.encode(target, prompts)
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, **warping)
    request.prepare(target, prompt, drafter=drafter, gamma=1, key=key, **options)  # checks that the two belong together
    keys = None if key is None else noise.row_keys(key, len(prompt.length))
    warp, *controls = plan(target, len(prompt.length), **warping)
    for group in in_batches(prompt, batch):
        own = None if keys is None else keys[group.rows]
        text = generate(target, group.prompt, key=own, **options)
        rows = jax.tree.map(lambda x, rows=group.rows: x[rows], tuple(controls))
        yield Text(group, jnp.asarray(text.tokens[:, :max_new_tokens]), text.lengths, warp, rows)


@functools.partial(jax.jit, static_argnames=("target", "drafter", "warp"))
def overlap(
    target: LanguageModel,
    drafter: LanguageModel,
    warp: Warp,
    params: Params,
    draft_params: Params,
    controls: tuple[warps.Controls, warps.Controls | None],
    prompt: Prompt,
    tokens: Int[Array, "B N"],
) -> Float[Array, "B N"]:
    """sum_x min(p(x), q(x)) of the two laws of each new token, given those before it; 0 or 1 if greedy."""
    row, new = rounds.first_row(target, prompt), tokens.shape[1]
    prefix = Prefix(row, row.length, tokens[:, :-1], jnp.tri(new, new - 1, -1, bool))
    own = controls[0] if controls[1] is None else controls[1]
    p = warp(controls[0], teacher_forced(target, params, prompt, tokens), prefix)
    q = warp(own, warps.fit(teacher_forced(drafter, draft_params, prompt, tokens), target.vocab_size), prefix)
    if p.log_probs is None or q.log_probs is None:
        return (p.tokens == q.tokens).astype(jnp.float32)
    return jnp.minimum(jnp.sum(jnp.exp(jnp.minimum(p.log_probs, q.log_probs)), axis=-1), 1.0)


def teacher_forced(
    lm: LanguageModel, params: Params, prompt: Prompt, tokens: Int[Array, "B N"]
) -> Float[Array, "B N V"]:
    """Logits of each new token, given the prompt and the tokens before it: prefill, then one pass."""
    known = jnp.asarray(lm.vocab_size - 1, tokens.dtype)  # ids that a drafter lacks read as its last one
    prompt, tokens = prompt._replace(tokens=jnp.minimum(prompt.tokens, known)), jnp.minimum(tokens, known)
    first, cache = lm.prefill(params, prompt, buffers.row_width(lm, prompt) + tokens.shape[1])
    if tokens.shape[1] == 1:
        return first.logits
    rest, _ = lm.extend(params, cache, tokens[:, :-1])
    return jnp.concatenate([first.logits, rest.logits], axis=1)


def in_batches(prompt: Prompt, batch: int) -> Iterator[Group]:
    """Rows in batches of one shape; a last one that is short is filled with copies of the last row.

    >>> [group.rows.tolist() for group in in_batches(Prompt(jnp.ones((5, 3), int), jnp.ones(5, int)), 2)]
    [[0, 1], [2, 3], [4, 4]]
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: expected at least 1")
    total = len(prompt.length)
    batch = min(batch, total)
    for start in range(0, total, batch):
        rows = np.minimum(np.arange(start, start + batch), total - 1)
        yield Group(jax.tree.map(lambda x, rows=rows: x[rows], prompt), rows, min(batch, total - start))
