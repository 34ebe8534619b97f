"""Heads that draft token by token: hidden state and token in, hidden state and logits out (EAGLE,
MTP).

A pair is the hidden state of one position and the token of the next: pair t gives the hidden state
of position t + 1, and the logits of token t + 2. In decoding such a network reads the target's
hidden states up to the last committed token, and its outputs after that.

Training-time test (Li et al., EAGLE-3, arXiv 2503.01840) does the same at every position of a row
at once. At depth k the network reads, at each position, its output of depth k - 1 with the token k
places further on. It attends to the pairs of depth 0 up to its position, then to the pairs of the
same position at depths 1 to k. These are the pairs of a draft that begins there.

Shapes: B batch, T step, N nodes, F fed nodes. S positions of whole rows, A places where drafts
begin, K depths. D width of the hidden states paired with tokens, M the layers' width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core import branches, chunks, token_rows
from jaxspec.core import kv_cache as kv
from jaxspec.draft_heads.target import HeadParts, PartlyShared, SharedWithTarget, zeros
from jaxspec.draft_heads.training import DraftStarts
from jaxspec.drafters.hidden_states import TargetRequirements, on_path
from jaxspec.drafters.stepwise import NodeLogits, Parent, at_once, chain
from jaxspec.nets import stack
from jaxspec.nets.attention import LayerInputs, Mask, QueryMask, for_queries
from jaxspec.nets.decoder import empty_cache
from jaxspec.rules.common import take_position


class RecurrentHead(NamedTuple):
    """Such a network as pure functions."""

    # (parameters, the target's pass) -> what is paired with tokens, of its features or taps [B, T,
    # D]
    read: Callable[[core.Params, core.Forward], Float[Array, "B T D"]]
    empty: Callable[[int, core.Room], core.Cache]  # (batch, room) -> a cache of rows without pairs
    # (parameters, shared, cache, hidden states [B, T, D], tokens [B, T], parent=None, real=None as
    # in `Extend`) -> hidden states for the next positions, in place of the target's, and the cache.
    # It feeds pairs of a hidden state and the token after it, at each row's own length.
    extend: Callable[..., tuple[Float[Array, "B T D"], core.Cache]]
    rewind: core.Rewind  # forgets positions, as `LanguageModel.rewind` does
    # (parameters, shared, hidden states) -> logits of what follows the tokens that these were made
    # with, in the target's vocabulary [B, T, V]
    logits: Callable[[core.Params, SharedWithTarget, Float[Array, "B T D"]], Float[Array, "B T V"]]
    requirements: TargetRequirements  # its requirements of the target
    # parameters -> the hidden state that is paired with `mask_token` for every draft token but the
    # first [D]: all are drafted in one pass (P-EAGLE). None: each is made of the one before it.
    slot: Callable[[core.Params], Float[Array, " D"]] | None = None
    mask_token: int = 0


# --- the network


class RecurrentNetwork(PartlyShared):
    """Such a network, by halves; `config.layer` is the shape of its layers."""

    @property
    def mask_token(self) -> int | None:
        """The id that stands for every draft token but the first, if all are drafted in one
        pass.
        """
        return None

    def read(self, forward: core.Forward) -> Float[Array, "B T D"]:
        """Makes the features that are paired with tokens, from the target's pass."""
        return forward.features

    def joined(
        self,
        shared: SharedWithTarget,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: list[LayerInputs],
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        """Makes the layers and their inputs."""
        raise NotImplementedError

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Makes the features of the next pairs from the layers' output."""
        return x

    def logits(
        self, shared: SharedWithTarget, hidden: Float[Array, "B T M"]
    ) -> Float[Array, "B T V"]:
        """Makes the logits of what follows the tokens of the pairs."""
        raise NotImplementedError

    def __call__(self, forward: core.Forward, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Reads whole rows, with an embedding and a head of zeros where the target's are used: for
        initialisation.
        """
        c = self.config.layer
        shared = zeros(c.dim, c.vocab_size)
        cache = self.empty(tokens.shape[0], core.Room(tokens.shape[1]))
        return self.logits(shared, self.extend(shared, cache, self.read(forward), tokens)[0])

    @nn.nowrap
    def empty(self, batch: int, room: core.Room) -> kv.KVCache:
        """Makes a cache without pairs."""
        return empty_cache(self.config.layer, batch, room)

    def extend(
        self,
        shared: SharedWithTarget,
        cache: kv.KVCache,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T M"], kv.KVCache]:
        """Feeds further pairs."""
        pass_ = kv.Pass(cache.length, tokens.shape[1], parent, real)

        def seen(view: kv.View) -> Mask | QueryMask:
            return for_queries(
                pass_.step, lambda first, count: (view.mask(first, count)[:, None], None), parent
            )[0]

        masks = [seen(view) for view in cache.views(pass_)]
        x, layers = self._layers(shared, hidden, tokens, pass_.positions(), masks)
        x, _, cache = stack.with_cache(layers, x, cache, pass_=pass_)
        return self.fed_on(x), cache

    def step(
        self,
        shared: SharedWithTarget,
        hidden: Float[Array, "B S D"],
        tokens: Int[Array, "B S"],
        position: Int[Array, "1 S"],
        masks: list[Mask | QueryMask],
        past: stack.Past,
    ) -> tuple[Float[Array, "B S M"], stack.Past]:
        """Feeds a pair at each position, in training; masks say which keys of `past`, and then of
        these, each layer reads (`for_queries`).

        Returns the hidden states that are fed next, and all keys and values so far.
        """
        x, layers = self._layers(shared, hidden, tokens, position, masks)
        x, past = stack.with_past(layers, x, past)
        return self.fed_on(x), past

    def _layers(self, shared, hidden, tokens, position, masks):
        turns = [layer.attention.rotation for layer in self.config.layer.layers]
        rotations = [turn and turn[0].at(position, turn[1]) for turn in turns]
        inputs = [
            LayerInputs(mask, rotation, None)
            for mask, rotation in zip(masks, rotations, strict=True)
        ]
        return self.joined(shared, hidden, tokens, position, inputs)

    def slot(self) -> Float[Array, " D"]:
        """Makes the hidden state that is paired with mask tokens, of a network that drafts in one
        pass.
        """
        raise NotImplementedError


def functions(
    module: RecurrentNetwork, requirements: TargetRequirements, mask_token: int | None = None
) -> RecurrentHead:
    """Makes pure functions of a network; with a `mask_token` it drafts in one pass."""
    net = type(module)
    read, extend, logits = (
        stack.pure(module, method) for method in (net.read, net.extend, net.logits)
    )
    if mask_token is None:
        slot = None
    else:
        slot = stack.pure(module, net.slot)
    return RecurrentHead(
        read, module.empty, extend, kv.rewind, logits, requirements, slot, mask_token or 0
    )


def unrolled(network: Callable[[Any], RecurrentNetwork]) -> Callable[..., Float[Array, "B A K M"]]:
    """Makes `Training.hidden_states` of a network that is fed its outputs.

    What a step computed inside is computed again for its gradient.
    """

    def hidden_states(
        config: Any, params: core.Params, shared: SharedWithTarget, starts: DraftStarts
    ):
        module = network(config)
        mask_token = module.mask_token
        hidden = stack.pure(module, type(module).read)(params, starts.forward)
        windows = [layer.attention.window for layer in config.layer.layers]

        size = hidden.shape[1]
        outputs = []
        past = ()
        index = jnp.arange(size, dtype=jnp.int32)

        def mask_at(
            depth: int, window: int | None, first: int | Int[Array, ""], count: int
        ) -> tuple[Mask, None]:
            # Past lies in blocks of S: the text's own pairs, causal, then each depth's, of which a
            # draft sees its own only. A draft is far shorter than a window, which so ends among the
            # text's pairs.
            query = first + jnp.arange(count, dtype=jnp.int32)[:, None]
            key = index[None, :]
            if window is None:
                seen = query >= key
            else:
                seen = (query >= key) & (query + depth - key < window)
            of_draft = [
                (query == key) & (depth - i < (window or size)) for i in range(1, depth + 1)
            ]
            return jnp.concatenate([seen, *of_draft], axis=1)[None, None], None

        def step(depth: int, params: core.Params, hidden: Array, fed: Array, past: stack.Past):
            masks = [
                for_queries(size, functools.partial(mask_at, depth, window))[0]
                for window in windows
            ]
            feed = stack.pure(module, type(module).step)
            return feed(params, shared, hidden, fed, index[None] + depth, masks, past)

        for depth in range(starts.depths):
            fed = jax.lax.slice_in_dim(starts.tokens, depth, depth + size, axis=1)
            if depth and mask_token is not None:
                hidden = jnp.broadcast_to(
                    stack.pure(module, type(module).slot)(params), hidden.shape
                )
                fed = jnp.full_like(fed, mask_token)
            # Checkpointed, because activations of all depths together would be the largest part of
            # the memory.
            hidden, past = jax.checkpoint(functools.partial(step, depth))(params, hidden, fed, past)
            outputs.append(hidden)
        return jnp.stack(outputs, axis=2)[:, starts.place]

    return hidden_states


# --- the drafter


class HiddenState(NamedTuple):
    """The network's cache, and the inputs of its next pass."""

    cache: core.Cache  # pairs of a hidden state and the token after it
    # how many pairs of each row it holds, every hidden state of which is the target's own
    num_cached: Int[Array, " B"]
    # after the last of these pairs. Only right after prefill, when the token after the target's
    # last hidden state is not known yet, it is that hidden state, and `num_cached` one fewer than
    # there are pairs.
    hidden: Float[Array, "B D"]


class FedHidden(NamedTuple):
    """A draft in the making: the cache, and hidden states: of a tree those after the last committed
    token and each draft token that was fed, of a chain the last one.
    """

    cache: core.Cache
    hidden: Float[Array, "B F+1 D"]


@functools.lru_cache
def drafter(head: RecurrentHead, parts: HeadParts) -> core.Drafter:
    """Makes a drafter of any network that has these functions, for `target.bind`."""

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        params, shared = parts(weights)
        state = _completed(head, parts, weights, caches.draft, context.row)
        if head.slot is not None:
            return _in_one_pass(head, params, shared, state, caches, context.gamma)

        def root(so_far: FedHidden) -> NodeLogits:
            return head.logits(params, shared, so_far.hidden[:, :1]), so_far

        def nodes(
            tokens: Int[Array, "B n"], parent: Parent, level: Any, so_far: FedHidden
        ) -> NodeLogits:
            before = so_far.hidden
            first = 0
            if parent is not None:
                # `parent` counts draft tokens from 0, and is -1 where the last committed one
                # precedes; `hidden` has the latter's state in front. The new nodes are the last of
                # those fed; their hidden states go behind the ones that are there.
                first = parent.shape[1] - tokens.shape[1] + 1
                before = jnp.take_along_axis(before, parent[:, first - 1 :, None] + 1, axis=1)
            output, cache = head.extend(params, shared, so_far.cache, before, tokens, parent)
            hidden = jax.lax.dynamic_update_slice_in_dim(
                so_far.hidden, output.astype(state.hidden.dtype), first, axis=1
            )
            return head.logits(params, shared, output), FedHidden(cache, hidden)

        def end(so_far: FedHidden, draft: core.Draft, slots: Int[Array, "#B N"]) -> core.Caches:
            return caches._replace(
                draft=state._replace(cache=head.rewind(so_far.cache, state.num_cached))
            )

        # [B, F + 1, D] for a tree, whose nodes look up their parents; a chain needs one state only.
        hidden = jnp.pad(state.hidden[:, None], ((0, 0), (0, fed or 0), (0, 0)))
        return core.Reading(FedHidden(state.cache, hidden), root, nodes, end)

    def commit(end: core.RoundEnd) -> core.Caches:
        (params, shared), row, state = parts(end.weights), end.row, end.caches.draft
        hidden = head.read(params, on_path(end.forward, end.verdict))
        # What the draft made up is replaced: accepted tokens are paired with the target's own
        # hidden states.
        tokens = token_rows.window(row.tokens, state.num_cached + 1, hidden.shape[1])
        output, cache = head.extend(
            params, shared, head.rewind(state.cache, state.num_cached), hidden, tokens
        )
        # a finished row has no new pair
        count = row.length - 1 - state.num_cached
        num_cached = row.length - 1
        last = jnp.where(
            (count > 0)[:, None], take_position(output, jnp.maximum(count - 1, 0)), state.hidden
        )
        return end.caches._replace(
            draft=HiddenState(
                head.rewind(cache, num_cached), num_cached, last.astype(state.hidden.dtype)
            )
        )

    init = functools.partial(_after_prompt, head, parts)
    return chain(core.Steps(init, begin, commit, head.requirements.vocab_size))


def _after_prompt(
    head: RecurrentHead, parts: HeadParts, start: core.DraftStart, nodes: int
) -> HiddenState:
    """Feeds the pairs of the prompts."""
    (params, shared), row = parts(start.weights), token_rows.decoder_prompt(parts.lm, start.prompt)
    # Pair s is (hidden state s, token s + 1). After prefill the last pair lacks its token.
    num_cached = row.length - 1
    hidden = head.read(params, start.prefilled)
    tokens = row.tokens[:, 1:]
    last = num_cached
    pairs_before = None
    before = start.before
    # the pairs before `start` are there, of the last of which the token is known
    if before is not None:
        tokens = token_rows.window(row.tokens, before.start + 1, before.width - 1)
        last = num_cached - before.start
        pairs_before = before.of(before.state.cache)

    def extend(
        cache: core.Cache, pairs: tuple[Array, Array], real: Array
    ) -> tuple[tuple, core.Cache]:
        return (), head.extend(params, shared, cache, *pairs, None, real)[1]

    cache = head.empty(len(row.length), start.room)
    if tokens.shape[1]:
        read = functools.partial(chunks.read, extend, head.rewind, head.empty)
        _, _, cache = read((hidden[:, :-1], tokens), num_cached, start.room, pairs_before)
    return HiddenState(head.rewind(cache, num_cached), num_cached, take_position(hidden, last))


def _completed(
    head: RecurrentHead,
    parts: HeadParts,
    weights: core.Weights,
    state: HiddenState,
    row: core.Prompt,
) -> HiddenState:
    """Feeds the pair that prefill left open, to the rows that have it."""
    # Prefill cannot feed the last pair: its token is drawn after it. The first round does.
    open_pair = state.num_cached < row.length - 1

    def feed(state: HiddenState) -> HiddenState:
        (params, shared), cache = parts(weights), head.rewind(state.cache, state.num_cached)
        token = token_rows.window(row.tokens, jnp.minimum(state.num_cached + 1, row.length - 1), 1)
        output, cache = head.extend(params, shared, cache, state.hidden[:, None], token)
        hidden = jnp.where(
            open_pair[:, None], output[:, 0].astype(state.hidden.dtype), state.hidden
        )
        return HiddenState(head.rewind(cache, row.length - 1), row.length - 1, hidden)

    return branches.run_if(jnp.any(open_pair), feed, state)


def _in_one_pass(
    head: RecurrentHead,
    params: core.Params,
    shared: SharedWithTarget,
    state: HiddenState,
    caches: core.Caches,
    count: int,
) -> core.Reading:
    """Drafts `count` tokens: after the last pair, and after pairs of a mask token and
    `RecurrentHead.slot`.
    """

    def all_logits(carry: tuple[()]) -> tuple[Float[Array, "B G V"], tuple[()]]:
        assert head.slot is not None
        shape = state.hidden.shape[0], max(count - 1, 1)  # a network is fed one slot at least
        slots = jnp.broadcast_to(head.slot(params), (*shape, state.hidden.shape[-1]))
        masks = jnp.full(shape, head.mask_token, jnp.int32)
        # The grown cache is dropped: what slots have made is no text.
        output, _ = head.extend(
            params, shared, head.rewind(state.cache, state.num_cached), slots, masks
        )
        hidden = jnp.concatenate([state.hidden[:, None], output.astype(state.hidden.dtype)], axis=1)
        return head.logits(params, shared, hidden[:, :count]), carry

    return at_once(all_logits, (), lambda carry: caches._replace(draft=state))
