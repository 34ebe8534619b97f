"""A draft model that drafts all tokens in one pass, each at a mask token (PARD, An et al., arXiv
2504.18583).
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.core.checks import in_range, integers
from jaxspec.drafters.common import check_model, no_commit
from jaxspec.drafters.model import ModelState, catch_up, known, prefill, take_back
from jaxspec.drafters.stepwise import at_once, chain


def parallel(draft: core.Model, mask_token: int, longest: int = 16) -> core.BoundDrafter:
    """Drafts gamma tokens in one pass of a model that was trained to fill in mask tokens.

        drafter = jaxspec.load_drafter("amd/PARD-Qwen3-0.6B", target=target) # reads `pard_token` in
        its config.json

    For committed tokens [a b c] and a cache that holds a, the pass reads [b c m m m ...], where m
    is the mask token. The distributions after c and after each m give the draft tokens. Each is
    made without the draft tokens before it, so later draft tokens are accepted less often than a
    model's own; but a draft costs one pass, whatever gamma is. The cache then counts the committed
    tokens alone, and what masks have left is overwritten.

    Exact at every temperature: given the committed tokens the draft tokens are independent, so the
    distribution that a draft token was drawn from is the one that is known. State: the model's
    cache.

    Args:
        draft: the model, with the target's vocabulary.
        mask_token: the id of its mask token, which the target need not know.
        longest: most draft tokens of a round; caches have room for as many masks.

    Raises:
        TypeError: draft is not a model.
        ValueError: a mask token that the model does not have, longest < 1, or other numbers than
            integers.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = core.Prompt(jnp.array([[3, 1, 3, 1]]), jnp.array([4]))
        >>> out = jaxspec.generate(
        ...     target, prompt, drafter=parallel(draft, mask_token=4), gamma=3, max_new_tokens=9
        ... )
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: An et al., 2025, arXiv 2504.18583.
    """
    check_model(draft, "draft")
    (longest,), (mask_token,) = integers(1, longest=longest), integers(mask_token=mask_token)
    in_range(0, draft.lm.vocab_size, below=True, mask_token=mask_token)
    name = f"{draft.name or 'a model'}, in parallel"
    return core.BoundDrafter(
        _parallel(draft.lm, mask_token, longest), draft.params, (draft,), name=name
    )


@functools.lru_cache
def _parallel(lm: core.LanguageModel, mask_token: int, longest: int) -> core.Drafter:
    def init(start: core.DraftStart, nodes: int) -> ModelState:
        _, cache = prefill(lm, start.weights.draft, start)
        return ModelState(cache, token_rows.decoder_prompt(lm, start.prompt).length)

    def begin(
        weights: core.Weights, caches: core.Caches, context: core.DraftContext, fed: int | None
    ) -> core.Reading:
        state = caches.draft
        row = context.row
        count = context.gamma
        params = weights.draft
        drafts = context.max_draft > 0

        def logits(cache: core.Cache) -> tuple[Float[Array, "B G V"], core.Cache]:
            before = state._replace(cache=cache)
            if context.adaptive:  # rounds without a draft have committed more than a pass reads
                before = catch_up(
                    lm, params, before, row._replace(length=row.length - 1), drafts, count + 1
                )
            # A round commits at most count + 1 tokens, so the last of them and count - 1 masks are
            # among 2 count.
            start = jnp.clip(before.num_cached, row.length - 1 - count, row.length - 1)
            # Where nothing is drafted, nothing is written far ahead: layers with a window could not
            # take it back.
            start = jnp.where(drafts, start, jnp.minimum(start, before.num_cached))
            position = start[:, None] + jnp.arange(2 * count, dtype=start.dtype)[None, :]
            in_row = jnp.take_along_axis(
                row.tokens, jnp.minimum(position, row.tokens.shape[1] - 1), axis=1
            )
            tokens = jnp.where(position < row.length[:, None], known(lm, in_row), mask_token)
            forward, cache = lm.extend(params, lm.rewind(before.cache, start), tokens)
            drafting = (row.length - 1 - start)[:, None] + jnp.arange(count, dtype=start.dtype)[
                None, :
            ]
            if lm.inside is None:
                return jnp.take_along_axis(forward.logits, drafting[:, :, None], axis=1), cache
            # Where there is a head, no other logits are computed.
            features = jnp.take_along_axis(forward.features, drafting[:, :, None], axis=1)
            return lm.inside.head(params, features), cache

        def end(cache: core.Cache) -> core.Caches:
            length: Int[Array, " B"] = jnp.where(drafts, row.length, state.num_cached)
            return caches._replace(draft=state._replace(cache=cache, num_cached=length))

        return at_once(logits, state.cache, end)

    steps = core.Steps(init, begin, no_commit, lm.vocab_size, depth=longest, rollback=take_back)
    return chain(steps, trees=False)._replace(lm=lm, spare=longest)
