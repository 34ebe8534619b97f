"""Kernels for passes over few tokens on one GPU: attention to a cache, and products with int8 and
int4 matrices.

XLA makes scores, softmax and mixing up to three kernels, and reads the whole room of a cache.
`attention` does all three, and reads what is filled. A product of an int4 matrix writes the sums of
its groups, and a second kernel adds them. `quantised_product` adds them as it reads. Both are
written for Triton. They compile for an H100, and in Pallas' interpreter their results are XLA's.
**No card has timed them**, so they are not part of the package: `jaxspec.nets.kernels.replaced`
puts those that `replacements` returns in place of XLA's. XLA cannot split them over a mesh.

Shapes: B batch, T step, S keys, H query heads, K key-value heads, D head dimension; R = H / K * T
rows of queries that read the same keys; N spans of keys. Of products: N = B T rows, G groups of
columns, P numbers in a word of memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxspec.nets.kernels import ArrayFunction, Replacement
from jaxspec.nets.quantised import Quantised, entries_name, entries_of

# keys of one product, and of one program: 2,048 keys of 8 heads are read by 64 programs
KEYS = 64
SPAN = 256
# rows of queries, and entries of a head, that a program has registers for
ROWS = 64
WIDEST = 256
MASKED = -1e30  # as in `nets.attention`
# of a product: outputs of a program, its least turns, and the most programs
OUTPUTS = 64
TURNS = 4
PROGRAMS = 1024
# numbers in a word of a quantised matrix, and the most words of a turn
WORDS = {"int8": (1, 128), "int4": (8, 64)}


def replacements(*names: str) -> dict[str, Replacement]:
    """Returns the kernels of some names ("attention", "product"), for `jaxspec.nets.kernels`.

    They are for one GPU, without a mesh. Where one takes other shapes, XLA's form stays.

    >>> sorted(replacements("attention", "product"))
    ['attention', 'product']
    """
    known = {"attention": attention_forms, "product": product_forms}
    return {name: known[name] for name in names}


def attention_forms(
    plain: ArrayFunction, *arrays: Any, scale: float, cap: float | None
) -> dict[str, ArrayFunction]:
    """Returns the kernel for `nets.attention.attend` on a GPU of CUDA, if it takes the arrays."""
    query, keys, *_ = arrays
    if not takes_attention(query, keys):
        return {}
    kernel = functools.partial(attention, scale=scale, cap=cap)
    return {"cuda": with_gradient_of(plain, kernel)}


def product_forms(
    plain: ArrayFunction, x: Float[Array, "B T in"], matrix: Quantised
) -> dict[str, ArrayFunction]:
    """Returns the kernel for a quantised product on a GPU of CUDA, if it takes the matrix."""
    if not takes_product(x, matrix):
        return {}
    return {"cuda": with_gradient_of(plain, quantised_product)}


def with_gradient_of(
    plain: Callable[..., Array], kernel: Callable[..., Array]
) -> Callable[..., Array]:
    """Makes a kernel a function with the gradient of what it stands in for: it has none. (`jvp`
    fails.)
    """
    run = jax.custom_vjp(kernel)
    run.defvjp(
        lambda *arrays: (kernel(*arrays), arrays),
        lambda arrays, y_grad: jax.vjp(plain, *arrays)[1](y_grad),
    )
    return run


def _indices(size: int, least: int = 1) -> Array:
    """Counts up to `size`, and on to a power of two: Triton's arrays have no other lengths."""
    return jax.lax.broadcasted_iota(jnp.int32, (max(least, 1 << (size - 1).bit_length()),), 0)


def takes_attention(query: Float[Array, "B H T D"], keys: Float[Array, "B K S D"]) -> bool:
    """Tells whether a program has registers for all queries that read the same keys, and they have
    one dtype.
    """
    _, heads, step, width = query.shape
    return query.dtype == keys.dtype and heads // keys.shape[1] * step <= ROWS and width <= WIDEST


def attention(
    query: Float[Array, "B H T D"],
    keys: Float[Array, "B K S D"],
    values: Float[Array, "B K S D"],
    mask: Bool[Array, "#B 1 #T S"],
    bias: Float[Array, "#B #H T S"] | None,
    sinks: Float[Array, " H"] | None,
    *,
    scale: float,
    cap: float | None,
    interpret: bool = False,
) -> Float[Array, "B H T D"]:
    """Computes `nets.attention.attend`: each program mixes the values of a span of keys, for one
    key-value head.

    Blocks of keys that no query may read are not read. Spans are put together by the logarithms of
    their sums, as in Flash-Decoding (Dao et al., 2023).
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    B, H, T, D = query.shape
    K, S = keys.shape[1:3]
    R = H // K * T
    N = pl.cdiv(S, SPAN)
    exact = None
    if query.dtype == jnp.float32:
        exact = jax.lax.Precision.HIGHEST

    def kernel(query_ref, keys_ref, values_ref, mask_ref, *refs):
        *bias_ref, mixed_ref, sums_ref = refs
        group = pl.program_id(1) * (H // K)
        first = pl.program_id(2) * SPAN
        # a tensor core's product has 16 rows
        row = _indices(R, least=16)
        column = _indices(D, least=16)
        is_row = (row < R)[:, None]
        is_column = (column < D)[None, :]
        queries = triton.load(
            query_ref.at[0, 0, row[:, None], column[None, :]], mask=is_row & is_column, other=0.0
        )
        # Row r is query r % T of head r // T of the group; the mask, and some biases, are one for
        # all queries or heads.
        of_step = lambda ref: (row % T if ref.shape[2] > 1 else 0 * row)[:, None]  # noqa: E731

        def read(i, carry):
            key = (first + i * KEYS + _indices(KEYS))[None, :]
            within = is_row & (key < S)
            allowed = triton.load(
                mask_ref.at[0, 0, of_step(mask_ref), key], mask=within, other=False
            )

            def add(carry):
                top, total, mixed = carry
                entry = key[0][:, None], column[None, :]
                of_key = (entry[0] < S) & is_column
                block = triton.load(keys_ref.at[0, 0, *entry], mask=of_key, other=0.0)
                scores = triton.dot(queries, block, trans_b=True, precision=exact) * scale
                if cap is not None:
                    scores = cap * jnp.tanh(scores / cap)
                for ref in bias_ref:
                    head = (group + row // T if ref.shape[1] > 1 else 0 * row)[:, None]
                    scores += triton.load(
                        ref.at[0, head, of_step(ref), key], mask=within, other=0.0
                    )
                scores = jnp.where(allowed, scores, MASKED)
                higher = jnp.maximum(top, jnp.max(scores, axis=1))
                kept = jnp.exp(top - higher)
                weights = jnp.exp(scores - higher[:, None])
                block = triton.load(values_ref.at[0, 0, *entry], mask=of_key, other=0.0)
                added = triton.dot(weights.astype(block.dtype), block, precision=exact)
                return (
                    higher,
                    total * kept + jnp.sum(weights, axis=1),
                    mixed * kept[:, None] + added,
                )

            return jax.lax.cond(
                jnp.max(allowed.astype(jnp.int32)) > 0, add, lambda carry: carry, carry
            )

        zeros = jnp.zeros((len(row),), jnp.float32)
        start = zeros + MASKED, zeros, jnp.zeros((len(row), len(column)), jnp.float32)
        top, total, mixed = jax.lax.fori_loop(0, pl.cdiv(min(S, SPAN), KEYS), read, start)
        total = jnp.where(total > 0, total, 1.0)  # of a span that no query reads
        result = 0, 0, 0, row[:, None], column[None, :]
        triton.store(
            mixed_ref.at[*result],
            (mixed / total[:, None]).astype(mixed_ref.dtype),
            mask=is_row & is_column,
        )
        triton.store(sums_ref.at[0, 0, 0, row], top + jnp.log(total), mask=row < R)

    def whole(x: Array, by_head: bool) -> pl.BlockSpec:
        """Gives each program the part of its row, and of its head."""
        shape = (1, 1 if by_head else x.shape[1], *x.shape[2:])
        return pl.BlockSpec(
            shape, lambda b, k, n: (b if x.shape[0] > 1 else 0, k if by_head else 0, 0, 0)
        )

    inputs = [query.reshape(B, K, R, D), keys, values, mask, *([] if bias is None else [bias])]
    mixed, sums = pl.pallas_call(
        kernel,
        [
            jax.ShapeDtypeStruct(
                (B, K, N, R, D), query.dtype if N == 1 and sinks is None else jnp.float32
            ),
            jax.ShapeDtypeStruct((B, K, N, R), jnp.float32),
        ],
        grid=(B, K, N),
        in_specs=[whole(x, by_head=i < 3) for i, x in enumerate(inputs)],
        out_specs=[
            pl.BlockSpec((1, 1, 1, R, D), lambda b, k, n: (b, k, n, 0, 0)),
            pl.BlockSpec((1, 1, 1, R), lambda b, k, n: (b, k, n, 0)),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention",
    )(*inputs)
    if N == 1 and sinks is None:
        return mixed.reshape(B, H, T, D)
    if sinks is not None:  # a span of one key, whose value is zeros
        of_none = jnp.repeat(sinks.astype(jnp.float32).reshape(K, H // K), T, axis=1)[None, :, None]
        sums = jnp.concatenate([sums, jnp.broadcast_to(of_none, (B, K, 1, R))], axis=2)
    weights = jax.nn.softmax(sums, axis=2)[:, :, :N, :, None]
    return jnp.sum(weights * mixed, axis=2).astype(query.dtype).reshape(B, H, T, D)


def takes_product(x: Float[Array, "B T in"], matrix: Quantised) -> bool:
    """Tells whether the kernel multiplies with a matrix.

    It takes int8 and int4 without zero points, up to 64 rows in bfloat16 or float16, and matrices
    of less than 2**31 entries, as offsets have 32 bits. A turn has 16 words or more: groups are
    multiples of 16 columns in int8, of 128 in int4.
    """
    name, (batch, step, _) = entries_name(matrix), x.shape
    is_plain = name in WORDS and "zero" not in matrix and matrix["scale"].ndim == 2
    fits = x.dtype.itemsize == 2 and batch * step <= ROWS and entries_of(matrix).size < 2**31
    return is_plain and fits and _turn(matrix) >= 16


def _turn(matrix: Quantised) -> int:
    """Counts the words that a program reads of each output in one turn: a group is a number of
    whole turns.
    """
    per_word, limit = WORDS[entries_name(matrix)]
    words, remainder = divmod(entries_of(matrix).shape[-1], per_word)
    if remainder:
        return 0
    return min(words & -words, limit)


def quantised_product(
    x: Float[Array, "B T in"], matrix: Quantised, *, interpret: bool = False
) -> Array:
    """Computes `quantised.product`: each program multiplies some outputs with a span of the
    columns.

    Returns:
        Products [B, T, out], in the dtype of `x`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    name = entries_name(matrix)
    scale = matrix["scale"]
    (per_word, _), turn = WORDS[name], _turn(matrix)
    entries = entries_of(matrix).reshape(-1, *entries_of(matrix).shape[-2:])  # [G, out, width]
    if name == "int4":
        # Memory holds eight numbers in 32 bits already: nothing is copied. A product multiplies one
        # of each eight.
        entries = jax.lax.bitcast_convert_type(
            entries.reshape(*entries.shape[:2], -1, per_word), jnp.int32
        )
    rows = x.reshape(-1, x.shape[-1] // per_word, per_word).transpose(2, 0, 1)  # [P, N, words]
    (G, out, words), N = entries.shape, rows.shape[1]
    turns = G * words // turn
    tiles = pl.cdiv(out, OUTPUTS)
    # The sums of all spans are written and read, in float32: they stay below a tenth of the matrix.
    most_spans = G * words * entries.dtype.itemsize // (10 * 8 * N)
    span = pl.cdiv(turns, max(1, min(turns // TURNS, PROGRAMS // tiles, most_spans)))
    spans = pl.cdiv(turns, span)

    def kernel(rows_ref, entries_ref, scale_ref, sums_ref):
        output = _indices(OUTPUTS)
        row = _indices(N, least=16)
        word = _indices(turn)
        is_output = pl.program_id(0) * OUTPUTS + output < out
        is_row = row < N
        first = pl.program_id(1) * span
        of_outputs, of_rows = (
            is_real[:, None] & (word < turn)[None, :] for is_real in (is_output, is_row)
        )

        def add(i, total):
            start = (first + i) * turn
            group, column = (start // words, start % words) if G > 1 else (0, start)
            index = group, output[:, None], column + word[None, :]
            block = triton.load(entries_ref.at[*index], mask=of_outputs, other=0)
            sums = jnp.zeros_like(total)
            for p in range(per_word):
                index = p, row[:, None], start + word[None, :]
                columns = triton.load(rows_ref.at[*index], mask=of_rows, other=0.0)
                number = block if per_word == 1 else _number(block, p)
                sums += triton.dot(number.astype(x.dtype), columns, trans_b=True)
            if G > 1:
                sums *= triton.load(scale_ref.at[output, group], mask=is_output, other=0.0)[:, None]
            return total + sums

        zeros = jnp.zeros((OUTPUTS, len(row)), jnp.float32)
        total = jax.lax.fori_loop(0, jnp.minimum(span, turns - first), add, zeros)
        if G == 1:
            total *= triton.load(scale_ref.at[output, 0 * output], mask=is_output, other=0.0)[
                :, None
            ]
        index = 0, row[None, :], output[:, None]
        triton.store(
            sums_ref.at[*index],
            total.astype(sums_ref.dtype),
            mask=is_output[:, None] & is_row[None, :],
        )

    sums = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((spans, N, out), x.dtype if spans == 1 else jnp.float32),
        grid=(tiles, spans),
        in_specs=[
            pl.BlockSpec(rows.shape, lambda i, k: (0, 0, 0)),
            pl.BlockSpec((G, OUTPUTS, words), lambda i, k: (0, i, 0)),
            pl.BlockSpec((OUTPUTS, scale.shape[1]), lambda i, k: (i, 0)),
        ],
        out_specs=pl.BlockSpec((1, N, OUTPUTS), lambda i, k: (k, 0, i)),
        compiler_params=triton.CompilerParams(num_warps=2, num_stages=3),
        interpret=interpret,
        name="quantised_product",
    )(rows, entries, scale)
    return sums.sum(axis=0).astype(x.dtype).reshape(*x.shape[:-1], out)


def _number(word: Array, p: int) -> Array:
    """Takes number p of the eight in a word, as bfloat16.

    A GPU converts integers at a fraction of its rate. But the bits 0x4300 + n are 128 + n in
    bfloat16, for n below 128; and of a number in four bits with its sign, `n ^ 8` is n + 8.

    >>> [_number(jnp.int32(0x7F8), p).item() for p in range(3)]
    [-8.0, -1.0, 7.0]
    """
    bits = ((word >> (4 * p)) & 0xF) ^ 0x4308
    return jax.lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16) - jnp.bfloat16(136)
