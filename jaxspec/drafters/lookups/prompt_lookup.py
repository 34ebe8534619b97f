"""Copy from the context: what followed the last occurrence of these tokens (prompt lookup decoding).

The n-gram matching of Saxena's prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding) and of LLMA
(Yang et al., arXiv 2304.04487): where the output repeats the input (edits, summaries, quotations, code) it drafts for
nothing, and elsewhere its draft is empty.

Shapes: B batch, P prompt, S capacity of a row, N = P + 1 + S, K longest match, C matches, G gamma.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.core import BoundDrafter, Caches, Draft, DraftContext, Drafter, Forward, Prompt, TreeSize, Weights
from jaxspec.core.checks import integers
from jaxspec.drafters.common import no_commit, same_state, searched
from jaxspec.drafters.lookups import continuations

NO_TOKEN = -1  # padding: equal to no token of a row
BEFORE = -2  # what stands before a row's first token: equal to nothing
MATCHES = 16  # that a tree is made of


def prompt_lookup(longest: int = 3, shortest: int = 1, *, candidates: int = 1, length: int = 5) -> BoundDrafter:
    """Proposes, as point masses, what followed the longest match of the last few tokens.

    The last `longest` tokens of the row are sought in the row itself and in the prompt (an encoder-decoder's prompt is
    no part of its row), then fewer, down to `shortest`; of equal matches the most recent one counts. A match that
    runs into the end of the row is taken as a loop: "a b a b" goes on with "a b". Where nothing matches, the row
    proposes no draft token. State: the prompt. Cost: comparisons of integers, O((P + S) longest) a round.

    With several candidates the draft is a tree of what followed up to 16 matches: the longest first, of equals what
    followed most often, then what followed most recently.

    Args:
        longest, shortest: tokens to match, at most and at least. 1 drafts most often, more draft better.
        candidates: continuations to propose. Above 1 they make a tree of at most candidates x length nodes, and gamma
            is not read.
        length: of each, in such a tree.

    Raises:
        ValueError: not 1 <= shortest <= longest; no candidates, or of no tokens.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target = table_model(jax.random.key(1), vocab=9, sharpness=9.0)  # soon repeats itself
        >>> prompt = Prompt(jnp.array([[5, 6, 7, 8, 5, 6]]), jnp.array([6]))
        >>> out = jaxspec.generate(target, prompt, drafter=prompt_lookup(), gamma=3, max_new_tokens=40)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=40).tokens).all())
        True
    """
    longest, shortest = integers(longest=longest, shortest=shortest)
    if not 1 <= shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}: expected 1 <= shortest <= longest")
    continuations.check(candidates, length)
    if candidates == 1:
        return BoundDrafter(_prompt_lookup(longest, shortest, None), name="prompt_lookup")
    functions = _prompt_lookup(longest, shortest, TreeSize(candidates * length, length))
    return BoundDrafter(functions, name=f"prompt_lookup({candidates} candidates)")


@functools.lru_cache
def _prompt_lookup(longest: int, shortest: int, tree: TreeSize | None) -> Drafter:
    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> Prompt:
        return prompt

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        return searched(lambda: search(caches.draft, context.row, context.gamma), context), caches

    def search(prompt: Prompt, context: Prompt, gamma: int) -> Draft:
        text = text_of(prompt, context)
        match = match_lengths(text, context, longest)  # B N
        past = jnp.arange(text.shape[1], dtype=match.dtype)[None, :]
        followed = jnp.concatenate([text[:, 1:] >= 0, jnp.zeros_like(text[:, :1], bool)], axis=1)
        score = jnp.where(jnp.logical_and(followed, match >= shortest), match * text.shape[1] + past, -1)
        if tree is None:
            best = jnp.argmax(score, axis=-1)[:, None]
        else:
            best = jax.lax.top_k(score, min(MATCHES, score.shape[1]))[1]
        best = best.astype(context.length.dtype)  # B C
        found = jnp.take_along_axis(score, best, axis=1) >= 0

        row_start = prompt.tokens.shape[1] + 1
        end = jnp.where(best < row_start, prompt.length[:, None], row_start + context.length[:, None])
        available = jnp.maximum(end - (best + 1), 1)
        step = jnp.arange(gamma, dtype=best.dtype)[None, None, :]
        # In the row the continuation reaches the present, and a loop goes on; the prompt just ends.
        source = (best + 1)[..., None] + step % available[..., None]
        tokens = jnp.take_along_axis(text[:, None], source, axis=2)
        length = jnp.where(found, jnp.where(best < row_start, jnp.minimum(available, gamma), gamma), 0)
        if tree is None:
            return Draft(jnp.maximum(tokens[:, 0], 0), length[:, 0].astype(context.length.dtype))
        # Any longer match outweighs all shorter ones together.
        weight = float(MATCHES) ** jnp.take_along_axis(match, best, axis=1).astype(jnp.float32)
        return continuations.as_tree(tokens, step < length[..., None], weight, tree.nodes)

    return Drafter(init, propose, no_commit, may_be_empty=True, tree=tree, rollback=same_state)


def text_of(prompt: Prompt, row: Prompt) -> Int[Array, "B N"]:
    """The prompt, a gap, and the row; NO_TOKEN where there is none."""
    parts = []
    for tokens, length in (prompt, row):
        real = jnp.arange(tokens.shape[1], dtype=length.dtype)[None, :] < length[:, None]
        parts.append(jnp.where(real, tokens, NO_TOKEN))
    gap = jnp.full((row.tokens.shape[0], 1), NO_TOKEN, row.tokens.dtype)
    return jnp.concatenate([parts[0], gap, parts[1]], axis=1)


def match_lengths(text: Int[Array, "B N"], row: Prompt, longest: int) -> Int[Array, "B N"]:
    """How many of the row's last tokens, `longest` at most, the text repeats up to each position.

    >>> row = Prompt(jnp.array([[4, 5, 4, 5]]), jnp.array([4]))
    >>> match_lengths(jnp.array([[9, 5, 4, 5]]), row, 3).tolist()
    [[0, 1, 0, 3]]
    """
    run = jnp.ones(text.shape, bool)
    total = jnp.zeros(text.shape, row.length.dtype)
    for back in range(longest):
        at = row.length - 1 - back
        wanted = jnp.take_along_axis(row.tokens, jnp.maximum(at, 0)[:, None], axis=1)
        wanted = jnp.where(at[:, None] >= 0, wanted, BEFORE)
        earlier = jnp.pad(text, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, : text.shape[1]]
        run = jnp.logical_and(run, earlier == wanted)
        total = total + run.astype(total.dtype)
    return total
