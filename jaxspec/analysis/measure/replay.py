"""Offline replay: p and q along the target's texts; then any rule, gamma and temperature, without models.

Let a round begin somewhere in a text x1 x2 ... of the target's. Only the text's own prefixes have known distributions,
and for an exact rule that is enough:

    P(at least k draft tokens are accepted | the text) = S_k(x)
                                                      = P(the draft begins x1..xk, and these are accepted) / p(x1..xk).

For the tokens of a round, continued by plain sampling, have the distribution p. They begin x1..xk in one of two ways:
these are accepted draft tokens, or a token of the target's own is among them; given the text, the first has the
probability S_k. It falls as k grows, and is the product of `Rule.acceptance_ratio` over the prefix: of min(1, q / p)
for the rejection rule. Under the block rule it is the least so far of the products of q / p. So the number of rounds
that a text takes is a Markov chain whose mean is computed, not sampled (`analysis.theory.text_rounds`).

The text of an inexact rule is not the target's. S_k (which may exceed 1) still is the importance weight whose mean
over the target's texts is the probability that a round which begins there accepts k draft tokens, but where the next
one begins is not known. The same holds at another temperature than the text's, where S_k is multiplied by the ratio of
the two distributions of x1..xk: such weights grow with gamma and with the distance, and the standard error with them.

Shapes: N positions of all texts in a row, V vocabulary, G gamma.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, appendix A.1 (the rejection rule).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import programs, sampling
from jaxspec.analysis.measure import acceptance, batching
from jaxspec.analysis.measure.statistics import Ratio
from jaxspec.analysis.theory import divergence, text_rounds
from jaxspec.core import AcceptanceRatio, Distribution, Draft, LanguageModel, Params, Prompt, Rule, noise
from jaxspec.decode.request import Prepared

CHUNK = 256  # positions at a time


class LogitTrace(NamedTuple):
    """The logits of a pair along texts of the target's, one text after the other.

    Attributes:
        temperature: of the texts.
        counts: how many tokens each text has [rows].
        tokens: the texts.
        target, draft: float32 logits of each of their tokens, given those before it, memory-mapped.
    """

    temperature: float
    counts: Int[np.ndarray, " rows"]
    tokens: Int[np.ndarray, " N"]
    target: Float[np.ndarray, "N V"]
    draft: Float[np.ndarray, "N V"]

    def first(self, rows: int) -> LogitTrace:
        """The first texts, or all if there are no more than `rows`."""
        counts = self.counts[:rows]
        here = slice(int(counts.sum()))
        return LogitTrace(self.temperature, counts, self.tokens[here], self.target[here], self.draft[here])


class Evaluation(NamedTuple):
    """What decoding with a rule would yield along the texts.

    Attributes:
        rule, gamma, temperature: what was asked for.
        own_text: whether the texts are what decoding with this rule generates: it is exact, and the temperature theirs.
        alpha: probability that a round's first draft token is accepted, over all positions.
        accepted: draft tokens that a round accepts and emits if it is as likely to begin at any position but a text's
            first.
        tokens_per_round: as `Stats.tokens_per_round` over all rows; with texts that are not its own, 1 + accepted.
    """

    rule: str
    gamma: int
    temperature: float
    own_text: bool
    alpha: Ratio
    accepted: Ratio
    tokens_per_round: Ratio


def collect(
    prepared: Prepared, *, batch: int = acceptance.BATCH, advance: Callable[[int], object] = lambda rows: None
) -> LogitTrace:
    """Generates plainly from the target and feeds the texts to both models: 8 V bytes a position, in temporary files.

    Args:
        prepared: of a target and a model that drafts; its rows are the unit of the standard errors. Of its options the
            temperature alone shapes the texts. Texts at 0 serve temperature 0 only, so collect some for each that
            matters.
        batch: rows at a time.
        advance: called with the number of rows done, for a progress bar.

    Raises:
        TypeError: the drafter is no Model.
        ValueError: other sampling options than one temperature; batch < 1.

    Example:
        >>> from jaxspec import rules
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(temperature=1.0, key=jax.random.key(0), max_new_tokens=20)
        >>> trace = collect(prepared.replace(drafter=prepared.target))
        >>> evaluate(trace, rules.rejection(), gamma=3).tokens_per_round.value  # 19 tokens in 5 rounds
        3.8
    """
    temperature, models = _temperature(prepared), (prepared.target, batching.drafting_model(prepared))
    texts = list(acceptance.texts(prepared, batch))
    counts = np.concatenate([text.lengths[: text.part.real] for text in texts])
    words = prepared.target.tokenizer
    shape = (int(counts.sum()), prepared.target.lm.vocab_size if words is None else len(words))
    sides = [_scratch(shape) for _ in models]
    tokens, at = np.zeros(shape[0], np.int32), 0
    for text in texts:
        real, prompt = text.real, text.part.prepared.prompt
        real[text.part.real :] = False
        rows = slice(at, at := at + int(real.sum()))
        tokens[rows] = np.asarray(text.tokens)[real]
        for side, model in zip(sides, models, strict=True):
            side[rows] = np.asarray(_logits(model.lm, shape[1], model.params, prompt, text.tokens))[real]
        advance(text.part.real)
    return LogitTrace(temperature, counts, tokens, *sides)


def _scratch(shape: tuple[int, ...]) -> Float[np.ndarray, "N V"]:
    """On disk, in a file that is gone with the array."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def evaluate(trace: LogitTrace, rule: Rule, *, gamma: int, temperature: float | None = None) -> Evaluation:
    """What decoding with a rule, gamma draft tokens a round and the trace's drafter would yield.

    Args:
        trace: see `collect`.
        rule: any that has an `acceptance_ratio`.
        gamma: draft tokens a round, at least 1.
        temperature: of both models; by default that of the texts.

    Raises:
        ValueError: gamma < 1; a rule whose ratio is not known; another temperature, and the texts are at 0; a rule that
            at temperature 0 accepts draft tokens which differ from the text, so that the next distribution is not
            known.
    """
    own = trace.temperature
    temperature = own if temperature is None else float(temperature)
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}: expected at least 1 draft token a round")
    if rule.acceptance_ratio is None:
        raise ValueError(f"the rule {rule.name} has no acceptance_ratio: expected one, or decode to measure it")
    if temperature != own and own == 0:
        raise ValueError(f"the texts are greedy, and no measure of temperature {temperature:g}: collect some at it")
    if temperature == 0 and not matches_when_greedy(rule):
        raise ValueError(
            f"at temperature 0 {rule.name} accepts draft tokens that are not in the text: decode to measure it"
        )
    ratio, shift = _along(trace, rule.acceptance_ratio, temperature)
    alpha, accepted, rounds = np.zeros((3, len(trace.counts)))
    for row, (end, count) in enumerate(zip(np.cumsum(trace.counts), trace.counts, strict=True)):
        weights = text_rounds.survival(ratio[end - count : end], shift[end - count : end], gamma, rule.exact)
        alpha[row] = weights[:, 0].sum()
        accepted[row] = weights[1:].sum()
        rounds[row] = text_rounds.expected_rounds(weights[1:])
    later, own_text = trace.counts - 1, rule.exact and temperature == own
    tokens_per_round = Ratio(later, rounds) if own_text else Ratio(later + accepted, later)
    found = (Ratio(alpha, trace.counts, probability=True), Ratio(accepted, later), tokens_per_round)
    return Evaluation(rule.name, gamma, temperature, own_text, *found)


def matches_when_greedy(rule: Rule) -> bool:
    """Whether a rule accepts, at temperature 0, nothing but the target's own token: tried on a near tie.

    >>> from jaxspec import rules
    >>> [matches_when_greedy(rule) for rule in (rules.rejection(), rules.typical(), rules.lenient(0.5))]
    [True, True, False]
    """
    keys, draft = noise.row_keys(jax.random.key(0), 1), Draft(jnp.array([[1]]), jnp.array([1]))
    target = Distribution(tokens=jnp.array([[0, 0]]), logits=jnp.array([[[1.0, 0.999]] * 2]))
    return int(rule.verify(keys, jnp.array([0]), draft, target).num_accepted[0]) == 0


def alpha_of_candidates(trace: LogitTrace, count: int) -> list[Ratio]:
    """Probability that one of the first 1, 2, ... K independent candidates for a token is accepted, over all positions.

    The exact probability at each position (`divergence.beta_of_candidates`), with the distributions at the texts' own
    temperature; the texts only give the positions. The first is the rejection rule's alpha, without the noise of which
    token the text has; at temperature 0 all candidates are one, and so are the ratios.

    Args:
        trace: see `collect`.
        count: K, at least 1.

    Raises:
        ValueError: count < 1.
    """

    def beta(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return divergence.beta_of_candidates(p, q, count)

    whole = _at_each_position(trace, beta)
    return [_by_row(trace, whole[:, k]) for k in range(count)]


def lenient_alpha(trace: LogitTrace, lenience: float) -> Ratio:
    """How often a draft token is accepted with a lenience, over all positions: Table 5 of the paper (appendix A.5).

    Sampling: E[sum_x min(p(x) / l, q(x))]. At temperature 0: the share of positions where the drafter's likeliest token
    has p(x) >= l max(p), p being the target's distribution at temperature 1.

    Args:
        trace: see `collect`; it has the temperature.
        lenience: l, in (0, 1]; 1 is none.

    Raises:
        ValueError: a lenience outside (0, 1].
    """
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}: expected a number in (0, 1], 1 being none")
    if trace.temperature:
        return _by_row(trace, _at_each_position(trace, lambda p, q: divergence.beta(p, q, lenience)))
    accepted = np.zeros(len(trace.tokens))
    for index in _chunks(len(accepted)):
        target, drafted = trace.target[index].astype(np.float64), np.argmax(trace.draft[index], axis=-1)
        chosen = np.take_along_axis(target, drafted[:, None], axis=-1)[:, 0]
        accepted[index] = chosen >= target.max(axis=-1) + math.log(lenience)
    return _by_row(trace, accepted)


def _temperature(prepared: Prepared) -> float:
    """The one temperature of a generation that has no other sampling options."""
    given = prepared.options.get("temperature")
    found = np.unique(np.asarray(0.0 if given is None else given, np.float64))
    other = [name for name, value in prepared.request.sampling_params._asdict().items() if value is not None]
    if len(found) > 1 or other != ["temperature"] or prepared.request.draft_sampling_params is not None:
        raise ValueError("replay is of a temperature alone: expected one for all rows, and no other sampling options")
    return float(found[0])


def _by_row(trace: LogitTrace, values: Float[np.ndarray, " N"]) -> Ratio:
    """The mean of what is known of each position."""
    sums = np.add.reduceat(values, np.cumsum(trace.counts) - trace.counts)
    return Ratio(sums, trace.counts, probability=True)


def _at_each_position(trace: LogitTrace, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """A function of p and q in float64, at the texts' own temperature."""
    own, found = jnp.float32(trace.temperature), []
    for index in _chunks(len(trace.tokens)):
        sides = (np.asarray(_jitted_distribution(side[index], own), np.float64) for side in (trace.target, trace.draft))
        found.append(function(*(np.exp(side)[:, 0] for side in sides)))
    return np.concatenate(found)[: len(trace.tokens)]


def _along(trace: LogitTrace, acceptance_ratio: AcceptanceRatio, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """The rule's ratio at every token, and the probability that it has now over the one that it was drawn with."""
    found = np.zeros((2, len(trace.tokens)))
    for index in _chunks(len(trace.tokens)):
        part = trace.tokens[index], trace.target[index], trace.draft[index]
        both = _of_chunk(acceptance_ratio, jnp.float32(trace.temperature), jnp.float32(temperature), *part)
        found[:, index] = np.asarray(both)
    return found[0], found[1]


def _chunks(count: int) -> Iterator[Int[np.ndarray, " chunk"]]:
    """Positions in chunks of one size; the last position fills the last chunk."""
    for start in range(0, count, CHUNK):
        yield np.minimum(np.arange(start, start + CHUNK), count - 1)


@programs.jit(static_argnames=("acceptance_ratio",))
def _of_chunk(
    acceptance_ratio: AcceptanceRatio,
    own: Float[Array, ""],
    temperature: Float[Array, ""],
    tokens: Int[Array, " N"],
    target: Float[Array, "N V"],
    draft: Float[Array, "N V"],
) -> Float[Array, "2 N"]:
    drawn, p, q = (_distribution(*side) for side in ((target, own), (target, temperature), (draft, temperature)))
    text = tokens[:, None]
    then, now = (jnp.take_along_axis(log_probs, text[..., None], axis=-1)[:, 0, 0] for log_probs in (drawn, p))
    return jnp.stack([acceptance_ratio(p, q, text)[:, 0], jnp.exp(now - then)])


def _distribution(logits: Float[Array, "N V"], temperature: Float[Array, ""]) -> Float[Array, "N 1 V"]:
    sampling_params = sampling.SamplingParams(jnp.full(len(logits), temperature))
    log_probs = sampling.at_temperature()(sampling_params, logits[:, None]).log_probs
    assert log_probs is not None
    return log_probs


_jitted_distribution = jax.jit(_distribution)


@programs.jit(static_argnames=("lm", "vocab"))
def _logits(
    lm: LanguageModel, vocab: int, params: Params, prompt: Prompt, tokens: Int[Array, "B T"]
) -> Float[Array, "B T V"]:
    """Teacher-forced logits over the target's real ids."""
    return sampling.match_vocab(acceptance.teacher_forced(lm, params, prompt, tokens), vocab)
