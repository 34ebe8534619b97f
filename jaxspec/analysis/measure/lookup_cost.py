"""Whole drafts as passes of a model, for `analysis.measure.cost` to time: searches, cascades, own layers, heads.

Shapes: B batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.analysis.measure import batching
from jaxspec.core import (
    Cache,
    Caches,
    Distribution,
    DraftContext,
    Drafter,
    Forward,
    LanguageModel,
    Model,
    Params,
    Prompt,
    Verdict,
    Weights,
    noise,
    token_rows,
)
from jaxspec.decode.request import Prepared
from jaxspec.decode.state import decoder_prompt
from jaxspec.sampling import match_vocab


def lookup_as_model(prepared: Prepared) -> Model:
    """A model whose c (`analysis.measure.cost.measure`) is what the draft tokens of a round cost together.

    A pass puts the token that it is fed in the place of the row's last one, has the drafter propose, commits all of the
    draft, and answers with the first draft token. What the drafter reads of the target's verification is zeros.

    Args:
        prepared: with a drafter (a look-up, the target's own layers, a head, a cascade), which draws its tokens if the
            generation samples.

    Returns:
        A model that is good for being measured alone.
    """
    assert prepared.drafter is not None and isinstance(prepared.drafter.functions, Drafter)
    reads_target = prepared.drafter.target is not None
    sizes = prepared.decoder.gamma, prepared.decoder.nodes
    lm = _language_model(
        prepared.drafter.functions, prepared.target.lm, *sizes, reads_target, batching.is_sampled(prepared)
    )
    return Model(
        lm, (prepared.weights.target if reads_target else None, prepared.drafter.params), prepared.target.tokenizer
    )


@functools.lru_cache
def _language_model(
    drafter: Drafter, target: LanguageModel, gamma: int, nodes: int, reads_target: bool, sampled: bool
) -> LanguageModel:
    def to_distribution(logits: Float[Array, "B T W"], draft_tokens: Any = None, seen: Any = None) -> Distribution:
        logits = match_vocab(logits, target.vocab_size)
        if sampled:
            return Distribution(log_probs=jax.nn.log_softmax(logits), logits=logits)
        return Distribution(tokens=noise.first_largest(logits), logits=logits)

    def prefill(params: tuple[Params, Params], prompt: Prompt, capacity: int) -> tuple[Forward, Cache]:
        row = decoder_prompt(target, prompt)
        batch, width = row.tokens.shape
        forward, cache = Forward(jnp.zeros((batch, 1, target.vocab_size)), jnp.zeros((batch, width, 0))), None
        if reads_target:
            forward, cache = target.prefill(params[0], prompt, capacity)
        state = drafter.init(Weights(*params), prompt, capacity - width, forward)
        row = row._replace(tokens=jnp.pad(row.tokens, ((0, 0), (0, capacity - width))))
        verified = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(batch, nodes + 1, x.shape[-1])), forward)
        return forward, (Caches(cache, state), row, verified)

    def extend(
        params: tuple[Params, Params],
        cache: tuple[Caches, Prompt, Forward],
        tokens: Int[Array, "B 1"],
        parent: Int[Array, "B N"] | None = None,
    ) -> tuple[Forward, Cache]:
        assert parent is None
        (caches, row, verified), weights = cache, Weights(*params)
        row = row._replace(tokens=token_rows.append(row.tokens, row.length - 1, tokens))
        limit, keys = jnp.full_like(row.length, gamma), noise.row_keys(jax.random.key(0), tokens.shape[0])
        context = DraftContext(keys, row, limit, gamma, False, to_distribution)
        draft, caches = drafter.propose(weights, caches, context)
        logits = jax.nn.one_hot(draft.tokens[:, :1], target.vocab_size)
        verdict = Verdict(draft.length, draft.tokens[:, 0], draft.length, draft.parent)
        judged = verified._replace(logits=jnp.repeat(logits, nodes + 1, axis=1))
        caches = drafter.commit(weights, caches, row, verdict, judged)
        return Forward(logits, logits[..., :0]), (caches, row, verified)

    def rewind(cache: Cache, length: Int[Array, " B"]) -> Cache:
        return cache

    return LanguageModel(prefill, extend, rewind, target.vocab_size, target.start_token)
