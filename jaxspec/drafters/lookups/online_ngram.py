"""N-gram tables that grow while a row is generated: the target's own top tokens after each context
it has verified.

N-gram-assisted decoding, as in Ou, Chen and Tian (arXiv 2404.08698): nothing is trained, and each
pass of the target, which is paid for anyway, fills the tables.

Shapes: B batch, P prompt, T step, G gamma; O context lengths, longest first; W tokens of the
longest context; H slots of a table; K tokens stored for a context; E = W + K numbers of an entry.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core.checks import integers
from jaxspec.core.token_rows import NO_TOKEN, tokens_at
from jaxspec.drafters.common import same_state, skip_if_idle
from jaxspec.drafters.lookups.ngram_model import positions_up_to

SHARES = 840  # of a vote; divisible by 1 to 8
LONGEST = 16  # n: votes of all lengths together fit into 32 bits


# Hash tables, one for each context length. An entry is a context (its tokens, NO_TOKEN before a
# shorter one), so that another one in its slot is not taken for it, and the best tokens after it,
# the best first.
Entries = Int[Array, "B O H E"]


def online_ngram(n: int = 4, top: int = 3, slots: int = 1024) -> core.BoundDrafter:
    """Proposes, as point masses, the target's last predictions after the same n - 1, n - 2, ..., 1
    tokens.

    At every position that a round verifies the target's `top` most probable tokens replace the
    remembered ones of the contexts that end there. The prompt's own n-grams come first; prefill's
    own prediction is left out, since an encoder-decoder's follows a start token, which a drafter
    does not get. A draft follows the tables from draft token to draft token, and ends where no
    context is known; where not even the first one is, the row proposes nothing.

    The draft token is elected: the i-th best token after a context of length m gets 2^m / i votes.
    So the longest context decides, unless several shorter ones prefer its second choice.

    Exact: the proposal is a point mass, and tables are a function of the committed tokens alone.
    Only positions up to the last accepted draft token are read; those after it, which the target
    has seen too, follow tokens that were rejected. Each position is entered once, in order, so that
    it does not matter how rounds fell either. State: 74 kB a row as it stands, 4 (n - 1) slots (n -
    1 + top) bytes.

    Args:
        n: length of the longest n-grams, 2 for bigrams.
        top: tokens remembered after a context. They cost nothing, and on the shipped models more
            than one changes no more than the third digit of the tokens per round.
        slots: contexts of one length that a row remembers; of two in one slot the later one is.

    Raises:
        ValueError: n < 2, or top or slots < 1.

    Example:
        >>> drafter = online_ngram(n=3).functions
        >>> row = core.Prompt(jnp.array([[5, 6, 7, 8, 5, 6]]), jnp.array([6]))
        >>> context = core.DraftContext(None, row, None, 2, False, None)
        >>> caches = core.Caches(None, drafter.init(core.DraftStart(None, row, None, None)))
        >>> draft, _ = drafter.propose(None, caches, context)
        >>> draft.tokens.tolist(), draft.length.tolist()  # from the prompt
        ([[7, 8]], [2])
        >>> forward = core.Forward(jax.nn.one_hot(jnp.array([[9, 4, 4]]), 10), None)
        >>> row, ones = (
        ...     core.Prompt(jnp.array([[5, 6, 7, 8, 5, 6, 9]]), jnp.array([7])),
        ...     jnp.array([1]),
        ... )
        >>> caches = drafter.commit(
        ...     core.RoundEnd(None, caches, row, core.Verdict(0 * ones, 9 * ones, ones), forward)
        ... )
        >>> draft, _ = drafter.propose(
        ...     None, caches, context._replace(row=core.Prompt(jnp.array([[4, 6]]), 2 * ones))
        ... )
        >>> (
        ...     draft.tokens.tolist(),
        ...     draft.length.tolist(),
        ... )  # after 5 6, and so after 6, the target has generated 9
        ([[9, 0]], [1])
    """
    n, top, slots = integers(n=n, top=top, slots=slots)
    if not 2 <= n <= LONGEST or top < 1 or slots < 1:
        raise ValueError(
            f"n is {n}, top {top} and slots {slots}: expected 2 to {LONGEST}, at least 1 and at "
            "least 1"
        )
    return core.BoundDrafter(_online_ngram(n, top, slots), name=f"online_ngram({n})")


@functools.lru_cache
def _online_ngram(n: int, top: int, slots: int) -> core.Drafter:
    sizes = tuple(range(n - 1, 0, -1))
    weight = [2**size * SHARES // rank for size in sizes for rank in range(1, top + 1)]

    def init(start: core.DraftStart) -> Entries:
        prompt = start.prompt.text
        batch, width = prompt.tokens.shape
        empty = jnp.full((batch, len(sizes), slots, n - 1 + top), NO_TOKEN, jnp.int32)
        position = jnp.broadcast_to(jnp.arange(width, dtype=prompt.length.dtype), (batch, width))
        followers = jnp.pad(prompt.tokens[:, 1:], ((0, 0), (0, 1)))[..., None]
        # B P K
        followers = jnp.pad(followers, ((0, 0), (0, 0), (0, top - 1)), constant_values=NO_TOKEN)
        inside = position < prompt.length[:, None] - 1
        return _enter(empty, contexts_at(prompt, position), followers, inside)

    def contexts_at(row: core.Prompt, position: Int[Array, "B T"]) -> Int[Array, "B O T W"]:
        return _contexts(tokens_at(row.tokens, positions_up_to(position, n - 1)), sizes)

    def propose(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext
    ) -> core.Proposal:
        return skip_if_idle(
            lambda: search(caches.draft, context.row, context.gamma), context
        ), caches

    def search(entries: Entries, row: core.Prompt, gamma: int) -> core.Draft:
        def draft_token(carry, _):
            last, goes_on = carry
            in_table, tokens = _look_up(entries, _contexts(last[:, None, :], sizes))
            goes_on = goes_on & jnp.any(in_table, axis=1)
            token = jnp.where(goes_on, _vote(in_table, tokens, jnp.array(weight, jnp.int32)), 0)
            return (jnp.concatenate([last[:, 1:], token[:, None]], axis=1), goes_on), (
                token,
                goes_on,
            )

        last = tokens_at(row.tokens, positions_up_to(row.length - 1, n - 1))  # B W
        start = last, jnp.ones(last.shape[:1], bool)
        _, (tokens, goes_on) = jax.lax.scan(draft_token, start, None, length=gamma)  # G B
        length = jnp.sum(goes_on, axis=0, dtype=row.length.dtype)
        return core.Draft(tokens.T, length)

    def commit(end: core.RoundEnd) -> core.Caches:
        row = end.row
        verdict = end.verdict
        logits = end.forward.logits
        step = jnp.arange(logits.shape[1], dtype=row.length.dtype)[None, :]
        # Where the round began. Not so in a row that has ended, which may have committed fewer; but
        # it drafts no more.
        position = row.length[:, None] - 2 - verdict.num_accepted[:, None] + step
        verified = step <= verdict.num_accepted[:, None]
        best_of = min(top, logits.shape[-1])
        width = logits.shape[1]

        def ranked(logits: Float[Array, "B T V"]) -> Int[Array, "B G+1 K"]:
            best = jax.lax.top_k(logits, best_of)[1].astype(jnp.int32)
            unread = (0, width - logits.shape[1])
            return jnp.pad(best, ((0, 0), unread, (0, top - best_of)), constant_values=NO_TOKEN)

        # Where no draft token was accepted in any row there is one position to read, and ranking is
        # what costs.
        any_accepted = jnp.any(verdict.num_accepted > 0)
        best = jax.lax.cond(any_accepted, ranked, lambda logits: ranked(logits[:, :1]), logits)
        return end.caches._replace(
            draft=_enter(end.caches.draft, contexts_at(row, position), best, verified)
        )

    return core.Drafter(init, propose, commit, may_be_empty=True, rollback=same_state)


def _contexts(last: Int[Array, "B T W"], sizes: tuple[int, ...]) -> Int[Array, "B O T W"]:
    """Returns the last tokens, for each number of tokens; all NO_TOKEN if the row is shorter.

    >>> _contexts(jnp.array([[[4, 5], [-1, 6]]]), (2, 1)).tolist()
    [[[[4, 5], [-1, -1]], [[-1, 5], [-1, 6]]]]
    """
    contexts = []
    for size in sizes:
        first = last.shape[-1] - size
        inside = (jnp.arange(last.shape[-1]) >= first)[None, None, :]
        contexts.append(jnp.where(inside & (last[..., first : first + 1] >= 0), last, NO_TOKEN))
    return jnp.stack(contexts, axis=1)


def _slot(context: Int[Array, "*shape W"], slots: int) -> Int[Array, "*shape"]:
    """Hashes a context to its slot in a table of so many."""
    total = jnp.zeros(context.shape[:-1], jnp.uint32)
    for i in range(context.shape[-1]):
        # A product's upper bits depend on all bits of a token: they are brought down, twice.
        for factor in (0x9E3779B1, 0x85EBCA6B):  # odd, without a pattern
            total = (total ^ context[..., i].astype(jnp.uint32)) * jnp.uint32(factor)
            total = total ^ (total >> 15)
    return (total % jnp.uint32(slots)).astype(jnp.int32)


def _enter(
    entries: Entries,
    contexts: Int[Array, "B O T W"],
    best: Int[Array, "B T K"],
    is_new: Bool[Array, "B T"],
) -> Entries:
    """Puts what follows each wanted position into the tables; of two positions with one slot the
    later one stays.
    """
    nowhere = entries.shape[2]
    real = is_new[:, None, :] & (contexts[..., -1] >= 0)
    slot = jnp.where(real, _slot(contexts, nowhere), nowhere)  # B O T
    followers = jnp.broadcast_to(best[:, None], (*slot.shape, best.shape[-1]))
    new = jnp.concatenate([contexts, followers], axis=-1)  # B O T E

    def enter(
        table: Int[Array, "H E"], slot: Int[Array, " T"], new: Int[Array, "T E"]
    ) -> Int[Array, "H E"]:
        # A scatter that meets a slot twice may leave either entry, so it meets each once: sorted,
        # the positions with one slot are neighbours, in order, and the last of them goes in.
        order = jnp.argsort(slot, stable=True)
        slot = slot[order]
        new = new[order]
        comes_again = jnp.append(slot[:-1] == slot[1:], False)
        return table.at[jnp.where(comes_again, nowhere, slot)].set(new, mode="drop")

    return jax.vmap(jax.vmap(enter))(entries, slot, new)


def _look_up(
    entries: Entries, contexts: Int[Array, "B O 1 W"]
) -> tuple[Bool[Array, "B O"], Int[Array, "B O K"]]:
    """Looks contexts up: whether each is in its table, and the best tokens after it."""
    width = contexts.shape[-1]
    slot = _slot(contexts, entries.shape[2])
    entry = jnp.take_along_axis(entries, slot[..., None], axis=2)[:, :, 0]
    same = jnp.all(entry[..., :width] == contexts[:, :, 0], axis=-1)
    return same & (contexts[:, :, 0, -1] >= 0), entry[..., width:]


def _vote(
    in_table: Bool[Array, "B O"], tokens: Int[Array, "B O K"], weight: Int[Array, " OK"]
) -> Int[Array, " B"]:
    """Returns the token with the most votes; of equal ones the first.

    >>> tokens = jnp.array([[[7, 8], [8, 9]]])
    >>> [
    ...     int(_vote(jnp.array([has]), tokens, jnp.array([4, 2, 3, 1]))[0])
    ...     for has in ([True, True], [True, False])
    ... ]
    [8, 7]
    """
    flat = tokens.reshape(tokens.shape[0], -1)
    votes = jnp.where((in_table[..., None] & (tokens >= 0)).reshape(flat.shape), weight[None, :], 0)
    same = flat[:, :, None] == flat[:, None, :]  # B OK OK
    total = jnp.sum(jnp.where(same, votes[:, None, :], 0), axis=-1)
    total = jnp.where(votes > 0, total, 0)
    return jnp.take_along_axis(flat, jnp.argmax(total, axis=1)[:, None], axis=1)[:, 0]
