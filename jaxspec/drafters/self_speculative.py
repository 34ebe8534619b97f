"""A target that drafts for itself with some of its own layers: early exit and layer skipping.

The leading layers that draft as a whole compute for each draft token just what the target would: its keys and values
lie in the target's cache where verification wants them, and its hidden states are handed on, so that verification runs
the layers after these only. What skipping has changed of the later layers' cache, verification overwrites.

Shapes: B batch, T step, N nodes fed so far, n nodes of a level, M model dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.core import (
    BoundDrafter,
    Cache,
    Caches,
    Draft,
    DraftContext,
    Drafter,
    DraftStart,
    Forward,
    Head,
    LanguageModel,
    Layers,
    Model,
    Params,
    Parts,
    Prompt,
    Rewind,
    Room,
    RoundEnd,
    TreeReader,
    Weights,
    chunks,
    token_rows,
)
from jaxspec.core.checks import integer
from jaxspec.drafters.common import check_model, shown
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements, check_target, inside_of, on_path
from jaxspec.drafters.sequential import Logits, sequential


class ExitAdapter(NamedTuple):
    """A network between one of the target's layers and its head (Kangaroo); the layers before it draft, too.

    Attributes:
        empty: (batch, room) -> a cache of rows without tokens.
        extend: (parameters, cache, the target's hidden states of further tokens [B, T, M], parent or None as in
            `LanguageModel.extend`) -> what logits are made of [B, T, M], and the cache.
        rewind: see `LanguageModel.rewind`.
        requirements: of the target; its one tap is the layer.
    """

    empty: Callable[[int, Room], Cache]
    extend: Callable[..., tuple[Float[Array, "B T M"], Cache]]
    rewind: Rewind
    requirements: TargetRequirements


def early_exit(
    target: Model, layers: int, *, head: Model | None = None, adapter: DraftHead[ExitAdapter] | None = None
) -> BoundDrafter:
    """Drafts with the target's own first layers: after them come the final norm and the head.

    There is no second model, no second cache and no second pass over these layers: their keys and values, and their
    hidden states, are those that verification needs, so that it only runs the layers after them. gamma draft tokens
    cost gamma passes of `layers` layers and of the head; verification is that much cheaper.

    A model's layers predict tokens early only if it was trained for it: LayerSkip's checkpoints are (ordinary Llama
    folders, which `jaxspec.load` reads), and `[early_exit]` in a recipe trains for it; of others few draft tokens are
    accepted, at any exit but a late one. An adapter helps without touching the target: attention and a norm, trained,
    between the layers and the head (Kangaroo). It has a cache of its own, of the size of one layer's.

    Args:
        target: the model whose text is drafted, one of jaxspec's networks.
        layers: how many of its first layers draft; of an encoder-decoder, of the decoder's.
        head: a model whose head makes the drafter's logits, such as `jaxspec.trim_vocabulary(target, size=...)`: with a
            large vocabulary most of an early exit's time is the head's. By default the target.
        adapter: a network and its parameters: `draft_heads.kangaroo.head(config)` in a `DraftHead`, for a target with
            taps; `jaxspec.load_drafter` reads trained ones. By default the target's final norm takes its place.

    Raises:
        TypeError: the target or the head is no model, or the adapter none.
        ValueError: not 1 <= layers < the target's, a target whose layers cannot be run in part, or a head or an adapter
            of another model or after other layers.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = Model(decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), config=shape)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> drafter = early_exit(target, layers=1, head=jaxspec.trim_vocabulary(target, size=16))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Elhoushi et al., LayerSkip, ACL 2024, arXiv 2404.16710; Liu et al., Kangaroo, NeurIPS 2024, arXiv
    2404.18911.
    """
    layers, count = integer(layers, "layers", "an integer"), layers_of(target).count
    if count == 1:
        raise ValueError(f"{target.name or 'the target'} has one layer, and so no exit before the last: expected more")
    if not 1 <= layers < count:
        raise ValueError(
            f"layers is {layers} and {target.name or 'the target'} has {count}: expected an exit after at least 1 and "
            f"at most {count - 1}"
        )
    if adapter is not None and not (isinstance(adapter, DraftHead) and isinstance(adapter.network, ExitAdapter)):
        raise TypeError(
            f"adapter is {shown(adapter)}: expected a jaxspec.DraftHead of draft_heads.kangaroo.head(config)"
        )
    if adapter is not None and adapter.network.requirements.taps != (layers - 1,):
        tap, *_ = adapter.network.requirements.taps
        raise ValueError(f"layers is {layers}, and the adapter was made for an exit after {tap + 1}: expected that")
    first = tuple(range(layers))
    return make_drafter(target, Parts(first, first), f"early_exit({layers})", head, adapter)


def skip_layers(
    target: Model, attention: Sequence[int] = (), mlp: Sequence[int] = (), *, head: Model | None = None
) -> BoundDrafter:
    """Drafts with the target itself, without the attention or the feed-forward blocks of chosen layers.

    No training is needed, nor a second model or cache. The layers before the first one that is skipped are not run
    again by verification, as in `drafters.early_exit`. `analysis.layers.search_layers` finds sets that are fast on your
    prompts; good ones skip some of the later half, most of them attention.

    Args:
        target: the model whose text is drafted, one of jaxspec's networks.
        attention: layers, from 0, whose attention is skipped; of an encoder-decoder, of the decoder's, with the
            attention to the encoder's output.
        mlp: layers whose feed-forward block is skipped.
        head: as in `drafters.early_exit`.

    Raises:
        TypeError: the target or the head is no model.
        ValueError: nothing is skipped, or everything; no such layer, or one that is named twice; other things than
            integers; a target whose layers cannot be run in part.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = Model(decoder.language_model(shape), decoder.init(shape, jax.random.key(0)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> drafter = skip_layers(target, attention=[1, 2], mlp=[2])
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Zhang et al., Draft & Verify, ACL 2024, arXiv 2309.08168.
    """
    count, name = layers_of(target).count, target.name or "the target"
    remaining, names = [], []
    for part, layers in (("attention", attention), ("mlp", mlp)):
        skipped = _skipped_layers(part, layers)
        if outside := [layer for layer in skipped if not 0 <= layer < count]:
            raise ValueError(f"{part} skips layer {outside[0]}: {name} has layers 0 to {count - 1}")
        if len(set(skipped)) < len(skipped):
            raise ValueError(f"{part} is {skipped}: expected each layer once")
        remaining.append(tuple(layer for layer in range(count) if layer not in skipped))
        names.append(f"{part}={skipped}")
    if not any(remaining):
        raise ValueError(f"attention and mlp skip all {count} layers of {name}: expected some of them to be left")
    if all(len(layers) == count for layers in remaining):
        raise ValueError("attention and mlp skip nothing: the drafter would be the target; expected some layers")
    for reader, source in layers_of(target).sources:
        if reader in remaining[0] and source not in remaining[0]:
            raise ValueError(
                f"layer {reader} of {name} attends to the keys of layer {source}, whose attention is skipped: "
                "expected both or neither"
            )
    return make_drafter(target, Parts(*remaining), f"skip_layers({', '.join(names)})", head)


def _skipped_layers(part: str, layers: Sequence[int]) -> list[int]:
    expected = f"the layers, from 0, whose {part} is skipped, such as [5, 7]"
    try:
        values = list(layers)
    except TypeError:
        raise ValueError(f"{part} is {layers!r}: expected {expected}") from None
    if isinstance(layers, str | bytes):
        raise ValueError(f"{part} is {layers!r}: expected {expected}")
    return [integer(layer, f"a layer of {part}", f"an integer, of {expected}") for layer in values]


def layers_of(target: Model) -> Layers:
    """Returns the target's layers, once it is known that they can be run in part.

    Raises:
        TypeError: the target is no model.
        ValueError: they cannot be run in part.
    """
    check_model(target, "target")
    if (inside := target.lm.inside) is None or inside.layers is None:
        raise ValueError(
            f"the layers of {target.name or 'the target'} cannot be run in part (LanguageModel.inside.layers): "
            "expected a network of jaxspec.nets, as jaxspec.load returns it"
        )
    return inside.layers


class SelfDraftParams(NamedTuple):
    """The drafter's parameters, beside the target's.

    Attributes:
        head: of a model whose head makes the logits; None: the target's.
        adapter: of the network between the layers and the head; None: there is none.
    """

    head: Params = None
    adapter: Params = None


class Nodes(NamedTuple):
    """The fed nodes of a draft, as drafting hands them on to verification.

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


class LayerSplit(NamedTuple):
    """The layers that draft, and those that verify, cut where they part.

    Attributes:
        shared: the leading layers, which both run.
        drafting: what else drafts.
        verifying: the other layers, whole.
    """

    shared: Parts
    drafting: Parts
    verifying: Parts


def make_drafter(
    target: Model, parts: Parts, name: str, head: Model | None = None, adapter: DraftHead[ExitAdapter] | None = None
) -> BoundDrafter:
    """Makes the drafter that runs these parts of its target.

    Args:
        target: a model for which `layers_of` returned layers.
        parts: what drafts.
        name: of the drafter.
        head: a model whose head makes the drafter's logits; None: the target.
        adapter: a network between the parts, which are the first layers then, and the head; None: the final norm.

    Raises:
        TypeError: the head is no model.
        ValueError: the head or the adapter is for another model.
    """
    lm, trimmed = target.lm, None
    if head is not None:
        check_model(head, "head")
        sizes = inside_of(target).width, lm.vocab_size
        trimmed = inside_of(head, "the drafter", sizes, "expected jaxspec.trim_vocabulary(target)").head
    if adapter is not None:
        check_target(adapter.network.requirements, target, "an adapter")
    functions = _self_speculative(lm, parts, trimmed, None if adapter is None else adapter.network)
    params = SelfDraftParams(None if head is None else head.params, None if adapter is None else adapter.params)
    return BoundDrafter(functions, params, target=target, name=name)


def split_layers(parts: Parts, count: int) -> LayerSplit:
    """Splits the layers where drafting parts from verification: at the first one that does not draft as a whole.

    >>> split = split_layers(Parts(attention=(0, 1, 3), mlp=(0, 2, 3)), count=4)
    >>> split.shared, split.drafting
    (Parts(attention=(0,), mlp=(0,)), Parts(attention=(1, 3), mlp=(2, 3)))
    """
    drafts_whole = (layer in parts.attention and layer in parts.mlp for layer in range(count))
    cut = next((layer for layer, whole_layer in enumerate(drafts_whole) if not whole_layer), count)
    first, rest = tuple(range(cut)), tuple(range(cut, count))
    drafting = Parts(*(tuple(layer for layer in layers if layer >= cut) for layers in parts))
    return LayerSplit(Parts(first, first), drafting, Parts(rest, rest))


@functools.lru_cache
def _self_speculative(lm: LanguageModel, parts: Parts, head: Head | None, adapter: ExitAdapter | None) -> Drafter:
    assert lm.inside is not None and lm.inside.layers is not None
    layers, target_head, width = lm.inside.layers, lm.inside.head, lm.inside.width
    shared, drafting, verifying = split_layers(parts, layers.count)

    # A round's fed tokens are numbered: 0 is the last committed one, which lies at `nodes.start` in its row, i is the
    # i-th that was fed after it. `at` is the number of the first of the tokens at hand.

    def place(nodes: Nodes, at: int | Int[Array, ""]) -> Int[Array, " B"]:
        return nodes.start + jnp.asarray(at, nodes.start.dtype)

    def init(start: DraftStart) -> Cache:
        if adapter is None:
            return ()
        row, extend = token_rows.decoder_prompt(lm, start.prompt), adapter.extend

        def read(cache: Cache, stream: Float[Array, "B T M"], real: Int[Array, " B"]) -> tuple[tuple, Cache]:
            return (), extend(start.weights.draft.adapter, cache, stream)[1]

        stream = _exit_stream(start.prefilled)
        return chunks.read(read, adapter.rewind, adapter.empty, stream, row.length, start.room, start.before)[2]

    def feed(
        weights: Weights,
        nodes: Nodes,
        tokens: Int[Array, "B n"],
        at: int | Int[Array, ""],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B n M"], Nodes]:
        """Runs the shared layers over n tokens, and adds their output to the stream."""
        assert nodes.stream is not None
        cache = lm.rewind(nodes.cache, place(nodes, at))
        embedded = layers.embed(weights.target, cache, tokens, parent)
        stream, cache = layers.run(weights.target, cache, embedded, shared, parent)
        # B n M into B N+1 M, at the tokens' numbers
        written = jax.lax.dynamic_update_slice_in_dim(nodes.stream, stream, at, axis=1)
        return stream, nodes._replace(stream=written, cache=cache)

    def logits_after(
        weights: Weights,
        nodes: Nodes,
        stream: Float[Array, "B n M"],
        at: int | Int[Array, ""],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B n V"], Nodes]:
        """Makes the drafter's logits after n tokens of which the shared layers have made `stream`."""
        if adapter is None:
            # What `drafting` writes lies behind the cut, where `verifying` overwrites it.
            cache = lm.rewind(nodes.cache, place(nodes, at))
            hidden, cache = layers.run(weights.target, cache, stream, drafting, parent)
            nodes, features = nodes._replace(cache=cache), layers.features(weights.target, hidden)
        else:
            cache = adapter.rewind(nodes.adapter, place(nodes, at))
            features, cache = adapter.extend(weights.draft.adapter, cache, stream[..., :width], parent)
            nodes = nodes._replace(adapter=cache)
        return (target_head(weights.target, features) if head is None else head(weights.draft.head, features)), nodes

    def no_nodes(weights: Weights, caches: Caches, row: Prompt, count: int) -> Nodes:
        """Returns a draft before its first token, with room for the last committed one and `count` nodes."""
        embedded = jax.eval_shape(layers.embed, weights.target, caches.target, row.tokens[:, :1])  # B 1 M
        stream = jnp.zeros((embedded.shape[0], 1 + count, embedded.shape[2]), embedded.dtype)
        return Nodes(stream, row.length - 1, caches.target, caches.draft)

    def handed_on(nodes: Nodes) -> Caches:
        adapter_cache = nodes.adapter if adapter is None else adapter.rewind(nodes.adapter, nodes.start)
        return Caches(nodes.cache, nodes._replace(cache=None, adapter=adapter_cache))

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)

        # The carry of the draft loop: the nodes, and how many tokens were fed.
        def step(tokens: Int[Array, "B 1"], at: Int[Array, ""], nodes: Nodes) -> Logits:
            stream, nodes = feed(weights, nodes, tokens, at)
            logits, nodes = logits_after(weights, nodes, stream, at)
            return logits[:, 0], None, (nodes, at + 1)

        def first(carry: tuple[Nodes, Int[Array, ""]]) -> Logits:
            return step(last, carry[1], carry[0])

        def following(i: Int[Array, ""], token: Int[Array, " B"], carry: tuple[Nodes, Int[Array, ""]]) -> Logits:
            return step(token[:, None], i, carry[0])

        carry = no_nodes(weights, caches, context.row, context.gamma), jnp.zeros((), jnp.int32)
        draft, (nodes, num_fed) = sequential(first, following, carry, context)
        # The last draft token was not fed; where no row may draft, nor was the last committed one.
        tokens = jnp.concatenate([last, draft.tokens], axis=1)
        _, nodes = feed(weights, nodes, jax.lax.dynamic_slice_in_dim(tokens, num_fed, 1, axis=1), num_fed)
        return draft, handed_on(nodes)

    def complete_target_pass(
        weights: Weights, caches: Caches, tokens: Int[Array, "B T"], parent: Int[Array, "B T"] | None = None
    ) -> tuple[Forward, Cache]:
        nodes: Nodes = caches.draft
        stream, step = nodes.stream, tokens.shape[1]
        if stream is None:
            return lm.extend(weights.target, caches.target, tokens, parent)
        nodes, num_fed = nodes._replace(cache=caches.target), stream.shape[1]
        if num_fed < step:  # the nodes that end a tree's paths
            nodes = nodes._replace(stream=jnp.pad(stream, ((0, 0), (0, step - num_fed), (0, 0))))
            _, nodes = feed(weights, nodes, tokens[:, num_fed:], num_fed, parent)
        assert nodes.stream is not None
        stream = nodes.stream[:, :step]
        cache = lm.rewind(nodes.cache, place(nodes, 0))
        hidden, cache = layers.run(weights.target, cache, stream, verifying, parent)
        features = layers.features(weights.target, hidden)
        return Forward(
            target_head(weights.target, features), features, None if adapter is None else stream[..., :width]
        ), cache

    def commit(end: RoundEnd, depth: int | None = None) -> Caches:
        if adapter is None:
            return end.caches._replace(draft=())
        # What a policy, a tree or another drafter has made of this round does not matter: it reads what was accepted.
        stream = _exit_stream(on_path(end.forward, end.verdict, depth))
        _, cache = adapter.extend(end.weights.draft.adapter, end.caches.draft.adapter, stream)
        return end.caches._replace(draft=adapter.rewind(cache, end.row.length - 1))

    def rollback(state: Cache, row: Prompt) -> Cache:
        return state if adapter is None else adapter.rewind(state, row.length - 1)

    # As a `TreeReader`: the nodes that have children are fed level by level, to the places that they have in
    # verification.

    def begin_draft(weights: Weights, caches: Caches, context: DraftContext, fed: int) -> Nodes:
        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)
        return feed(weights, no_nodes(weights, caches, context.row, fed), last, 0)[1]

    def root_logits(weights: Weights, state: Any, nodes: Nodes, context: DraftContext, width: int) -> Any:
        assert nodes.stream is not None
        return logits_after(weights, nodes, nodes.stream[:, :1], 0)

    def node_logits(weights: Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], nodes: Nodes) -> Any:
        at = 1 + parent.shape[1] - tokens.shape[1]
        stream, nodes = feed(weights, nodes, tokens, at, parent)
        return logits_after(weights, nodes, stream, at, parent)

    def end_draft(caches: Caches, nodes: Nodes, context: DraftContext, slots: Int[Array, "B N"]) -> Caches:
        # With a policy nodes may be verified that were not fed, because their children are of no use.
        drafted = handed_on(nodes)
        return drafted._replace(draft=drafted.draft._replace(stream=None)) if context.adaptive else drafted

    reader = TreeReader(
        init=lambda nodes: init,
        begin_draft=begin_draft,
        root_logits=root_logits,
        node_logits=node_logits,
        end_draft=end_draft,
        commit=lambda levels: functools.partial(commit, depth=levels + 1),
        vocab_size=lm.vocab_size,
        complete_target_pass=complete_target_pass,
        rollback=rollback,
    )
    return Drafter(
        *(init, propose, commit), tree_reader=reader, complete_target_pass=complete_target_pass, rollback=rollback
    )


def _exit_stream(forward: Forward) -> Float[Array, "B T M"]:
    """Returns the output of the one layer that the target has taps of, which an adapter reads."""
    assert forward.taps is not None
    return forward.taps
