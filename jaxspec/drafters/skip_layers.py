"""The target without some of its layers as its drafter (Draft & Verify, Zhang et al., arXiv 2309.08168)."""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.core import BoundDrafter, Model, Parts
from jaxspec.core.checks import integer
from jaxspec.drafters import own_layers


def skip_layers(
    target: Model, attention: Sequence[int] = (), mlp: Sequence[int] = (), *, head: Model | None = None
) -> BoundDrafter:
    """Drafts with the target itself, but for the attention of some layers and the feed-forward block of some.

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
        >>> from jaxspec.nets import gpt
        >>> shape = gpt.GPTConfig(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = Model(gpt.language_model(shape), gpt.init(shape, jax.random.key(0)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> drafter = skip_layers(target, attention=[1, 2], mlp=[2])
        >>> out = jaxspec.generate(target, prompt, drafter=drafter, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Zhang et al., Draft & Verify, ACL 2024, arXiv 2309.08168.
    """
    count, name = own_layers.layers_of(target).count, target.name or "the target"
    chosen, names = [], []
    for what, layers in (("attention", attention), ("mlp", mlp)):
        skipped = _integers(what, layers)
        if odd := [layer for layer in skipped if not 0 <= layer < count]:
            raise ValueError(f"{what} skips layer {odd[0]}: {name} has layers 0 to {count - 1}")
        if len(set(skipped)) < len(skipped):
            raise ValueError(f"{what} is {skipped}: expected each layer once")
        chosen.append(tuple(layer for layer in range(count) if layer not in skipped))
        names.append(f"{what}={skipped}")
    if not any(chosen):
        raise ValueError(f"attention and mlp skip all {count} layers of {name}: expected some of them to be left")
    if all(len(run) == count for run in chosen):
        raise ValueError("attention and mlp skip nothing: the drafter would be the target; expected some layers")
    return own_layers.bound(target, Parts(*chosen), f"skip_layers({', '.join(names)})", head)


def _integers(what: str, layers: Sequence[int]) -> list[int]:
    expected = f"the layers, from 0, whose {what} is skipped, such as [5, 7]"
    try:
        found = list(layers)
    except TypeError:
        raise ValueError(f"{what} is {layers!r}: expected {expected}") from None
    if isinstance(layers, str | bytes):
        raise ValueError(f"{what} is {layers!r}: expected {expected}")
    return [integer(layer, f"a layer of {what}", f"an integer, of {expected}") for layer in found]
