"""keras-hub's causal language models as a model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core import Model, Params
from jaxspec.nets.adapters.functions import by_row, from_function


def from_keras_hub(model: Any) -> Model:
    """Makes a model of a `keras_hub.models.CausalLM`, with the cache of its `call_with_cache`.

    The cache has one array for all layers. A window that is counted within a pass, not in the row,
    would give another text: try such a model by `testing.check_model`, with a `length` beyond it.

    Args:
        model: the Keras model, on the JAX backend.

    Returns:
        The model, without a tokenizer: prompt it with token ids. Its parameters are the values of
        the Keras variables; after training, `_replace(params=...)` takes new ones.

    Raises:
        ValueError: Keras runs on another backend.
        TypeError: the model has no `call_with_cache`, or its backbone does not say the size of the
            cache.

    Example:
        >>> causal_lm = keras_hub.models.Llama3CausalLM.from_preset(preset)  # doctest: +SKIP
        >>> model = from_keras_hub(causal_lm)  # doctest: +SKIP
    """
    import keras

    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Keras runs on the backend {keras.backend.backend()!r}: expected 'jax'. Set "
            "KERAS_BACKEND=jax before keras is imported"
        )
    if not hasattr(model, "call_with_cache"):
        raise TypeError(
            f"the model is of type {type(model).__name__}: expected one with call_with_cache, such "
            "as keras_hub.models.Llama3CausalLM"
        )
    backbone = model.backbone
    variables = (list(model.trainable_variables), list(model.non_trainable_variables))
    heads = _size(backbone, "num_key_value_heads", "num_heads")
    head_dim = getattr(backbone, "head_dim", None)
    if head_dim is None:
        hidden_dim = _size(backbone, "hidden_dim")
        head_dim = hidden_dim // _size(backbone, "num_query_heads", "num_heads")

    def empty(batch: int, capacity: int) -> Array:
        # [row, 1, layer, keys or values, entry, head, width]: the 1 is the batch of its own call
        shape = (batch, 1, backbone.num_layers, 2, capacity, heads, head_dim)
        return jnp.zeros(shape, model.compute_dtype)

    def step(
        params: Params, cache: Array, tokens: Int[Array, "1 T"], length: Int[Array, ""]
    ) -> tuple[Array, Array]:
        values = zip(jax.tree.leaves(variables), jax.tree.leaves(params), strict=True)
        with keras.StatelessScope(state_mapping=list(values)):
            logits, _, cache = model.call_with_cache(tokens, cache, length)
        return logits, cache

    lm = from_function(by_row(step), backbone.vocabulary_size, empty_cache=empty)
    params = jax.tree.map(lambda variable: variable.value, variables)
    return Model(lm, params, name=type(model).__name__)


def _size(backbone: Any, *names: str) -> int:
    """Returns a size of a backbone by the first of these names that it has."""
    for name in names:
        if hasattr(backbone, name):
            return getattr(backbone, name)
    raise TypeError(
        f"the backbone is of type {type(backbone).__name__} and has no {' or '.join(names)}, which "
        "the size of its cache needs: convert the model with jaxspec.from_arrays"
    )
