"""A target that drafts for itself with some of its own layers: what early exit and layer skipping have in common.

The leading layers that draft as a whole compute for each draft token just what the target would: its keys and values
lie in the target's cache where verification wants them, and its hidden states are handed on, so that verification runs
the layers after these only. What skipping has changed of the later layers' cache, verification overwrites.

Shapes: B batch, T step, N nodes fed so far, n nodes of a level, M model dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import (
    BoundDrafter,
    Cache,
    Caches,
    Commit,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    Head,
    LanguageModel,
    Layers,
    Model,
    Params,
    Parts,
    Prompt,
    Rewind,
    TreeReader,
    Verdict,
    Weights,
    token_rows,
)
from jaxspec.drafters.common import check_model
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, check_target, on_path, row_of
from jaxspec.drafters.sequential import Logits, sequential


class ExitAdapter(NamedTuple):
    """A network between one of the target's layers and its head (Kangaroo); the layers before it draft, too.

    Attributes:
        empty: (batch, capacity) -> a cache of rows without tokens.
        extend: (parameters, cache, the target's hidden states of further tokens [B, T, M], parent or None as in
            `LanguageModel.extend`) -> what logits are made of [B, T, M], and the cache.
        rewind: see `LanguageModel.rewind`.
        requirements: of the target; its one tap is the layer.
    """

    empty: Callable[[int, int], Cache]
    extend: Callable[..., tuple[Float[Array, "B T M"], Cache]]
    rewind: Rewind
    requirements: TargetRequirements


class Own(NamedTuple):
    """The drafter's parameters, beside the target's.

    Attributes:
        head: of a model whose head makes the logits; None: the target's.
        adapter: of the network between the layers and the head; None: there is none.
    """

    head: Params = None
    adapter: Params = None


class Nodes(NamedTuple):
    """What drafting hands on to verification.

    Attributes:
        stream: what the shared layers made of the last committed token and of each node that was fed after it; None if
            not all nodes that are verified were fed.
        start: where in each row that token is.
        cache: the target's; None once it was handed back.
        adapter: the adapter's cache; empty if there is none.
    """

    stream: Float[Array, "B N+1 M"] | None
    start: Int[Array, " B"]
    cache: Cache
    adapter: Cache = ()


class Halves(NamedTuple):
    """The layers that draft, and those that verify, cut where they part.

    Attributes:
        shared: the leading layers, which both run.
        drafting: what else drafts.
        verifying: the other layers, whole.
    """

    shared: Parts
    drafting: Parts
    verifying: Parts


def bound(
    target: Model, parts: Parts, name: str, head: Model | None = None, adapter: DraftHead[ExitAdapter] | None = None
) -> BoundDrafter:
    """The drafter that runs these parts of its target.

    Args:
        target: one of jaxspec's networks.
        parts: what drafts.
        name: of the drafter.
        head: a model whose head makes the drafter's logits; None: the target.
        adapter: a network between the parts, which are the first layers then, and the head; None: the final norm.

    Raises:
        TypeError: the target or the head is no model.
        ValueError: the target's layers cannot be run in part, or the head or the adapter is for another model.
    """
    layers_of(target)
    lm = target.lm
    if head is not None:
        check_model(head, "head")
    network = None if adapter is None else adapter.network
    if network is not None:
        check_target(network.requirements, target, "an adapter")
    own = Own(None if head is None else head.params, None if adapter is None else adapter.params)
    if head is None:
        return BoundDrafter(_own_layers(lm, parts, None, network), own, target=target, name=name)
    if head.lm.head is None or (head.lm.feature_size, head.lm.vocab_size) != (lm.feature_size, lm.vocab_size):
        raise ValueError(
            f"the head is that of {head.name or 'a model'} of width {head.lm.feature_size} with {head.lm.vocab_size} "
            f"token ids, and {target.name or 'the target'} has {lm.feature_size} and {lm.vocab_size}: expected "
            "jaxspec.trim_vocabulary(target)"
        )
    return BoundDrafter(_own_layers(lm, parts, head.lm.head, network), own, target=target, name=name)


def layers_of(target: Model) -> Layers:
    """The target's layers.

    Raises:
        TypeError: the target is no model.
        ValueError: they cannot be run in part.
    """
    check_model(target, "target")
    if target.lm.layers is None or target.lm.head is None:
        raise ValueError(
            f"the layers of {target.name or 'the target'} cannot be run in part (LanguageModel.layers is None): "
            "expected a network of jaxspec.nets, as jaxspec.load returns it"
        )
    return target.lm.layers


def halves(parts: Parts, count: int) -> Halves:
    """Where drafting parts from verification.

    >>> found = halves(Parts(attention=(0, 1, 3), mlp=(0, 2, 3)), count=4)
    >>> found.shared, found.drafting
    (Parts(attention=(0,), mlp=(0,)), Parts(attention=(1, 3), mlp=(2, 3)))
    """
    same = (layer in parts.attention and layer in parts.mlp for layer in range(count))
    cut = next((layer for layer, both in enumerate(same) if not both), count)
    first, rest = tuple(range(cut)), tuple(range(cut, count))
    own = Parts(*(tuple(layer for layer in chosen if layer >= cut) for chosen in parts))
    return Halves(Parts(first, first), own, Parts(rest, rest))


@functools.lru_cache
def _own_layers(lm: LanguageModel, parts: Parts, head: Head | None, adapter: ExitAdapter | None) -> Drafter:
    layers = lm.layers
    assert layers is not None and lm.head is not None
    target_head = lm.head
    shared, drafting, verifying = halves(parts, layers.count)

    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> Cache:
        if adapter is None:
            return ()
        row = row_of(lm, prompt)
        cache = adapter.empty(len(row.length), row.tokens.shape[1] + headroom)
        _, cache = adapter.extend(weights.draft.adapter, cache, _stream(prefilled))
        return adapter.rewind(cache, row.length - 1)

    def rewound(nodes: Nodes, at: int | Int[Array, ""]) -> Cache:
        """The cache as it is before fed token `at`; 0 is the last committed one."""
        return lm.rewind(nodes.cache, nodes.start + jnp.asarray(at, nodes.start.dtype))

    def feed(
        weights: Weights,
        nodes: Nodes,
        tokens: Int[Array, "B n"],
        at: int | Int[Array, ""],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B n M"], Nodes]:
        """Runs the shared layers over the fed tokens `at`, `at` + 1, ..."""
        cache = rewound(nodes, at)
        x = layers.embed(weights.target, cache, tokens, parent)
        x, cache = layers.run(weights.target, cache, x, shared, parent)
        assert nodes.stream is not None
        stream = jax.lax.dynamic_update_slice_in_dim(nodes.stream, x, at, axis=1)
        return x, nodes._replace(stream=stream, cache=cache)

    def logits(
        weights: Weights,
        nodes: Nodes,
        x: Float[Array, "B n M"],
        at: int | Int[Array, ""],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B n V"], Nodes]:
        """The drafter's logits after the fed tokens `at`, `at` + 1, ..., of which the shared layers have made `x`."""
        if adapter is None:
            x, cache = layers.run(weights.target, rewound(nodes, at), x, drafting, parent)
            nodes, features = nodes._replace(cache=cache), layers.features(weights.target, x)
        else:
            before = adapter.rewind(nodes.adapter, nodes.start + jnp.asarray(at, nodes.start.dtype))
            features, cache = adapter.extend(weights.draft.adapter, before, x, parent)
            nodes = nodes._replace(adapter=cache)
        return (target_head(weights.target, features) if head is None else head(weights.draft.head, features)), nodes

    def empty(weights: Weights, caches: Caches, row: Prompt, nodes: int) -> Nodes:
        one = jax.eval_shape(layers.embed, weights.target, caches.target, row.tokens[:, :1])
        stream = jnp.zeros((one.shape[0], 1 + nodes, one.shape[2]), one.dtype)
        return Nodes(stream, row.length - 1, caches.target, caches.draft)

    def handed_on(nodes: Nodes) -> Caches:
        back = nodes.adapter if adapter is None else adapter.rewind(nodes.adapter, nodes.start)
        return Caches(nodes.cache, nodes._replace(cache=None, adapter=back))

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)

        def step(tokens: Int[Array, "B 1"], at: Int[Array, ""], nodes: Nodes) -> Logits:
            x, nodes = feed(weights, nodes, tokens, at)
            made, nodes = logits(weights, nodes, x, at)
            return made[:, 0], None, (nodes, at + 1)

        def first(carry: tuple[Nodes, Int[Array, ""]]) -> Logits:
            return step(last, carry[1], carry[0])

        def following(i: Int[Array, ""], token: Int[Array, " B"], carry: tuple[Nodes, Int[Array, ""]]) -> Logits:
            return step(token[:, None], i, carry[0])

        carry = empty(weights, caches, context.row, context.gamma), jnp.zeros((), jnp.int32)
        draft, (nodes, fed) = sequential(first, following, carry, context)
        # The last draft token was not fed; where no row may draft, nor was the last committed one.
        tokens = jnp.concatenate([last, draft.tokens], axis=1)
        _, nodes = feed(weights, nodes, jax.lax.dynamic_slice_in_dim(tokens, fed, 1, axis=1), fed)
        return draft, handed_on(nodes)

    def finish(
        weights: Weights, caches: Caches, tokens: Int[Array, "B T"], parent: Int[Array, "B T"] | None = None
    ) -> tuple[Forward, Cache]:
        nodes: Nodes = caches.draft
        stream, step = nodes.stream, tokens.shape[1]
        if stream is None:
            return lm.extend(weights.target, caches.target, tokens, parent)
        nodes, known = nodes._replace(cache=caches.target), stream.shape[1]
        if known < step:  # the nodes that end a tree's paths
            nodes = nodes._replace(stream=jnp.pad(stream, ((0, 0), (0, step - known), (0, 0))))
            _, nodes = feed(weights, nodes, tokens[:, known:], known, parent)
        assert nodes.stream is not None
        stream = nodes.stream[:, :step]
        x, cache = layers.run(weights.target, rewound(nodes, 0), stream, verifying, parent)
        features = layers.features(weights.target, x)
        return Forward(target_head(weights.target, features), features, None if adapter is None else stream), cache

    def commit(
        weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward, depth: int | None = None
    ) -> Caches:
        if adapter is None:
            return caches._replace(draft=())
        # What a policy, a tree or another drafter has made of this round does not matter: it reads what was accepted.
        hidden = _stream(on_path(forward, verdict, depth))
        _, cache = adapter.extend(weights.draft.adapter, caches.draft.adapter, hidden)
        return caches._replace(draft=adapter.rewind(cache, row.length - 1))

    def rollback(state: Cache, row: Prompt) -> Cache:
        return state if adapter is None else adapter.rewind(state, row.length - 1)

    # Of a tree: the nodes that have children are fed level by level, to the places that they have in verification.

    def start(weights: Weights, caches: Caches, context: DraftContext, fed: int) -> Nodes:
        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)
        return feed(weights, empty(weights, caches, context.row, fed), last, 0)[1]

    def after_root(weights: Weights, state: Any, nodes: Nodes, context: DraftContext, width: int) -> Any:
        assert nodes.stream is not None
        return logits(weights, nodes, nodes.stream[:, :1], 0)

    def after_nodes(weights: Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], nodes: Nodes) -> Any:
        at = 1 + parent.shape[1] - tokens.shape[1]
        x, nodes = feed(weights, nodes, tokens, at, parent)
        return logits(weights, nodes, x, at, parent)

    def after(caches: Caches, nodes: Nodes, context: DraftContext, slots: Int[Array, "B N"]) -> Caches:
        # With a policy nodes may be verified that were not fed, because their children are of no use.
        back = handed_on(nodes)
        return back._replace(draft=back.draft._replace(stream=None)) if context.adaptive else back

    def commit_of(levels: int) -> Commit:
        return functools.partial(commit, depth=levels + 1)

    reader = TreeReader(
        *(lambda nodes: init, start, after_root, after_nodes, after, commit_of, lm.vocab_size),
        complete_target_pass=finish,
        rollback=rollback,
    )
    return Drafter(init, propose, commit, tree_reader=reader, complete_target_pass=finish, rollback=rollback)


def _stream(forward: Forward) -> Float[Array, "B T M"]:
    """What an adapter reads of the target: the output of the one layer that it has taps of."""
    assert forward.taps is not None
    return forward.taps
