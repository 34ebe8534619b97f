"""The drafter, and the context of a round that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.decoder import Caches, Weights
from jaxspec.core.distribution import Distribution, ToDistribution
from jaxspec.core.draft import Draft, Verdict
from jaxspec.core.language_model import (
    Before,
    Cache,
    Forward,
    Keys,
    LanguageModel,
    Model,
    Params,
    Prompt,
    Room,
)


class DraftContext(NamedTuple):
    """The facts of a round that a decoder gives a drafter; read, never carried.

    Attributes:
        keys: the rows' keys.
        row: the committed tokens.
        max_draft: most tokens on a path of each row's draft, 0..gamma; 0 for a finished row. A
            drafter need not keep to it (the decoder cuts drafts), but one whose tokens cost
            something stops where no row may go on.
        gamma: the largest that `max_draft` can be (static).
        adaptive: whether `max_draft` may be below gamma for all rows before the last rounds
            (static): if not, a loop may as well run its gamma steps.
        to_distribution: logits -> the distribution to draw from, with the drafter's own sampling
            parameters.
        confidence: the policy's function of the distribution of each draft token; None if it has
            none.
        should_continue: (index of a draft token, the confidences so far) -> whether each row goes
            on after it.
        entropy: the function of the distribution of each draft token that a trace with numbers
            reports; None without.
        finished: rows that have ended [B], also during the rounds inside a draft; None: not known.
        ahead: goes through a chain of point masses. It replaces the first token that is ruled out
            by a likely one, drops the tokens after it, and continues the chain with likely tokens.
            None: it knows of no likely tokens.
    """

    keys: Keys
    row: Prompt
    max_draft: Int[Array, " batch"]
    gamma: int
    adaptive: bool
    to_distribution: ToDistribution
    confidence: Callable[[Distribution], Float[Array, " batch"]] | None = None
    should_continue: (
        Callable[[int | Int[Array, ""], Float[Array, "batch draft"]], Bool[Array, " batch"]] | None
    ) = None
    entropy: Callable[[Distribution], Float[Array, " batch"]] | None = None
    finished: Bool[Array, " batch"] | None = None
    ahead: Callable[[Draft], Draft] | None = None


class DraftStart(NamedTuple):
    """The facts that a drafter makes its state of, once the target has read the prompts.

    Attributes:
        weights: the parameters of target and drafter.
        prompt: the prompts.
        room: the tokens that a row may grow to, one draft's tokens included, and how many are taken
            back at once.
        prefilled: the target's outputs, with features and taps at every position of the row that
            prefill read.
        before: the drafter's state after the beginning of these rows, where that was read before.
            `prefilled` then has `before.width` positions, from `before.start` on. None: the prompts
            are read from their first token.
    """

    weights: Weights
    prompt: Prompt
    room: Room
    prefilled: Forward
    before: Before | None = None


class RoundEnd(NamedTuple):
    """The facts that a drafter learns at the end of a round.

    Attributes:
        weights: the parameters of target and drafter.
        caches: the target's cache, which holds the committed row but its last token, and the
            drafter's state.
        row: the committed tokens, this round's included.
        verdict: the draft tokens that the rule accepted.
        forward: the target's outputs at every fed token.
    """

    weights: Weights
    caches: Caches
    row: Prompt
    verdict: Verdict
    forward: Forward


Proposal = tuple[Draft, Caches]
"""A draft, and the caches after it."""


class DraftInit(Protocol):
    def __call__(self, start: DraftStart, /) -> Any:
        """Makes the drafter's state, every leaf batch-first."""
        ...


class Propose(Protocol):
    def __call__(self, weights: Weights, caches: Caches, context: DraftContext) -> Proposal:
        """Drafts tokens that follow the committed row, in the target's vocabulary.

        It may read the target's weights and use the target's cache, which the decoder rewinds to
        the committed row before it verifies.
        """
        ...


class Commit(Protocol):
    def __call__(self, end: RoundEnd, /) -> Caches:
        """Takes in the verdict; returns both caches, the drafter's at the committed row."""
        ...


class CompleteTargetPass(Protocol):
    def __call__(
        self,
        weights: Weights,
        caches: Caches,
        tokens: Int[Array, "batch step"],
        parent: Int[Array, "batch step"] | None = None,
    ) -> tuple[Forward, Cache]:
        """The target's pass over the last committed token and the draft. Drafting has done a part
        of it.

        In place of the target's `extend`, with the same outputs; the target's cache is rewound to
        the committed row.
        """
        ...


class Rollback(Protocol):
    def __call__(self, state: Any, row: Prompt) -> Any:
        """The drafter's state after committed tokens were taken back: `row` is a prefix of the row
        that the state has seen, and one token more.
        """
        ...


class TreeSize(NamedTuple):
    """The size of a drafter's trees.

    Attributes:
        nodes: the number of their nodes.
        depth: the most nodes that lie on one path.
        sources: how many distributions the children of one node may come from (`Draft.sources`).
    """

    nodes: int
    depth: int
    sources: int = 1


class Reading(NamedTuple):
    """The functions with which a stepwise drafter reads its logits in one round.

    Attributes:
        carry: the value that the functions below pass on, such as a cache; of one structure
            throughout.
        root: carry -> logits after each row's last committed token [B, 1, W], and the carry.
        nodes: (tokens [B, n], parent, level, carry) -> logits after n further draft tokens [B, n,
            W], and the carry. In a tree these are the fed tokens of one level, and `parent` [B, F]
            is that of all draft tokens fed so far, these included, as `Extend` has it. In a chain n
            is 1 and `parent` None. `level` counts from 1: an integer, or in a chain a traced one.
        end: (carry, draft, slots) -> the caches after the draft. `slots` [#B, N]: the number of
            each draft token among the draft tokens that were fed; -1: it was not fed. None: the
            caches stay as they are.
        going: carry -> whether each row's chain may go on after what was read [B]; None: it may.
        estimate: carry -> the drafter's own estimate that the token which is drawn from these
            logits is accepted [B] (`Distribution.estimate`); None: it makes none.
    """

    carry: Any
    root: Callable[[Any], tuple[Float[Array, "batch 1 width"], Any]]
    nodes: Callable[..., tuple[Float[Array, "batch new width"], Any]]
    end: Callable[[Any, Draft, Int[Array, "#batch node"]], Caches] | None = None
    going: Callable[[Any], Bool[Array, " batch"]] | None = None
    estimate: Callable[[Any], Float[Array, " batch"]] | None = None


class Steps(NamedTuple):
    """A drafter that knows its logits after any draft token: `drafters.chain` and `drafters.tree`
    are made of it.

    Attributes:
        init: (start, nodes of a tree, 0 for chains) -> the drafter's state, every leaf batch-first.
        begin: (weights, caches, context, fed) -> the functions of a round. `weights.draft` are the
            drafter's own values (`BoundDrafter.params`), `weights.target` the target's parameters.
            `fed`: the most draft tokens of a tree that are fed; None: a chain, of which at most
            `context.gamma` are.
        width: the width of its logits, W.
        depth: the most draft tokens on a path; None: any number.
        rollback, complete_target_pass: the functions of `Drafter`. For `complete_target_pass` a
            tree's fed tokens come first.
    """

    init: Callable[[DraftStart, int], Any]
    begin: Callable[[Weights, Caches, DraftContext, int | None], Reading]
    commit: Commit
    width: int
    depth: int | None = None
    rollback: Rollback | None = None
    complete_target_pass: CompleteTargetPass | None = None


class Drafter(NamedTuple):
    """Drafts tokens. Functions only; values travel beside it (`BoundDrafter`), as `Model` holds a
    `LanguageModel`'s.

    Attributes:
        lm: the language model that drafts, for checks of its vocabulary and positions; None without
            one.
        may_be_empty: whether it may propose nothing; where it does so for every row, the target is
            fed one token a row.
        tree: the size of its trees, which then takes gamma's place; None: it drafts chains of gamma
            tokens.
        longest: most tokens of its chains, whatever gamma (the number of heads, for instance);
            None: any number.
        steps: the functions that drafters of trees make their trees of; None: it drafts chains
            only.
        complete_target_pass: the rest of the target's pass; None: the target's pass is its
            `extend`.
        rollback: the function that takes tokens back. None: it cannot take tokens back, and so
            cannot draft for another drafter (`drafters.cascade`).
        spare: how many tokens more than a draft's it feeds a row, to take them back; both caches
            have room for them.
        resumes: whether it can go on from `DraftStart.before`, so from a prefix and from turn to
            turn of a chat. False: its state takes the hidden states of whole prompts.
    """

    init: DraftInit
    propose: Propose
    commit: Commit
    lm: LanguageModel | None = None
    may_be_empty: bool = False
    tree: TreeSize | None = None
    longest: int | None = None
    steps: Steps | None = None
    complete_target_pass: CompleteTargetPass | None = None
    rollback: Rollback | None = None
    spare: int = 0
    resumes: bool = True


class BoundDrafter(NamedTuple):
    """A drafter with the values that it is called with, as the factories of `drafters` return it.

    Attributes:
        functions: static: a decoder is made from these, so that other values compile nothing.
        params: traced values: `Weights.draft`.
        models: the models that it was made from, to be checked against the target.
        target: the model that a drafter on hidden states was made for. The target must be that
            model, and its language model (with the taps that the drafter reads) is used.
        name: its name in tables: the factory, with what tells it from others of that factory in
            short.
    """

    functions: Drafter
    params: Params = None
    models: tuple[Model, ...] = ()
    target: Model | None = None
    name: str = ""
