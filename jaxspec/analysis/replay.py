"""Offline replay: how far rounds get along the target's own texts, for any exact rule, gamma or
tree, without models.

Let a round begin somewhere in a text x1 x2 ... of the target's. Only the text's own prefixes have
known distributions, and for an exact rule that is enough:

    P(at least k draft tokens are accepted | the text) = S_k(x) = P(the draft begins x1..xk, and
                                                      these are accepted) / p(x1..xk).

For the tokens of a round, continued by plain sampling, have the distribution p. They begin with
x1..xk in one of two ways: all of these are accepted draft tokens, or one is the target's own token.
Given the text, the first way has the probability S_k. It falls as k grows, and is a product of
ratios, one for each token:

- In a chain the ratio is `Rule.acceptance_ratio` (for the rejection rule min(1, q / p)). Under the
  block rule S_k is the smallest product of q / p so far.
- In a tree S_k is a sum over the nodes of a level. Each adds the product along its path, and a
  node's ratio is that of its rank among its siblings. A chain is a tree with one child per node.

So the number of rounds of a text follows a Markov chain, whose mean is computed, not sampled
(`formulas.expected_rounds`). At temperature 0 the mean is the number itself. For siblings drawn
with replacement, the mass that twins share is left out.

Shapes: N positions of all texts in a row, T tokens of one text, V vocabulary, K children of a node
at most, G depth.

References: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, appendix A.1 (the rejection
rule). Chen et al., Sequoia, arXiv 2402.12374 (the acceptance vector, the mean of `tree_ratios`).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from jaxspec import core, sampling
from jaxspec.analysis import acceptance, formulas
from jaxspec.analysis.statistics import Rate
from jaxspec.core import noise, programs
from jaxspec.core.checks import in_range
from jaxspec.decode.request import Prepared
from jaxspec.drafters.trees.children import DrawName, check
from jaxspec.drafters.trees.shape import Choices
from jaxspec.sampling import samplers
from jaxspec.sampling.params import KEEPS_ALL

CHUNK = 256  # positions at a time
# draws of siblings at each position, where their acceptance is averaged over those before them
SAMPLES = 4


class LogitTrace(NamedTuple):
    """The logits of a pair along texts of the target's, one text after the other."""

    temperature: float  # the temperature of the texts
    counts: Int[np.ndarray, " rows"]  # how many tokens each text has [rows]
    tokens: Int[np.ndarray, " N"]  # the texts
    # float32 logits of each of their tokens, after the processors; memory-mapped
    target: Float[np.ndarray, "N V"]
    draft: Float[np.ndarray, "N V"]  # the drafter's


def collect(prepared: Prepared, *, batch: int = acceptance.BATCH) -> LogitTrace:
    """Generates plainly from the target and feeds the texts to both models: 8 V bytes a position,
    in temporary files.

    Args:
        prepared: a generation with a target and a draft model. Its rows are the unit of the
            standard errors. Its temperature and logits processors shape the texts. Texts at 0 serve
            temperature 0 only, so collect some for each temperature that matters.
        batch: rows at a time.

    Example:
        >>> from jaxspec import rules
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(temperature=1.0, key=jax.random.key(0), max_new_tokens=20)
        >>> trace = collect(prepared.replace(drafter=prepared.target))
        >>> ratios = chain_ratios(trace, rules.rejection())
        >>> tokens_per_round(chain(3), ratios, trace.counts).value  # 19 tokens in 5 rounds
        3.8
    """
    temperature = _temperature(prepared)
    models = (prepared.target, acceptance.drafting_model(prepared))
    texts = list(acceptance.texts(prepared, batch))
    counts = np.concatenate([text.lengths[: text.part.real] for text in texts])
    tokenizer = prepared.target.tokenizer
    shape = (
        int(counts.sum()),
        prepared.target.lm.vocab_size if tokenizer is None else len(tokenizer),
    )
    sides = [_scratch(shape) for _ in models]
    static = (prepared.target.lm, prepared.sampler, shape[1])
    tokens = np.zeros(shape[0], np.int32)
    start = 0
    for text in texts:
        real = text.real
        prompt = text.part.prepared.prompt
        sampling_params = text.part.prepared.request.sampling_params
        real[text.part.real :] = False
        positions = slice(start, start := start + int(real.sum()))
        tokens[positions] = np.asarray(text.tokens)[real]
        for side, model in zip(sides, models, strict=True):
            logits = _logits(model.lm, *static, model.params, sampling_params, prompt, text.tokens)
            side[positions] = np.asarray(logits)[real]
    return LogitTrace(temperature, counts, tokens, *sides)


def _scratch(shape: tuple[int, ...]) -> Float[np.ndarray, "N V"]:
    """Makes an array on disk, in a file that is gone with it."""
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, np.float32, "w+", shape=shape)


def chain(gamma: int) -> Choices:
    """Returns a chain as a tree of one child per node.

    >>> chain(2)
    ((0,), (0, 0))
    """
    return tuple((0,) * depth for depth in range(1, gamma + 1))


def chain_ratios(trace: LogitTrace, rule: core.Rule) -> Float[np.ndarray, "N 1 1"]:
    """Computes a rule's ratio for each token x of the texts: P(x is drafted and accepted) / p(x),
    as of one child.
    """
    if rule.acceptance_ratio is None:
        raise ValueError(
            f"the rule {rule.name} has no acceptance_ratio: expected one, or decode to measure it"
        )
    if trace.temperature == 0 and not matches_when_greedy(rule):
        raise ValueError(
            f"at temperature 0 {rule.name} accepts tokens that are not in the text: decode to "
            "measure it"
        )
    ratios = np.zeros(len(trace.tokens))
    temperature = jnp.float32(trace.temperature)
    for index in _chunks(len(trace.tokens)):
        texts_and_logits = trace.tokens[index], trace.target[index], trace.draft[index]
        ratios[index] = np.asarray(
            _chunk_ratios(rule.acceptance_ratio, temperature, *texts_and_logits)
        )
    return ratios[:, None, None]


def acceptance_rate(trace: LogitTrace, rule: core.Rule) -> Rate:
    """Computes the probability that a round's first draft token is accepted, over all positions of
    the texts.
    """
    ratios = chain_ratios(trace, rule)[:, 0, 0]
    return mean_of_rows(trace, np.minimum(ratios, 1.0) if rule.exact else ratios)


def mean_of_rows(trace: LogitTrace, values: Float[np.ndarray, " N"]) -> Rate:
    """Averages a value of each position over all positions; texts are the unit of its error."""
    sums = np.add.reduceat(values, np.cumsum(trace.counts) - trace.counts)
    return Rate.of(sums, trace.counts, probability=True)


def matches_when_greedy(rule: core.Rule) -> bool:
    """Tells whether a rule accepts, at temperature 0, nothing but the target's own token: tried on
    a near tie.

    >>> from jaxspec import rules
    >>> [
    ...     matches_when_greedy(rule)
    ...     for rule in (rules.rejection(), rules.typical(), rules.lenient(0.5))
    ... ]
    [True, True, False]
    """
    keys = noise.row_keys(jax.random.key(0), 1)
    draft = core.Draft(jnp.array([[1]]), jnp.array([1]))
    target = core.Distribution(tokens=jnp.array([[0, 0]]), logits=jnp.array([[[1.0, 0.999]] * 2]))
    return int(rule.verify(keys, jnp.array([0]), draft, target).num_accepted[0]) == 0


def tree_ratios(trace: LogitTrace, draw: DrawName, children: int) -> Float[np.ndarray, "N K K"]:
    """Computes, at each token x of the texts, P(child r of k is x and is accepted) / p(x), for k up
    to `children`.

    Their mean over the positions is the acceptance by rank. It is exact for "top" (1 where x is the
    drafter's r-th token), for "mixed" (all of p's mass on the fixed children is accepted) and for
    "replacement" (each sibling meets the p that its elders leave). For "without_replacement" it is
    averaged over some draws of the elder siblings. At temperature 0 children are the most probable
    tokens with any draw.
    """
    check(draw)
    vocab = trace.target.shape[1]
    in_range(1, vocab, children=children)
    ratios = np.zeros((len(trace.tokens), children, children))
    temperature = trace.temperature
    for chunk, index in enumerate(_chunks(len(ratios))):
        rows = (jnp.asarray(values[index]) for values in (trace.tokens, trace.target, trace.draft))
        key = jax.random.fold_in(jax.random.key(0), chunk)
        draw_here = "top" if temperature == 0 else draw
        ratios[index] = np.asarray(
            _chunk_tree_ratios(draw_here, children, temperature or 1.0, key, *rows)
        )
    return ratios


@functools.partial(jax.jit, static_argnames=("draw", "children"))
def _chunk_tree_ratios(
    draw: DrawName,
    children: int,
    temperature: Float[Array, ""],
    key: Key[Array, ""],
    tokens: Int[Array, " N"],
    target: Float[Array, "N V"],
    draft: Float[Array, "N V"],
) -> Float[Array, "N K K"]:
    """Computes `tree_ratios` of a chunk of positions; x is each position's token, p and q are [N,
    V].
    """
    p, q = (jax.nn.softmax(logits / temperature, axis=-1) for logits in (target, draft))
    x = tokens[:, None]
    # [1, K, 1 or K]
    counts = jnp.arange(1, children + 1)[None, :, None]
    ranks = jnp.arange(children)[None, None, :]
    # [N, 1]
    p_x, q_x, draft_x = (jnp.take_along_axis(values, x, axis=1) for values in (p, q, draft))
    # The rank of x among the drafter's tokens [N, 1, 1]; of equal ones the lower id is first, as in
    # top_k.
    lower = jnp.arange(draft.shape[1])[None, :] < x
    rank = jnp.sum((draft > draft_x) | ((draft == draft_x) & lower), axis=1)[:, None, None]
    if draw == "top":
        return ((rank == ranks) & (ranks < counts)).astype(jnp.float32)
    if draw == "mixed":
        # Of k children the first is drawn from what the k - 1 likeliest leave of q, and these are
        # the others.
        top = jnp.pad(jnp.cumsum(jax.lax.top_k(q, children)[0], axis=1), ((0, 0), (1, 0)))[
            :, None, :children
        ]
        remaining = jnp.moveaxis(1 - top, 1, 2)  # [N, K, 1]
        drawn = jnp.minimum(1.0, q_x[:, :, None] / jnp.maximum(remaining * p_x[:, :, None], 1e-30))
        drawn = jnp.where((ranks == 0) & (rank >= counts - 1), drawn, 0.0)
        is_fixed = (rank == ranks - 1) & (ranks < counts)
        return jnp.where(is_fixed, 1.0, drawn)

    def sample(key: Key[Array, ""]) -> Float[Array, "N K"]:
        """Goes through the siblings: `p_left` is what is left of p, `siblings` the distribution
        that draws the next.
        """
        gumbel = jax.random.gumbel(key, q.shape, jnp.float32)
        order = jax.lax.top_k(jnp.log(q) + gumbel, children)[1]  # draws without replacement
        p_left = p
        siblings = q
        all_rejected = jnp.ones_like(p_x)
        by_rank = []
        for child in range(children):
            left_x, siblings_x = (
                jnp.take_along_axis(values, x, axis=1) for values in (p_left, siblings)
            )
            by_rank.append(all_rejected * jnp.minimum(left_x, siblings_x) / jnp.maximum(p_x, 1e-30))
            if draw == "replacement":  # what is left does not depend on which token was drawn
                all_rejected = all_rejected * (
                    1 - jnp.sum(jnp.minimum(p_left, siblings), axis=1, keepdims=True)
                )
            else:
                y = order[:, child : child + 1]  # [N, 1], this sibling
                left_y, siblings_y = (
                    jnp.take_along_axis(values, y, axis=1) for values in (p_left, siblings)
                )
                all_rejected = all_rejected * jnp.maximum(
                    1 - left_y / jnp.maximum(siblings_y, 1e-30), 0.0
                )
            after = jnp.maximum(p_left - siblings, 0.0)
            mass = jnp.sum(after, axis=1, keepdims=True)
            p_left = jnp.where(mass > 1e-6, after / jnp.maximum(mass, 1e-30), p_left)
            if draw == "without_replacement":
                siblings = jnp.where(jnp.arange(q.shape[1])[None, :] == y, 0.0, siblings)
                siblings = siblings / jnp.maximum(jnp.sum(siblings, axis=1, keepdims=True), 1e-30)
        return jnp.concatenate(by_rank, axis=1)

    samples = SAMPLES if draw == "without_replacement" else 1
    by_rank = jnp.mean(jax.lax.map(sample, jax.random.split(key, samples)), axis=0)
    return jnp.where(ranks < counts, by_rank[:, None, :], 0.0)


def tokens_per_round(
    choices: Sequence[Sequence[int]],
    ratios: Float[np.ndarray, "N K K"],
    counts: Int[np.ndarray, " rows"],
) -> Rate:
    """Computes the tokens per round of a tree along the texts, as `Stats.tokens_per_round` over all
    rows.

    Args:
        choices: the tree.
        ratios: the result of `tree_ratios`, or of `chain_ratios` for a chain.
        counts: how many tokens each text has.

    >>> always = np.zeros((9, 2, 2))
    >>> always[:, :, 0] = 1  # the first child is always right: 8 tokens in 3 rounds, then in 4
    >>> [
    ...     round(tokens_per_round(tree, always, np.array([9])).value, 2)
    ...     for tree in (((0,), (0, 0)), ((0,), (1,)))
    ... ]
    [2.67, 2.0]
    """
    rounds = [
        formulas.expected_rounds(survives) for survives, _ in _by_text(choices, ratios, counts)
    ]
    return Rate.of(np.asarray(counts) - 1, np.array(rounds))


def by_depth(
    choices: Sequence[Sequence[int]],
    ratios: Float[np.ndarray, "N K K"],
    counts: Int[np.ndarray, " rows"],
) -> Float[np.ndarray, "G K K"]:
    """Computes acceptance by depth, number of children and rank, where rounds with a tree really
    come to judge them.

    Rounds begin after a token that was not drafted, go on where those before were accepted, and are
    cut where the text ends, so that the mean over all positions promises too much.

    >>> always = np.zeros((9, 2, 2))
    >>> always[1::2, :, 0] = (
    ...     1  # every second token is right: a chain of 2 always begins with a right one
    ... )
    >>> by_depth(((0,), (0, 0)), always, np.array([9]))[:, 0, 0].tolist()
    [1.0, 0.0]
    """
    depth = max(map(len, choices))
    accepted = np.zeros((depth, *ratios.shape[1:]))
    mass = np.zeros((depth, 1, 1))
    for survives, later in _by_text(choices, ratios, counts):
        tokens = len(survives)
        exactly = formulas.exact_counts(survives)
        begins = np.zeros(tokens + depth + 1)  # how probably a round begins at each token
        begins[:1] = 1
        for t in range(tokens):
            begins[t + 1 : t + depth + 2] += begins[t] * exactly[t]
        for level in range(depth):
            reached = begins[:tokens] * (survives[:, level - 1] if level else 1.0)
            accepted[level] += np.tensordot(reached, later[level : level + tokens], 1)
            mass[level] += reached.sum()
    return accepted / np.maximum(mass, 1e-12)


def _by_text(
    choices: Sequence[Sequence[int]],
    ratios: Float[np.ndarray, "N K K"],
    counts: Int[np.ndarray, " rows"],
) -> Iterator[tuple[Float[np.ndarray, "T G"], Float[np.ndarray, "TG K K"]]]:
    """Yields the survival of rounds along each text [T, G], and the ratios after each token, with
    zeros after its end.

    Survival: how probably a round that begins at each token but the first accepts 1, 2, .. of the
    tokens there.
    """
    nodes = sorted((tuple(map(int, node)) for node in choices), key=len)
    depth = len(nodes[-1])
    children = {node: sum(child[:-1] == node for child in nodes) for node in ((), *nodes)}
    for end, count in zip(np.cumsum(counts), counts, strict=True):
        # A node is reached if all nodes on its path are accepted: the product of their ratios at
        # the tokens there.
        later = np.pad(ratios[end - count + 1 : end], ((0, depth), (0, 0), (0, 0)))
        reached: dict[tuple[int, ...], np.ndarray] = {(): np.ones(count - 1)}
        survives = np.zeros((count - 1, depth))
        for node in nodes:
            level = len(node) - 1
            step = later[level : level + count - 1, children[node[:-1]] - 1, node[-1]]
            reached[node] = reached[node[:-1]] * step
            survives[:, level] += reached[node]
        yield np.minimum(np.minimum.accumulate(survives, axis=1), 1.0), later


def _temperature(prepared: Prepared) -> float:
    """Returns the one temperature of a generation without truncation."""
    option = prepared.options.sampling.get("temperature")
    temperatures = np.unique(np.asarray(0.0 if option is None else option, np.float64))
    if len(temperatures) > 1 or not can_replay(prepared):
        raise ValueError(
            f"replay got temperatures that differ, {', '.join(KEEPS_ALL)}, or sampling options of "
            "the drafter's own: expected one temperature for all rows, and logits processors, bias "
            "or penalties if any"
        )
    return float(temperatures[0])


def can_replay(prepared: Prepared) -> bool:
    """Tells whether tokens are drawn at a temperature alone, after any logits processors, from both
    models.
    """
    of_target = prepared.request.sampling_params
    of_draft = prepared.request.draft_sampling_params
    return of_draft is None and all(getattr(of_target, name) is None for name in KEEPS_ALL)


def _chunks(count: int) -> Iterator[Int[np.ndarray, " chunk"]]:
    """Yields positions in chunks of one size; the last position fills the last chunk."""
    for start in range(0, count, CHUNK):
        yield np.minimum(np.arange(start, start + CHUNK), count - 1)


@programs.jit(static_argnames=("acceptance_ratio",))
def _chunk_ratios(
    acceptance_ratio: core.AcceptanceRatio,
    temperature: Float[Array, ""],
    tokens: Int[Array, " N"],
    target: Float[Array, "N V"],
    draft: Float[Array, "N V"],
) -> Float[Array, " N"]:
    p, q = (distribution(logits, temperature) for logits in (target, draft))
    return acceptance_ratio(p, q, tokens[:, None])[:, 0]


def distribution(
    logits: Float[Array, "N V"], temperature: Float[Array, ""]
) -> Float[Array, "N 1 V"]:
    """Returns the log probabilities of each position at a temperature."""
    sampling_params = sampling.SamplingParams(jnp.full(len(logits), temperature, jnp.float32))
    log_probs = sampling.at_temperature()(sampling_params, logits[:, None]).log_probs
    assert log_probs is not None
    return log_probs


@programs.jit(static_argnames=("lm", "target", "sampler", "vocab"))
def _logits(
    lm: core.LanguageModel,
    target: core.LanguageModel,
    sampler: core.Sampler,
    vocab: int,
    params: core.Params,
    sampling_params: Any,
    prompt: core.Prompt,
    tokens: Int[Array, "B T"],
) -> Float[Array, "B T V"]:
    """Computes teacher-forced logits over the target's real ids, after the logits processors."""
    logits = sampling.match_vocab(
        acceptance.teacher_forced(lm, params, prompt, tokens), target.vocab_size
    )
    preceding = acceptance.preceding_tokens(target, prompt, tokens)
    return sampling.match_vocab(
        samplers.processed(sampler, sampling_params, logits, preceding), vocab
    )
