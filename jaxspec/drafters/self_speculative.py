"""A target that drafts for itself with some of its layers: early exit and layer skipping.

Leading layers that all draft compute the same as in the target. Keys and values of draft tokens
then lie in the target's cache already, and hidden states are handed on: verification runs the later
layers only. What skipping has changed of these layers' cache, verification overwrites.

Shapes: B batch, T step, N nodes fed so far, n nodes of a level, M model dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core import checks, chunks, token_rows
from jaxspec.core.checks import integer
from jaxspec.drafters.common import check_model, shown
from jaxspec.drafters.hidden_states import (
    DraftHead,
    TargetRequirements,
    check_target,
    inside_of,
    on_path,
)
from jaxspec.drafters.stepwise import NodeLogits, Parent, chain


class ExitAdapter(NamedTuple):
    """A network between one of the target's layers and its head (Kangaroo); the layers before it
    draft, too.
    """

    empty: Callable[[int, core.Room], core.Cache]  # (batch, room) -> a cache of rows without tokens
    # (parameters, cache, the target's hidden states of further tokens [B, T, M], parent or None as
    # in `LanguageModel.extend`) -> what logits are made of [B, T, M], and the cache
    extend: Callable[..., tuple[Float[Array, "B T M"], core.Cache]]
    rewind: core.Rewind  # see `LanguageModel.rewind`
    requirements: TargetRequirements  # the sizes of its target; its one tap is the layer


def early_exit(
    target: core.Model,
    layers: int,
    *,
    head: core.Model | None = None,
    adapter: DraftHead[ExitAdapter] | None = None,
) -> core.BoundDrafter:
    """Drafts with the target's own first layers: after them come the final norm and the head.

    It needs neither a second model nor a second cache. Verification needs the same keys, values and
    hidden states, and only runs the layers after these. gamma draft tokens cost gamma passes of
    `layers` layers and of the head.

    A model's layers predict tokens early only if it was trained for it. LayerSkip's checkpoints
    are, and `jaxspec.load` reads them; `[early_exit]` in a recipe trains for it. Of other models
    few draft tokens are accepted. An adapter helps without touching the target: attention and a
    norm, trained, between the layers and the head (Kangaroo). Its cache is as large as one layer's.

    Args:
        target: the model whose text is drafted, one of jaxspec's networks.
        layers: how many of its first layers draft; of an encoder-decoder, of the decoder's.
        head: a model whose head makes the drafter's logits, such as
            `jaxspec.trim_vocabulary(target, size=...)`: with a large vocabulary most of an early
            exit's time is the head's. By default the target.
        adapter: a network and its parameters: `draft_heads.kangaroo.head(config)` in a `DraftHead`,
            for a target with taps; `jaxspec.load_drafter` reads trained ones. By default the
            target's final norm takes its place.

    Raises:
        TypeError: the target or the head is not a model, or the adapter is not an adapter.
        ValueError: not 1 <= layers < the target's, a target whose layers cannot be run in part, or
            a head or an adapter of another model or after other layers.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = core.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), config=shape
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> drafter = early_exit(target, layers=1, head=jaxspec.trim_vocabulary(target, size=16))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Elhoushi et al., LayerSkip, ACL 2024, arXiv 2404.16710; Liu et al., Kangaroo, NeurIPS
    2024, arXiv 2404.18911.
    """
    layers = integer(layers, "layers", "an integer")
    count = layers_of(target).count
    if count == 1:
        raise ValueError(
            f"{target.name or 'the target'} has one layer, and so no exit before the last: "
            "expected more"
        )
    if not 1 <= layers < count:
        raise ValueError(
            f"layers is {layers} and {target.name or 'the target'} has {count}: expected an exit "
            f"after at least 1 and at most {count - 1}"
        )
    if adapter is not None and not (
        isinstance(adapter, DraftHead) and isinstance(adapter.network, ExitAdapter)
    ):
        raise TypeError(
            f"adapter is {shown(adapter)}: expected a DraftHead of "
            "draft_heads.kangaroo.head(config)"
        )
    if adapter is not None and adapter.network.requirements.taps != (layers - 1,):
        tap, *_ = adapter.network.requirements.taps
        raise ValueError(
            f"layers is {layers}, and the adapter was made for an exit after {tap + 1}: expected "
            "that"
        )
    first = tuple(range(layers))
    return make_drafter(target, core.Parts(first, first), f"early_exit({layers})", head, adapter)


def skip_layers(
    target: core.Model,
    attention: Sequence[int] = (),
    mlp: Sequence[int] = (),
    *,
    head: core.Model | None = None,
) -> core.BoundDrafter:
    """Drafts with the target itself, without the attention or the feed-forward blocks of chosen
    layers.

    No training is needed, nor a second model or cache. The layers before the first one that is
    skipped are not run again by verification, as in `drafters.early_exit`.
    `benchmarks.layers_to_skip`, in a checkout, finds sets that are fast on your prompts; good ones
    skip some of the later half, most of them attention.

    Args:
        target: the model whose text is drafted, one of jaxspec's networks.
        attention: layers, from 0, whose attention is skipped; of an encoder-decoder, of the
            decoder's, with the attention to the encoder's output.
        mlp: layers whose feed-forward block is skipped.
        head: a model whose head makes the logits, as in `drafters.early_exit`.

    Raises:
        TypeError: the target or the head is no model.
        ValueError: no layer is skipped, or every layer is. A layer does not exist, is named twice,
            or is not an integer. The target's layers cannot be run in part.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = core.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> drafter = skip_layers(target, attention=[1, 2], mlp=[2])
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Zhang et al., Draft & Verify, ACL 2024, arXiv 2309.08168.
    """
    count = layers_of(target).count
    name = target.name or "the target"
    remaining = []
    names = []
    for block, layers in (("attention", attention), ("mlp", mlp)):
        skipped = _skipped_layers(block, layers)
        outside = [layer for layer in skipped if not 0 <= layer < count]
        if outside:
            raise ValueError(
                f"{block} skips layer {outside[0]}: {name} has layers 0 to {count - 1}"
            )
        if len(set(skipped)) < len(skipped):
            raise ValueError(f"{block} is {skipped}: expected each layer once")
        remaining.append(tuple(layer for layer in range(count) if layer not in skipped))
        names.append(f"{block}={skipped}")
    if not any(remaining):
        raise ValueError(
            f"attention and mlp skip all {count} layers of {name}: expected some of them to be left"
        )
    if all(len(layers) == count for layers in remaining):
        raise ValueError(
            "attention and mlp skip nothing: the drafter would be the target; expected some layers"
        )
    for reader, source in layers_of(target).sources:
        if reader in remaining[0] and source not in remaining[0]:
            raise ValueError(
                f"layer {reader} of {name} attends to the keys of layer {source}, whose attention "
                "is skipped: expected both or neither"
            )
    return make_drafter(target, core.Parts(*remaining), f"skip_layers({', '.join(names)})", head)


def _skipped_layers(block: str, layers: Sequence[int]) -> list[int]:
    expected = f"the layers, from 0, whose {block} is skipped, such as [5, 7]"
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise ValueError(f"{block} is {layers!r}: expected {expected}")
    return [integer(layer, f"a layer of {block}", f"an integer, of {expected}") for layer in layers]


def layers_of(target: core.Model) -> core.Layers:
    """Returns the target's layers, once it is known that they can be run in part."""
    check_model(target, "target")
    inside = target.lm.inside
    if inside is None or inside.layers is None:
        raise ValueError(
            f"the layers of {target.name or 'the target'} cannot be run in part "
            f"(LanguageModel.inside.layers): {checks.OWN_NETWORK}"
        )
    return inside.layers


class SelfDraftParams(NamedTuple):
    """The drafter's parameters, beside the target's."""

    # the parameters of another model whose head makes the logits; None: the target's
    head: core.Params = None
    # the parameters of the network between the layers and the head; None: there is none
    adapter: core.Params = None


class Nodes(NamedTuple):
    """The fed nodes of a draft, as drafting hands them on to verification."""

    # the shared layers' outputs from the last committed token on, or None
    stream: Float[Array, "B N+1 M"] | None
    start: Int[Array, " B"]  # the position of that token in each row
    cache: core.Cache  # the target's; None once it was handed back
    adapter: core.Cache = ()  # the adapter's cache; empty if there is none


class LayerSplit(NamedTuple):
    """The layers that draft, and those that verify, cut where they part."""

    shared: core.Parts  # the leading layers, which both run
    drafting: core.Parts  # the other parts that draft
    verifying: core.Parts  # the other layers, whole


def make_drafter(
    target: core.Model,
    parts: core.Parts,
    name: str,
    head: core.Model | None = None,
    adapter: DraftHead[ExitAdapter] | None = None,
) -> core.BoundDrafter:
    """Makes the drafter that runs these parts of its target, given the layers that `layers_of`
    returned.

    An adapter takes the final norm's place; the parts are then the first layers.
    """
    lm = target.lm
    trimmed = head_of(target, head)
    if adapter is not None:
        check_target(adapter.network.requirements, target, "an adapter")
    functions = _self_speculative(lm, parts, trimmed, None if adapter is None else adapter.network)
    params = SelfDraftParams(
        None if head is None else head.params, None if adapter is None else adapter.params
    )
    return core.BoundDrafter(functions, params, target=target, name=name)


def head_of(target: core.Model, head: core.Model | None) -> core.Head | None:
    """Returns the function of the head that drafts in the place of the target's; None: the target's
    own drafts.

    Raises:
        TypeError: the head is no model.
        ValueError: it reads features of another width, or writes another vocabulary.
    """
    if head is None:
        return None
    check_model(head, "head")
    sizes = inside_of(target).width, target.lm.vocab_size
    return inside_of(head, "the drafter", sizes, "expected jaxspec.trim_vocabulary(target)").head


def split_layers(parts: core.Parts, count: int) -> LayerSplit:
    """Splits the layers where drafting parts from verification: at the first one that does not
    draft as a whole.

    >>> split = split_layers(core.Parts(attention=(0, 1, 3), mlp=(0, 2, 3)), count=4)
    >>> split.shared, split.drafting
    (Parts(attention=(0,), mlp=(0,)), Parts(attention=(1, 3), mlp=(2, 3)))
    """
    drafts_whole = (layer in parts.attention and layer in parts.mlp for layer in range(count))
    cut = next((layer for layer, whole_layer in enumerate(drafts_whole) if not whole_layer), count)
    first = tuple(range(cut))
    second = tuple(range(cut, count))
    drafting = core.Parts(*(tuple(layer for layer in layers if layer >= cut) for layers in parts))
    return LayerSplit(core.Parts(first, first), drafting, core.Parts(second, second))


@functools.lru_cache
def _self_speculative(
    lm: core.LanguageModel, parts: core.Parts, head: core.Head | None, adapter: ExitAdapter | None
) -> core.Drafter:
    assert lm.inside is not None and lm.inside.layers is not None
    layers = lm.inside.layers
    functions = SelfDraft(
        lm,
        layers,
        lm.inside.head,
        lm.inside.width,
        split_layers(parts, layers.count),
        head,
        adapter,
    )
    complete = functions.complete_target_pass
    steps = (
        functions.init,
        functions.begin,
        functions.commit,
        lm.vocab_size,
        None,
        functions.rollback,
        complete,
    )
    return chain(core.Steps(*steps))


class SelfDraft(NamedTuple):
    """The functions of a drafter that runs parts of its target.

    A round's fed tokens are numbered: 0 is the last committed one, which lies at `nodes.start` in
    its row, i is the i-th that was fed after it. `at` is the number of the first of the tokens at
    hand.
    """

    lm: core.LanguageModel  # the target's
    layers: core.Layers  # the target's
    target_head: core.Head  # the target's
    width: int  # width of the target's hidden states
    split: LayerSplit
    head: core.Head | None  # makes the drafter's logits; None: the target's
    adapter: ExitAdapter | None

    def init(self, start: core.DraftStart, nodes: int) -> core.Cache:
        """Reads the prompt with the adapter, if any."""
        adapter = self.adapter
        if adapter is None:
            return ()
        row = token_rows.decoder_prompt(self.lm, start.prompt)

        def read(cache: core.Cache, stream: Array, real: Array) -> tuple[tuple, core.Cache]:
            return (), adapter.extend(start.weights.draft.adapter, cache, stream)[1]

        stream = _exit_stream(start.prefilled)
        return chunks.read(
            read, adapter.rewind, adapter.empty, stream, row.length, start.room, start.before
        )[2]

    def rewound(self, nodes: Nodes, offset: int | Int[Array, ""]) -> core.Cache:
        """Returns the target's cache as it was before the tokens at hand."""
        return self.lm.rewind(nodes.cache, _position(nodes, offset))

    def feed(
        self,
        weights: core.Weights,
        nodes: Nodes,
        tokens: Int[Array, "B n"],
        offset: int | Int[Array, ""],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B n M"], Nodes]:
        """Runs the shared layers over n tokens, and adds their output to the stream."""
        assert nodes.stream is not None
        cache = self.rewound(nodes, offset)
        embedded = self.layers.embed(weights.target, cache, tokens, parent)
        stream, cache = self.layers.run(weights.target, cache, embedded, self.split.shared, parent)
        # B n M into B N+1 M, at the tokens' numbers
        written = jax.lax.dynamic_update_slice_in_dim(nodes.stream, stream, offset, axis=1)
        return stream, nodes._replace(stream=written, cache=cache)

    def logits_after(
        self,
        weights: core.Weights,
        nodes: Nodes,
        stream: Float[Array, "B n M"],
        offset: int | Int[Array, ""],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B n V"], Nodes]:
        """Makes the drafter's logits after n tokens, from the shared layers' output `stream`."""
        if self.adapter is None:
            # What `drafting` writes lies behind the cut, where `verifying` overwrites it.
            cache = self.rewound(nodes, offset)
            hidden, cache = self.layers.run(
                weights.target, cache, stream, self.split.drafting, parent
            )
            nodes = nodes._replace(cache=cache)
            features = self.layers.features(weights.target, hidden)
        else:
            cache = self.adapter.rewind(nodes.adapter, _position(nodes, offset))
            features, cache = self.adapter.extend(
                weights.draft.adapter, cache, stream[..., : self.width], parent
            )
            nodes = nodes._replace(adapter=cache)
        if self.head is None:
            return self.target_head(weights.target, features), nodes
        return self.head(weights.draft.head, features), nodes

    def begin(
        self,
        weights: core.Weights,
        caches: core.Caches,
        context: core.DraftContext,
        fed: int | None,
    ) -> core.Reading:
        """Begins a round: nothing is fed yet, and buffers have room for all tokens of the round."""
        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)

        def read(
            tokens: Int[Array, "B n"], parent: Parent, offset: int | Int[Array, ""], nodes: Nodes
        ) -> NodeLogits:
            stream, nodes = self.feed(weights, nodes, tokens, offset, parent)
            return self.logits_after(weights, nodes, stream, offset, parent)

        def nodes(
            tokens: Int[Array, "B n"], parent: Parent, level: int | Int[Array, ""], carry: Nodes
        ) -> NodeLogits:
            # A tree's nodes are fed to the places that they have in verification.
            return read(
                tokens,
                parent,
                level if parent is None else 1 + parent.shape[1] - tokens.shape[1],
                carry,
            )

        def end(carry: Nodes, draft: core.Draft, slots: Int[Array, "#B N"]) -> core.Caches:
            if fed is None:
                # Of a chain the last draft token was not fed; where no row may draft, nor was the
                # last committed one.
                offset = jnp.where(jnp.any(context.max_draft > 0), jnp.max(slots) + 2, 0)
                tokens = jnp.concatenate([last, draft.tokens], axis=1)
                _, carry = self.feed(
                    weights, carry, jax.lax.dynamic_slice_in_dim(tokens, offset, 1, axis=1), offset
                )
            elif context.adaptive:
                # With a policy nodes may be verified that were not fed, because their children are
                # of no use.
                carry = carry._replace(stream=None)
            if self.adapter is None:
                adapter_cache = carry.adapter
            else:
                adapter_cache = self.adapter.rewind(carry.adapter, carry.start)
            return core.Caches(carry.cache, carry._replace(cache=None, adapter=adapter_cache))

        # Room for the last committed token and all that are fed after it.
        embedded = jax.eval_shape(self.layers.embed, weights.target, caches.target, last)  # B 1 M
        size = 1 + (context.gamma if fed is None else fed)
        stream = jnp.zeros((embedded.shape[0], size, embedded.shape[2]), embedded.dtype)
        carry = Nodes(stream, context.row.length - 1, caches.target, caches.draft)
        return core.Reading(carry, lambda carry: read(last, None, 0, carry), nodes, end)

    def complete_target_pass(
        self,
        weights: core.Weights,
        caches: core.Caches,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B T"] | None = None,
    ) -> tuple[core.Forward, core.Cache]:
        """Runs the layers after the shared ones over the stream that drafting has left."""
        nodes: Nodes = caches.draft
        stream = nodes.stream
        step = tokens.shape[1]
        if stream is None:
            return self.lm.extend(weights.target, caches.target, tokens, parent)
        nodes = nodes._replace(cache=caches.target)
        num_fed = stream.shape[1]
        if num_fed < step:  # the nodes that end a tree's paths
            nodes = nodes._replace(stream=jnp.pad(stream, ((0, 0), (0, step - num_fed), (0, 0))))
            _, nodes = self.feed(weights, nodes, tokens[:, num_fed:], num_fed, parent)
        assert nodes.stream is not None
        stream = nodes.stream[:, :step]
        cache = self.rewound(nodes, 0)
        hidden, cache = self.layers.run(weights.target, cache, stream, self.split.verifying, parent)
        features = self.layers.features(weights.target, hidden)
        logits = self.target_head(weights.target, features)
        return core.Forward(
            logits, features, None if self.adapter is None else stream[..., : self.width]
        ), cache

    def commit(self, end: core.RoundEnd) -> core.Caches:
        """Has the adapter read the accepted tokens, whatever a policy or a tree made of the
        round.
        """
        if self.adapter is None:
            return end.caches._replace(draft=())
        stream = _exit_stream(on_path(end.forward, end.verdict))
        _, cache = self.adapter.extend(end.weights.draft.adapter, end.caches.draft.adapter, stream)
        return end.caches._replace(draft=self.rollback(cache, end.row))

    def rollback(self, state: core.Cache, row: core.Prompt) -> core.Cache:
        """Takes tokens back: all that the rows do not hold, and their last one."""
        if self.adapter is None:
            return state
        return self.adapter.rewind(state, row.length - 1)


def _position(nodes: Nodes, offset: int | Int[Array, ""]) -> Int[Array, " B"]:
    return nodes.start + jnp.asarray(offset, nodes.start.dtype)


def _exit_stream(forward: core.Forward) -> Float[Array, "B T M"]:
    """Returns the output of the one layer that the target has taps of, which an adapter reads."""
    assert forward.taps is not None
    return forward.taps
