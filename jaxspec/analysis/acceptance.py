"""The acceptance rate alpha = E[sum_x min(p(x), q(x))] of a pair, measured on text that the target
generates.

Not the share of draft tokens that a run of speculative decoding accepted: within a round, draft
tokens after the first rejection are never tested, so that share is too small. In `measure` every
position counts, and counts once. `conditional` is the rate of a run: of the draft tokens that were
tested, how many were accepted.

Shapes: B batch, P prompt, N new tokens, V vocabulary, G gamma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core, sampling
from jaxspec.analysis.statistics import Rate
from jaxspec.core import programs, token_rows
from jaxspec.core.token_rows import decoder_prompt
from jaxspec.decode import batches, loop
from jaxspec.decode.generate import complete
from jaxspec.decode.request import Prepared

BATCH = 16  # rows at a time


class Acceptance(NamedTuple):
    """The acceptance rate of a pair.

    >>> overlaps = np.array([[1.0, 0.5, 0.5, 1.0], [0.5, 0.5, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0]])
    >>> measured = Acceptance(overlaps, np.array([4, 2, 2]))
    >>> measured.alpha, round(measured.stderr, 3), measured.positions
    (0.6875, 0.072, 8)
    >>> (
    ...     [round(end, 3) for end in measured.interval],
    ...     [round(rate.value, 2) for rate in measured.by_position],
    ... )
    ([0.379, 0.996], [0.67, 0.67, 0.5, 1.0])
    """

    # sum_x min(p(x), q(x)) at each position of each text; 0 after its end
    overlaps: Float[np.ndarray, "rows N"]
    counts: Int[np.ndarray, " rows"]  # how many positions each row has

    @property
    def rate(self) -> Rate:
        """Alpha and its error: rows are independent, the positions of a row are not."""
        return Rate.of(self.overlaps.sum(axis=1), self.counts, probability=True)

    alpha = property(
        lambda self: self.rate.value, doc="The mean over all positions: 5.5 of 8 is 0.6875."
    )
    stderr = property(
        lambda self: self.rate.stderr,
        doc="Standard error of alpha, over prompts; NaN for a single row.",
    )
    interval = property(
        lambda self: self.rate.interval, doc="The 95% confidence interval of alpha, over prompts."
    )

    @property
    def by_position(self) -> list[Rate]:
        """Alpha at each position of the text, over the rows that reach it."""
        reached = [
            self.overlaps[self.counts > t, t] for t in range(int(self.counts.max(initial=0)))
        ]
        return [Rate.of(overlaps, np.ones(len(overlaps)), probability=True) for overlaps in reached]

    positions = property(
        lambda self: int(self.counts.sum()), doc="The number of measured positions, over all rows."
    )


class ConditionalAcceptance(NamedTuple):
    """The share of the tested draft tokens that was accepted; tested: those before were accepted,
    the text goes on.

    Nothing after a round's first rejection is tested, so only better rounds contribute later draft
    tokens.

    Two texts with two draft tokens a round. In the first 2 of 2 are accepted, then none; in the
    second the first of 2:

    >>> rates = ConditionalAcceptance(
    ...     accepted=np.array([[1, 1], [1, 0]]), tested=np.array([[2, 1], [1, 1]])
    ... )
    >>> rates.overall.value, [round(rate.value, 2) for rate in rates.by_draft_token]
    (0.6, [0.67, 0.5])
    """

    # how many were accepted, by row and place in the round [rows, gamma]
    accepted: Int[np.ndarray, "rows G"]
    tested: Int[np.ndarray, "rows G"]  # how many were tested

    @property
    def overall(self) -> Rate:
        """Accepted over tested; its interval is over prompts."""
        return Rate.of(self.accepted.sum(axis=1), self.tested.sum(axis=1), probability=True)

    @property
    def by_draft_token(self) -> list[Rate]:
        """The rates of a round's first draft token, of the second if the first was accepted, ...;
        NaN if untested.
        """
        places = zip(self.accepted.T, self.tested.T, strict=True)
        return [Rate.of(accepted, tested, probability=True) for accepted, tested in places]

    def first(self, rows: int) -> ConditionalAcceptance:
        """Takes only the first rows: later ones may repeat prompts, and intervals need independent
        texts.
        """
        return ConditionalAcceptance(self.accepted[:rows], self.tested[:rows])


class TargetText(NamedTuple):
    """The target's own text from some rows of a generation."""

    part: batches.Batch  # the rows
    tokens: Int[Array, "B N"]  # the new tokens, padded to the longest [batch, new]
    lengths: Int[np.ndarray, " B"]  # how many of them are real [batch]

    @property
    def real(self) -> Bool[np.ndarray, "B N"]:
        """True at tokens of the text, False at padding."""
        return np.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]


def measure(
    prepared: Prepared, *, batch: int = BATCH, advance: Callable[[int], object] = lambda rows: None
) -> Acceptance:
    """Measures alpha over every position of the text that the target, decoding plainly, generates.

    The text is then fed to both models, one teacher-forced pass each, and distributions are made of
    both models' logits as the decoder makes them. At temperature 0 both are point masses: alpha is
    the share of positions where the drafter's argmax is the target's. The position of an end token
    counts, those after it do not.

    Args:
        prepared: a generation with a target and a draft model. Its rows are the unit of the
            standard error; its gamma and policy are not read. With a rule of lenience l < 1 the
            rate is E[sum_x min(p(x) / l, q(x))]. Greedily it is then the share of positions where
            the drafter's likeliest token has p(x) >= l max(p), with p at temperature 1 (Table 5 of
            the paper, appendix A.5).
        batch: rows at a time; all batches share one compiled program. The result does not depend on
            it.
        advance: called with the number of rows done, for a progress bar.

    Raises:
        TypeError: the drafter is not a Model. Others have a distribution only where they drafted.
        ValueError: batch < 1.

    Example:
        >>> import jax
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(temperature=1.0, key=jax.random.key(0), max_new_tokens=8)
        >>> (
        ...     round(measure(prepared.replace(drafter=prepared.target)).alpha, 5),
        ...     measure(prepared).positions,
        ... )
        (1.0, 16)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Corollary 3.6 and section
    4.2.
    """
    overlaps = []
    counts = []
    for text in texts(prepared, batch):
        overlap = _overlaps(text) * text.real  # a batch is as wide as its longest text
        padding = (0, int(np.max(prepared.request.max_new_tokens)) - overlap.shape[1])
        overlaps.append(np.pad(overlap, ((0, 0), padding))[: text.part.real])
        counts.append(text.lengths[: text.part.real])
        advance(text.part.real)
    return Acceptance(np.concatenate(overlaps), np.concatenate(counts))


def texts(prepared: Prepared, batch: int = BATCH) -> Iterator[TargetText]:
    """Yields the text that the target, decoding plainly, generates from a generation's prompts, in
    equal batches.
    """
    drafting_model(prepared)
    for group in batches.in_batches(prepared, batch):
        out = complete(group.prepared.plain())
        yield TargetText(group, jnp.asarray(out.tokens), out.lengths)


def _overlaps(text: TargetText) -> Float[np.ndarray, "B N"]:
    """Computes sum_x min(p(x), q(x)) at every position of a text; entries past its end have no
    meaning.
    """
    rule = text.part.prepared.options.rule
    prepared = text.part.prepared
    log_lenience = jnp.log(jnp.float32(1.0 if rule.lenience is None else rule.lenience))
    lms = prepared.target.lm, drafting_model(prepared).lm
    traced = prepared.weights, prepared.request, prepared.prompt, text.tokens, log_lenience
    return np.asarray(_overlap(*lms, prepared.sampler, *traced), np.float64)


@programs.jit(static_argnames=("target", "draft", "sampler"))
def _overlap(
    target: core.LanguageModel,
    draft: core.LanguageModel,
    sampler: core.Sampler,
    weights: core.Weights,
    request: core.Request,
    prompt: core.Prompt,
    tokens: Int[Array, "B N"],
    log_lenience: Float[Array, ""],
) -> Float[Array, "B N"]:
    """Computes sum_x min(p(x) / l, q(x)) of the two distributions of each new token; 0 or 1 if
    greedy.
    """
    preceding = preceding_tokens(target, prompt, tokens)
    draft_params = request.draft_sampling_params
    if draft_params is None:
        draft_params = request.sampling_params
    draft_logits = sampling.match_vocab(
        teacher_forced(draft, weights.draft, prompt, tokens), target.vocab_size
    )
    # [B, N, V]
    p = sampler(
        request.sampling_params, teacher_forced(target, weights.target, prompt, tokens), preceding
    )
    q = sampler(draft_params, draft_logits, preceding)
    if p.log_probs is None or q.log_probs is None:  # greedy: point masses
        assert p.logits is not None and q.tokens is not None
        drafted = jnp.take_along_axis(p.logits, q.tokens[..., None], axis=-1)[..., 0]
        is_near = drafted >= jnp.max(p.logits, axis=-1) + log_lenience
        return jnp.where(log_lenience < 0, is_near, p.tokens == q.tokens).astype(jnp.float32)
    return jnp.minimum(
        jnp.sum(jnp.exp(jnp.minimum(p.log_probs - log_lenience, q.log_probs)), axis=-1), 1.0
    )


def preceding_tokens(
    target: core.LanguageModel, prompt: core.Prompt, tokens: Int[Array, "B N"]
) -> core.Preceding:
    """Returns the tokens before each new token of a text, for a sampler."""
    row = decoder_prompt(target, prompt)
    new = tokens.shape[1]
    # Position t of the text sees the new tokens before it: a strictly lower triangle [1, N, N - 1].
    return core.Preceding(row, row.length, tokens[:, :-1], jnp.tri(new, new - 1, -1, bool)[None])


def drafting_model(prepared: Prepared) -> core.Model:
    """Returns the model that a generation was given as its drafter."""
    drafter = prepared.options.drafter
    if isinstance(drafter, core.Model) and prepared.drafter is not None:
        return prepared.drafter.models[0]  # which may share the target's encoder
    if isinstance(drafter, core.BoundDrafter):
        described = "no model"
    else:
        described = f"of type {type(drafter).__name__}"
    raise TypeError(
        f"drafter is {described}: expected a jaxspec.Model, whose distribution is known"
    )


def conditional(*traces: loop.Trace) -> ConditionalAcceptance:
    """Counts the draft tokens of a run that were tested, and of these the accepted ones, by their
    place in the round.

    Accepted over drafted (`Stats.acceptance_rate`) is less, since it counts draft tokens after a
    rejection as well. At gamma = 1 this estimates alpha; beyond, it differs from alpha where right
    draft tokens cluster. Of rules that judge a round's draft tokens together it shows how far
    rounds get.

    Args:
        *traces: `Generation.trace` of one run or several, of chains, all with one gamma; their rows
            are put one after the other.

    Example:
        >>> import jax
        >>> from jaxspec.testing import prepared_table
        >>> out = complete(
        ...     prepared_table(gamma=3, max_new_tokens=20, temperature=1.0, key=jax.random.key(0))
        ... )
        >>> rates = conditional(out.trace)
        >>> int(rates.accepted.sum()) == int(out.stats.accepted.sum()), len(rates.by_draft_token)
        (True, 3)

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, Algorithm 1.
    """
    accepted = []
    tested = []
    for trace in traces:
        slot = np.arange(trace.draft.shape[2])
        committed = np.asarray(trace.num_committed)
        # A round commits its accepted tokens and one more, unless it is cut: tokens after its end
        # are not text. Counts are [rows, rounds].
        for rows, counts in ((accepted, trace.num_accepted), (tested, trace.num_tested)):
            rows.append((slot < np.minimum(np.asarray(counts), committed)[..., None]).sum(axis=1))
    return ConditionalAcceptance(np.concatenate(accepted), np.concatenate(tested))


def teacher_forced(
    lm: core.LanguageModel, params: core.Params, prompt: core.Prompt, tokens: Int[Array, "B N"]
) -> Float[Array, "B N V"]:
    """Computes the logits of each new token, given the prompt and the tokens before it: prefill,
    then one pass.
    """
    # ids that a drafter lacks read as its last one
    last_id = jnp.asarray(lm.vocab_size - 1, tokens.dtype)
    prompt = prompt._replace(tokens=jnp.minimum(prompt.tokens, last_id))
    tokens = jnp.minimum(tokens, last_id)
    first, cache = lm.prefill(params, prompt, token_rows.reading_room(lm, prompt, tokens.shape[1]))
    if tokens.shape[1] == 1:
        return first.logits
    later, _ = lm.extend(params, cache, tokens[:, :-1])
    return jnp.concatenate([first.logits, later.logits], axis=1)
