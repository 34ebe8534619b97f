"""The loss and the held-out acceptance, without decoding, of a drafter that reads its target's
hidden states.

The target reads a batch of texts in the training step itself, as it reads them in decoding. Nothing
is stored, and the target does not change, unless it learns with its heads (`combined_loss`). A
draft begins at every position (`draft_heads.training`), and its distributions are compared with the
target's after the same tokens. Logits are the largest arrays by far. They and their gradient are
computed a few positions at a time, so that memory does not grow with the length of texts. Only the
own loss of a target that learns needs the logits of whole texts.

A drafter with a smaller vocabulary learns the target's distribution among its tokens, at the
positions where the target's most probable token is one of them (EAGLE-3, arXiv 2503.01840). Reports
count all of the target's probability.

Shapes: B batch, R tokens of a row, S = R - 1 positions, M model dimension. A places where drafts
begin, K draft tokens, V vocabulary, W drafter's vocabulary. C places at once, P parts of C places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import Forward, LanguageModel, Params, Prompt, token_rows
from jaxspec.draft_heads import kind_of
from jaxspec.draft_heads.target import shared_with
from jaxspec.draft_heads.training import VOCABULARY, DraftStarts, DraftStep, Training
from jaxspec.training.data import TrainingBatch
from jaxspec.training.divergences import Divergence
from jaxspec.training.losses import LossFunction, negative_log_likelihood, over_real
from jaxspec.training.recipes import Learn


class Lesson(NamedTuple):
    """The data of a step: texts, and the target's parameters, which a compiled program is given as
    arguments.

    A learning target's parameters are not here, but beside the heads' (`apart`).
    """

    batch: TrainingBatch
    target: Params


class TargetRows(NamedTuple):
    """Texts as the target's rows, and its outputs."""

    tokens: Int[Array, "B R"]
    length: Int[Array, " B"]
    forward: Forward


class HeadTask(NamedTuple):
    """A drafter, its target and its objective."""

    lm: LanguageModel  # the target's language model
    config: Any  # the configuration of the drafter's network
    frozen: dict[str, Array]  # parameters that are not trained: the drafter's vocabulary
    learn: Learn  # the recipe's [learn] table

    @property
    def kind(self) -> Training:
        """The training of drafters of this kind."""
        training = kind_of(self.config).training
        assert training is not None, "recipes have the kinds that are trained"
        return training

    @property
    def depths(self) -> int:
        """The number of draft tokens: the recipe's, at most as many as the kind has."""
        longest = self.kind.longest(self.config)
        depths = self.learn.depths or longest or 4
        if longest is None:
            return depths
        return min(depths, longest)


TARGET = "target"  # the parameters of a target that learns, beside those of its heads


def apart(params: Params, lesson: Lesson) -> tuple[Params, Lesson]:
    """Moves a learning target's parameters from the heads' to the lesson.

    >>> params, lesson = apart({"heads_0": 1.0, TARGET: {"norm": 2.0}}, Lesson(None, {}))
    >>> params, lesson.target
    ({'heads_0': 1.0}, {'norm': 2.0})
    """
    if TARGET not in params:
        return params, lesson
    return {name: params[name] for name in params if name != TARGET}, lesson._replace(
        target=params[TARGET]
    )


class HeldOutAcceptance(NamedTuple):
    """The acceptance that one pass over texts promises, for each number of draft tokens.

    Texts that the target itself generated, at the temperature in question, are those that decoding
    meets.
    """

    # acceptance rate of each draft token at temperature 1, after right ones: the mean of sum_x
    # min(p, q)
    alpha: Float[np.ndarray, " K"]
    # share of positions where its most probable token is the target's: the acceptance rate at
    # temperature 0
    agrees: Float[np.ndarray, " K"]
    # the mean of the products of the former up to each draft token
    accepted: Float[np.ndarray, " K"]
    all_agree: Float[np.ndarray, " K"]  # share of positions where all up to it agree

    @property
    def tokens_per_round(self) -> tuple[float, float]:
        """The expected tokens of a round at temperatures 0 and 1, with as many draft tokens a
        round.

        >>> rates = np.array([0.5, 0.25])
        >>> HeldOutAcceptance(rates, rates, rates, rates).tokens_per_round
        (1.75, 1.75)
        """
        return 1 + float(self.all_agree.sum()), 1 + float(self.accepted.sum())

    def __str__(self) -> str:
        def written(rates: Float[np.ndarray, " K"]) -> str:
            return " ".join(f"{rate:.2f}" for rate in rates)

        greedy, sampled = self.tokens_per_round
        at_0 = f"T=0: α {written(self.agrees)}, {greedy:.2f} tokens a round"
        return f"{at_0}; T=1: α {written(self.alpha)}, {sampled:.2f}"


def read(lm: LanguageModel, lesson: Lesson) -> TargetRows:
    """Runs the target over complete rows."""
    target = jnp.asarray(lesson.batch.target)
    length = jnp.asarray(lesson.batch.target_length)
    if lm.limits.start_token is None:
        rows = Prompt(target, jnp.maximum(length, 1))
        forward, _ = lm.prefill(lesson.target, rows, token_rows.reading_room(lm, rows, 0))
        return TargetRows(target, length, forward)
    source = source_of(lesson)
    first, cache = lm.prefill(
        lesson.target, source, token_rows.reading_room(lm, source, target.shape[1])
    )
    later, _ = lm.extend(lesson.target, cache, target)

    def joined(x: Array | None, y: Array | None) -> Array | None:
        if x is None or y is None:
            return None
        return jnp.concatenate([x, y], axis=1)

    features = jnp.concatenate([first.features, later.features], axis=1)
    forward = Forward(first.logits, features, joined(first.taps, later.taps), first.encoded)
    begins = token_rows.decoder_prompt(lm, source)
    return TargetRows(
        jnp.concatenate([begins.tokens, target], axis=1), length + begins.length, forward
    )


def read_tree(
    lm: LanguageModel,
    lesson: Lesson,
    extend: Callable[..., Any],
    nodes: Int[Array, "B n"],
    parent: Int[Array, "B n"],
) -> Forward:
    """Runs the target over a tree after the first token of each row.

    Args:
        lesson: the texts, and its parameters.
        extend: (run, params, cache, tokens, parent), which calls `run`, the target's `extend`.
        nodes, parent: the tree's tokens and their parents (`core.Extend`).
    """
    begin = Prompt(jnp.asarray(lesson.batch.target)[:, :1], jnp.ones(nodes.shape[0], jnp.int32))
    if lm.limits.start_token is not None:
        begin = source_of(lesson)
    _, cache = lm.prefill(
        lesson.target, begin, token_rows.room(lm, begin, nodes.shape[1], nodes.shape[1])
    )
    return extend(lm.extend, lesson.target, cache, nodes, parent)[0]


def source_of(lesson: Lesson) -> Prompt:
    """Returns the sources that an encoder reads."""
    return Prompt(
        jnp.asarray(lesson.batch.source), jnp.maximum(jnp.asarray(lesson.batch.source_length), 1)
    )


class Part(NamedTuple):
    """A part of the places of a batch's rows where drafts begin; the leading axis P is scanned
    over.
    """

    ahead: Int[Array, "P B C K"]  # the token that each draft begins after, and those after it
    labels: Int[Array, "P B C K"]  # the text's own token in the place of each draft token
    real: Bool[Array, "P B C K"]  # whether the text goes on after these
    # the target's features from the first of these tokens on, for all that the drafts are compared
    # with
    window: Float[Array, "P B C*stride+K M"]


class Drafted(NamedTuple):
    """A batch, ready for the comparison of distributions."""

    hidden: Float[Array, "P B C _ D"]
    parts: Part
    distance: Float[Array, ""]
    count: Float[Array, " K"]


def draft(task: HeadTask, params: Params, lesson: Lesson) -> Drafted:
    """Computes the hidden states of all drafts of a batch, and the features to compare them with,
    in parts.
    """
    return draft_after(task, params, lesson, jax.lax.stop_gradient(read(task.lm, lesson)))


def draft_after(task: HeadTask, params: Params, lesson: Lesson, rows: TargetRows) -> Drafted:
    """Computes what `draft` does, of texts that the target has read."""
    depths = task.depths
    stride = task.learn.stride
    shared = shared_with(task.lm, lesson.target)
    size = rows.tokens.shape[1] - 1
    stride = min(stride, size)
    # Drafts begin at every stride-th position; the first differs from batch to batch, and depends
    # on nothing else.
    offset = jnp.sum(rows.tokens, dtype=jnp.int32) % stride
    position = offset + stride * jnp.arange(size // stride, dtype=jnp.int32)
    tokens = jnp.pad(rows.tokens[:, 1:], ((0, 0), (0, depths)))
    encoded, before = rows.forward.encoded, rows.forward._replace(logits=None, encoded=None)
    forward = jax.tree.map(lambda x: x[:, :size], before)._replace(encoded=encoded)
    source_length = None
    if encoded is not None:
        source_length = source_of(lesson).length
    all_params = {**params, **task.frozen}
    following = tokens[:, : size + depths - 1]
    reread = functools.partial(read_tree, task.lm, lesson)
    hidden = task.kind.hidden_states(
        task.config,
        all_params,
        shared,
        DraftStarts(forward, following, position, depths, reread, source_length),
    )

    # Draft token k of place a is compared at position a + k [A, K]; what it predicts is the token
    # two further on.
    number = jnp.arange(depths, dtype=jnp.int32)
    after = position[:, None] + number[None, :]
    real = after[None] + 2 < rows.length[:, None, None]  # [B, A, K]
    distance = jnp.zeros((), jnp.float32)
    if task.learn.regression and task.kind.predicts_features(task.config):
        actual = jnp.pad(rows.forward.features, ((0, 0), (0, depths), (0, 0)))[:, after + 1]
        errors = jnp.mean(optax.losses.huber_loss(hidden, actual), axis=-1)
        distance = jnp.sum(jnp.where(real, errors, 0.0) * _weights(task)[None, None])

    # Places are cut into P parts of C, padded to a multiple; each part has a window of features for
    # its places.
    batch = hidden.shape[0]
    places = position.shape[0]
    places_per_part = max(1, min(places, (task.learn.chunk // batch - depths) // stride))
    count = -(-places // places_per_part)
    features = rows.forward.features
    missing = count * places_per_part - places
    width = (places_per_part - 1) * stride + depths
    features = jnp.pad(features, ((0, 0), (0, count * places_per_part * stride + depths), (0, 0)))

    def in_parts(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(batch, count, places_per_part, *x.shape[2:]), 1, 0)

    starts = offset + 1 + stride * places_per_part * jnp.arange(count, dtype=jnp.int32)
    windows = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(features, start, width, axis=1))(
        starts
    )
    parts = Part(
        in_parts(tokens[:, after]), in_parts(tokens[:, after + 1]), in_parts(real), windows
    )
    return Drafted(in_parts(hidden), parts, distance, jnp.sum(real, axis=(0, 1), dtype=jnp.float32))


class Compared(NamedTuple):
    """The target's and the drafter's distributions of draft tokens of one number, among the
    drafter's tokens.
    """

    log_p: Float[Array, "B C W"]
    log_q: Float[Array, "B C W"]
    among: Float[Array, "B C"]
    agrees: Bool[Array, "B C"]
    lesson_kl: Float[Array, "B C"]  # the forward KL of the kind's own lesson; 0 where there is none


def compare(
    task: HeadTask,
    target: Params,
    params: Params,
    hidden: Float[Array, "B C _ D"],
    part: Part,
    learns: bool = False,
    depths: Sequence[int] | None = None,
) -> list[Compared]:
    """Computes the distributions of each draft token at some of the places: those drafted with, or
    those that learn.

    `depths` are the numbers of some draft tokens, of heads that need none of the others; None
    stands for all.

    `log_p` are the target's own; their probabilities sum to less than 1 if the drafter has fewer
    tokens. `among` tells whether the drafter has the target's most probable token, `agrees` whether
    it is also the drafter's most probable one.
    """
    shared = shared_with(task.lm, target)
    ids = task.frozen.get(VOCABULARY)
    params = {**params, **task.frozen}
    batch, places, count = part.ahead.shape
    # [B, C stride + K, V]
    window_log_p = jax.nn.log_softmax(jax.lax.stop_gradient(shared.logits(part.window)))
    flat = hidden.reshape(-1, *hidden.shape[2:])
    draft_tokens = part.ahead.reshape(-1, count)
    memory = None
    compared = []
    last = (places - 1) * task.learn.stride
    if learns and task.kind.learned is not None:
        logits_of = task.kind.learned
    else:
        logits_of = task.kind.logits
    for depth in range(count) if depths is None else depths:
        log_p = window_log_p[:, depth : depth + last + 1 : task.learn.stride]
        step = DraftStep(flat, draft_tokens, depth, memory)
        logits, memory = logits_of(task.config, params, shared, step)
        best_p = jnp.argmax(log_p, axis=-1)
        best_q = jnp.argmax(logits, axis=-1).reshape(batch, places)
        among = jnp.ones(best_p.shape, jnp.float32)
        if ids is not None:
            log_p = log_p[..., ids]
            logits = logits[..., ids]
            among = jnp.zeros(task.lm.vocab_size, jnp.float32).at[ids].set(1.0)[best_p]
        log_q = jax.nn.log_softmax(logits)
        lesson_kl = jnp.zeros(best_p.shape, jnp.float32)
        if learns and task.kind.own is not None:
            rows = log_p.reshape(log_q.shape), log_q
            lesson = task.kind.own(task.config, params, shared, step, *rows, task.learn.hard)
            if lesson is not None:
                lesson_kl = own_divergence(*lesson).reshape(best_p.shape)
        compared.append(
            Compared(log_p, log_q.reshape(log_p.shape), among, best_p == best_q, lesson_kl)
        )
    return compared


def own_divergence(
    labels: Float[Array, "N K"], estimate: Float[Array, "N K"]
) -> Float[Array, " N"]:
    """Computes the forward KL of a kind's own lesson, whose labels may have probabilities of zero.

    >>> labels, estimate = jnp.log(jnp.array([[1.0, 0.0]])), jnp.array([[-0.75, -2.0]])
    >>> own_divergence(labels, estimate).tolist()
    [0.75]
    """
    possible = labels > -jnp.inf
    difference = jnp.where(possible, labels, 0.0) - jnp.where(possible, estimate, 0.0)
    return jnp.sum(jnp.exp(labels) * difference, axis=-1)


def head_loss(task: HeadTask, divergence: Divergence) -> LossFunction:
    """Returns the divergence from the target's distributions, draft tokens weighted by
    `learn.decay`, as a loss.

    A divergence that reads the mean acceptance rate (`blend`) reads the rate of a part of the
    batch, at one depth. With `learn.one_head` the loss is that of one draft token, which is drawn
    for each batch (Stern, Shazeer, Uszkoreit, arXiv 1811.03115). The logits of the others are not
    computed. The target learns nothing.
    """
    apart_from_target = _distances(task, divergence)

    def loss(params: Params, batch: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
        heads, lesson = apart(params, batch)
        lesson = lesson._replace(target=jax.lax.stop_gradient(lesson.target))
        drafted = draft(task, heads, lesson)
        drawn = None
        if task.learn.one_head:
            drawn = drawn_head(lesson.batch, task.depths)
        total, count = apart_from_target(heads, lesson.target, drafted, drawn)
        return total + task.learn.regression * drafted.distance, count

    return loss


def combined_loss(task: HeadTask, divergence: Divergence) -> LossFunction:
    """Returns the loss of a target that learns with its heads: the target's on the texts, and the
    heads'.

    Both are means over tokens; `learn.heads_weight` is the weight of the second (Medusa 2, Cai et
    al., arXiv 2401.10774). Both learn the tokens of the texts: a target that labels its heads would
    drift towards them. With `learn.one_head` a batch teaches the target's own head or one of the
    others, each with the same probability (blockwise parallel decoding's fine-tuning, Stern,
    Shazeer, Uszkoreit, arXiv 1811.03115).
    """
    apart_from_target = _distances(task, divergence)

    def loss(params: Params, batch: Any) -> tuple[Float[Array, ""], Float[Array, ""]]:
        heads, lesson = apart(params, batch)
        rows = read(task.lm, lesson)

        def of_heads(drawn: Int[Array, ""] | None) -> Float[Array, ""]:
            drafted = draft_after(task, heads, lesson, rows)
            total, count = apart_from_target(params, None, drafted, drawn)
            return total / jnp.maximum(count, 1.0)

        def of_target() -> Float[Array, ""]:
            return target_loss(task.lm, lesson.target, rows)

        if task.learn.one_head:
            drawn = drawn_head(lesson.batch, 1 + task.depths)
            mean = jax.lax.cond(drawn == 0, of_target, lambda: of_heads(drawn - 1))
        else:
            mean = of_target() + task.learn.heads_weight * of_heads(None)
        return mean, jnp.ones((), jnp.float32)

    return loss


def target_loss(lm: LanguageModel, target: Params, rows: TargetRows) -> Float[Array, ""]:
    """Computes the target's own negative log likelihood of texts that it has read, per token."""
    logits = shared_with(lm, target).logits(rows.forward.features[:, :-1])
    labels = rows.tokens[:, 1:]
    position = jnp.arange(labels.shape[1], dtype=jnp.int32)[None, :]
    # What the row of an encoder-decoder begins with is given, not learnt.
    begins = max(1, len(lm.limits.first_tokens))
    real = (position + 1 >= begins) & (position + 1 < rows.length[:, None])
    total, count = over_real(negative_log_likelihood(logits, labels), real.astype(jnp.float32))
    return total / jnp.maximum(count, 1.0)


def _distances(
    task: HeadTask, divergence: Divergence
) -> Callable[..., tuple[Float[Array, ""], Float[Array, ""]]]:
    """Returns (params, target, drafted, drawn) -> the sum of divergences from the target, and its
    number of tokens.

    `drawn` is the number of the only head that learns; None stands for all, weighted by
    `learn.decay`. A target that learns is among `params`, and is given there alone. The sum is then
    the heads' negative log likelihood of the texts.
    """
    weights = _weights(task)

    def of_text(
        log_q: Float[Array, "B C W"], labels: Int[Array, "B C"]
    ) -> tuple[Array, Float[Array, "B C"]]:
        ids = task.frozen.get(VOCABULARY, jnp.arange(task.lm.vocab_size, dtype=jnp.int32))
        is_label = ids[None, None, :] == labels[:, :, None]
        return -jnp.sum(jnp.where(is_label, log_q, 0.0), axis=-1), jnp.any(
            is_label, axis=-1
        ).astype(jnp.float32)

    def of_depths(
        depths: Sequence[int],
        weights: Array,
        target: Params | None,
        params: Params,
        hidden: Array,
        part,
    ):
        total = jnp.zeros((), jnp.float32)
        target_learns = target is None
        if target_learns:
            target = params[TARGET]
            params = {name: params[name] for name in params if name != TARGET}
        compared = compare(task, target, params, hidden, part, learns=True, depths=depths)
        for depth, both in zip(depths, compared, strict=True):
            log_p = both.log_p - jax.nn.logsumexp(both.log_p, axis=-1, keepdims=True)
            counted = part.real[:, :, depth].astype(jnp.float32) * both.among
            if target_learns:
                per_token, among = of_text(both.log_q, part.labels[:, :, depth])
                counted = part.real[:, :, depth].astype(jnp.float32) * among
            else:
                per_token = divergence(log_p, both.log_q, counted) + task.learn.own * both.lesson_kl
            total += weights[depth] * jnp.sum(per_token * counted)
        return total

    of_all = functools.partial(of_depths, range(task.depths), weights)
    of_each = [
        functools.partial(of_depths, [depth], jnp.ones_like(weights))
        for depth in range(task.depths)
    ]

    def of_drawn(
        fixed: tuple[Params | None, Array], params: Params, hidden: Array, part: Part
    ) -> Float[Array, ""]:
        target, drawn = fixed
        return jax.lax.switch(drawn, of_each, target, params, hidden, part)

    def total(
        params: Params, target: Params | None, drafted: Drafted, drawn: Int[Array, ""] | None
    ):
        if drawn is None:
            summed: Any = in_parts(of_all, target, params, drafted.hidden, drafted.parts)
            return summed, jnp.sum(weights * drafted.count)
        summed = in_parts(of_drawn, (target, drawn), params, drafted.hidden, drafted.parts)
        return summed, drafted.count[drawn]

    return total


def drawn_head(batch: TrainingBatch, count: int) -> Int[Array, ""]:
    """Draws the head that a batch teaches. It depends on the batch's tokens alone, so that a run
    resumes exactly.
    """
    tokens = jnp.sum(jnp.asarray(batch.target), dtype=jnp.int32)
    return jax.random.randint(
        jax.random.fold_in(jax.random.key(0), tokens), (), 0, count, jnp.int32
    )


def held_out_acceptance(task: HeadTask) -> Callable[[Params, Iterable[Lesson]], HeldOutAcceptance]:
    """Returns a function of parameters and lessons that measures the drafter's acceptance on these
    texts.
    """

    def of_part(target: Params, params: Params, hidden: Array, part: Part) -> Float[Array, "4 K"]:
        sums = []
        run_p = 1.0
        run_best = 1.0
        for depth, both in enumerate(compare(task, target, params, hidden, part)):
            real = part.real[:, :, depth].astype(jnp.float32)
            alpha = jnp.sum(jnp.exp(jnp.minimum(both.log_p, both.log_q)), axis=-1)
            agrees = both.agrees.astype(jnp.float32)
            run_p = run_p * alpha
            run_best = run_best * agrees
            sums.append(jnp.stack([jnp.sum(x * real) for x in (alpha, agrees, run_p, run_best)]))
        return jnp.stack(sums, axis=1)

    @jax.jit
    def of_batch(params: Params, lesson: Lesson) -> tuple[Float[Array, "4 K"], Float[Array, " K"]]:
        params, lesson = apart(params, lesson)
        drafted = draft(task, params, lesson)
        sums: Any = in_parts(of_part, lesson.target, params, drafted.hidden, drafted.parts)
        return sums, drafted.count

    def over(params: Params, lessons: Iterable[Lesson]) -> HeldOutAcceptance:
        sums, counts = zip(*(of_batch(params, lesson) for lesson in lessons), strict=True)
        return HeldOutAcceptance(*np.asarray(sum(sums)) / np.maximum(np.asarray(sum(counts)), 1.0))

    return over


def _weights(task: HeadTask) -> Float[Array, " K"]:
    return jnp.asarray(task.learn.decay ** np.arange(task.depths), jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_parts(
    function: Callable[..., Array], fixed: Any, params: Params, hidden: Array, parts: Any
) -> Array:
    """Sums function(fixed, params, hidden[i], parts[i]) over i, one after the other.

    The gradient, by `params` and `hidden`, is computed with the value, so that nothing inside of
    `function` is stored or computed twice.
    """

    values: Array = jax.lax.map(
        lambda operands: function(fixed, params, *operands), (hidden, parts)
    )
    return jnp.sum(values, axis=0)


def _forward(function: Callable[..., Array], fixed: Any, params: Params, hidden: Array, parts: Any):
    def add(carry: tuple[Array, Params], operands: tuple[Array, Any]):
        value, (by_params, by_hidden) = jax.value_and_grad(function, argnums=(1, 2))(
            fixed, params, *operands
        )
        return (carry[0] + value, jax.tree.map(jnp.add, carry[1], by_params)), by_hidden

    start = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    (value, by_params), by_hidden = jax.lax.scan(add, start, (hidden, parts))
    return value, (by_params, by_hidden)


def _backward(function: Callable[..., Array], gradient: tuple[Params, Array], cotangent: Array):
    return None, *jax.tree.map(lambda x: (cotangent * x).astype(x.dtype), gradient), None


in_parts.defvjp(_forward, _backward)
