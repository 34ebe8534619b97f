"""The multi-token prediction module that a model was trained with, as its drafter (DeepSeek-V3, Qwen3-Next)."""

from __future__ import annotations

from jaxspec.base import Bound, Drafter, Model, RecurrentHead
from jaxspec.drafters.eagle import recurrent


def mtp(head: Bound[RecurrentHead], target: Model) -> Bound[Drafter]:
    """Drafts with the module that a model's checkpoint brings along for predicting the token after the next.

    Such a module is one more of the model's layers, and reads the model's features: see `drafters.eagle`, of which this
    is the same loop. For more than one draft token it is fed what it made, and the further ones are accepted less
    often, unless it was trained so.

    Args:
        head: a network and its parameters: `nets.mtp.head(config)` in a `Bound`; `jaxspec.load_drafter` reads those of
            a model's own folder.
        target: the model.

    Raises:
        ValueError: the module is of another model, or the target lacks the functions that it needs.

    Example:
        >>> import dataclasses, jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder, mtp as net
        >>> shape = decoder.DecoderConfig(32, dim=16, ff_dim=32, layers=2, heads=4, kv_heads=2, head_dim=4)
        >>> target = jaxspec.Model(decoder.language_model(shape), decoder.init(shape, jax.random.key(0)))
        >>> config = net.MTPConfig(dataclasses.replace(shape, layers=1))
        >>> module = jaxspec.Bound(net.head(config), net.init(config, jax.random.key(1)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=mtp(module, target), gamma=2, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, section 2.2; Gloeckle et al., arXiv 2404.19737.
    """
    return recurrent(head, target, "an MTP module", "mtp")
