"""One round of speculation: a draft, the target's pass over it, the verdict. Nothing of a
generation around it.

`decode.speculative` runs it for the target, `drafters.cascade` for a drafter that is a speculative
decoder itself.

Axis letters as in `jaxspec.core`; T tokens fed in the pass: the last committed one and N draft
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec import core
from jaxspec.core import branches, kv_cache, token_rows, tree

Arrays = TypeVar("Arrays")


def size_of(drafter: core.Drafter, gamma: int) -> core.TreeSize:
    """Returns the size of a draft. A chain has min(gamma, drafter.longest) nodes; 0 nodes mean
    plain decoding.
    """
    if drafter.tree is not None:
        return drafter.tree
    if drafter.longest is None:
        longest = gamma
    else:
        longest = min(gamma, drafter.longest)
    return core.TreeSize(longest, longest)


def check_trees(target: core.LanguageModel, drafter: core.Drafter, rule: core.Rule) -> None:
    """Raises ValueError for a drafter of trees with a model or a rule that takes chains only."""
    if drafter.tree is not None:
        check_takes_trees(target, "the target", "the drafter drafts token trees")
        check_takes_trees(rule, f"the rule {rule.name}", "the drafter drafts token trees")
        if drafter.tree.sources > 1 and not rule.sources:
            raise ValueError(
                f"the rule {rule.name} takes children of one distribution only (Rule.sources is "
                f"False), and the drafter draws the children of a node from {drafter.tree.sources} "
                "distributions: use rules.rejection() or rules.traversal(), or another rule with "
                "Rule.sources"
            )


def check_takes_trees(
    party: core.LanguageModel | core.Drafter | core.Rule, name: str, purpose: str
) -> None:
    """Raises ValueError for a party that takes chains only, for a purpose that needs token trees.

    >>> check_takes_trees(
    ...     core.Rule(None, "mine", exact=True), "the rule mine", "the drafter drafts token trees"
    ... )
    ... # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the rule mine takes chains only (Rule.trees is False), and the drafter drafts token trees: use rules...
    """
    if isinstance(party, core.LanguageModel):
        lacks = party.select is None
        field = "LanguageModel.select is None"
        instead = (
            "use another model (recurrent layers take no trees), or a drafter of chains, such as "
            "drafters.model"
        )
    elif isinstance(party, core.Drafter):
        lacks = party.steps is None
        field = "Drafter.steps is None; of a model, LanguageModel.select"
        instead = "use drafters.model of another model, or the drafter as it is"
    else:
        lacks = not party.trees
        field = "Rule.trees is False"
        instead = "use rules.rejection() or rules.traversal(), or another rule with Rule.trees"
    if lacks:
        raise ValueError(f"{name} takes chains only ({field}), and {purpose}: {instead}")


def check_room(cache: core.Cache, tokens: int) -> None:
    """Raises ValueError for a round that may take back more tokens than its cache was made to take
    back. All of this is static.

    >>> from jaxspec.core import Room
    >>> check_room(
    ...     kv_cache.empty(1, Room(64, rewind=4), [kv_cache.whole(1, 8)]), 6
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: the cache takes back at most 4 tokens (Room.rewind), and a round up to 6: begin rows with the decoder...
    """
    for layers in jax.tree.leaves(cache, is_leaf=lambda node: isinstance(node, kv_cache.KVCache)):
        if (
            isinstance(layers, kv_cache.KVCache)
            and layers.rewind is not None
            and layers.rewind < tokens
        ):
            raise ValueError(
                f"the cache takes back at most {layers.rewind} tokens (Room.rewind), and a round "
                f"up to {tokens}: begin rows with the decoder that goes on with them, with the "
                "same drafter and gamma. A drafter that feeds a row more tokens than its draft "
                "says so in Drafter.spare"
            )


def run_round(
    target: core.LanguageModel,
    drafter: core.Drafter,
    rule: core.Rule,
    weights: core.Weights,
    caches: core.Caches,
    context: core.DraftContext,
    to_distribution: core.ToDistribution,
    widths: tuple[int, ...],
    shorten: Callable[[core.Draft], Int[Array, " B"]] | None = None,
) -> core.RoundResult:
    """Drafts, verifies in one pass, and judges.

    Args:
        target: the target, whose cache holds `context.row` but its last token.
        context: the drafter's context; rows whose `max_draft` is 0 still get their next token.
        to_distribution: the target's logits to distributions.
        widths: the widths of passes to compile, from `bucket_widths`.
        shorten: most tokens of each row's draft that are verified, as a policy has it; None: all.
    """
    row, (nodes, depth, _) = context.row, size_of(drafter, context.gamma)
    check_room(caches.target, nodes + 1 + drafter.spare)
    with jax.named_scope("draft"):
        draft, caches = _proposed(drafter.propose(weights, caches, context), caches)
        _check_shape(draft, drafter, nodes)
        draft = _final(in_32_bits(draft), drafter, context, target.vocab_size, shorten)
    # The cache is one token behind: the row's last committed token is fed before the draft.
    last = token_rows.window(row.tokens, row.length - 1, 1)  # [B, 1]
    fed = jnp.concatenate([last, draft.tokens], axis=1)  # [B, nodes + 1]
    # `parent` now counts fed tokens: 0 is the last committed one. `verdict.path` counts draft
    # tokens.
    if draft.parent is None:
        parent = None
    else:
        parent = tree.fed(draft.parent)

    def pass_over(width: int, cache: core.Cache) -> tuple[core.TargetPass, core.Cache]:
        branch = None if parent is None else parent[:, :width]
        if drafter.complete_target_pass is None:
            forward, cache = target.extend(weights.target, cache, fed[:, :width], branch)
        else:
            forward, cache = drafter.complete_target_pass(
                weights, caches._replace(target=cache), fed[:, :width], branch
            )
        # Without draft tokens the processors look at the committed row alone.
        if width == 1:
            distribution = to_distribution(forward.logits)
        else:
            # Which draft tokens [.., N] precede the position after each fed token [.., T]: for
            # penalties on repetition.
            chain = jnp.tri(width, width - 1, -1, bool)[None]
            if branch is None:
                seen = chain
            else:
                seen = tree.ancestors(branch)[:, :, 1:]
            distribution = to_distribution(forward.logits, draft.tokens[:, : width - 1], seen)
        return core.TargetPass(forward, distribution, unusable(forward, distribution)), cache

    with jax.named_scope("target"):
        # A drafter may have fed the target's cache (early exit): forget that.
        cache = target.rewind(caches.target, row.length - 1)
        target_pass, cache = bucketed_pass(pass_over, cache, jnp.max(draft.length), widths)
    with jax.named_scope("accept"):
        verdict = rule.verify(context.keys, row.length, draft, target_pass.distribution)
        _check_verdict(verdict, rule, draft)
        verdict = in_32_bits(verdict)
    with jax.named_scope("commit"):
        tokens = committed_tokens(draft, verdict, depth)
        # A tree's accepted nodes lie scattered among the fed ones. Select moves them to where a
        # chain's would lie.
        if verdict.path is not None and target.select is not None:
            path = verdict.path[:, :depth]
            verdict = verdict._replace(path=path)
            cache = target.select(cache, row.length, path)
    return core.RoundResult(draft, verdict, tokens, target_pass, caches._replace(target=cache))


def in_32_bits(values: Arrays) -> Arrays:
    """Returns int64 arrays of a tree as int32, and float64 ones as float32: the dtypes of all
    buffers of a generation.

    Under `jax_enable_x64` a drafter or a rule of your own makes wider arrays.

    >>> in_32_bits({"length": jnp.array([3]), "tokens": jnp.array([3], jnp.int16)})["length"].dtype
    dtype('int32')
    """

    def narrowed(x: Any) -> Any:
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize > 4:
            return jnp.asarray(x, jnp.int32)
        if dtype == jnp.float64:
            return jnp.asarray(x, jnp.float32)
        return x

    return jax.tree.map(narrowed, values)


def _final(
    draft: core.Draft,
    drafter: core.Drafter,
    context: core.DraftContext,
    vocab: int,
    shorten: Callable[[core.Draft], Int[Array, " B"]] | None,
) -> core.Draft:
    """Returns a draft as the target reads it: extended by tokens that are certain, and cut to its
    limits.
    """
    # A chain that is a function of what precedes it may be changed; one that was drawn has to be
    # judged as it is, and one whose drafting was a part of the target's pass ends where that did.
    is_fixed = (
        draft.parent is None and draft.log_probs is None and drafter.complete_target_pass is None
    )
    if context.ahead is not None and is_fixed:
        draft = context.ahead(draft)
    # A user's drafter may draft past a row's limit, or ids that the target's embedding lacks: both
    # end here.
    draft = truncate(draft, context.max_draft, vocab)
    if shorten is None:
        return draft
    return truncate(draft, shorten(draft), vocab)


def truncate(draft: core.Draft, limit: Int[Array, " B"], vocab: int) -> core.Draft:
    """Cuts a draft at a row's limit and at ids that the target lacks. The ids that are fed are
    always valid.

    A token that the target lacks (of a datastore or a tokenizer with more ids) has probability 0,
    so it could not be accepted. A chain ends before it. A tree loses it with all that follows it. A
    tree also loses its padding and nodes that do not come after their parent: the nodes that are
    verified are those of `tree.in_tree`.

    >>> cut = truncate(core.Draft(jnp.array([[3, 9, 4]]), jnp.array([3])), jnp.array([2]), vocab=5)
    >>> cut.tokens.tolist(), cut.length.tolist()
    ([[3, 4, 4]], [1])
    >>> star = core.Draft(jnp.array([[3, 9, 4]]), jnp.array([3]), parent=jnp.array([[0, 0, 1]]))
    >>> cut = truncate(star, jnp.array([1]), vocab=5)
    >>> cut.parent.tolist(), cut.length.tolist()
    ([[0, -1, -1]], [1])
    >>> truncate(
    ...     star._replace(parent=jnp.array([[2, 0, 0]])), jnp.array([2]), vocab=10
    ... ).parent.tolist()
    [[-1, 0, 0]]
    """
    # An invalid id is still fed, clipped, since shapes are static. It ends the chain or its branch
    # instead.
    valid = (draft.tokens >= 0) & (draft.tokens < vocab)
    tokens = jnp.clip(draft.tokens, 0, vocab - 1)
    if draft.parent is None:
        # How many tokens at the front are valid: the product is 0 from the first invalid one on.
        run = jnp.sum(jnp.cumprod(valid.astype(draft.length.dtype), axis=1), axis=1).astype(
            draft.length.dtype
        )
        return draft._replace(
            tokens=tokens, length=jnp.minimum(jnp.minimum(draft.length, run), limit)
        )
    # Nodes are numbered from 1, 0 is the last committed token; -1 marks what is no part of the
    # tree.
    node = jnp.arange(1, tokens.shape[1] + 1, dtype=draft.length.dtype)[None, :]
    parent = jnp.where(draft.parent < node, draft.parent, -1)
    within = tree.depth(tree.fed(parent))[:, 1:] <= limit[:, None]
    stays = valid & within & (node <= draft.length[:, None])
    parent = jnp.where(stays, parent, -1)
    # A tree's length is the number of its last node; nodes cut off before it keep their numbers.
    length = jnp.max(jnp.where(tree.in_tree(parent), node, 0), axis=1)
    return draft._replace(tokens=tokens, parent=parent, length=length)


def committed_tokens(
    draft: core.Draft, verdict: core.Verdict, depth: int
) -> Int[Array, "B depth+1"]:
    """The accepted tokens and the one after them: draft [x y z], 1 accepted, next t: [x t . .]."""
    accepted = draft.tokens
    if verdict.path is not None:
        accepted = jnp.take_along_axis(draft.tokens, verdict.path[:, :depth], axis=1)
    slot = jnp.arange(depth + 1, dtype=verdict.num_accepted.dtype)[None, :]
    # The slot for the token after a draft that is accepted whole.
    accepted = jnp.pad(accepted, ((0, 0), (0, 1)))
    return jnp.where(slot < verdict.num_accepted[:, None], accepted, verdict.next_token[:, None])


def fed_on_path(verdict: core.Verdict, positions: int) -> Bool[Array, "B T"]:
    """The fed tokens on the way to the verdict: the last committed one and the accepted ones."""
    slot = jnp.arange(positions, dtype=verdict.num_accepted.dtype)[None, :]
    if verdict.path is None:
        return slot <= verdict.num_accepted[:, None]
    step = jnp.arange(verdict.path.shape[1], dtype=verdict.num_accepted.dtype)[None, :]
    # Slots past the accepted ones repeat fed token 0, which is on the way in any case.
    fed = jnp.where(step < verdict.num_accepted[:, None], verdict.path + 1, 0)
    return (slot == 0) | jnp.any(fed[:, :, None] == slot[:, None, :], axis=1)


def fed_before(verdict: core.Verdict, depth: int) -> Int[Array, "B depth+1"] | None:
    """The fed token that each of `committed_tokens` follows; None for a chain, where these are 0,
    1, 2, ...

    >>> verdict = core.Verdict(
    ...     jnp.array([2]), jnp.array([7]), jnp.array([3]), path=jnp.array([[1, 3, 0, 0]])
    ... )
    >>> fed_before(verdict, depth=2).tolist()
    [[0, 2, 4]]
    """
    if verdict.path is None:
        return None
    return jnp.pad(verdict.path[:, :depth] + 1, ((0, 0), (1, 0)))


def _proposed(returned: Any, old_caches: core.Caches) -> tuple[core.Draft, core.Caches]:
    """Returns what a drafter proposed, if it is what `core.Propose` returns for the caches that it
    was given.
    """
    if isinstance(returned, tuple) and len(returned) == 2:
        draft, caches = returned
        if isinstance(draft, core.Draft) and isinstance(caches, core.Caches):
            old, new = (
                (jax.tree.structure(cache), [jnp.shape(x) for x in jax.tree.leaves(cache)])
                for cache in (old_caches.target, caches.target)
            )
            if old != new:
                raise ValueError(
                    "the drafter's propose returned a target's cache of another kind or room: "
                    "expected the one that it was given, perhaps fed, with every token that was "
                    "fed taken back by the decoder (Room.rewind)"
                )
            return draft, caches
    names = ", ".join(
        type(x).__name__ for x in (returned if type(returned) is tuple else [returned])
    )
    raise TypeError(
        f"the drafter's propose returned {names}: expected (Draft, Caches): the draft, and the "
        "caches that propose was given, with the drafter's new state as caches.draft"
    )


def committed_caches(returned: Any) -> core.Caches:
    """Returns the caches that a drafter's `commit` returned."""
    if isinstance(returned, core.Caches):
        return returned
    raise TypeError(
        f"the drafter's commit returned {type(returned).__name__}: expected Caches, those that "
        "commit was given, with the drafter's new state as caches.draft"
    )


def _check_shape(draft: core.Draft, drafter: core.Drafter, nodes: int) -> None:
    """Raises ValueError if a draft does not have the shapes that its drafter announced."""
    kinds = [
        "a chain" if chain else "a tree" for chain in (draft.parent is None, drafter.tree is None)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the drafter proposed {kinds[0]} and announces {kinds[1]}: set Drafter.tree to match"
        )
    sources, announced = (
        1 + len(draft.other_log_probs),
        1 if drafter.tree is None else drafter.tree.sources,
    )
    if sources > announced:
        raise ValueError(
            f"the drafter proposed {sources} distributions for the children of a node and "
            f"announces {announced}: set TreeSize.sources to match"
        )
    if (draft.sources is None) != (sources == 1):
        if sources > 1:
            expected = "the number of each node's distribution"
        else:
            expected = "None for one distribution"
        raise ValueError(
            f"the drafter proposed {sources} distributions for the children of a node, and "
            f"Draft.sources is {'None' if draft.sources is None else 'given'}: expected {expected}"
        )
    for name in ("tokens", "length", "parent", "sources"):
        x = getattr(draft, name)
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise TypeError(
                f"the drafter proposed {name} of dtype {jnp.result_type(x)}: expected integers"
            )
    if draft.tokens.shape[1] != nodes:
        width = draft.tokens.shape[1]
        raise ValueError(
            f"the drafter proposed {width} tokens a row: expected {nodes}, some of which may be "
            "padding"
        )


def _check_verdict(verdict: core.Verdict, rule: core.Rule, draft: core.Draft) -> None:
    """Raises ValueError if a rule returned an impossible verdict."""
    if not isinstance(verdict, core.Verdict):
        raise TypeError(
            f"the rule {rule.name} returned type {type(verdict).__name__}: expected a core.Verdict"
        )
    if (verdict.path is None) != (draft.parent is None):
        draft_kind, expected = (
            ("a chain", "None") if draft.parent is None else ("a tree", "the numbers of its nodes")
        )
        got = "no path" if verdict.path is None else "a path"
        raise ValueError(
            f"the rule {rule.name} returned {got} for {draft_kind}: expected Verdict.path to be "
            f"{expected}"
        )
    rows = draft.length.shape
    nodes = draft.tokens.shape
    shapes = {"num_accepted": rows, "next_token": rows, "num_tested": rows}
    for name, shape in (shapes if draft.parent is None else shapes | {"path": nodes}).items():
        x = getattr(verdict, name)
        if jnp.shape(x) != shape or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            got = f"shape {jnp.shape(x)} and dtype {jnp.result_type(x)}"
            raise ValueError(
                f"the rule {rule.name} returned {name} of {got}: expected integers of shape {shape}"
            )


def unusable(forward: core.Forward, distribution: core.Distribution) -> Bool[Array, "B T"]:
    """Finds positions after which nothing can be generated.

    Logits hold NaN or +inf, or nothing but -inf; or bans, with what the model rules out, leave
    nothing.
    """
    if distribution.tokens is not None:
        none_allowed = distribution.tokens < 0
    else:
        assert distribution.log_probs is not None
        # normalising nothing makes every entry NaN
        none_allowed = jnp.isnan(distribution.log_probs[..., 0])
    # The maximum is NaN if any logit is, and infinite if all are -inf or one is +inf: one reduction
    # finds all three.
    not_finite = ~jnp.isfinite(jnp.max(forward.logits, axis=-1))
    return not_finite | none_allowed


def bucket_widths(nodes: int, *, adaptive: bool, may_be_empty: bool) -> tuple[int, ...]:
    """The widths of the target's pass. Each compiles a program, so they are few.

    Args:
        nodes: most draft tokens.
        adaptive: whether a policy chooses the length of drafts. Passes over 1, 2, 4, 8, ... and
            nodes + 1 tokens are then separate programs. (Matrix units work on powers of two: 3
            tokens cost what 4 do.)
        may_be_empty: whether there may be no draft token at all.

    >>> (
    ...     bucket_widths(7, adaptive=True, may_be_empty=False),
    ...     bucket_widths(7, adaptive=False, may_be_empty=True),
    ... )
    ((1, 2, 4, 8), (1, 8))
    """
    if adaptive:
        return (*(1 << i for i in range(nodes.bit_length()) if 1 << i <= nodes), nodes + 1)
    if may_be_empty:
        return (1, nodes + 1)
    return (nodes + 1,)


def bucketed_pass(
    pass_over: Callable[[int, core.Cache], tuple[core.TargetPass, core.Cache]],
    cache: core.Cache,
    needed: Int[Array, ""],
    widths: tuple[int, ...],
) -> tuple[core.TargetPass, core.Cache]:
    """Makes the narrowest pass, of `bucket_widths`, that reads each row's last token and all draft
    tokens.

    `needed` is the number of the last draft token, counted from 1, that any row has; what follows
    need not be read. Outputs always have a position for each token of the widest pass; positions
    that were not read are zero.
    """
    if len(widths) == 1:
        return pass_over(widths[0], cache)

    def padded_pass(width: int, cache: core.Cache) -> tuple[core.TargetPass, core.Cache]:
        outputs, cache = pass_over(width, cache)
        return padded(outputs, widths[-1]), cache

    # The bucket is chosen on the device, for the whole batch: its longest draft decides.
    index = jnp.sum(jnp.asarray(widths[:-1]) < needed + 1, dtype=jnp.int32)
    return branches.switch(
        index, [functools.partial(padded_pass, width) for width in widths], cache
    )


def padded(outputs: Arrays, width: int) -> Arrays:
    """Pads outputs or a draft [B, T, ..] with zeros to `width` positions; what has none stays.

    >>> padded(core.Distribution(jnp.ones((1, 2, 3)), greedy=jnp.array([True])), 5).log_probs.shape
    (1, 5, 3)
    """

    def pad(x: Array) -> Array:
        if x.ndim < 2:
            return x
        return jnp.pad(x, [(0, 0), (0, width - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    return jax.tree.map(pad, outputs)
