"""A target that drafts for itself, and leaves its layers where two in a row agree.

Shapes: B batch, M model dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core.checks import integer
from jaxspec.drafters import self_speculative
from jaxspec.drafters.self_speculative import Nodes, SelfDraft
from jaxspec.drafters.stepwise import NodeLogits, chain


def saturation_exit(target: core.Model, first: int, *, head: core.Model | None = None) -> core.BoundDrafter:
    """Drafts with as many of the target's layers as it takes until two in a row have the same likeliest token.

    The first `first` layers always run, and verification does not run them again, as in `drafters.early_exit`. After
    each further layer the final norm and the head make logits. Where their likeliest token is that of the layer before,
    these logits draft. The last layer is left to verification.

    Each row of a batch exits by itself: what it drafts does not depend on other rows. But a pass runs as many layers as
    the deepest row of the batch takes, so the time is that row's. Later layers have no keys of a token that exited
    early. So a token of a draft runs at most the layers that the tokens of that draft before it ran.

    Each layer from `first` on costs a pass of the head, too. With a large vocabulary that is more than the layer, and
    `head` should be a trimmed one. It drafts chains, no token trees.

    Args:
        target: the model whose text is drafted, one of jaxspec's networks with three layers or more.
        first: how many of its first layers always run.
        head: a model whose head makes the logits, such as `jaxspec.trim_vocabulary(target, size=...)`. By default the
            target.

    Raises:
        TypeError: the target or the head is no model.
        ValueError: `first` is not from 1 to two less than the number of layers; the target's layers cannot be run in
            part; or the head is one of another model.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=4, heads=2, max_positions=48)
        >>> target = core.Model(decoder.language_model(shape), decoder.init(shape, jax.random.key(0)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=saturation_exit(target, 1), gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Schuster et al., Confident Adaptive Language Modeling, NeurIPS 2022, arXiv 2207.07061, which compares
    hidden states in place of tokens.
    """
    first, count = integer(first, "first", "an integer"), self_speculative.layers_of(target).count
    if not 1 <= first <= count - 2:
        raise ValueError(
            f"first is {first} and {target.name or 'the target'} has {count} layers: expected at least 1, and at least "
            "2 layers after these"
        )
    trimmed = self_speculative.head_of(target, head)
    params = self_speculative.SelfDraftParams(None if head is None else head.params)
    functions = _saturation_exit(target.lm, first, trimmed)
    return core.BoundDrafter(functions, params, target=target, name=f"saturation_exit({first})")


@functools.lru_cache
def _saturation_exit(lm: core.LanguageModel, first: int, head: core.Head | None) -> core.Drafter:
    leading = tuple(range(first))
    functions = SaturationExit(*self_speculative.self_draft(lm, core.Parts(leading, leading), head, None))
    return chain(functions.steps(), trees=False)


class Exit(NamedTuple):
    """The layers of a pass so far."""

    stream: Float[Array, "B 1 M"]  # after the last layer that each row took
    logits: Float[Array, "B 1 V"]  # the drafter's, made of it
    has_exited: Bool[Array, " B"]
    depth: Int[Array, " B"]  # how many layers each row took
    cache: core.Cache  # the target's


class SaturationExit(SelfDraft):
    """The functions of the drafter. `Nodes.depth` is the most layers that a row's next token may run."""

    def begin(
        self, weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        """Begins a round, in which any number of layers may run."""
        reading = super().begin(weights, caches, context, fed)
        depth = jnp.full_like(context.row.length, self.layers.count - 1)
        return reading._replace(carry=reading.carry._replace(depth=depth))

    def logits_after(
        self,
        weights: core.Weights,
        nodes: Nodes,
        stream: Float[Array, "B 1 M"],
        offset: int | Int[Array, ""],
        parent: None = None,
    ) -> NodeLogits:
        """Runs further layers, until all rows have exited."""
        assert nodes.depth is not None
        limit, first = nodes.depth, len(self.split.shared.mlp)
        start = Exit(
            stream,
            self.logits_of(weights, self.layers.features(weights.target, stream)),
            limit <= first,
            jnp.full_like(limit, first),
            self.rewound(nodes, offset),
        )

        def run(layer: int, before: Exit) -> Exit:
            cache = self.rewound(nodes._replace(cache=before.cache), offset)
            stream, cache = self.layers.run(weights.target, cache, before.stream, core.Parts((layer,), (layer,)))
            logits = self.logits_of(weights, self.layers.features(weights.target, stream))
            # A row that has exited keeps what it had, however deep the others go.
            stays = before.has_exited[:, None, None]
            agrees = jnp.argmax(logits[:, 0], axis=-1) == jnp.argmax(before.logits[:, 0], axis=-1)
            depth = jnp.where(before.has_exited, before.depth, layer + 1)
            return Exit(
                jnp.where(stays, before.stream, stream),
                jnp.where(stays, before.logits, logits),
                before.has_exited | agrees | (depth >= limit),
                depth,
                cache,
            )

        state = start
        for layer in range(first, self.layers.count - 1):
            everyone = jnp.all(state.has_exited)
            state = jax.lax.cond(everyone, lambda exit_state: exit_state, functools.partial(run, layer), state)
        return state.logits, nodes._replace(cache=state.cache, depth=state.depth)
