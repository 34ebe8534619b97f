"""Heads that draft token by token: hidden state and token in, hidden state and logits out (EAGLE, MTP).

A pair is the hidden state of one position and the token of the next: pair t gives the hidden state of position t + 1,
and the logits of token t + 2. In decoding such a network reads the target's hidden states up to the last committed
token, and its own after that.

Training-time test (Li et al., EAGLE-3, arXiv 2503.01840) does the same at every position of a row at once. At depth k
the network reads, at each position, its own output of depth k - 1 with the token k places further on. It attends to the
pairs of depth 0 up to its position, then to the pairs of its own position at depths 1 to k. These are the pairs of a
draft that begins there.

Shapes: B batch, T step, N nodes, F fed nodes. S positions of whole rows, A places where drafts begin, K depths. D width
of the hidden states paired with tokens, M the layers' width, V vocabulary.
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
from jaxspec.draft_heads.target import PartlyShared, SharedWithTarget, shared_with, zeros
from jaxspec.draft_heads.training import DraftStarts
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, check_target, on_path
from jaxspec.drafters.sequential import Logits, sequential
from jaxspec.nets import stack
from jaxspec.nets.attention import Mask, QueryMask, causal, for_queries
from jaxspec.nets.decoder import AttentionInputs, empty_cache, rotation_of
from jaxspec.rules.common import take_position


class RecurrentHead(NamedTuple):
    """Such a network as pure functions.

    Attributes:
        read: (parameters, the target's pass) -> what is paired with tokens, of its features or taps [B, T, D].
        empty: (batch, room) -> a cache of rows without pairs.
        extend: (parameters, shared, cache, hidden states [B, T, D], tokens [B, T], parent or None as in
            `LanguageModel.extend`) -> hidden states for the next positions, in place of the target's, and the cache. It
            feeds pairs of a hidden state and the token after it, at each row's own length.
        rewind: forgets positions, as `LanguageModel.rewind` does.
        logits: (parameters, shared, hidden states) -> logits of what follows the tokens that these were made with, in
            the target's vocabulary [B, T, V].
        requirements: its requirements of the target.
    """

    read: Callable[[core.Params, core.Forward], Float[Array, "B T D"]]
    empty: Callable[[int, core.Room], core.Cache]
    extend: Callable[..., tuple[Float[Array, "B T D"], core.Cache]]
    rewind: core.Rewind
    logits: Callable[[core.Params, SharedWithTarget, Float[Array, "B T D"]], Float[Array, "B T V"]]
    requirements: TargetRequirements


# --- the network


class Recurrent(PartlyShared):
    """Such a network, by halves; `config.layer` is the shape of its layers."""

    def read(self, forward: core.Forward) -> Float[Array, "B T D"]:
        """Makes what is paired with tokens, of the target's pass."""
        return forward.features

    def joined(
        self,
        shared: SharedWithTarget,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        position: Int[Array, "#B T"],
        inputs: AttentionInputs,
    ) -> tuple[Float[Array, "B T M"], list[stack.Layer]]:
        """Makes what goes into the layers, and these."""
        raise NotImplementedError

    def fed_on(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Makes what the next pairs are given of the layers' output."""
        return x

    def logits(self, shared: SharedWithTarget, hidden: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        """Makes the logits of what follows the tokens of the pairs."""
        raise NotImplementedError

    def __call__(self, forward: core.Forward, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Reads whole rows, with an embedding and a head of zeros where the target's are used: for initialisation."""
        c = self.config.layer
        shared, cache = zeros(c.dim, c.vocab_size), self.empty(tokens.shape[0], core.Room(tokens.shape[1]))
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
    ) -> tuple[Float[Array, "B T M"], kv.KVCache]:
        """Feeds further pairs."""
        at = kv.Pass(cache.length, tokens.shape[1], parent)
        mask = causal(at.length, at.step, cache.capacity, parent)
        x, layers = self._layers(shared, hidden, tokens, at.positions(), mask)
        x, _, cache = stack.with_cache(layers, x, cache, at=at)
        return self.fed_on(x), cache

    def step(
        self,
        shared: SharedWithTarget,
        hidden: Float[Array, "B S D"],
        tokens: Int[Array, "B S"],
        position: Int[Array, "1 S"],
        mask: Mask | QueryMask,
        past: stack.Past,
    ) -> tuple[Float[Array, "B S M"], stack.Past]:
        """Feeds a pair at each position, in training; `mask` says which keys of `past`, and then of these, it reads
        (`for_queries`).

        Returns the hidden states that are fed next, and all keys and values so far.
        """
        x, layers = self._layers(shared, hidden, tokens, position, mask)
        x, past = stack.with_past(layers, x, past)
        return self.fed_on(x), past

    def _layers(self, shared, hidden, tokens, position, mask):
        inputs = AttentionInputs(mask, rotation_of(self.config.layer, position), None)
        return self.joined(shared, hidden, tokens, position, inputs)


def functions(module: Recurrent, requirements: TargetRequirements) -> RecurrentHead:
    """Makes pure functions of a network."""
    net = type(module)
    read, extend, logits = (stack.pure(module, method) for method in (net.read, net.extend, net.logits))
    return RecurrentHead(read, module.empty, extend, kv.rewind, logits, requirements)


def unrolled(network: Callable[[Any], Recurrent]) -> Callable[..., Float[Array, "B A K M"]]:
    """Makes `Training.hidden_states` of a network: it is fed what it made.

    What a step computed inside is computed again for its gradient.
    """

    def hidden_states(config: Any, params: core.Params, shared: SharedWithTarget, starts: DraftStarts):
        module = network(config)
        hidden = stack.pure(module, type(module).read)(params, starts.forward)

        size, outputs, past = hidden.shape[1], [], ()
        index = jnp.arange(size, dtype=jnp.int32)

        def mask_at(depth: int, first: int | Int[Array, ""], count: int) -> tuple[Mask, None]:
            query, key = first + jnp.arange(count, dtype=jnp.int32)[:, None], index[None, :]
            return jnp.concatenate([query >= key, *[query == key] * depth], axis=1)[None, None], None

        def step(depth: int, params: core.Params, hidden: Array, fed: Array, past: stack.Past):
            mask, _ = for_queries(size, functools.partial(mask_at, depth))
            feed = stack.pure(module, type(module).step)
            return feed(params, shared, hidden, fed, index[None] + depth, mask, past)

        for depth in range(starts.depths):
            fed = jax.lax.slice_in_dim(starts.tokens, depth, depth + size, axis=1)
            hidden, past = jax.checkpoint(functools.partial(step, depth))(params, hidden, fed, past)
            outputs.append(hidden)
        return jnp.stack(outputs, axis=2)[:, starts.place]

    return hidden_states


# --- the drafter


class HiddenState(NamedTuple):
    """The network's cache, and what its next pass begins with.

    Attributes:
        cache: pairs of a hidden state and the token after it.
        num_cached: how many pairs of each row it holds, every hidden state of which is the target's own.
        hidden: after the last of these pairs. Only right after prefill, when the token after the target's last hidden
            state is not known yet, it is that hidden state, and `num_cached` one fewer than there are pairs.
    """

    cache: core.Cache
    num_cached: Int[Array, " B"]
    hidden: Float[Array, "B D"]


class Nodes(NamedTuple):
    """A tree in the making: the cache, and the hidden states after the last committed token and each fed node."""

    cache: core.Cache
    hidden: Float[Array, "B F+1 D"]


def drafter(head: DraftHead[RecurrentHead], target: core.Model, title: str, name: str) -> core.BoundDrafter:
    """Drafts with any network that has these functions; `title` names the network in complaints."""
    check_target(head.network.requirements, target, title)
    return core.BoundDrafter(_drafter(head.network, target.lm), head.params, target=target, name=name)


@functools.lru_cache
def _drafter(head: RecurrentHead, lm: core.LanguageModel) -> core.Drafter:
    def init(start: core.DraftStart) -> HiddenState:
        row, shared = token_rows.decoder_prompt(lm, start.prompt), shared_with(lm, start.weights.target)
        num_cached, hidden = row.length - 1, head.read(start.weights.draft, start.prefilled)
        tokens, last, pairs_before, before = row.tokens[:, 1:], num_cached, None, start.before
        if before is not None:  # the pairs before `start` are there, of the last of which the token is known
            tokens = token_rows.window(row.tokens, before.start + 1, before.width - 1)
            last, pairs_before = num_cached - before.start, before.of(before.state.cache)

        def extend(
            cache: core.Cache, pairs: tuple[Float[Array, "B T D"], Int[Array, "B T"]], real: Int[Array, " B"]
        ) -> tuple[tuple, core.Cache]:
            return (), head.extend(start.weights.draft, shared, cache, *pairs)[1]

        cache = head.empty(len(row.length), start.room)
        if tokens.shape[1]:
            read = functools.partial(chunks.read, extend, head.rewind, head.empty)
            _, _, cache = read((hidden[:, :-1], tokens), num_cached, start.room, pairs_before)
        return HiddenState(head.rewind(cache, num_cached), num_cached, take_position(hidden, last))

    def complete(weights: core.Weights, state: HiddenState, row: core.Prompt) -> HiddenState:
        """Feeds the pair that prefill left open, to the rows that have it."""
        open_pair = state.num_cached < row.length - 1

        def feed(state: HiddenState) -> HiddenState:
            token = token_rows.window(row.tokens, jnp.minimum(state.num_cached + 1, row.length - 1), 1)
            shared, cache = shared_with(lm, weights.target), head.rewind(state.cache, state.num_cached)
            output, cache = head.extend(weights.draft, shared, cache, state.hidden[:, None], token)
            hidden = jnp.where(open_pair[:, None], output[:, 0].astype(state.hidden.dtype), state.hidden)
            return HiddenState(head.rewind(cache, row.length - 1), row.length - 1, hidden)

        return branches.run_if(jnp.any(open_pair), feed, state)

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> tuple[core.Draft, core.Caches]:
        row, shared = context.row, shared_with(lm, weights.target)
        state = complete(weights, caches.draft, row)

        def logits(hidden: Float[Array, "B 1 D"]) -> Float[Array, "B V"]:
            return head.logits(weights.draft, shared, hidden)[:, 0]

        def first(carry: tuple[Float[Array, "B D"], core.Cache]) -> Logits:
            return logits(carry[0][:, None]), None, carry

        def following(
            i: Int[Array, ""], last: Int[Array, " B"], carry: tuple[Float[Array, "B D"], core.Cache]
        ) -> Logits:
            hidden, cache = head.extend(weights.draft, shared, carry[1], carry[0][:, None], last[:, None])
            return logits(hidden), None, (hidden[:, 0].astype(carry[0].dtype), cache)

        draft, (_, cache) = sequential(first, following, (state.hidden, state.cache), context)
        return draft, caches._replace(draft=state._replace(cache=head.rewind(cache, state.num_cached)))

    def commit(end: core.RoundEnd, depth: int | None = None) -> core.Caches:
        weights, row, state = end.weights, end.row, end.caches.draft
        shared = shared_with(lm, weights.target)
        hidden = head.read(weights.draft, on_path(end.forward, end.verdict, depth))
        tokens = token_rows.window(row.tokens, state.num_cached + 1, hidden.shape[1])
        output, cache = head.extend(weights.draft, shared, head.rewind(state.cache, state.num_cached), hidden, tokens)
        count, num_cached = row.length - 1 - state.num_cached, row.length - 1  # a finished row has no new pair
        last = jnp.where((count > 0)[:, None], take_position(output, jnp.maximum(count - 1, 0)), state.hidden)
        return end.caches._replace(
            draft=HiddenState(head.rewind(cache, num_cached), num_cached, last.astype(state.hidden.dtype))
        )

    # Of a tree: the hidden state after each node that was fed is what its children are paired with.

    def start(weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int) -> Nodes:
        state = complete(weights, caches.draft, context.row)
        return Nodes(state.cache, jnp.pad(state.hidden[:, None], ((0, 0), (0, fed), (0, 0))))

    def after_root(
        weights: core.Weights, state: HiddenState, nodes: Nodes, context: core.DraftContext, width: int
    ) -> Any:
        return head.logits(weights.draft, shared_with(lm, weights.target), nodes.hidden[:, :1]), nodes

    def after_nodes(weights: core.Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], nodes: Nodes) -> Any:
        shared, (fed, new) = shared_with(lm, weights.target), (parent.shape[1], tokens.shape[1])
        before = jnp.take_along_axis(nodes.hidden, parent[:, fed - new :, None] + 1, axis=1)
        output, cache = head.extend(weights.draft, shared, nodes.cache, before, tokens, parent)
        output = output.astype(nodes.hidden.dtype)
        hidden = jax.lax.dynamic_update_slice_in_dim(nodes.hidden, output, fed - new + 1, axis=1)
        return head.logits(weights.draft, shared, output), Nodes(cache, hidden)

    def after(caches: core.Caches, nodes: Nodes, context: core.DraftContext, slots: Int[Array, "B N"]) -> core.Caches:
        num_cached = context.row.length - 1
        return caches._replace(draft=HiddenState(head.rewind(nodes.cache, num_cached), num_cached, nodes.hidden[:, 0]))

    def commit_of(levels: int) -> core.Commit:
        return functools.partial(commit, depth=levels + 1)

    vocab = head.requirements.vocab_size
    reader = core.TreeReader(lambda nodes: init, start, after_root, after_nodes, after, commit_of, vocab)
    return core.Drafter(init, propose, commit, tree_reader=reader)
