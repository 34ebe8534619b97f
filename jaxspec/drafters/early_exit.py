"""The target's first layers as its drafter (LayerSkip, arXiv 2404.16710), with an adapter (Kangaroo, 2404.18911)."""

from __future__ import annotations

from jaxspec.core import BoundDrafter, Model, Parts
from jaxspec.core.checks import integer
from jaxspec.drafters import own_layers
from jaxspec.drafters.common import shown
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.drafters.own_layers import ExitAdapter


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
        >>> from jaxspec.nets import gpt
        >>> shape = gpt.GPTConfig(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = Model(gpt.language_model(shape), gpt.init(shape, jax.random.key(0)), config=shape)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> drafter = early_exit(target, layers=1, head=jaxspec.trim_vocabulary(target, size=16))
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Elhoushi et al., LayerSkip, ACL 2024, arXiv 2404.16710; Liu et al., Kangaroo, NeurIPS 2024, arXiv
    2404.18911.
    """
    layers, count = integer(layers, "layers", "an integer"), own_layers.layers_of(target).count
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
    return own_layers.bound(target, Parts(first, first), f"early_exit({layers})", head, adapter)
