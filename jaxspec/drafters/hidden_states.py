"""What drafters that read their target's hidden states share: checks, the accepted path, tokens that are drawn in a
row.

Axis letters as in `jaxspec.base`; W logits of a drafter, C draft tokens that it has logits of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.base import (
    Bound,
    Cache,
    Caches,
    Commit,
    Draft,
    DraftContext,
    Drafter,
    DraftInit,
    Forward,
    Head,
    LanguageModel,
    Model,
    Needs,
    Params,
    Prompt,
    Shared,
    Verdict,
    Weights,
)
from jaxspec.drafters.sequential import sequential
from jaxspec.drafters.tree_cache import NodeReader


class TargetRequirements(NamedTuple):
    """What a network expects of its target; checked before anything runs.

    Attributes:
        vocab_size: number of token ids.
        hidden_size: width of the target's features, and of each tap.
        taps: layers whose output it reads (`Forward.taps`), counted as `language_model(config, taps)` does; empty:
            none.
        embedding, head: whether it takes these from the target.
    """

    vocab_size: int
    hidden_size: int
    taps: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False


def bound(drafter: Drafter, params: Params, target: Model) -> Bound[Drafter]:
    """A drafter with its values, and the target that it was made for."""
    return Bound(drafter, params, target=target)


def check_target(needs: Needs, target: Model, kind: str) -> None:
    """Compares what a network expects with the target.

    Raises:
        ValueError: the target gives no features or not the taps, or is of another width or vocabulary.
    """
    lm, name = target.lm, target.name or "the target"
    if lm.feature_size == 0:
        raise ValueError(
            f"{kind} reads hidden states, and {name} gives none (LanguageModel.feature_size is 0): expected a network "
            "of jaxspec.nets"
        )
    if lm.feature_size != needs.hidden_size:
        raise ValueError(
            f"{kind} reads hidden states of width {needs.hidden_size}, and those of {name} have {lm.feature_size}: it "
            "was made for another target"
        )
    if lm.vocab_size != needs.vocab_size:
        raise ValueError(
            f"{kind} was made for {needs.vocab_size} token ids, and {name} has {lm.vocab_size}: it was made for "
            "another target"
        )
    if needs.taps and lm.taps != needs.taps:
        have = f"has the outputs of layers {list(lm.taps)}" if lm.taps else "was built without taps"
        raise ValueError(
            f"{kind} reads the outputs of layers {list(needs.taps)}, and {name} {have}: give it "
            f"jaxspec.with_taps(target, {list(needs.taps)})"
        )
    for wanted, function, what in ((needs.embedding, lm.embed, "embed"), (needs.head, lm.head, "head")):
        if wanted and function is None:
            raise ValueError(f"{kind} uses its target's {what}, and the LanguageModel of {name} has none")


class TrimmedParams(NamedTuple):
    """A network's own parameters, and those of the model whose head it uses."""

    own: Params
    head: Params


def with_head(network: Bound[Any], model: Model) -> Bound[Any]:
    """A network that uses the head of `model` in place of its target's: one of fewer tokens (FR-Spec).

    The text keeps the target's distribution; what the head leaves out is never drafted.

    Args:
        network: of `nets.eagle`, `mtp`, `heads` or `block`, without a head of its own, with its parameters.
        model: `jaxspec.trim_vocabulary(target, size=...)`.

    Raises:
        ValueError: the network has a head of its own, or the model's reads features of another width or writes another
            vocabulary.

    Reference: Zhao et al., FR-Spec, arXiv 2502.14856.
    """
    needs = network.functions.needs
    if not needs.head:
        raise ValueError(
            "the drafter has a head of its own, which is trimmed in training (draft_vocab), not afterwards"
        )
    have = model.lm.feature_size, model.lm.vocab_size
    if model.lm.head is None or have != (needs.hidden_size, needs.vocab_size):
        raise ValueError(
            f"the head is that of {model.name or 'a model'} of width {have[0]} with {have[1]} token ids, and the "
            f"drafter's target has {needs.hidden_size} and {needs.vocab_size}: expected jaxspec.trim_vocabulary(target)"
        )
    functions = _with_head(network.functions, model.lm.head)
    return network._replace(functions=functions, params=TrimmedParams(network.params, model.params))


@functools.cache
def _with_head(functions: Any, head: Head) -> Any:
    def passed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: TrimmedParams, *arguments: Any) -> Any:
            logits = functools.partial(head, params.head)
            given = (x._replace(logits=logits) if isinstance(x, Shared) else x for x in arguments)
            return function(params.own, *given)

        return call

    found = {
        name: getattr(functions, name, None) for name in ("read", "extend", "append", "block", "logits", "correct")
    }
    return functions._replace(**{name: passed(function) for name, function in found.items() if function is not None})


def shared_with(lm: LanguageModel, params: Params) -> Shared:
    """The target's embedding and head, with its parameters; what it lacks nobody calls (`check_target`)."""

    def embed(tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        assert lm.embed is not None
        return lm.embed(params, tokens)

    def logits(features: Float[Array, "B T M"]) -> Float[Array, "B T V"]:
        assert lm.head is not None
        return lm.head(params, features)

    return Shared(embed, logits)


def row_of(lm: LanguageModel, prompt: Prompt) -> Prompt:
    """What the target's row holds after prefill: the prompt, or an encoder-decoder's start token."""
    if lm.start_token is None:
        return prompt
    return Prompt(jnp.full_like(prompt.tokens[:, :1], lm.start_token), jnp.ones_like(prompt.length))


def on_path(forward: Forward, verdict: Verdict, depth: int | None = None) -> Forward:
    """The target's features and taps at the last committed token and the accepted ones after it, in order.

    What follows these is garbage. Fed tokens of a chain are in order already.

    Args:
        forward: of the verification.
        verdict: of the rule.
        depth: most draft tokens of a path; None: all that were fed.
    """
    if verdict.path is None:
        return forward
    path = verdict.path if depth is None else verdict.path[:, :depth]
    fed = jnp.pad(path + 1, ((0, 0), (1, 0)))[:, :, None]

    def along(x: Float[Array, "B N D"] | None) -> Float[Array, "B depth D"] | None:
        return None if x is None else jnp.take_along_axis(x, fed, axis=1)

    return Forward(forward.logits, jnp.take_along_axis(forward.features, fed, axis=1), along(forward.taps))


def take(rows: Array, index: Int[Array, " B"]) -> Array:
    """rows[b, index[b]] for each b."""
    return jnp.take_along_axis(rows, index.reshape(-1, *[1] * (rows.ndim - 1)), axis=1)[:, 0]


def draw_in_a_row(
    first: Callable[[Any], tuple[Float[Array, "B W"], Any]],
    following: Callable[[Int[Array, ""], Int[Array, " B"], Any], tuple[Float[Array, "B W"], Any]],
    carry: Any,
    context: DraftContext,
    count: int,
) -> tuple[Draft, Any]:
    """`sequential` for drafters with logits of at most `count` tokens, whatever gamma; functions as there."""
    gamma = min(context.gamma, count)
    own = context._replace(gamma=gamma, limit=jnp.minimum(context.limit, gamma))

    def begin(carry: Any):
        logits, carry = first(carry)
        return logits, None, carry

    def proceed(i: Int[Array, ""], last: Int[Array, " B"], carry: Any):
        logits, carry = following(i, last, carry)
        return logits, None, carry

    draft, carry = sequential(begin, proceed, carry, own)
    # Among other drafters (`drafters.fallback`) gamma may be larger: the rest is padding.
    return jax.tree.map(lambda x: _padded(x, gamma, context.gamma), draft), carry


def _padded(x: Array, gamma: int, width: int) -> Array:
    if x.ndim < 2 or gamma == width:
        return x
    return jnp.pad(x, [(0, 0), (0, width - gamma)] + [(0, 0)] * (x.ndim - 2))


def reader_at_once(
    init: DraftInit,
    logits: Callable[[Weights, Caches, DraftContext], tuple[Float[Array, "B C W"], Cache | None]],
    commit: Commit,
    needs: Needs,
    count: int,
) -> NodeReader:
    """Trees of a drafter whose distributions depend on the depth alone, and are all known at once.

    Args:
        init, commit: the drafter's.
        logits: (weights, caches, context) -> those of `count` draft tokens, or of as many as the tree has nodes, if
            these are fewer; and the target's cache, if they were made with it.
        needs: the drafter's, of the target.
        count: of draft tokens that there are logits for.
    """

    def start(weights: Weights, caches: Caches, context: DraftContext, fed: int) -> tuple:
        made, cache = logits(weights, caches, context)
        return made, jnp.zeros((), jnp.int32), cache

    def first(weights: Weights, state: Any, carry: tuple, context: DraftContext, width: int) -> Any:
        return carry[0][:, :1], carry

    def following(weights: Weights, tokens: Int[Array, "B n"], parent: Int[Array, "B F"], carry: tuple) -> Any:
        made, depth, cache = carry
        here = jax.lax.dynamic_slice_in_dim(made, depth + 1, 1, axis=1)
        return jnp.broadcast_to(here, (*tokens.shape, made.shape[-1])), (made, depth + 1, cache)

    def after(caches: Caches, carry: tuple, context: DraftContext, slots: Int[Array, "B N"]) -> Caches:
        return caches if carry[2] is None else caches._replace(target=carry[2])

    return NodeReader(
        lambda nodes: init, start, first, following, after, lambda levels: commit, needs.vocab_size, count
    )
