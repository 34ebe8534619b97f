"""A target that drafts for itself with a part of its cache: the first tokens of each row and the
last ones.

Shapes: B batch, K key-value heads, S slots of a layer of the target, C copied entries, N nodes, n
nodes of a level, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.core import kv_cache, token_rows
from jaxspec.core.checks import integer
from jaxspec.core.layer_caches import Attended, KeysValues, LayerArray, LayerCache, New, write
from jaxspec.core.passes import Pass, View
from jaxspec.drafters.common import check_model, no_commit, no_state, same_state
from jaxspec.drafters.stepwise import NodeLogits, Parent, chain


def windowed(target: core.Model, window: int = 512, sinks: int = 4) -> core.BoundDrafter:
    """Drafts with the target itself, which attends only to the first tokens of a row and to its
    last ones.

    It needs neither a second model nor training. Each round copies the keys and values of these
    tokens, and drafts with the copy. A draft token reads all of the target's weights, but `sinks` +
    `window` entries of the cache and the draft in place of the whole row. So it pays only where the
    caches of the batch are larger than the weights: long prompts, many rows. On rows of at most
    `sinks` + `window` tokens it drafts the target's text, at the target's cost.

    The first tokens are kept because softmax gives them much weight, whatever they are. A layer
    with a sliding window attends to the copied part of it.

    Args:
        target: the model whose text is drafted, a decoder of jaxspec's networks whose layers all
            have attention.
        window: how many of the last committed tokens are attended to, beside the draft.
        sinks: how many of the first tokens are.

    Raises:
        TypeError: the target is not a model.
        ValueError: `window` is below 1 or `sinks` below 0. The target is an encoder-decoder, has
            layers with a state in place of keys, or relative position biases; or is not a network
            of jaxspec.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=48)
        >>> target = core.Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0))
        ... )
        >>> prompt = jaxspec.Prompt(jnp.arange(12)[None], jnp.array([12]))
        >>> drafter = windowed(target, window=4, sinks=1)
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Sun et al., TriForce, COLM 2024, arXiv 2404.11912, which also chooses entries by
    their attention; Xiao et al., StreamingLLM, ICLR 2024, arXiv 2309.17453.
    """
    check_model(target, "target")
    window = integer(window, "window", "an integer")
    sinks = integer(sinks, "sinks", "an integer")
    for value, name, least in ((window, "window", 1), (sinks, "sinks", 0)):
        if value < least:
            raise ValueError(f"{name} is {value}: expected a number of tokens, {least} or more")
    complaint = _complaint(target)
    if complaint:
        raise ValueError(
            f"{target.name or 'the target'} cannot draft with a part of its cache: {complaint}; "
            "expected a decoder of jaxspec.nets whose layers all have attention"
        )
    return core.BoundDrafter(
        _windowed(target.lm, window, sinks), target=target, name=f"windowed({window}, {sinks})"
    )


def _complaint(target: core.Model) -> str | None:
    """Says why a target cannot draft so; None: it can."""
    lm = target.lm
    if lm.limits.start_token is not None or lm.encoder is not None:
        return "it is an encoder-decoder"
    # Decoders of jaxspec's networks have a `KVCache`, which this function reads.
    if lm.inside is None or lm.inside.keys_values is not kv_cache.keys_values:
        return "its cache is not that of jaxspec's decoders"
    if lm.select is None:
        return "it has layers with a state in place of keys"
    if lm.inside.has_slot_biases:
        return "its position biases go by the slots of the whole cache"
    return None


@functools.lru_cache
def _windowed(lm: core.LanguageModel, window: int, sinks: int) -> core.Drafter:
    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        last_position = context.row.length - 1
        last = token_rows.window(context.row.tokens, last_position, 1)

        def nodes(
            tokens: Int[Array, "B n"], parent: Parent, level: Any, cache: core.Cache
        ) -> NodeLogits:
            forward, cache = lm.extend(weights.target, cache, tokens, parent)
            return forward.logits, cache

        # The last committed token and all that are fed after it. The last token of a chain is not
        # fed.
        room = context.gamma if fed is None else 1 + fed
        copy = copied(caches.target, last_position, window, sinks, room)
        return core.Reading(copy, lambda cache: nodes(last, None, 0, cache), nodes)

    return chain(core.Steps(no_state, begin, no_commit, lm.vocab_size, rollback=same_state))


def copied(
    cache: kv_cache.KVCache, length: Int[Array, " B"], window: int, sinks: int, room: int
) -> kv_cache.KVCache:
    """Copies the first and the last entries of a cache, with room for `room` more tokens.

    >>> whole = kv_cache.empty(1, core.Room(20), [kv_cache.whole(kv_heads=1, head_dim=1)])
    >>> numbered = jnp.arange(20.0)[None, None, :, None]
    >>> whole = whole._replace(layers=(Attended(numbered, numbered),))
    >>> copied(whole, jnp.array([12]), window=3, sinks=2, room=2).keys[0].ravel().tolist()
    [0.0, 1.0, 9.0, 10.0, 11.0, 0.0, 0.0]
    """
    layers = tuple(
        copied_layer(layer, length, window, sinks, room) if isinstance(layer, Attended) else layer
        for layer in cache.layers
    )
    return kv_cache.KVCache(layers, length, None)


def copied_layer(
    layer: Attended, length: Int[Array, " B"], window: int, sinks: int, room: int
) -> Copied:
    """Copies the first and the last of the first `length` entries of a layer."""
    sinks = min(sinks, layer.slots)
    window = min(window, layer.slots if layer.window is None else layer.window, layer.slots - sinks)
    # Of a ring the first slots may hold later entries. Their places count as the first tokens,
    # which then lie before the layer's window.
    first = jnp.maximum(length - window, sinks)

    def copy(entries: LayerArray) -> LayerArray:
        if layer.wraps:
            slot = (first[:, None] + jnp.arange(window, dtype=first.dtype)[None, :]) % layer.slots
            last = jnp.take_along_axis(entries, slot[:, None, :, None], axis=2)
        else:
            take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=window, axis=1)
            last = jax.vmap(take)(entries, first)
        batch, heads, _, dim = entries.shape
        more = jnp.zeros((batch, heads, room, dim), entries.dtype)
        return jnp.concatenate([entries[:, :, :sinks], last, more], axis=2)

    return Copied(copy(layer.keys), copy(layer.values), length, sinks, window, layer.window)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copied(LayerCache):
    """A copy of some entries of a layer: the first, the last before `base`, and all that are fed
    from `base` on.

    Attributes:
        keys, values: the entries, in this order; room for further ones is at the end.
        base: how many tokens each row had when its entries were copied.
        sinks, last: the numbers of first and of last entries.
        window: the window of the layer, in tokens; None: it attends to all positions.
    """

    keys: LayerArray
    values: LayerArray
    base: Int[Array, " B"]
    sinks: int = dataclasses.field(metadata={"static": True})
    last: int = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def own(self) -> KeysValues:
        return self.keys, self.values

    def view(self, pass_: Pass) -> View:
        """Returns the entries that a pass may read; layers of one kind were copied together, and
        share it.
        """
        key = self.keys.shape[2], self.window, True
        if key not in pass_.views:
            pass_.views[key] = CopiedView(pass_, self._entries(), self.window)
        return pass_.views[key]

    def _entries(self) -> Int[Array, "B C"]:
        """Says which entry is in each place. Places that a short row lacks count as tokens that
        come later than all.
        """
        base = self.base[:, None]
        slots = self.keys.shape[2]

        def numbers(count: int) -> Int[Array, "1 count"]:
            return jnp.arange(count, dtype=base.dtype)[None, :]

        first = jnp.broadcast_to(numbers(self.sinks), (len(base), self.sinks))
        before = jnp.concatenate(
            [first, jnp.maximum(base - self.last, self.sinks) + numbers(self.last)], axis=1
        )
        after = base + numbers(slots - self.sinks - self.last)
        return jnp.concatenate([jnp.where(before < base, before, base + slots), after], axis=1)

    def read(self, pass_: Pass, records: Sequence[Any], k: New, v: New) -> KeysValues:
        start = self.sinks + self.last + pass_.length - self.base
        return write(self.keys, k, start), write(self.values, v, start)

    def after(self, record: KeysValues, pass_: Pass) -> Copied:
        keys, values = record
        return dataclasses.replace(self, keys=keys, values=values)


class CopiedView(View):
    """The entries of a copy that the tokens of a pass may read."""

    def __init__(self, pass_: Pass, numbers: Int[Array, "B C"], window: int | None):
        self.pass_ = pass_
        self.size = numbers.shape[1]
        self.window = window
        self.held = numbers
