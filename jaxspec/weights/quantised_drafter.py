"""A target that drafts for itself with a copy of its matrices in int8 or int4."""

from __future__ import annotations

import dataclasses
import functools

import jax

from jaxspec import sharding
from jaxspec.core import BoundDrafter, Model, checks
from jaxspec.core.checks import are_shapes
from jaxspec.drafters.common import check_model
from jaxspec.drafters.model import model
from jaxspec.drafters.share_encoder import with_shared_encoder
from jaxspec.nets import axes_of, net_of
from jaxspec.weights import loading, quantisation


def quantised(target: Model, *, bits: int = 8, compute: str | None = None) -> BoundDrafter:
    """Drafts with the target itself, its matrices rounded to int8 or int4.

    In int8 a pass reads half of the bytes of a bfloat16 target, a quarter of a float32 one's, and
    nearly all draft tokens are accepted; in int4 it reads half of that, and fewer are. Either way
    nothing needs training, or training again when the target's weights change, as in reinforcement
    learning. The text is exactly the unrounded target's. The gain is bounded by c, the time of a
    pass of the copy over the target's.

    An encoder is not copied: the drafter's decoder reads the output of the target's.

    Args:
        target: a model with a network of `jaxspec.nets` and floating-point matrices. On a mesh the
            copy lies on the same mesh.
        bits: 8 or 4, of the copy's matrices; see `jaxspec.weights.quantisation`.
        compute: the dtype of the copy's activations and caches, as `jaxspec.load` takes it with
            these.

    Raises:
        TypeError: the target is not a model.
        ValueError: its matrices are quantised already, it is of no network of `jaxspec.nets`, or
            `bits` is another.

    Example:
        >>> import jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=2, heads=2, max_positions=48)
        >>> target = Model(
        ...     decoder.language_model(shape), decoder.init(shape, jax.random.key(0)), config=shape
        ... )
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(
        ...     target, prompt, drafter=quantised(target), gamma=3, max_new_tokens=9
        ... )
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: EfficientRollout, arXiv 2606.18967, whose drafter is the policy itself, quantised.
    """
    check_model(target, "target")
    name = target.name or "the target"
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits!r}: expected 8 or 4")
    if quantisation.has_quantised(target.params):
        dtype = quantisation.dtype_of(target.params, "float32")
        raise ValueError(
            f"{name} has {dtype} matrices already, and its copy would be as slow: expected a wider "
            "dtype"
        )
    dtype = f"int{bits}"
    quantise = functools.partial(quantisation.quantise, dtype=dtype)
    if are_shapes(target.params):
        params = jax.eval_shape(quantise, target.params)
    else:
        params = quantise(target.params)
    if target.config is None or not quantisation.has_quantised(params):
        raise ValueError(f"{name} has no matrices to quantise: {checks.OWN_NETWORK}")
    config = dataclasses.replace(target.config, dtype=loading.dtype_names(dtype, compute)[1])
    mesh = sharding.mesh_of(params)
    if mesh is not None:
        params = jax.device_put(params, sharding.parameters(params, axes_of(config), mesh))
    copy = Model(
        net_of(config).language_model(config), params, target.tokenizer, config, f"{dtype} {name}"
    )
    # The target has encoded the prompt already.
    if copy.lm.encoder is not None and target.lm.encoder is not None:
        encoder = target.lm.encoder.params(target.params)
        copy = copy._replace(params=copy.lm.encoder.with_params(params, encoder))
    return model(with_shared_encoder(copy, target))
