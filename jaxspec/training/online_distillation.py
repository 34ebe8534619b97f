"""Online speculative decoding: a draft model that goes on learning from the job that it drafts for
(arXiv 2310.07177).

A draft that was trained on one kind of text drafts another kind badly. Between two batches of a job
it learns the target's distributions at the positions of rejected draft tokens. Its parameters are
arguments of the compiled decoder, so nothing is compiled again; and whatever they are, the text is
the target's, at every moment.

Shapes: B rows of a batch, N rows of the buffer, P tokens of a prompt, T new tokens, K most probable
tokens, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxspec import sharding
from jaxspec.core import BoundDrafter, LanguageModel, Model, Params, Prompt, programs, token_rows
from jaxspec.core.checks import at_least, one_of
from jaxspec.decode import Generation
from jaxspec.decode.prompts import Prompts, encode
from jaxspec.training.divergences import DIVERGENCES, Divergence
from jaxspec.training.top_tokens import log_probs_of, most_probable, with_the_rest

POSITIONS = ("rejected", "all")
Texts = Generation | Sequence[Sequence[int]]


class Buffer(NamedTuple):
    """Finished rows, and their target's distributions. Rows that are still empty have no position
    to learn.
    """

    prompt: Prompt  # each row's prompt
    tokens: Int[Array, "N T"]  # the new tokens
    learn: Float[Array, "N T"]  # 1.0 at those whose distribution is to be learnt
    # top, log_p: the target's K most probable tokens there, and their log probabilities
    top: Int[Array, "N T K"]
    log_p: Float[Array, "N T K"]


class OnlineState(NamedTuple):
    """The state of learning, from which it goes on: a pytree of arrays, for Orbax or any other
    store.
    """

    # the draft model's floating-point ones, in float32; None in place of each array of integers
    params: Params
    optimizer: Any  # the state of optax's optimizer
    buffer: Buffer  # the finished rows; the oldest row is overwritten first
    rows: Int[Array, ""]  # how many rows were ever put there
    step: Int[Array, ""]  # how many optimizer steps were made


class Online(NamedTuple):
    """A draft model that learns; functions only, as an optax optimizer has them.

    Attributes:
        init: () -> the state to begin with.
        drafter: state -> what `generate` takes as its drafter.
        update: (state, target, prompts, what `generate` made of them) -> the state after learning,
            and the mean loss of its steps (for KL in nats a position). The target's parameters may
            change from batch to batch. In place of a `Generation` rows of new tokens will do, such
            as those that a job's `Completion`s have, in the order of the prompts, where all
            positions are learnt: they do not tell which were rejected.
    """

    init: Callable[[], OnlineState]
    drafter: Callable[[OnlineState], Any]
    update: Callable[[OnlineState, Model, Prompts, Texts], tuple[OnlineState, float]]


def online(
    drafter: Model | BoundDrafter,
    *,
    optimizer: optax.GradientTransformation,
    max_prompt: int,
    max_new_tokens: int,
    divergence: str = "kl",
    positions: str = "rejected",
    top_k: int = 64,
    size: int = 64,
    rows: int = 8,
    steps: int = 1,
    seed: int = 0,
) -> Online:
    """Makes a draft model that learns from its target between the batches of a job: online
    speculative decoding.

    After a batch the target reads the finished rows once more, all positions in one pass. Its
    `top_k` most probable tokens at each position go into a buffer of `size` rows. Then the draft
    model takes `steps` optimizer steps, each on `rows` random rows of the buffer. So an update
    costs one pass of the target over texts that took it many passes to generate, and `steps`
    forward and backward passes of the draft model. The decoder itself does not change and is not
    compiled again. Logits are in memory for a few positions at a time.

    All probability outside of the `top_k` tokens counts as one outcome, in the target's
    distribution and in the draft's. So the divergence is a lower bound of that of the whole
    distributions (1 - alpha among them), and equal to it with `top_k` the size of the vocabulary.

    A job that stores the state after an update, and is resumed with it, learns and generates the
    same, bit for bit.

    Args:
        drafter: a draft model, or a drafter made of one, such as `drafters.tree(model, ...)`, that
            has no parameters but that model's. Its weights must be floating-point numbers, and
            learn in float32. Arrays of integers (the ids of a trimmed head) stay as they are, and
            so does a shared encoder (`drafters.share_encoder`).
        optimizer: such as `optax.adam(1e-3)`; the paper has constant rates of 1e-4 and 2e-5.
        max_prompt, max_new_tokens: tokens that a row of the buffer has room for.
        divergence: the loss, a name of `training.divergences.DIVERGENCES`.
        positions: "rejected": where a draft token was rejected; "all": all new tokens.
        top_k: K.
        size: N, at least as many as a batch has rows. Memory: 8 N T K bytes.
        rows: rows of the buffer in each step.
        steps: optimizer steps after each batch.
        seed: the seed of the draws of rows.

    Raises:
        ValueError: a drafter that is not one draft model, or whose weights are integers; a number
            or name that is not among those expected. By `update`: rows that are too long, or too
            many.
        FloatingPointError: by `update`: the loss or a parameter became infinite or NaN; the given
            state is unchanged.

    Example:
        >>> import jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompts = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> learner = online(
        ...     draft, optimizer=optax.sgd(1.0), max_prompt=2, max_new_tokens=32, steps=20
        ... )
        >>> state, rounds = learner.init(), []
        >>> for batch in range(3):
        ...     out = jaxspec.generate(
        ...         target, prompts, drafter=learner.drafter(state), max_new_tokens=32
        ...     )
        ...     state, loss = learner.update(state, target, prompts, out)
        ...     rounds.append(int(out.stats.rounds.sum()))
        >>> rounds[0] > rounds[-1]  # of the same text, which is the target's
        True

    Reference: Liu et al., Online Speculative Decoding, ICML 2024, arXiv 2310.07177.
    """
    one_of(positions, "positions", POSITIONS)
    one_of(divergence, "divergence", DIVERGENCES)
    at_least(
        1, max_prompt=max_prompt, max_new_tokens=max_new_tokens, top_k=top_k, rows=rows, steps=steps
    )
    if size < rows:
        raise ValueError(
            f"size is {size} and rows {rows}: expected a buffer of at least the rows of a step"
        )
    draft = _model_of(drafter)
    draft = draft._replace(params=programs.automatic(draft.params))
    _check_room(draft.lm, "the draft model", max_prompt, max_new_tokens)
    step = _step_of(draft, optimizer, DIVERGENCES[divergence], rows, seed)

    @programs.outside_context_mesh
    def fresh() -> OnlineState:
        params = _learnt(draft.params)
        zero = jnp.zeros((), jnp.int32)
        buffer = _empty(size, max_prompt, max_new_tokens, min(top_k, draft.lm.vocab_size))
        state = OnlineState(params, optimizer.init(params), buffer, zero, zero)
        mesh = sharding.mesh_of(params)
        if mesh is None:
            return state
        return sharding.place(state, None, mesh)

    # Every state lies where the first one does: otherwise programs would be compiled for one place
    # and another.
    places = jax.tree.map(lambda x: x.sharding, fresh())

    def current(state: OnlineState) -> Model | BoundDrafter:
        params = _with_learnt(draft.params, state.params)
        if isinstance(drafter, Model):
            return drafter._replace(params=params)
        return drafter._replace(params=params, models=(draft._replace(params=params),))

    @programs.outside_context_mesh
    def update(
        state: OnlineState, target: Model, prompts: Prompts, out: Texts
    ) -> tuple[OnlineState, float]:
        _check_room(target.lm, "the target", max_prompt, max_new_tokens)
        texts = _texts(state.buffer, encode(target, prompts), out, positions)
        slot = (state.rows + jnp.arange(len(texts.learn))) % size
        buffer = _collect(target.lm, target.params, state.buffer, slot, texts)
        state = state._replace(buffer=buffer, rows=state.rows + len(texts.learn))
        losses = []
        for _ in range(steps):
            state, loss = step(state)
            losses.append(float(loss))
        if not np.isfinite(losses).all():
            advice = "lower the learning rate, and go on from the state before"
            raise FloatingPointError(f"the losses are {losses}: {advice}")
        return jax.device_put(state, places), float(np.mean(losses))

    return Online(lambda: jax.device_put(fresh(), places), current, update)


def _step_of(
    draft: Model,
    optimizer: optax.GradientTransformation,
    divergence: Divergence,
    rows: int,
    seed: int,
) -> Callable[[OnlineState], tuple[OnlineState, Float[Array, ""]]]:
    """Makes a compiled optimizer step on some random rows of the buffer; its loss is NaN where a
    parameter is.
    """
    encoder = draft.lm.encoder

    def mean_divergence(params: Params, sample: Buffer) -> Float[Array, ""]:
        params = _with_learnt(draft.params, params)
        log_q = log_probs_of(draft.lm, params, sample.prompt, sample.tokens, sample.top)
        by_token = divergence(with_the_rest(sample.log_p), with_the_rest(log_q), sample.learn)
        return jnp.sum(by_token * sample.learn) / jnp.maximum(jnp.sum(sample.learn), 1.0)

    @jax.jit
    def step(state: OnlineState) -> tuple[OnlineState, Float[Array, ""]]:
        size = state.buffer.learn.shape[0]
        drawn = jax.random.uniform(
            jax.random.fold_in(jax.random.key(seed), state.step), (size,), jnp.float32
        )
        empty = (jnp.arange(size) >= state.rows).astype(drawn.dtype)
        # A sample of the filled rows.
        sample = token_rows.take_rows(state.buffer, jnp.argsort(drawn + empty)[:rows])
        value, gradient = jax.value_and_grad(mean_divergence)(state.params, sample)
        # Adam's bias correction is a float to an integer power
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        if encoder is not None and encoder.is_shared:  # it is the target's, and stays so
            params = encoder.with_params(params, _learnt(encoder.params(draft.params)))
        finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(params)]))
        state = state._replace(params=params, optimizer=optimizer_state, step=state.step + 1)
        return state, jnp.where(finite, value, jnp.nan)

    return step


class NewTexts(NamedTuple):
    """A batch of finished rows, as wide as the buffer's; `learn` is 1.0 where a token is to be
    learnt.
    """

    prompt: Prompt
    tokens: Int[Array, "B T"]
    learn: Float[Array, "B T"]


def _empty(rows: int, prompt: int, new: int, top_k: int) -> Buffer:
    """Makes a buffer without a position to learn; a prompt has one token, since attention needs
    one.
    """
    ints, floats = (functools.partial(jnp.zeros, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    prompts = Prompt(ints((rows, prompt)), jnp.ones(rows, jnp.int32))
    return Buffer(
        prompts,
        ints((rows, new)),
        floats((rows, new)),
        ints((rows, new, top_k)),
        floats((rows, new, top_k)),
    )


def _texts(buffer: Buffer, prompt: Prompt, out: Texts, positions: str) -> NewTexts:
    """Returns a batch's prompts and texts as rows for a buffer. Raises ValueError for rows that do
    not fit.
    """
    tokens, learn = (
        (out.tokens, to_learn(out, positions))
        if isinstance(out, Generation)
        else _all_of(out, positions)
    )
    batch, (size, max_new_tokens), max_prompt = (
        len(tokens),
        buffer.learn.shape,
        buffer.prompt.tokens.shape[1],
    )
    if batch % len(prompt.length):
        raise ValueError(
            f"got {len(prompt.length)} prompts and {batch} texts: expected as many of each prompt"
        )
    prompt = token_rows.repeat_rows(prompt, batch // len(prompt.length))
    longest = int(prompt.length.max())
    if longest > max_prompt or tokens.shape[1] > max_new_tokens or batch > size:
        got = (
            f"the longest of {batch} prompts has {longest} tokens, and the longest text "
            f"{tokens.shape[1]}"
        )
        limits = f"max_prompt={max_prompt}, max_new_tokens={max_new_tokens} and size={size} rows"
        raise ValueError(f"{got}: expected at most {limits}")
    prompt = prompt._replace(tokens=_to_width(prompt.tokens, max_prompt))
    return NewTexts(
        prompt, *(_to_width(rows, max_new_tokens) for rows in (tokens, learn.astype(np.float32)))
    )


@programs.jit(static_argnames=("lm",))
def _collect(
    lm: LanguageModel, params: Params, buffer: Buffer, slot: Int[Array, " B"], texts: NewTexts
) -> Buffer:
    """Puts a batch, with the target's most probable tokens at each position, into rows of the
    buffer.
    """
    top, log_p = most_probable(lm, params, texts.prompt, texts.tokens, buffer.top.shape[-1])
    return token_rows.put_rows(buffer, slot, Buffer(*texts, top, log_p))


def to_learn(out: Generation, positions: str) -> Bool[np.ndarray, "B T"]:
    """Marks the new tokens to learn: all, or those in whose place a draft token was rejected.

    The first token is prefill's. A round that accepts n tokens commits n + 1. If it tested more
    than n, the token at the last place was rejected (in a tree perhaps a sibling of an accepted
    one).
    """
    real = np.arange(out.tokens.shape[1])[None, :] < out.lengths[:, None]
    if positions == "all":
        return real
    trace, committed = out.trace, np.asarray(out.trace.num_committed)
    column = 1 + np.cumsum(committed, axis=1) - committed + trace.num_accepted
    rejected = (trace.num_tested > trace.num_accepted) & (column < out.lengths[:, None])
    learn = np.zeros_like(real)
    learn[np.nonzero(rejected)[0], column[rejected]] = True
    return learn


def _all_of(
    rows: Sequence[Sequence[int]], positions: str
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Returns rows of new tokens, padded, and marks all of them to be learnt."""
    if positions != "all":
        untold = "got rows of tokens, which do not tell where a draft token was rejected"
        raise ValueError(
            f"{untold}: expected what jaxspec.generate returns, or a learner with positions='all'"
        )
    tokens, length = map(np.asarray, token_rows.pad(rows)[:2])
    tokens = tokens[:, : length.max()]
    return tokens, np.arange(tokens.shape[1])[None, :] < length[:, None]


def _to_width(rows: Any, width: int) -> Array:
    """Cuts rows, or pads them, to a width; only padding is cut."""
    rows = jnp.asarray(rows)[:, :width]
    return jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _model_of(drafter: Model | BoundDrafter) -> Model:
    """Returns the draft model whose parameters a drafter has."""
    if (
        isinstance(drafter, BoundDrafter)
        and len(drafter.models) == 1
        and drafter.params is drafter.models[0].params
    ):
        drafter = drafter.models[0]
    if not isinstance(drafter, Model):
        raise ValueError(
            "the drafter is not one draft model: expected a jaxspec.Model, or a drafter made of "
            "one alone"
        )
    dtypes = {x.dtype for x in jax.tree.leaves(drafter.params)}
    integers = {dtype for dtype in dtypes if not jnp.issubdtype(dtype, jnp.floating)}
    # Integers of a byte are quantised weights; wider ones are ids, unless there is nothing else.
    weights = [
        x
        for x in integers
        if integers == dtypes or (jnp.issubdtype(x, jnp.integer) and x.itemsize < 2)
    ]
    if weights:
        names = ", ".join(sorted(map(str, weights)))
        raise ValueError(
            f"the draft model has parameters of {names}, which cannot be learnt: load it as float32"
        )
    return drafter


def _with_learnt(params: Params, learnt: Params) -> Params:
    """Returns parameters in their dtypes, with the learnt values where they exist."""

    def in_place(new: Array | None, old: Array) -> Array:
        if new is None:
            return old
        return new.astype(old.dtype)

    return jax.tree.map(in_place, learnt, params, is_leaf=lambda leaf: leaf is None)


def _learnt(params: Params) -> Params:
    """Returns floating-point parameters in float32, and None in place of the others.

    >>> _learnt({"weight": jnp.ones(1, jnp.bfloat16), "ids": jnp.arange(2)})
    {'ids': None, 'weight': Array([1.], dtype=float32)}
    """
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else None,
        params,
    )


def _check_room(lm: LanguageModel, name: str, prompt: int, new: int) -> None:
    """Raises ValueError for rows of the buffer that have more positions than a model."""
    needed = new + (prompt if lm.limits.start_token is None else 1)
    if lm.limits.max_positions is not None and needed > lm.limits.max_positions:
        wide = f"max_prompt={prompt} and max_new_tokens={new} make rows of {needed} tokens"
        raise ValueError(
            f"{wide}: expected at most the {lm.limits.max_positions} positions of {name}"
        )
