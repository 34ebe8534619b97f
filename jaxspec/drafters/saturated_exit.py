"""A target that drafts for itself, token by token with as many of its layers as it takes until two
of them agree.

Shapes: B batch, N tokens fed after the last committed one, M model dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core import branches, token_rows
from jaxspec.core.checks import integer
from jaxspec.drafters.self_speculative import (
    Nodes,
    SelfDraft,
    SelfDraftParams,
    head_of,
    layers_of,
    split_layers,
)
from jaxspec.drafters.stepwise import NodeLogits, chain


def saturated_exit(
    target: core.Model,
    first_exit: int = 1,
    last_exit: int | None = None,
    *,
    head: core.Model | None = None,
) -> core.BoundDrafter:
    """Drafts with the target's own layers, and leaves them where two layers in a row prefer the
    same token.

    After `first_exit` layers, and after each further one, come the final norm and the head. Once
    the most probable token is the one that it was a layer before, the draft token is drawn from the
    later of the two distributions. So easy tokens cost few layers, and hard ones more. Rows exit at
    different layers, and a row's text does not depend on the rest of the batch. But a batch runs as
    many layers as the row that exits last.

    A layer beyond `first_exit` needs its keys and values of all draft tokens before, and these may
    have left earlier. So it reads the whole draft again: gamma + 1 tokens in place of one, with one
    reading of its weights. Its result is the target's own. Verification runs the layers after the
    first `first_exit` ones.

    Every layer from `first_exit` on costs a pass of the head, too: with a large vocabulary give a
    smaller one. `trace_numbers=True` shows the layers of each draft token in the column `layers` of
    `Generation.trace.table()`.

    Args:
        target: the model whose text is drafted: a network of jaxspec whose layers all have
            attention.
        first_exit: the layers after which the head runs first, so that a draft token takes one more
            at least; of an encoder-decoder, the decoder's layers.
        last_exit: the layers after which a draft token is drawn, whether or not they agree. By
            default all but the last.
        head: a model whose head makes the logits, as in `drafters.early_exit`.

    Raises:
        TypeError: the target or the head is not a model.
        ValueError: not 1 <= first_exit < last_exit < the target's layers; a target whose layers
            cannot be run in part, or that has layers with a state in place of keys; a head of
            another model.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = core.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(
        ...     target, prompt, drafter=saturated_exit(target), gamma=3, max_new_tokens=9
        ... )
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Schuster et al., CALM, NeurIPS 2022, arXiv 2207.07061, which leaves a layer where its
    state is saturated and verifies nothing.
    """
    count = layers_of(target).count
    name = target.name or "the target"
    first_exit = integer(first_exit, "first_exit", "an integer")
    if last_exit is None:
        last_exit = count - 1
    else:
        last_exit = integer(last_exit, "last_exit", "an integer")
    if not 1 <= first_exit < last_exit < count:
        raise ValueError(
            f"first_exit is {first_exit}, last_exit is {last_exit}, and {name} has {count} layers: "
            f"expected 1 <= first_exit < last_exit < {count}"
        )
    if target.lm.select is None:
        raise ValueError(
            f"{name} has layers with a state in place of keys, which cannot read a draft twice: "
            "expected a target whose layers all have attention"
        )
    params = SelfDraftParams(None if head is None else head.params)
    functions = _saturated_exit(target.lm, first_exit, last_exit, head_of(target, head))
    return core.BoundDrafter(
        functions, params, target=target, name=f"saturated_exit({first_exit} to {last_exit})"
    )


class Exits(NamedTuple):
    """The rows on their way through the layers, after one more layer each time."""

    stream: Float[Array, "B N+1 M"]  # the residual stream of all tokens that were fed
    cache: core.Cache  # the target's
    logits: Float[Array, "B 1 V"]  # the last ones, or those with which a row has left
    used: Int[Array, " B"]  # the layers that made them
    left: Bool[Array, " B"]


class LayeredNodes(NamedTuple):
    """The nodes of a draft, and the layers that each draft token took."""

    nodes: Nodes
    used: Int[Array, "B N+1"]


@functools.lru_cache
def _saturated_exit(
    lm: core.LanguageModel, first_exit: int, last_exit: int, head: core.Head | None
) -> core.Drafter:
    assert lm.inside is not None and lm.inside.layers is not None
    layers = lm.inside.layers
    inside = lm.inside
    first = tuple(range(first_exit))
    split = split_layers(core.Parts(first, first), layers.count)
    shared = SelfDraft(lm, layers, inside.head, inside.width, split, head, None)

    def logits_of(weights: core.Weights, stream: Float[Array, "B n M"]) -> Float[Array, "B n V"]:
        features = layers.features(weights.target, stream)
        if head is None:
            return inside.head(weights.target, features)
        return head(weights.draft.head, features)

    def one_layer(
        weights: core.Weights,
        start: Int[Array, " B"],
        offset: Int[Array, ""],
        layer: int,
        exits: Exits,
    ):
        """Runs a layer over the whole draft, and lets the rows leave whose most probable token has
        not changed.
        """
        cache = lm.rewind(exits.cache, start)
        stream, cache = layers.run(
            weights.target, cache, exits.stream, core.Parts((layer,), (layer,)), None
        )
        logits = logits_of(weights, jax.lax.dynamic_slice_in_dim(stream, offset, 1, axis=1))
        agree = jnp.argmax(logits[:, 0], axis=-1) == jnp.argmax(exits.logits[:, 0], axis=-1)
        return Exits(
            stream,
            cache,
            jnp.where(exits.left[:, None, None], exits.logits, logits),
            jnp.where(exits.left, exits.used, layer + 1),
            exits.left | agree,
        )

    def read(
        weights: core.Weights,
        tokens: Int[Array, "B 1"],
        offset: int | Int[Array, ""],
        carry: LayeredNodes,
    ) -> NodeLogits:
        offset = jnp.asarray(offset, jnp.int32)
        stream, nodes = shared.feed(weights, carry.nodes, tokens, offset)
        assert nodes.stream is not None
        used = jnp.full_like(nodes.start, first_exit)
        exits = Exits(
            nodes.stream, nodes.cache, logits_of(weights, stream), used, jnp.zeros(used.shape, bool)
        )
        for layer in range(first_exit, last_exit):
            step = functools.partial(one_layer, weights, nodes.start, offset, layer)
            exits = branches.run_if(~jnp.all(exits.left), step, exits)
        nodes = nodes._replace(cache=exits.cache)
        nodes = nodes._replace(cache=shared.rewound(nodes, offset + 1))
        layers_used = jax.lax.dynamic_update_slice_in_dim(
            carry.used, exits.used[:, None], offset, axis=1
        )
        return exits.logits, LayeredNodes(nodes, layers_used)

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        reading = shared.begin(weights, caches, context, fed)
        last = token_rows.window(context.row.tokens, context.row.length - 1, 1)

        def nodes(tokens, parent, level, carry: LayeredNodes) -> NodeLogits:
            return read(weights, tokens, level, carry)

        def end(carry: LayeredNodes, draft: core.Draft, slots: Int[Array, "#B N"]) -> core.Caches:
            assert reading.end is not None
            after = reading.end(carry.nodes, draft, slots)
            return after._replace(draft=LayeredNodes(after.draft, carry.used))

        assert reading.carry.stream is not None
        used = jnp.zeros(reading.carry.stream.shape[:2], reading.carry.start.dtype)
        return core.Reading(
            LayeredNodes(reading.carry, used),
            lambda carry: read(weights, last, 0, carry),
            nodes,
            end,
        )

    steps = core.Steps(
        shared.init,
        begin,
        shared.commit,
        lm.vocab_size,
        None,
        shared.rollback,
        shared.complete_target_pass,
    )
    drafter = chain(steps, trees=False)

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        draft, caches = drafter.propose(weights, caches, context)
        used = caches.draft.used[:, : context.gamma].astype(jnp.float32)
        return draft._replace(aux={**(draft.aux or {}), "layers": used}), caches._replace(
            draft=caches.draft.nodes
        )

    return drafter._replace(propose=propose)
