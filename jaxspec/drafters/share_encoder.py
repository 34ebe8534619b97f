"""Drafters of encoder-decoders that read the target's encoder output in place of their encoder's."""

from __future__ import annotations

import weakref

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool

from jaxspec.core import Model

_compared: dict[tuple[int, ...], bool] = {}
TOLERANCE = 1e-5  # relative: a scale that was rounded again when int8 weights were stored


def share_encoder(draft: Model, target: Model) -> Model:
    """Gives a draft model the target's encoder, which then runs once for both.

    A draft model that was trained with its target's encoder left as it is (`share_encoder` in the
    recipe's `[distil]`, as Distil-Whisper was) would otherwise compute the same hidden states of
    the prompt a second time. Its decoder computes cross-attention keys and values from the target's
    hidden states. `generate` and the other functions that take a draft model do this by themselves
    where the encoders are equal. A drafter that is made from a model, such as `drafters.tree`,
    needs the model that this returns.

    The text is exact in any case. Memory holds the encoder's parameters once.

    Args:
        draft: an encoder-decoder with the target's encoder.
        target: the model that it drafts for.

    Raises:
        ValueError: a model has no encoder whose output can be shared, or the encoders differ.

    Example:
        >>> import dataclasses, jaxspec
        >>> from jaxspec.nets import t5
        >>> config = t5.T5Config(
        ...     32, dim=16, ff_dim=32, heads=2, head_dim=8, encoder_layers=1, decoder_layers=2
        ... )
        >>> target = Model(
        ...     t5.language_model(config), t5.init(config, jax.random.key(0)), config=config
        ... )
        >>> config = dataclasses.replace(config, decoder_layers=1)
        >>> params = t5.init(config, jax.random.key(1)) | target.lm.encoder.params(target.params)
        >>> draft = share_encoder(Model(t5.language_model(config), params, config=config), target)
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> out = jaxspec.generate(target, prompt, drafter=draft, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Gandhi, von Platen, Rush, Distil-Whisper (whose assistant shares its encoder), arXiv
    2311.00430.
    """
    reason = difference(draft, target)
    if reason is not None:
        raise ValueError(
            f"{draft.name or 'the draft model'} cannot read the encoder of the target: {reason}"
        )
    return _shared(draft, target)


def with_shared_encoder(draft: Model, target: Model) -> Model:
    """Shares the encoder as `share_encoder` does, where that can be; else the draft model stays as
    it is.
    """
    if difference(draft, target) is not None:
        return draft
    return _shared(draft, target)


def difference(draft: Model, target: Model) -> str | None:
    """Explains why a draft model cannot read the output of the target's encoder; None: it can."""
    if draft.lm.encoder is None or target.lm.encoder is None:
        if draft.lm.encoder is None:
            name = "it"
        else:
            name = target.name or "the target"
        return f"{name} has no encoder whose output can be had"
    params = draft.lm.encoder.params(draft.params), target.lm.encoder.params(target.params)
    (draft_leaves, draft_tree), (target_leaves, target_tree) = (
        jax.tree.flatten(tree) for tree in params
    )
    alike = draft_tree == target_tree and all(
        a is b or (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(draft_leaves, target_leaves, strict=True)
    )
    if not alike:
        return "their encoders have parameters of other names, shapes or dtypes"
    pairs = [(a, b) for a, b in zip(draft_leaves, target_leaves, strict=True) if a is not b]
    if any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for pair in pairs for leaf in pair):
        return "their encoders cannot be compared inside of a transformation, nor by shapes alone"
    if _all_equal(pairs):
        return None
    return "their encoders have different parameters"


def _all_equal(pairs: list[tuple[Array, Array]]) -> bool:
    """Tests whether the arrays of each pair are equal, once for the same arrays."""
    arrays = [array for pair in pairs for array in pair]
    key = tuple(map(id, arrays))
    if key not in _compared:
        _compared[key] = all(bool(_equal(a, b)) for a, b in pairs)
        for array in arrays:  # another one may get its id
            weakref.finalize(array, _compared.pop, key, None)
    return _compared[key]


@jax.jit
def _equal(a: Array, b: Array) -> Bool[Array, ""]:
    a = a.astype(jnp.float32)
    b = b.astype(jnp.float32)
    return jnp.all(jnp.abs(a - b) <= TOLERANCE * jnp.abs(b))


def _shared(draft: Model, target: Model) -> Model:
    inside = draft.lm.inside
    shared = target.lm.encoder
    encoder = draft.lm.encoder
    assert inside is not None and encoder is not None and shared is not None
    lm = draft.lm._replace(inside=inside._replace(encoder=encoder._replace(is_shared=True)))
    return draft._replace(
        lm=lm, params=encoder.with_params(draft.params, shared.params(target.params))
    )
