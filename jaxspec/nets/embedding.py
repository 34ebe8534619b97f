"""Vectors of token ids and of positions, by rows of a matrix that may be quantised.

Shapes: B batch, T step, M model dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.nets import dense, quantised
from jaxspec.nets.quantised import Matrix


class Embedding(nn.Module):
    """Looks rows up, as `dtype`; a tied head multiplies with them.

    Parameters may have a second matrix, `more` [n, dim]: ids from `size` on are its rows. These are
    vectors to be fed in place of tokens (`draft_heads.lookahead_embeddings`).

    Attributes:
        size, dim: rows of the matrix, and their width.
        embedding_init: the matrix's initialiser.
    """

    size: int
    dim: int
    embedding_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        self.embedding: Matrix = dense.parameter(
            self, "embedding", self.embedding_init, (self.size, self.dim)
        )

    def __call__(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape M"]:
        if not self.has_variable("params", "more"):
            return self._rows(ids)
        # A drafter may lend the network further rows (PaSS): ids from `size` on look these up.
        more: Array = self.get_variable("params", "more")
        vectors = jnp.take(more, jnp.maximum(ids - self.size, 0), axis=0).astype(self.dtype)
        return jnp.where(
            (ids >= self.size)[..., None], vectors, self._rows(jnp.minimum(ids, self.size - 1))
        )

    def _rows(self, ids: Int[Array, "*shape"]) -> Float[Array, "*shape M"]:
        if isinstance(self.embedding, Mapping):
            return quantised.rows(ids, self.embedding).astype(self.dtype)
        if ids.size > 1:
            return jnp.take(self.embedding, ids, axis=0).astype(self.dtype)
        return jax.lax.platform_dependent(
            self.embedding,
            ids,
            cuda=_one_of_two,
            rocm=_one_of_two,
            default=lambda table, ids: jnp.take(table, ids, axis=0),
        ).astype(self.dtype)

    def logits(self, x: Float[Array, "B T M"], training: bool = False) -> Float[Array, "B T V"]:
        """Uses the matrix as output head.

        In training the transpose is kept apart from the product, so that the gradient is x^T
        dlogits, and not dlogits^T x: transposing dlogits was measured at a sixth of a training step
        on CPU.
        """
        if training and not isinstance(self.embedding, Mapping):
            table = jax.lax.optimization_barrier(self.embedding.astype(x.dtype).T)
            return jnp.matmul(x, table, precision=dense.precision(x.dtype))
        return dense.product(x, self.embedding)


def _one_of_two(table: Float[Array, "V M"], ids: Int[Array, "*shape"]) -> Float[Array, "*shape M"]:
    """Looks a single row up together with a second one, for GPUs.

    Of one row XLA makes a slice before it splits the program over devices; a slice of a table that
    is split gathers all of it on each device, in every step: 2.1 GB of Llama 3.1 70B. Of two rows
    it adds up what each device has.

    >>> _one_of_two(jnp.array([[1.0], [2.0]]), jnp.array([[1]])).tolist()
    [[[2.0]]]
    """
    rows = jax.lax.optimization_barrier(jnp.take(table, jnp.pad(ids.reshape(-1), (0, 1)), axis=0))
    return rows[:1].reshape(*ids.shape, table.shape[1])
