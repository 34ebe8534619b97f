"""Several heads on the target's features, each for a token further ahead: blockwise decoding, Medusa, Hydra."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import buffers
from jaxspec.base import (
    Bound,
    Caches,
    Draft,
    DraftContext,
    Drafter,
    Forward,
    LanguageModel,
    Model,
    ParallelHeads,
    Prompt,
    Verdict,
    Weights,
)
from jaxspec.drafters.hidden_states import (
    bound,
    check_target,
    draw_in_a_row,
    on_path,
    reader_at_once,
    row_of,
    shared_with,
    take,
)


class HeadsState(NamedTuple):
    """The target's features at the last position it has read: that before the last committed token."""

    features: Float[Array, "B M"]


def heads(head: Bound[ParallelHeads], target: Model) -> Bound[Drafter]:
    """Drafts as many tokens as there are heads beside the target's own, all from the features of its last pass
    (Medusa).

    There is no pass of any model: head i is a small block and a vocabulary projection, which predicts the token after i
    draft tokens. Medusa's and blockwise decoding's heads do not look at these, and so each token is drawn
    independently of those before it; Hydra's do. gamma is cut to the number of heads.

    Args:
        head: heads and their parameters: `nets.heads.head(config)` in a `Bound`; `jaxspec.load_drafter` reads Medusa's.
        target: the model whose features they read.

    Raises:
        ValueError: the heads are for another target, or the target gives no features.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import gpt, heads as net
        >>> shape = gpt.GPTConfig(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=48)
        >>> target = jaxspec.Model(gpt.language_model(shape), gpt.init(shape, jax.random.key(0)))
        >>> config = net.HeadsConfig(32, dim=16, heads=3)
        >>> medusa = heads(jaxspec.Bound(net.head(config), net.init(config, jax.random.key(1))), target)
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> out = jaxspec.generate(target, prompt, drafter=medusa, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(target, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Stern, Shazeer, Uszkoreit, NeurIPS 2018, arXiv 1811.03115; Cai et al., Medusa, ICML 2024, arXiv
    2401.10774; Ankner et al., Hydra, arXiv 2402.05109.
    """
    check_target(head.functions.needs, target, "the heads")
    return bound(_heads(head.functions, target.lm), head.params, target, "heads")


@functools.lru_cache
def _heads(head: ParallelHeads, lm: LanguageModel) -> Drafter:
    def init(weights: Weights, prompt: Prompt, headroom: int, prefilled: Forward) -> HeadsState:
        return HeadsState(take(prefilled.features, row_of(lm, prompt).length - 1))

    def propose(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Draft, Caches]:
        row, shared, features = context.row, shared_with(lm, weights.target), caches.draft.features
        last = buffers.window(row.tokens, row.length - 1, 1)
        count = min(context.gamma, head.count)
        read = jnp.pad(last, ((0, 0), (0, count - 1)))  # the last committed token, and the draft tokens so far

        def logits_of(index: int, read: Int[Array, "B H"]) -> Float[Array, "B V"]:
            return head.logits(weights.draft, shared, index, features, read)

        def first(read: Int[Array, "B H"]):
            return logits_of(0, read), read

        def following(i: Int[Array, ""], token: Int[Array, " B"], read: Int[Array, "B H"]):
            read = jax.lax.dynamic_update_slice_in_dim(read, token[:, None].astype(read.dtype), i, axis=1)
            later = range(1, count) or (0,)  # of a single draft token this is traced, and never run
            each = [functools.partial(logits_of, index) for index in later]
            return jax.lax.switch(i - 1, each, read), read

        draft, _ = draw_in_a_row(first, following, read, context, head.count)
        return draft, caches

    def commit(weights: Weights, caches: Caches, row: Prompt, verdict: Verdict, forward: Forward) -> Caches:
        features = on_path(forward, verdict).features
        return caches._replace(draft=HeadsState(take(features, verdict.num_accepted)))

    def at_once(weights: Weights, caches: Caches, context: DraftContext) -> tuple[Float[Array, "B C V"], None]:
        shared, features = shared_with(lm, weights.target), caches.draft.features
        none = jnp.zeros((features.shape[0], head.count), jnp.int32)
        each = [head.logits(weights.draft, shared, i, features, none) for i in range(head.count)]
        return jnp.stack(each, axis=1), None

    # Heads that read tokens would need those of each path.
    reader = None if head.reads_tokens else reader_at_once(init, at_once, commit, head.needs, head.count)
    return Drafter(init, propose, commit, longest=head.count, reader=reader)
