"""The exact law of what a decoder emits, by enumeration of everything it can draw.

The decoder is the shipped one: its `init` and `step` run as they are, compiled, except that
`noise.categorical` and `noise.uniform` return what a script says (and `lax.scan` and `loops.up_to` are unrolled, so
that every draw of a step is a call of its own). Each row of the batch is one path, with a weight. Paths are split in
the order in which a call draws:

* a draw of a token: the call is run to see the law it asks for, and the path becomes one path per token, each
  with its share of the weight;
* a coin: what a step does is piecewise constant in a coin. The points where it changes (tokens, lengths, number
  accepted, or the law of a later draw; with the later coins all at their top, or all at their bottom) are found by
  bisection over the 2^23 values that `jax.random.uniform` takes, and the path becomes one path per interval. For the
  rejection rule these are "accept" and "reject"; behind a rejection a coin splits nothing. A coin that matters only
  where some of the later ones are high and others low is missed.

So drafters that draw nothing, rules without coins, drafts of varying length and rules that take several
things from one coin are no special cases: nothing here knows what a draft is. But a decoder must draw by
`noise.categorical` and `noise.uniform` alone, and outside of `while_loop` and `cond`; one whose output depends on its
keys otherwise is refused, and so is one in which a path reads two draws with one key (see `independence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import accept as accept_rules
from jaxspec import buffers, drafters
from jaxspec import warp as warps
from jaxspec.base import AcceptRule, Decoder, DecodeState, Drafter, Model, Policy, Prompt, Warp, Weights
from jaxspec.decode import autoregressive, speculative
from jaxspec.testing.independence import NOTHING_USED, Draws, Used, merged
from jaxspec.testing.outcomes import Outcomes, Weight, take
from jaxspec.testing.script import init_program, step_program
from jaxspec.testing.tables import SequenceLaw, plain_law


def certify(
    target: Model,
    *,
    drafter: Model | Drafter | None = None,
    accept: AcceptRule | None = None,
    gamma: int = 2,
    warp: Warp | None = None,
    controls: Any = None,
    draft_controls: Any = None,
    prompt: Prompt | None = None,
    steps: int = 4,
    eos: Sequence[int] = (),
    draft_params: Any = None,
    policy: Policy | None = None,
) -> float:
    """How far a decoder's tokens are from plain sampling's: the total variation of the two exact laws.

    0 (some 1e-7, in float32) proves that the first `steps` tokens are exact for these parameters; 0.01 means
    that some event, say "the second token is 5", has a probability that is off by 0.01.

    It speaks of these parameters, of a row by itself, and of float32, so certify more than one pair. A coin that
    matters only where some later ones are high and others low may be missed. Draws that share a key are refused; that
    draws with different keys are independent is taken for granted, and that nothing else in the decoder depends on
    keys is tried with other keys, not proved.

    Args:
        target: a model with few tokens, such as `table_model(key, vocab=3)`.
        drafter: a Model, a Drafter, or None for plain decoding.
        accept: the rule; `accept.rejection()` by default.
        gamma: guesses per round.
        warp, controls: of `jaxspec.warp`, controls with one row; by default the model's own law.
        draft_controls: the drafter's, where they differ.
        prompt: one row; by default the token 0.
        steps: how many tokens the laws are over.
        eos: tokens that end a sequence.
        draft_params: the drafter's parameters, where they are not its own.
        policy: of `jaxspec.policies`, with one value for each of its parameters. What it remembers is then part of
            every path (`decoder_law(merge=False)`), so keep `steps` small.

    Raises:
        ValueError, FloatingPointError, RuntimeError: see `decoder_law`.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=3), table_model(jax.random.key(2), vocab=3)
        >>> certify(target, drafter=draft, gamma=1, steps=3) < 1e-6
        True
    """
    warp = warps.sampling() if warp is None else warp
    if controls is None:
        controls = warps.Controls(jnp.ones(1), jnp.full(1, target.lm.vocab_size), jnp.ones(1))
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)) if prompt is None else prompt
    if isinstance(drafter, Model):
        drafter, draft_params = drafters.model(drafter.lm), drafter.params
    if drafter is None:
        decoder = autoregressive(target.lm, warp)
    else:
        rule = accept_rules.rejection() if accept is None else accept
        draft_params = drafter.params if draft_params is None else draft_params
        drafter = drafter._replace(params=None, models=())
        bare = None if policy is None else policy._replace(params=None)
        decoder = speculative(target.lm, drafter, rule, warp, gamma, bare)
    law = decoder_law(
        decoder,
        Weights(target.params, draft_params),
        prompt,
        controls,
        draft_controls=draft_controls,
        policy_values=None if policy is None else jax.tree.map(_one_row, policy.params),
        steps=steps,
        eos=eos,
        merge=policy is None,
    )
    return total_variation(law, plain_law(target, prompt, warp, controls, steps, eos))


def total_variation(first: SequenceLaw, second: SequenceLaw) -> float:
    """Half the sum of the absolute differences: the most by which the probability of any event differs.

    >>> total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.75, (2,): 0.25})
    0.5
    """
    return sum(abs(first.get(x, 0.0) - second.get(x, 0.0)) for x in first.keys() | second.keys()) / 2


def decoder_law(
    decoder: Decoder,
    weights: Weights,
    prompt: Prompt,
    controls: Any,
    *,
    draft_controls: Any = None,
    policy_values: Any = None,
    steps: int,
    eos: Sequence[int] = (),
    limit: int | None = None,
    merge: bool = True,
) -> SequenceLaw:
    """The exact law of the first `steps` tokens that a decoder emits; the top of this file has the method.

    Args:
        decoder: of `jaxspec.speculative`, `jaxspec.autoregressive` or your own.
        weights: its parameters.
        prompt: one row.
        controls, draft_controls: of the decoder's warp, one row; the drafter's where they differ.
        policy_values: of the decoder's draft-length policy, one row; None where it has none.
        steps: tokens.
        eos: tokens that end a sequence; such sequences are shorter tuples.
        limit: the limit on new tokens that the decoder is given. By default so many that no draft is cut short by it
            before the last of the `steps` is there; `steps` itself proves the cut drafts exact, too.
        merge: whether paths with the same committed tokens are merged after each round, which keeps them
            fewer than the sequences. It takes for granted that what else a state holds (garbage behind the
            lengths, a drafter's memory of past rounds) does not change the law. Without, nothing is taken for
            granted, and each round multiplies the paths.

    Returns:
        The probability of each sequence that has one.

    Raises:
        ValueError: more than one row; a decoder that draws in another way, or twice with one key; a state with an
            array that does not have the batch first.
        FloatingPointError: the target's logits are not finite on some path.
        RuntimeError: a round that commits nothing.

    Example:
        >>> from jaxspec.testing import table_model_from
        >>> toy = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
        >>> prompt = Prompt(jnp.array([[0]]), jnp.array([1]))
        >>> decoder = autoregressive(toy.lm, warps.greedy())
        >>> decoder_law(decoder, Weights(toy.params), prompt, None, steps=3)
        {(0, 0, 0): 1.0}
    """
    if prompt.tokens.shape[0] != 1 or prompt.length.shape != (1,):
        raise ValueError(f"got a prompt of {prompt.tokens.shape[0]} rows: expected the one whose law is asked for")
    limit = steps + decoder.gamma if limit is None else limit
    shared = weights, jnp.asarray(list(eos) or [-1], jnp.int32)
    asked = jax.tree.map(np.asarray, (prompt, (controls, draft_controls, policy_values), np.full(1, limit, np.int32)))
    first = init_program(decoder, buffers.room(limit, decoder.gamma))
    call, weight = Outcomes(first, shared, asked, chunk=64), np.ones(1)
    draws, used = Draws(), NOTHING_USED
    law: SequenceLaw = {}
    for _ in range(steps + 1):
        ends = call.enumerate(weight)
        used = draws.record(call.events, ends, used)
        rows, weight = ends.state, ends.weight
        live, ended = _retire(rows, weight, steps)
        for tokens, probability in ended.items():
            law[tokens] = law.get(tokens, 0.0) + probability
        if not live.any():
            return draws.law(law)
        rows, weight, used = take((rows, weight, used), live)
        if merge:
            rows, weight, used = _merge(rows, weight, used)
        call = Outcomes(step_program(decoder), shared, rows)
    raise RuntimeError(f"a row has not ended after {steps} rounds: in some round nothing was committed to it")


def _one_row(value: Any) -> Array:
    array = jnp.asarray(value)
    return array[None] if array.ndim == 0 else array


def _new_tokens(rows: DecodeState) -> Int[np.ndarray, "N S"]:
    """The new tokens of each row from column 0, and -1 behind them."""
    slot = np.arange(rows.tokens.shape[1])[None, :]
    new = np.take_along_axis(np.asarray(rows.tokens), (slot + rows.start[:, None]) % slot.size, axis=1)
    return np.where(slot < (rows.length - rows.start)[:, None], new, -1)


def _merge(rows: DecodeState, weight: Weight, used: Used) -> tuple[DecodeState, Weight, Used]:
    """One of the rows for each sequence of committed tokens, with the weight and the used keys of all of them."""
    _, first, which = np.unique(_new_tokens(rows), axis=0, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    return take(rows, first), np.bincount(which, weights=weight), merged(used, which)


def _retire(rows: DecodeState, weight: Weight, steps: int) -> tuple[np.ndarray, SequenceLaw]:
    """Which rows go on, and the sequences of those that do not."""
    if rows.failed.any():
        raise FloatingPointError("the target's logits are not finite, on a path of nonzero probability")
    live = ~np.logical_or(rows.done, rows.length - rows.start >= steps)
    tokens, which = np.unique(_new_tokens(rows)[~live, :steps], axis=0, return_inverse=True)
    mass = np.bincount(which.reshape(-1), weights=weight[~live], minlength=len(tokens))
    return live, {tuple(x[x >= 0].tolist()): float(p) for x, p in zip(tokens, mass, strict=True)}
