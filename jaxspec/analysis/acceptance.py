"""The acceptance rate alpha = E[sum_x min(p(x), q(x))] of a pair, measured on text that the target generates.

Not the share of guesses that a run of speculative decoding accepted: within a round, guesses after the first
rejection never get their trial, so that share is censored. Here every position counts, and counts once.

Shapes: B batch, P prompt, N new tokens, V vocabulary.
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
from jaxspec.base import LanguageModel, Model, Params, Prefix, Prompt, Warp
from jaxspec.decode import generate, request, rounds
from jaxspec.decode.warping import Warping, plan


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """The acceptance rate of a pair.

    Attributes:
        sums: sum over each row's positions of sum_x min(p(x), q(x)) [rows].
        counts: how many positions each row has [rows].

    >>> measured = Acceptance(np.array([3.0, 1.0]), np.array([4, 2]))
    >>> round(measured.alpha, 3), round(measured.stderr, 3), measured.positions
    (0.667, 0.111, 6)
    """

    sums: np.ndarray
    counts: np.ndarray

    @property
    def alpha(self) -> float:
        """The mean over all positions: 4 of 6 is 0.667."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def stderr(self) -> float:
        """Standard error of alpha as a ratio of row totals: rows are independent, positions in one are not.

        NaN for a single row, which says nothing about the spread between rows.
        """
        rows = len(self.sums)
        if rows < 2:
            return float("nan")
        off = self.sums - self.alpha * self.counts
        return float(np.sqrt(rows / (rows - 1) * np.square(off).sum()) / self.counts.sum())

    @property
    def positions(self) -> int:
        """Positions measured, over all rows."""
        return int(self.counts.sum())


class Group(NamedTuple):
    """A batch of prompts, the rows of the whole that they are, and how many are not there just to fill it."""

    prompt: Prompt
    rows: np.ndarray
    real: int


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
    if not isinstance(drafter, Model):
        kind = type(drafter).__name__
        raise TypeError(f"drafter is a {kind}: expected a jaxspec.Model, whose law is known")
    prompt = request.encode(target, prompts)
    options: dict[str, Any] = dict(max_new_tokens=max_new_tokens, **warping)
    request.prepare(target, prompt, drafter=drafter, gamma=1, key=key, **options)  # checks that the two belong together
    keys = None if key is None else noise.row_keys(key, len(prompt.length))
    warp, *controls = plan(target, len(prompt.length), **warping)
    sums, counts = [], []
    for group in in_batches(prompt, batch):
        own = None if keys is None else keys[group.rows]
        text = generate(target, group.prompt, key=own, **options)
        tokens = jnp.asarray(text.tokens[:, :max_new_tokens])
        own_controls = jax.tree.map(lambda x, rows=group.rows: x[rows], tuple(controls))
        parties = (target.lm, drafter.lm, warp, target.params, drafter.params)
        shared = np.asarray(overlap(*parties, own_controls, group.prompt, tokens), np.float64)
        real = np.arange(tokens.shape[1])[None, :] < text.lengths[:, None]
        sums.append((shared * real).sum(axis=1)[: group.real])
        counts.append(text.lengths[: group.real])
        advance(group.real)
    return Acceptance(np.concatenate(sums), np.concatenate(counts))


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
