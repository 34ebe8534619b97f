"""Drafters that continue the target's hidden states: EAGLE's heads, and whatever has the same functions."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec.base import (
    Bound,
    Cache,
    Caches,
    Commit,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    LanguageModel,
    Model,
    Prompt,
    RecurrentHead,
    Verdict,
    Weights,
)
from jaxspec.drafters.hidden_states import bound, check_target, on_path, row_of, shared_with, take
from jaxspec.drafters.sequential import Logits, sequential
from jaxspec.drafters.tree_cache import NodeReader


class HiddenState(NamedTuple):
    """The network's cache, and what its next pass begins with.

    Attributes:
        cache: of pairs of a hidden state and the token after it.
        seen: how many pairs of each row it holds, every hidden state of which is the target's own.
        hidden: after the last of these pairs. Only right after prefill, when the token after the target's last hidden
            state is not known yet, it is that hidden state, and `seen` one fewer than there are pairs.
    """

    cache: Cache
    seen: Int[Array, " B"]
    hidden: Float[Array, "B D"]


class Nodes(NamedTuple):
    """A tree in the making: the cache, and the hidden states after the last committed token and each fed node."""

    cache: Cache
    hidden: Float[Array, "B F+1 D"]


def eagle(head: Bound[RecurrentHead], target: Model) -> Bound[Drafter]:
    """Drafts with one layer that continues the target's hidden states (EAGLE-1 and 3), sampling from its distributions.

    A draft token costs a pass of that layer and of a language-model head, a fraction of a pass of the target. The layer
    reads what the target itself made of the text, which is why it predicts better than a model of its size would.

    After each verification the target's own hidden states take the place of those that the layer made up: it reads the
    accepted tokens again with them. gamma draft tokens cost gamma passes, one of them over gamma + 1 tokens.

    Args:
        head: a network and its parameters: `nets.eagle.head(config)` in a `Bound`; `jaxspec.load_drafter` reads
            published ones.
        target: the model whose text it drafts; with taps, if the head reads them (`jaxspec.with_taps`).

    Raises:
        ValueError: the head is for another target, or the target lacks the taps or the functions that it needs.

    Example: see `nets.eagle.head`.

    Reference: Li et al., EAGLE, ICML 2024, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840.
    """
    return recurrent(head, target, "an EAGLE head", "eagle")


def recurrent(head: Bound[RecurrentHead], target: Model, kind: str, name: str) -> Bound[Drafter]:
    """The drafter of any network with these functions; `kind` names the network in complaints."""
    check_target(head.functions.needs, target, kind)
    return bound(_recurrent(head.functions, target.lm), head.params, target, name)


@functools.lru_cache
def _recurrent(head: RecurrentHead, lm: LanguageModel) -> Drafter:
    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> HiddenState:
        row, shared = row_of(lm, prompt), shared_with(lm, weights.target)
        batch, width = row.tokens.shape
        hidden, cache = head.read(weights.draft, prefilled), head.empty(batch, width + headroom)
        if width > 1:
            _, cache = head.extend(weights.draft, shared, cache, hidden[:, :-1], row.tokens[:, 1:])
        seen = row.length - 1
        return HiddenState(head.rewind(cache, seen), seen, take(hidden, seen))

    def complete(weights: Weights, state: HiddenState, row: Prompt) -> HiddenState:
        """Feeds the pair that prefill left open, to the rows that have it."""
        open_pair = state.seen < row.length - 1

        def feed(state: HiddenState) -> HiddenState:
            token = buffers.window(row.tokens, jnp.minimum(state.seen + 1, row.length - 1), 1)
            shared, cache = shared_with(lm, weights.target), head.rewind(state.cache, state.seen)
            made, cache = head.extend(weights.draft, shared, cache, state.hidden[:, None], token)
            hidden = jnp.where(open_pair[:, None], made[:, 0].astype(state.hidden.dtype), state.hidden)
            return HiddenState(head.rewind(cache, row.length - 1), row.length - 1, hidden)

        return jax.lax.cond(jnp.any(open_pair), feed, lambda state: state, state)

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        row, shared = context.row, shared_with(lm, weights.target)
        state = complete(weights, caches.draft, row)

        def logits(hidden: Float[Array, "B 1 D"]) -> Float[Array, "B V"]:
            return head.logits(weights.draft, shared, hidden)[:, 0]

        def first(carry: tuple[Float[Array, "B D"], Cache]) -> Logits:
            return logits(carry[0][:, None]), None, carry

        def following(i: Int[Array, ""], last: Int[Array, " B"], carry: tuple[Float[Array, "B D"], Cache]) -> Logits:
            made, cache = head.extend(weights.draft, shared, carry[1], carry[0][:, None], last[:, None])
            return logits(made), None, (made[:, 0].astype(carry[0].dtype), cache)

        draft, (_, cache) = sequential(first, following, (state.hidden, state.cache), context)
        return draft, caches._replace(draft=state._replace(cache=head.rewind(cache, state.seen)))

    def commit(
        weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward, depth: int | None = None
    ) -> Caches:
        state, shared = caches.draft, shared_with(lm, weights.target)
        hidden = head.read(weights.draft, on_path(forward, verdict, depth))
        tokens = buffers.window(row.tokens, state.seen + 1, hidden.shape[1])
        made, cache = head.extend(weights.draft, shared, head.rewind(state.cache, state.seen), hidden, tokens)
        count, seen = row.length - 1 - state.seen, row.length - 1  # a finished row has no new pair
        last = jnp.where((count > 0)[:, None], take(made, jnp.maximum(count - 1, 0)), state.hidden)
        return caches._replace(draft=HiddenState(head.rewind(cache, seen), seen, last.astype(state.hidden.dtype)))

    # Of a tree: the hidden state after each node that was fed is what its children are paired with.

    def start(weights: Weights, caches: Caches, context: DraftContext, fed: int) -> Nodes:
        state = complete(weights, caches.draft, context.row)
        return Nodes(state.cache, jnp.pad(state.hidden[:, None], ((0, 0), (0, fed), (0, 0))))

    def after_root(weights: Weights, state: HiddenState, nodes: Nodes, context: DraftContext, width: int) -> Any:
        return head.logits(weights.draft, shared_with(lm, weights.target), nodes.hidden[:, :1]), nodes

    def after_nodes(weights: Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], nodes: Nodes) -> Any:
        shared, (fed, new) = shared_with(lm, weights.target), (parent.shape[1], tokens.shape[1])
        before = jnp.take_along_axis(nodes.hidden, parent[:, fed - new :, None] + 1, axis=1)
        made, cache = head.extend(weights.draft, shared, nodes.cache, before, tokens, parent)
        made = made.astype(nodes.hidden.dtype)
        hidden = jax.lax.dynamic_update_slice_in_dim(nodes.hidden, made, fed - new + 1, axis=1)
        return head.logits(weights.draft, shared, made), Nodes(cache, hidden)

    def after(caches: Caches, nodes: Nodes, context: DraftContext, slots: Int[Array, "B N"]) -> Caches:
        seen = context.row.length - 1
        return caches._replace(draft=HiddenState(head.rewind(nodes.cache, seen), seen, nodes.hidden[:, 0]))

    def commit_of(levels: int) -> Commit:
        return functools.partial(commit, depth=levels + 1)

    vocab = head.needs.vocab_size
    reader = NodeReader(lambda nodes: init, start, after_root, after_nodes, after, commit_of, vocab)
    return Drafter(init, propose, commit, reader=reader)
