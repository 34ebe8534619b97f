"""Prompt lookup decoding: copy the tokens after the last occurrence of the row's last tokens.

The n-gram matching of Saxena's prompt lookup decoding
(github.com/apoorvumang/prompt-lookup-decoding) and of LLMA (Yang et al., arXiv 2304.04487). Where
the output repeats the input (edits, summaries, quotations, code) its drafts cost nothing. Elsewhere
its draft is empty.

Shapes: B batch, P prompt, S capacity of a row, N = P + 1 + S, K longest match, C matches, G gamma.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.core.checks import integers
from jaxspec.core.token_rows import BEFORE_ROW, NO_TOKEN
from jaxspec.drafters.common import lookup_drafter
from jaxspec.drafters.lookups import vote

MATCHES = 16  # that a tree is made of
# Tokens that begin an encoder-decoder's row: a start token, and perhaps a language.
MOST_START_TOKENS = 2


def prompt_lookup(
    longest: int = 3,
    shortest: int = 1,
    *,
    candidates: int = 1,
    length: int = 5,
    copy_from: int | None = None,
) -> core.BoundDrafter:
    """Proposes, as point masses, what followed the longest match of the last few tokens.

    It looks for the last `longest` tokens of the row in the row itself and in the prompt (an
    encoder-decoder's row does not contain the prompt) , then for fewer, down to `shortest`. The
    most recent of equal matches counts. A match that runs into the end of the row is taken as a
    loop: "a b a b" goes on with "a b". Where nothing matches, the row proposes no draft token.
    State: the prompt. Cost: comparisons of integers, O((P + S) longest) a round.

    With several candidates the draft is a tree of what followed up to 16 matches: the longest
    first, of equals what followed most often, then what followed most recently.

    Args:
        longest, shortest: tokens to match, at most and at least. 1 drafts most often, more draft
            better.
        candidates: continuations to propose. Above 1 they make a tree of at most candidates x
            length nodes, and gamma is not read.
        length: tokens of each continuation in such a tree.
        copy_from: where nothing is written yet, and so nothing matches, propose the prompt's tokens
            from this one on (from 0; a task's name may stand in front of the text that is edited).
            For encoder-decoders that edit their input: the first draft of shallow aggressive
            decoding (Sun et al., arXiv 2106.04970) is the input itself. With a decoder-only target
            it does nothing: the row begins with the prompt.

    Raises:
        ValueError: not 1 <= shortest <= longest; no candidates, or of no tokens; a negative
            copy_from, or one beside several candidates.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9, sharpness=9.0)  # soon repeats itself
        >>> prompt = core.Prompt(jnp.array([[5, 6, 7, 8, 5, 6]]), jnp.array([6]))
        >>> out = jaxspec.generate(
        ...     target, prompt, drafter=prompt_lookup(), gamma=3, max_new_tokens=40
        ... )
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=40).tokens).all())
        True
    """
    (shortest,) = integers(1, shortest=shortest)
    (longest,) = integers(shortest, longest=longest)
    tree = vote.tree_size(candidates, length)
    if tree is None:
        name = "prompt_lookup"
    else:
        name = f"prompt_lookup({candidates} candidates)"
    if copy_from is not None:
        (copy_from,) = integers(0, copy_from=copy_from)
        if tree is not None:
            raise ValueError(
                f"copy_from is {copy_from} and candidates is {candidates}: expected 1 candidate "
                "with it"
            )
        name = f"prompt_lookup(copy_from={copy_from})"
    return core.BoundDrafter(_prompt_lookup(longest, shortest, tree, copy_from), name=name)


@functools.lru_cache
def _prompt_lookup(
    longest: int, shortest: int, tree: core.TreeSize | None, copy_from: int | None
) -> core.Drafter:
    def search(
        weights: core.Weights, prompt: core.Prompt, context: core.DraftContext
    ) -> core.Draft:
        row = context.row
        gamma = context.gamma
        text = text_of(prompt, row)
        # B C
        match, position = best_matches(text, row, longest, shortest, 1 if tree is None else MATCHES)
        # A match in the row reaches the present: its continuation is a loop that goes on. The
        # prompt just ends.
        row_start = prompt.tokens.shape[1] + 1
        in_prompt = position < row_start
        end = jnp.where(in_prompt, prompt.length[:, None], row_start + row.length[:, None])
        available = jnp.maximum(end - (position + 1), 1)
        step = jnp.arange(gamma, dtype=position.dtype)[None, None, :]
        source = (position + 1)[..., None] + step % available[..., None]  # B C G
        tokens = jnp.take_along_axis(text[:, None], source, axis=2)
        length = jnp.where(match > 0, jnp.where(in_prompt, jnp.minimum(available, gamma), gamma), 0)
        if copy_from is not None:
            copied = copy_from + jnp.broadcast_to(step[0], (row.length.shape[0], gamma))
            first_tokens = token_rows.tokens_at(prompt.tokens, copied, NO_TOKEN)
            remaining = jnp.clip(prompt.length - copy_from, 0, gamma)
            # An encoder-decoder's row begins with a start token or two, which a prompt does not
            # have.
            is_first = (row.length <= MOST_START_TOKENS) & (match[:, 0] == 0)
            tokens = jnp.where(is_first[:, None, None], first_tokens[:, None], tokens)
            length = jnp.where(is_first[:, None], remaining[:, None], length)
        if tree is None:
            return core.Draft(jnp.maximum(tokens[:, 0], 0), length[:, 0].astype(row.length.dtype))
        # Any longer match outweighs all shorter ones together.
        weight = float(MATCHES) ** match.astype(jnp.float32)
        return vote.as_tree(tokens, step < length[..., None], weight, tree.nodes)

    return lookup_drafter(search, keep_prompt, tree)


def keep_prompt(start: core.DraftStart) -> core.Prompt:
    """Makes the state of a drafter that searches the prompt: the prompt."""
    return start.prompt.text


def text_of(prompt: core.Prompt, row: core.Prompt) -> Int[Array, "B N"]:
    """Joins the prompt, a gap, and the row, padded with NO_TOKEN."""
    parts = []
    for tokens, length, _ in (prompt, row):
        real = jnp.arange(tokens.shape[1], dtype=length.dtype)[None, :] < length[:, None]
        parts.append(jnp.where(real, tokens, NO_TOKEN))
    gap = jnp.full((row.tokens.shape[0], 1), NO_TOKEN, row.tokens.dtype)
    return jnp.concatenate([parts[0], gap, parts[1]], axis=1)


def best_matches(
    text: Int[Array, "B N"], row: core.Prompt, longest: int, shortest: int, count: int
) -> tuple[Int[Array, "B C"], Int[Array, "B C"]]:
    """Finds the places after which the text may go on as the row does: the longest matches, of
    equals the latest first.

    Between `shortest` and `longest` of the row's last tokens match, at `count` places at most.

    Returns:
        How many tokens match up to each place, 0 for padding; and the places.

    >>> row = core.Prompt(jnp.array([[4, 5, 4, 5]]), jnp.array([4]))
    >>> best_matches(jnp.array([[9, 5, 4, 5, 4, 5]]), row, 3, 1, 3)
    (Array([[3, 1, 0]], dtype=int32), Array([[3, 1, 0]], dtype=int32))
    """
    match = match_lengths(text, row, longest)
    position = jnp.arange(text.shape[1], dtype=row.length.dtype)[None, :]
    followed = jnp.pad(text[:, 1:] >= 0, ((0, 0), (0, 1)))
    score = jnp.where(followed & (match >= shortest), match * text.shape[1] + position, -1)
    # Scores differ, so the largest is the first of the top ones, which take longer.
    if count == 1:
        best = jnp.argmax(score, axis=1)[:, None]
    else:
        best = jax.lax.top_k(score, min(count, score.shape[1]))[1]
    best = best.astype(row.length.dtype)
    found_any = jnp.take_along_axis(score, best, axis=1) >= 0
    return jnp.where(found_any, jnp.take_along_axis(match, best, axis=1), 0), best


def match_lengths(text: Int[Array, "B N"], row: core.Prompt, longest: int) -> Int[Array, "B N"]:
    """Counts how many of the row's last tokens, `longest` at most, the text repeats up to each
    position.

    >>> row = core.Prompt(jnp.array([[4, 5, 4, 5]]), jnp.array([4]))
    >>> match_lengths(jnp.array([[9, 5, 4, 5]]), row, 3).tolist()
    [[0, 1, 0, 3]]
    """
    run = jnp.ones(text.shape, bool)  # B N: whether all of the last tokens so far are repeated
    total = jnp.zeros(text.shape, row.length.dtype)
    for back in range(longest):
        ending = token_rows.tokens_at(row.tokens, row.length[:, None] - 1 - back, BEFORE_ROW)  # B 1
        earlier = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, : text.shape[1]]
        run = run & (earlier == ending)
        total = total + run.astype(total.dtype)
    return total
