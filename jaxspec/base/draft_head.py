"""Networks that draft from a target's hidden states, as pure functions: what `drafters.eagle` and others take."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from jaxtyping import Array, Float, Int

from jaxspec.base.language_model import Cache, Extend, Forward, Params, Rewind


class Embed(Protocol):
    def __call__(self, params: Params, tokens: Int[Array, "batch step"]) -> Float[Array, "batch step dim"]:
        """Rows of the embedding matrix, as they are stored: a network may scale them, or add positions, afterwards."""
        ...


class EmbedTokens(Protocol):
    def __call__(self, tokens: Int[Array, "batch step"]) -> Float[Array, "batch step dim"]:
        """`Embed`, parameters filled in."""
        ...


class HeadLogits(Protocol):
    def __call__(self, features: Float[Array, "batch step dim"]) -> Float[Array, "batch step vocab"]:
        """`Head`, parameters filled in."""
        ...


class Shared(NamedTuple):
    """What a drafter's network may take from its target instead of having its own, parameters filled in.

    Attributes:
        embed: the target's embedding: `LanguageModel.embed`.
        logits: the target's language-model head: `LanguageModel.head`.
    """

    embed: EmbedTokens
    logits: HeadLogits


class Needs(NamedTuple):
    """What a network expects of its target; checked before anything runs.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the target's features, and of each tap.
        taps: layers whose output it reads (`Forward.taps`), counted as `language_model(config, taps)` does; empty:
        none.
        embedding, head: whether it takes these from the target.
    """

    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False


class Read(Protocol):
    def __call__(self, params: Params, forward: Forward) -> Float[Array, "batch step dim"]:
        """What the network makes of the target's features or taps at each position, before any token is added."""
        ...


class EmptyCache(Protocol):
    def __call__(self, batch: int, capacity: int) -> Cache:
        """A cache of rows without tokens, with room for `capacity` positions each."""
        ...


class ExtendHidden(Protocol):
    def __call__(
        self,
        params: Params,
        shared: Shared,
        cache: Cache,
        hidden: Float[Array, "batch step dim"],
        tokens: Int[Array, "batch step"],
        parent: Int[Array, "batch nodes"] | None = None,
    ) -> tuple[Float[Array, "batch step dim"], Cache]:
        """Feeds pairs of a hidden state and the token after it, at each row's own length.

        Returns the hidden states that take the place of the target's at the next positions. `parent`: as in
        `LanguageModel.extend`.
        """
        ...


class HiddenLogits(Protocol):
    def __call__(
        self, params: Params, shared: Shared, hidden: Float[Array, "batch step dim"]
    ) -> Float[Array, "batch step vocab"]:
        """The logits of what follows the tokens that these hidden states were made with, in the target's vocabulary."""
        ...


class RecurrentHead(NamedTuple):
    """A network that drafts token by token: hidden state and token in, hidden state and logits out (EAGLE, MTP).

    Attributes:
        read, empty, extend, logits: see the protocols.
        rewind: see `LanguageModel.rewind`.
        needs: of the target.
    """

    read: Read
    empty: EmptyCache
    extend: ExtendHidden
    rewind: Rewind
    logits: HiddenLogits
    needs: Needs


class ExtendStream(Protocol):
    def __call__(
        self,
        params: Params,
        cache: Cache,
        hidden: Float[Array, "batch step dim"],
        parent: Int[Array, "batch nodes"] | None = None,
    ) -> tuple[Float[Array, "batch step dim"], Cache]:
        """Reads the target's hidden states of further tokens, at each row's own length.

        Returns what logits are made of. `parent`: as in `LanguageModel.extend`.
        """
        ...


class ExitAdapter(NamedTuple):
    """A network between one of the target's layers and its head (Kangaroo); the layers before it draft, too.

    Attributes:
        empty, extend, logits: see the protocols.
        rewind: see `LanguageModel.rewind`.
        needs: of the target; its one tap is the layer.
    """

    empty: EmptyCache
    extend: ExtendStream
    rewind: Rewind
    logits: HiddenLogits
    needs: Needs


class HeadsLogits(Protocol):
    def __call__(
        self,
        params: Params,
        shared: Shared,
        head: int,
        features: Float[Array, "batch dim"],
        tokens: Int[Array, "batch head"],
    ) -> Float[Array, "batch vocab"]:
        """The logits of the draft token number `head`.

        `features`: the target's at the last position it read; `tokens`: the last committed token and the `head` draft
        tokens so far, which not every network looks at.
        """
        ...


class ParallelHeads(NamedTuple):
    """Several heads on the target's features, one for each draft token (blockwise, Medusa, Hydra).

    Attributes:
        logits: see the protocol.
        count: how many heads.
        reads_tokens: whether heads look at the tokens before theirs.
        needs: of the target.
    """

    logits: HeadsLogits
    count: int
    reads_tokens: bool
    needs: Needs


class AppendContext(Protocol):
    def __call__(self, params: Params, cache: Cache, context: Float[Array, "batch step dim"]) -> Cache:
        """Takes in what `read` made of further positions; the cache grows by them."""
        ...


class Block(Protocol):
    def __call__(
        self, params: Params, shared: Shared, cache: Cache, last: Int[Array, " batch"], count: int
    ) -> Float[Array, "batch positions dim"]:
        """The features of the `count` tokens after the last committed one, all in one pass.

        Positions that come before theirs and predict nothing may be returned in front, if `correct` is to read them.
        """
        ...


class Correct(Protocol):
    def __call__(
        self,
        params: Params,
        previous: Int[Array, " batch"],
        features: Float[Array, "batch dim"],
        memory: Float[Array, "batch rank"],
    ) -> tuple[Float[Array, "batch vocab"], Float[Array, "batch rank"]]:
        """What is added to a token's logits, given the token before it; and the memory that the next one is given."""
        ...


class BlockHead(NamedTuple):
    """A network that drafts a block of tokens in one pass, from the target's taps at all positions (DFlash, DSpark).

    Attributes:
        read, empty, append, block: see the protocols.
        rewind: see `LanguageModel.rewind`.
        logits: of features of a block.
        correct: see the protocol; None: the tokens of a block are independent, given what is committed.
        memory: width of what `correct` passes on, at the beginning zeros.
        count: most tokens of a block.
        needs: of the target.
    """

    read: Read
    empty: EmptyCache
    append: AppendContext
    block: Block
    rewind: Rewind
    logits: HiddenLogits
    correct: Correct | None
    memory: int
    count: int
    needs: Needs


class ExtendLookAhead(Protocol):
    def __call__(
        self,
        params: Params,
        run: Extend,
        target: Params,
        cache: Cache,
        tokens: Int[Array, "batch step"],
        parent: Int[Array, "batch nodes"] | None,
    ) -> tuple[Forward, Cache]:
        """The target's `extend` with its parameters, where ids from its vocabulary's size on are look-ahead vectors."""
        ...


class LookAheadEmbeddings(NamedTuple):
    """Input vectors after which the target itself drafts further tokens (PaSS).

    Attributes:
        extend: see the protocol.
        logits: of the target's features.
        count: most draft tokens: one more than there are vectors.
        needs: of the target.
    """

    extend: ExtendLookAhead
    logits: HiddenLogits
    count: int
    needs: Needs
