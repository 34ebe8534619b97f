"""The logits processor of structured output: an automaton that lives on the device, a state for
each row.

A mask is a row of bits, one for each token. So a position reads vocabulary / 8 bytes, and looks up
no token by itself. The states of all automata of a batch have one numbering, and their tables are
shared by its rows.

A row must end within its limit. After each allowed token the text has some distance from an end. A
state has a mask for each such distance. The number of tokens that the row has left chooses among
these masks.

Axis letters as in `jaxspec.core`; S states, L distances that are told apart, M masks, W words of a
mask, E edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxspec.core import Preceding, Processor, Prompt, token_rows
from jaxspec.core.token_rows import AllRows


class Automata(NamedTuple):
    """The automata of a batch."""

    # the state after each class of tokens, automaton by automaton, state by state
    edges: Int[Any, " E"]
    offset: Int[Any, " S"]  # the first of each state's edges
    owner: Int[Any, " S"]  # the automaton of each state
    classes: Int[Any, "automata V"]  # the class of each token, by automaton
    # the distances to an end that the tokens of each state lead to, ascending; `FAR` fills the row
    bound: Int[Any, "S L"]
    # the mask of the tokens that lead no farther than each of these distances
    mask: Int[Any, "S L"]
    # the masks. Bit j of word w is the token j W + w, so that unpacking moves no entry past another
    words: UInt[Any, "M W"]
    certain: Int[Any, " M"]  # the only token of each mask; -1 where there are several
    # the token that drafts go on with after each state; -1 where there is none
    likely: Int[Any, " S"]


class Values(NamedTuple):
    """The values of the processor."""

    tables: AllRows  # `Automata`, for all rows
    state: Int[Any, " B"]  # the first state of each row
    limit: Int[Any, " B"]  # most new tokens of each row


class RowState(NamedTuple):
    """The memory of a row: its state, and the tokens that it may still get."""

    state: Int[Array, " *rows"]
    left: Int[Array, " *rows"]


def after(tables: Automata, row_state: RowState, token: Int[Array, " *rows"]) -> RowState:
    """Reads a token; one that may not stand there leaves the state as it is, since no row ever goes
    on after it.
    """
    edge = tables.offset[row_state.state] + tables.classes[tables.owner[row_state.state], token]
    return RowState(tables.edges[edge], row_state.left - 1)


def _mask_of(tables: Automata, row_state: RowState) -> Int[Array, " *rows"]:
    """Finds the mask of each position. It allows the tokens after which a text can still end in
    time.
    """
    within = tables.bound[row_state.state] < row_state.left[..., None]
    level = jnp.maximum(jnp.sum(within, axis=-1, dtype=jnp.int32) - 1, 0)
    return jnp.take_along_axis(tables.mask[row_state.state], level[..., None], axis=-1)[..., 0]


def allowed(automata: Automata, row_state: RowState, vocab: int) -> Bool[Array, "B T V"]:
    """Unpacks the mask of each position."""
    words = automata.words[_mask_of(automata, row_state)]  # B T W
    shifts = jnp.arange(32, dtype=jnp.uint32)[None, None, :, None]
    bits = (words[:, :, None, :] >> shifts) & jnp.uint32(1)
    return bits.reshape(*row_state.state.shape, -1)[..., :vocab] > 0


def _init(sampling_params: Any, row: Prompt, start: Int[Array, " B"], vocab: int) -> RowState:
    values = sampling_params.structured
    tables = values.tables.value
    count = row.length - start

    def step(index: Int[Array, ""], row_state: RowState) -> RowState:
        moved = after(tables, row_state, token_rows.tokens_at(row.tokens, start + index))
        return RowState(
            *(jnp.where(index < count, new, old) for new, old in zip(moved, row_state, strict=True))
        )

    # A row without new tokens takes no step.
    return jax.lax.fori_loop(0, jnp.max(count), step, RowState(values.state, values.limit))


def _advance(sampling_params: Any, row_state: RowState, token: Int[Array, " B"]) -> RowState:
    return after(sampling_params.structured.tables.value, row_state, token)


def _apply(
    sampling_params: Any, logits: Float[Array, "B T V"], preceding: Preceding | None
) -> Float[Array, "B T V"]:
    assert preceding is not None
    tables = sampling_params.structured.tables.value
    return jnp.where(allowed(tables, preceding.memory, logits.shape[-1]), logits, -jnp.inf)


def _ahead(
    sampling_params: Any, row_state: RowState, drafted: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    tables = sampling_params.structured.tables.value
    mask = _mask_of(tables, row_state)
    only = tables.certain[mask]
    width = tables.words.shape[1]
    bit = tables.words[mask, drafted % width] >> (drafted // width).astype(jnp.uint32) & jnp.uint32(
        1
    )
    return jnp.where(only >= 0, only, tables.likely[row_state.state]), bit == 0


structured = Processor(_apply, _init, _advance, ahead=_ahead)
"""Rules out the tokens after which a row's text cannot match its pattern within its limit."""

__test__ = {
    "_mask_of": """
    >>> tables = Automata(None, None, None, None, jnp.array([[1, 3]]), jnp.array([[5, 6]]), None, None, None)
    >>> [int(_mask_of(tables, RowState(jnp.array(0), jnp.array(left)))) for left in (2, 3, 4)]
    [5, 5, 6]
    """
}
