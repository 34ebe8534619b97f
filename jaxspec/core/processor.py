"""Logits processors: they change the logits of the next token, and may remember the tokens before
it.

Decoders keep the memory of each row. It follows the committed tokens, and `fold` carries it over
draft tokens. So every position of a pass is processed after the tokens before it, in chains and in
trees.

Axis letters as in `jaxspec.core`; T positions of a pass, N draft tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core import token_rows
from jaxspec.core.distribution import LogitsProcessor, Preceding
from jaxspec.core.language_model import Params, Prompt


class ProcessorInit(Protocol):
    def __call__(self, values: Any, row: Prompt, start: Int[Array, " batch"], vocab: int, /) -> Any:
        """Makes the memory after a whole row, every leaf batch-first.

        `start`: length of the row before its first new token; `vocab`: number of token ids.
        """
        ...


class ProcessorAdvance(Protocol):
    def __call__(self, values: Any, memory: Any, token: Int[Array, " batch"], /) -> Any:
        """Takes one more token into each row's memory, whose shapes and dtypes stay as they are."""
        ...


class ProcessorAhead(Protocol):
    def __call__(
        self, values: Any, memory: Any, drafted: Int[Array, " batch"], /
    ) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
        """Finds a likely next token for each row; -1 if it knows none.

        Also says whether the processor rules out the token that was drafted.
        """
        ...


@dataclasses.dataclass(frozen=True)  # `jax.jit` takes no NamedTuple for a function
class Processor:
    """A logits processor that remembers the tokens before each position: an automaton, or counts of
    tokens.

    Functions only; `BoundProcessor` has values beside them. `values` below are these, or in
    `sampling.chain` the sampler's parameters.

    Attributes:
        apply: (values, logits, preceding) -> logits. `preceding.memory` is the memory before each
            position, leaves [batch, step, ...].
        init: the maker of its memory. None: the processor remembers nothing.
        advance: the memory after one more token. None with `init`.
        wide: whether the memory is as wide as the vocabulary. Then positions get no copies of it:
            `preceding.memory` is that of the committed row, leaves [batch, ...], and `apply` reads
            `preceding.draft_tokens`. `advance` is given the token -1 for rows that gain no token.
        ahead: the function of the protocol. Drafts run ahead over such tokens. None: it does not
            know of any.

    Example:
        >>> def alternate(
        ...     values, logits, preceding
        ... ):  # bans token 0 after an odd number of new tokens
        ...     odd = preceding.memory[:, :, None] % 2 == 1
        ...     return jnp.where(odd, logits.at[:, :, 0].set(-jnp.inf), logits)
        >>> processor = Processor(
        ...     alternate,
        ...     init=lambda values, row, start, vocab: row.length - start,
        ...     advance=lambda values, memory, token: memory + 1,
        ... )
        >>> preceding = Preceding(
        ...     Prompt(jnp.array([[3, 1, 2]]), jnp.array([3])), start=jnp.array([2])
        ... )
        >>> processor(None, jnp.zeros((1, 1, 2)), preceding).tolist()
        [[[-inf, 0.0]]]
    """

    apply: LogitsProcessor
    init: ProcessorInit | None = None
    advance: ProcessorAdvance | None = None
    wide: bool = False
    ahead: ProcessorAhead | None = None

    def __call__(
        self, values: Any, logits: Float[Array, "B T V"], preceding: Preceding | None
    ) -> Float[Array, "B T V"]:
        """Processes logits; without `preceding.memory` the row is read from its beginning."""
        if self.init is None or self.advance is None:
            return self.apply(values, logits, preceding)
        if preceding is None:
            raise ValueError(
                "a logits processor reads the tokens before each position: give the sampler "
                "`preceding`"
            )
        memory = preceding.memory
        if memory is None:
            memory = self.init(values, preceding.row, preceding.start, logits.shape[-1])
        if not self.wide:
            memory = fold(self.advance, values, memory, preceding, logits.shape[1])
        return self.apply(values, logits, preceding._replace(memory=memory))

    def commit(
        self, values: Any, memory: Any, tokens: Int[Array, "B N"], count: Int[Array, " B"]
    ) -> Any:
        """Takes the first `count` tokens of each row into its memory.

        >>> counter = Processor(
        ...     lambda *_: None, lambda *_: 0, lambda values, memory, token: memory + token
        ... )
        >>> counter.commit(
        ...     None, jnp.array([0, 0]), jnp.array([[3, 4], [5, 6]]), jnp.array([2, 1])
        ... ).tolist()
        [7, 5]
        """
        advance = self.advance
        if advance is None:
            return memory

        def step(memory: Any, entry: tuple[Int[Array, ""], Int[Array, " B"]]) -> tuple[Any, None]:
            real = entry[0] < count
            if self.wide:  # a choice between two memories would copy both
                return advance(values, memory, jnp.where(real, entry[1], -1)), None
            return token_rows.where(real, advance(values, memory, entry[1]), memory), None

        return jax.lax.scan(
            step, memory, (jnp.arange(tokens.shape[1], dtype=count.dtype), tokens.T)
        )[0]


class BoundProcessor(NamedTuple):
    """A processor with the values that it is called with.

    Attributes:
        functions: static: programs are made from these, so that other values compile nothing.
        params: traced values. Each leaf is a number, or has an entry for each row or one for all of
            them.
        name: its name in errors.
    """

    functions: Processor
    params: Params = None
    name: str = ""


def fold(
    advance: ProcessorAdvance, values: Any, memory: Any, preceding: Preceding, positions: int
) -> Any:
    """Carries memories over draft tokens: from those after the committed rows to those before each
    position.

    Leaves [B, ...] become [B, T, ...], where T is `positions`; `preceding` has the draft tokens
    before each of them.

    Example:
        >>> tokens, seen = jnp.array([[3, 4]]), jnp.array([[[0, 0], [1, 0], [1, 1]]], bool)
        >>> preceding = Preceding(Prompt(tokens, jnp.array([2])), jnp.array([2]), tokens, seen)
        >>> fold(
        ...     lambda values, memory, token: memory + token, None, jnp.array([10]), preceding, 3
        ... ).tolist()
        [[10, 13, 17]]
    """
    memories = jax.tree.map(lambda x: jnp.repeat(x[:, None], positions, axis=1), memory)  # B T ...
    if preceding.draft_tokens is None or preceding.seen is None:
        return memories
    batch, nodes = preceding.draft_tokens.shape
    seen = jnp.broadcast_to(preceding.seen, (batch, positions, nodes))
    at_positions = jax.vmap(functools.partial(advance, values), in_axes=(1, None), out_axes=1)

    def step(memories: Any, entry: tuple[Int[Array, " B"], Bool[Array, "B T"]]) -> tuple[Any, None]:
        token, real = entry
        return token_rows.where(real, at_positions(memories, token), memories), None

    # Draft tokens come after those that they follow, so that one walk serves all paths of a tree.
    return jax.lax.scan(step, memories, (preceding.draft_tokens.T, jnp.moveaxis(seen, 2, 0)))[0]
