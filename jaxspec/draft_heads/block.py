"""Block drafters: one pass over a block of mask tokens, whose attention also reads the target's
hidden states.

DFlash (Chen et al., arXiv 2602.06036) fuses the outputs of several of the target's layers into one
vector for each committed position. Each layer of the drafter makes keys and values from it. The
block is the last committed token and mask tokens, and all its positions attend to each other.
DSpark adds a low-rank function of the previous token to a token's logits, so that the tokens of a
block depend on each other. One form of it has a memory. As in `speculators`, the memory begins at
the last committed token's position, even if that position predicts no token.

With `reads_source` a drafter also reads the output of an encoder-decoder's encoder. The context of
a row then begins with the source's positions, and the decoder's follow.

Shapes: B batch, T step, S cache capacity, M the layers' width. F width of the target's taps, V
vocabulary, W the drafter's, R rank. P source positions, A places where drafts begin, C draft tokens
of a block, N drafts, K depths. L positions before theirs that a memory has read
(`BlockConfig.lead`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec import core
from jaxspec.core import chunks, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.draft_heads import block_files, formats
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.block_network import BlockDrafter
from jaxspec.draft_heads.formats import Format
from jaxspec.draft_heads.kind import Kind, WindowedSizes, sizes_of
from jaxspec.draft_heads.target import HeadParts, SharedWithTarget, bind, requirements_of
from jaxspec.draft_heads.training import DraftStarts, DraftStep, Training
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, on_path
from jaxspec.drafters.stepwise import NodeLogits, chain
from jaxspec.nets import stack

# --- its functions


class BlockHead(NamedTuple):
    """A block drafter's network as pure functions."""

    # (parameters, the target's pass) -> what is taken in of its taps [B, T, M]
    read: Callable[[core.Params, core.Forward], Float[Array, "B T M"]]
    # (parameters, the encoder's output [B, P, D]) -> what is taken in of it [B, P, M]; None: it
    # reads none
    source: Callable[[core.Params, Float[Array, "B P D"]], Float[Array, "B P M"]] | None
    # (batch, room) -> a cache of rows without positions
    empty: Callable[[int, core.Room], core.Cache]
    # (parameters, cache, what `read` made of further positions [B, T, M], how many of these are
    # real [B] or None) -> the cache, which grows by them
    append: Callable[..., core.Cache]
    # (parameters, shared, cache, the last committed tokens [B], count) -> the features of the
    # `count` tokens after these, all in one pass [B, L+C, M]. L positions that come before theirs
    # and predict nothing may be returned in front, if `next_logits` is to read them.
    block: Callable[
        [core.Params, SharedWithTarget, core.Cache, Int[Array, " B"], int], Float[Array, "B L+C M"]
    ]
    rewind: core.Rewind  # forgets positions, as `LanguageModel.rewind` does
    # (parameters, shared, features of a block) -> logits in the target's vocabulary [B, C, V];
    # where there is `next_logits`, any arrays [B, C, ...] that it reads
    logits: Callable[[core.Params, SharedWithTarget, Float[Array, "B C M"]], Any]
    # (parameters, what `logits` made for a position [B, 1, ...], previous tokens [B, n], the
    # position's features [B, 1, M], memory [B, R]) -> the position's logits after each of these
    # tokens [B, n, V], and the memory for the next position [B, R]. None: given the committed text,
    # the tokens of a block are independent.
    next_logits: Callable[..., tuple[Float[Array, "B n V"], Float[Array, "B R"]]] | None
    # R, the width of what `next_logits` passes on, at the beginning zeros; 0: nothing, and n may be
    # over 1
    memory: int
    count: int  # most tokens of a block
    requirements: TargetRequirements  # its requirements of the target
    # (parameters, previous tokens [B, 1], a position's features [B, 1, M]) -> the estimated
    # probability that the position's draft token is accepted [B]; None: it estimates nothing
    estimate: Callable[..., Float[Array, " B"]] | None = None


@functools.lru_cache
def head(config: BlockConfig, network: type[BlockDrafter] = BlockDrafter) -> BlockHead:
    """Makes a block drafter's pure functions, for `drafters.block`."""
    net = network(config)
    return BlockHead(
        read=stack.pure(net, network.read),
        source=stack.pure(net, network.source) if config.reads_source else None,
        empty=net.empty,
        append=stack.pure(net, network.append),
        block=stack.pure(net, network.block),
        rewind=kv.rewind,
        logits=stack.pure(net, network.logits),
        next_logits=stack.pure(net, network.next_logits) if config.is_sequential else None,
        memory=config.memory,
        estimate=stack.pure(net, network.estimate) if config.confidence else None,
        count=config.count,
        requirements=requirements_of(config, config.hidden_size, config.taps)._replace(
            encoder=config.reads_source
        ),
    )


def first_memory(
    head: BlockHead,
    params: core.Params,
    shared: SharedWithTarget,
    last: Int[Array, " B"],
    features: Float[Array, "B L M"],
) -> Float[Array, "B R"]:
    """Makes the memory that a block's first token is given: zeros, after the L positions that
    predict no token.
    """
    # Positions before the drafted ones still pass their memory on, as in training.
    memory = jnp.zeros((features.shape[0], head.memory), features.dtype)
    for i in range(features.shape[1]):
        assert head.next_logits is not None
        feature = features[:, i : i + 1]
        logits = head.logits(params, shared, feature)  # compiled away where the memory needs none
        _, memory = head.next_logits(params, logits, last[:, None], feature, memory)
    return memory


def init(
    config: BlockConfig, key: Key[Array, ""], network: type[BlockDrafter] = BlockDrafter
) -> core.Params:
    """Draws random parameters."""
    taps = jnp.zeros((1, 1, config.hidden_size * len(config.taps)), jnp.float32)
    return stack.init_params(network(config), key, taps, jnp.zeros((1,), jnp.int32))


# --- the drafter


def block(
    head: DraftHead[BlockHead], target: core.Model, trimmed: core.Model | None = None
) -> core.BoundDrafter:
    """Drafts a whole block of tokens in one pass over mask tokens, conditioned on the target's
    hidden states (DFlash).

    The cost does not grow with the number of draft tokens, so they may be many. Given the committed
    text, DFlash's tokens are independent of each other. DSpark's are drawn one after the other;
    each adds a low-rank function of the token before to the logits of its position. gamma is cut to
    the tokens of a block.

    Args:
        head: a network and its parameters: `draft_heads.block.head(config)` in a `DraftHead`;
            `jaxspec.load_drafter` reads published ones.
        target: the model whose text it drafts, with the taps that it reads (`jaxspec.with_taps`).
        trimmed: a model whose head is used in place of the target's:
            `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the network is for another target, or the target lacks the taps.

    Example:
        >>> import jaxspec
        >>> from jaxspec import nets
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.decoder_config(
        ...     32, dim=16, ff_dim=32, layers=3, heads=4, kv_heads=2, head_dim=4
        ... )
        >>> target = jaxspec.Model(
        ...     decoder.language_model(shape, taps=(0, 1)), decoder.init(shape, jax.random.key(0))
        ... )
        >>> config = BlockConfig(
        ...     nets.replace(shape, layers=1), 16, taps=(0, 1), block=4, mask_token=31
        ... )
        >>> drafter = block(
        ...     jaxspec.DraftHead(head(config), init(config, jax.random.key(1))), target
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Chen, Liang, Liu, DFlash, arXiv 2602.06036.
    """
    return bind(_drafter, head, target, trimmed, "a block drafter", "block")


class Context(NamedTuple):
    """The keys and values that a block reads."""

    cache: core.Cache
    # the position there of each row's first token: the source's length, or 0
    first: Int[Array, " B"]


@functools.lru_cache
def _drafter(head: BlockHead, parts: HeadParts) -> core.Drafter:
    def init(start: core.DraftStart, nodes: int) -> Context:
        (params, _), row = parts(start.weights), token_rows.decoder_prompt(parts.lm, start.prompt)
        context = head.read(params, start.prefilled)
        first = jnp.zeros_like(row.length)
        if head.source is not None:
            encoded = start.prefilled.encoded
            first = start.prompt.text.length
            assert encoded is not None
            cache = head.empty(
                len(first),
                dataclasses.replace(start.room, tokens=start.room.tokens + encoded.shape[1]),
            )
            cache = head.rewind(head.append(params, cache, head.source(params, encoded)), first)
            cache = head.rewind(head.append(params, cache, context), first + row.length)
            return Context(cache, first)
        # There are no outputs to keep: only the cache of the prompt's context is wanted.
        before = start.before and start.before.of(start.before.state.cache)
        rows = context, row.length, start.room, before
        cache = chunks.read(
            lambda *new: ((), head.append(params, *new)), head.rewind, head.empty, *rows
        )[2]
        return Context(cache, first)

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        (params, shared), row, count = parts(weights), context.row, context.gamma
        last = token_rows.window(row.tokens, row.length - 1, 1)
        # Trees have no policy that could ask for an estimate.
        estimates = head.estimate if fed is None else None

        def whole_block() -> tuple[Array, Any, Array, Array]:
            features = head.block(params, shared, caches.draft.cache, last[:, 0], count)
            lead = features.shape[1] - count
            memory = first_memory(head, params, shared, last[:, 0], features[:, :lead])
            logits = head.logits(params, shared, features[:, lead:])
            return features[:, lead:], logits, memory, jnp.zeros(last.shape[0], jnp.float32)

        def root(carry: Any) -> NodeLogits:
            return nodes(last, None, 0, whole_block())

        def nodes(
            tokens: Int[Array, "B n"], parent: Any, level: int | Int[Array, ""], carry: Any
        ) -> NodeLogits:
            features, block_logits, memory, estimate = carry
            at_level = functools.partial(
                jax.lax.dynamic_slice_in_dim, start_index=level, slice_size=1, axis=1
            )
            logits = jax.tree.map(at_level, block_logits)  # B 1 V
            if head.next_logits is not None:
                logits, memory = head.next_logits(
                    params, logits, tokens, at_level(features), memory
                )
            if estimates is not None:
                estimate = estimates(params, tokens, at_level(features))
            carry = features, block_logits, memory, estimate
            return jnp.broadcast_to(logits, (*tokens.shape, logits.shape[-1])), carry

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(whole_block))
        return core.Reading(
            empty, root, nodes, estimate=None if estimates is None else lambda carry: carry[3]
        )

    def commit(end: core.RoundEnd) -> core.Caches:
        (params, _), (cache, first) = parts(end.weights), end.caches.draft
        # The accepted path's hidden states become context; garbage after them is rewound at once.
        cache = head.append(params, cache, head.read(params, on_path(end.forward, end.verdict)))
        return end.caches._replace(
            draft=Context(head.rewind(cache, first + end.row.length - 1), first)
        )

    steps = core.Steps(init, begin, commit, head.requirements.vocab_size, head.count)
    return chain(steps, trees=head.memory == 0)  # with a memory, logits depend on the whole path


# --- in training


def draft_states(
    config: BlockConfig,
    params: core.Params,
    shared: SharedWithTarget,
    starts: DraftStarts,
    network: type[BlockDrafter] = BlockDrafter,
) -> Float[Array, "B A L+C M"]:
    """Makes the features of the blocks that begin at the places, after the features of the
    positions before them.
    """
    blocks = stack.pure(network(config), network.blocks)
    position = starts.place
    features = blocks(params, shared, starts, starts.tokens[:, position], position + 1)
    return features[:, :, : config.lead + starts.depths]


def draft_logits(
    config: BlockConfig, params: core.Params, shared: SharedWithTarget, at: DraftStep
) -> tuple[Float[Array, "N V"], Float[Array, "N R"] | None]:
    """Makes the logits of the tokens of one number of blocks, given the text's tokens before
    them.
    """
    functions = head(config)
    index = config.lead + at.depth
    memory = at.memory
    feature = at.hidden[:, index : index + 1]
    logits = functions.logits(params, shared, feature)
    if functions.next_logits is None:
        return logits[:, 0], None
    if memory is None:
        memory = first_memory(
            functions, params, shared, at.ahead[:, 0], at.hidden[:, : config.lead]
        )
    logits, memory = functions.next_logits(
        params, logits, at.ahead[:, at.depth, None], feature, memory
    )
    return logits[:, 0], memory


def confidence_lesson(
    config: BlockConfig,
    params: core.Params,
    shared: SharedWithTarget,
    at: DraftStep,
    log_p: Float[Array, "N W"],
    log_q: Float[Array, "N W"],
    hard: bool,
) -> tuple[Float[Array, "N 2"], Float[Array, "N 2"]] | None:
    """Makes the distribution of whether a token is accepted, and the drafter's estimate of it
    (DSpark).

    Its KL is the binary cross-entropy, up to a constant.
    """
    if not config.confidence:
        return None
    estimates = head(config).estimate
    index = config.lead + at.depth
    assert estimates is not None
    estimate = estimates(params, at.ahead[:, at.depth, None], at.hidden[:, index : index + 1])
    # At temperature 1 the acceptance rate is the overlap of both distributions: a label, which
    # learns nothing itself.
    rate = jax.lax.stop_gradient(jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1))

    def of_both_outcomes(accepted: Float[Array, " N"]) -> Float[Array, "N 2"]:
        return jnp.log(jnp.clip(jnp.stack([accepted, 1 - accepted], axis=-1), 1e-6, 1.0))

    return of_both_outcomes(rate), of_both_outcomes(estimate)


KIND = Kind(
    name="block",
    config=BlockConfig,
    sizes=sizes_of(BlockConfig, layers=WindowedSizes, head_norms=True),
    init=init,
    head=head,
    drafter=block,
    format=Format(
        title="block drafter",
        canonical=formats.plain,
        matches=block_files.matches,
        read=block_files.read,
        modules=block_files.modules,
        write=block_files.write,
        keys=block_files.with_options(),
    ),
    training=Training(
        draft_states, draft_logits, longest=lambda config: config.count, own=confidence_lesson
    ),
)
