"""A draft, which is a tree of tokens, and the verdict of an acceptance rule on it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Draw(enum.IntEnum):
    """The kinds of choices of a draft token from its distribution: its parent's entry of
    `Draft.log_probs`, or of another drafter's (`Draft.sources`).
    """

    # not drawn: a function of what precedes it (an argmax, a look-up), which is a point mass
    FIXED = 0
    # drawn from the entry without the tokens of its earlier siblings, normalised
    WITHOUT_REPLACEMENT = 1
    WITH_REPLACEMENT = 2  # drawn from the entry as it is, independently of its siblings


class Draft(NamedTuple):
    """A tree of draft tokens for each row. A chain is the special case without a `parent`.

    Fed tokens are counted with the last committed token as number 0, so that draft token i is fed
    token i + 1:

        committed [a b c], draft    x y z w         c -> x -> z     parent [0 0 1 1]
                                                         \\-> w      (x and y follow c; z and w follow x)
                                                    c -> y

    Attributes:
        tokens: the nodes; a parent comes before its children, siblings in the order of their
            trials.
        length: the first `length` nodes of each row are real, the rest is padding.
        parent: `parent[b, i]` is the fed token that draft token i follows: 0 the last committed
            one, j draft token j - 1. -1: the node is not in the tree. None: a chain, in which
            `parent[:, i]` would be i.
        log_probs: entry i is the drafter's distribution after fed token i, which the children of
            that token were drawn from. For a chain entry i is what token i was drawn from. There
            need not be entries for tokens that have no children. None for point masses alone (an
            argmax or a look-up is *not* a sample of its softmax). All children of a token are
            judged by its one entry, unless `sources` gives them others. Tokens of several drafters
            that are declared to have one distribution make the text wrong, and no round can notice.
            `testing.certify` does.
        draws: how each node was chosen, a `Draw`; None: all without replacement (in a chain no node
            has siblings).
        sources: the number of the distribution that each node of a tree was drawn from, where a
            node's children come from several drafters: 0 is the entry of `log_probs`, s that of
            `other_log_probs[s - 1]`. None: `log_probs`.
        other_log_probs: the distributions of the second drafter, the third, and so on, each with
            the entries that `log_probs` has. Rules that read them say so (`Rule.sources`); their
            number is static.
        aux: values that a drafter or the draft loop passes to its policy or rule, by name.
            "confidence" [B, G] is what the policy's `confidence` made of each distribution.
            "gumbel" [B, G, V] is plain sampling's noise at the draft tokens, which `rules.coupled`
            then need not draw again. "entropy" [B, G] is for a trace with numbers, and so is
            "layers" [B, G], see `TraceNumbers`.
    """

    tokens: Int[Array, "batch node"]
    length: Int[Array, " batch"]
    parent: Int[Array, "batch node"] | None = None
    log_probs: Float[Array, "batch inner vocab"] | None = None
    draws: Int[Array, "batch node"] | None = None
    sources: Int[Array, "batch node"] | None = None
    other_log_probs: tuple[Float[Array, "batch inner vocab"], ...] = ()
    aux: Mapping[str, Array] | None = None


class Verdict(NamedTuple):
    """The decision of an acceptance rule.

    Attributes:
        num_accepted: how many draft tokens of each row are accepted, 0..draft.length.
        next_token: the token after them: the residual sample at the first rejection, or the bonus
            token.
        num_tested: draft tokens that were tested: the accepted ones and those that were rejected on
            the way.
        path: the accepted draft tokens, by number, in order; entries from num_accepted on are of no
            meaning. None: 0, 1, 2, ...
    """

    num_accepted: Int[Array, " batch"]
    next_token: Int[Array, " batch"]
    num_tested: Int[Array, " batch"]
    path: Int[Array, "batch node"] | None = None
