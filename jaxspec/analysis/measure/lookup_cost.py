"""Searches of a drafter without a model as passes of one, so that `analysis.measure.cost` can time them.

Shapes: B batch.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec import buffers
from jaxspec.base import (
    Cache,
    Caches,
    DraftContext,
    Drafter,
    Forward,
    LanguageModel,
    Model,
    Params,
    Prompt,
    Verdict,
    Weights,
)
from jaxspec.decode.request import Job
from jaxspec.decode.state import decoder_prompt


def lookup_as_model(job: Job) -> Model:
    """A model whose c (`analysis.measure.cost.measure`) is what the draft tokens of a round cost together.

    A pass puts the token that it is fed in the place of the row's last one, has the drafter propose, commits all of the
    draft, and answers with the first draft token.

    Args:
        job: with a drafter that draws nothing (a look-up, or several).

    Returns:
        A model that is good for being measured alone.
    """
    assert job.drafter is not None and isinstance(job.drafter.functions, Drafter)
    lm = _language_model(job.drafter.functions, job.target.lm, job.decoder.gamma, job.decoder.nodes)
    return Model(lm, job.drafter.params, job.target.tokenizer)


@functools.cache
def _language_model(drafter: Drafter, target: LanguageModel, gamma: int, nodes: int) -> LanguageModel:
    nothing: Any = (
        None  # keys and distributions are for drafters that draw, the target's weights for those that read them
    )

    def prefill(params: Params, prompt: Prompt, capacity: int) -> tuple[Forward, Cache]:
        row = decoder_prompt(target, prompt)
        batch, width = row.tokens.shape
        forward = Forward(jnp.zeros((batch, 1, target.vocab_size)), jnp.zeros((batch, width, 0)))
        state = drafter.init(Weights(nothing, params), prompt, capacity - width, forward)
        return forward, (state, row._replace(tokens=jnp.pad(row.tokens, ((0, 0), (0, capacity - width)))))

    def extend(
        params: Params, cache: Cache, tokens: Int[Array, "B 1"], parent: Int[Array, "B N"] | None = None
    ) -> tuple[Forward, Cache]:
        assert parent is None
        (state, row), weights = cache, Weights(nothing, params)
        row = row._replace(tokens=buffers.append(row.tokens, row.length - 1, tokens))
        context = DraftContext(nothing, row, jnp.full_like(row.length, gamma), gamma, False, nothing)
        draft, caches = drafter.propose(weights, Caches(nothing, state), context)
        logits = jax.nn.one_hot(draft.tokens[:, :1], target.vocab_size)
        verified = jnp.repeat(logits, nodes + 1, axis=1)
        verdict = Verdict(draft.length, draft.tokens[:, 0], draft.length, draft.parent)
        caches = drafter.commit(weights, caches, row, verdict, Forward(verified, verified[..., :0]))
        return Forward(logits, logits[..., :0]), (caches.draft, row)

    def rewind(cache: Cache, length: Int[Array, " B"]) -> Cache:
        return cache

    return LanguageModel(prefill, extend, rewind, target.vocab_size, target.start_token)
