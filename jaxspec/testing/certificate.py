"""The exact distribution of the tokens that a decoder emits, by enumeration of everything it can
draw.

The decoder is the shipped one: its `init` and `step` run as they are, compiled, except that the
functions of `jaxspec.core.noise` return the entries of a script and record the draws (`script`).
Each text committed so far is a row with a weight, and in each round all outcomes from it are
enumerated (`outcomes`). Draws that nothing depends on stay open, which makes trees feasible.

The enumeration works without knowledge of drafts. So it treats all decoders alike: drafters that
draw nothing, rules that use a uniform twice, drafts of varying length, trees, and draws inside of
scans, loops and conds. A decoder must draw only by the functions of `noise`. It is refused if its
output depends on its keys in another way, or if a path depends on two draws with one key
(`independence`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import core
from jaxspec.core import token_rows
from jaxspec.decode import autoregressive, speculative
from jaxspec.decode.generate import impossible_verdict
from jaxspec.decode.request import Prepared, prepare
from jaxspec.testing.declared import check_declared
from jaxspec.testing.independence import Draws, Used, merged, nothing_used
from jaxspec.testing.outcomes import Outcomes, Weight, new_tokens
from jaxspec.testing.paths import take
from jaxspec.testing.script import init_program, step_program
from jaxspec.testing.tables import SequenceDistribution, plain_distribution

SUSPICIOUS = 1e-3  # total variation beyond rounding, for which a cause is sought


def certify(
    target: core.Model,
    *,
    drafter: core.Model | core.Drafter | core.BoundDrafter | None = None,
    rule: core.Rule | None = None,
    gamma: int = 2,
    steps: int = 4,
    prompt: core.Prompt | None = None,
    eos_ids: Sequence[int] = (),
    policy: core.BoundPolicy | core.Policy | None = None,
    sampler: core.Sampler | None = None,
    sampling_params: Any = None,
    **options: Any,
) -> float:
    """Computes the total variation of the exact distributions of a decoder's tokens and of plain
    sampling's.

    0 (some 1e-7, in float32) proves that the first `steps` tokens are exact for these parameters.
    0.01 means that the probability of some event, such as "the second token is 5", is off by 0.01.

    The proof is for these parameters, for a row by itself and for float32, so certify more than one
    pair. Draws that share a key are refused; draws with different keys count as independent. Other
    keys are tried as a check, without proof, that nothing else in the decoder depends on keys. With
    many draws in a round the enumeration may miss cases (`outcomes`).

    Args:
        target: a model with few tokens, such as `table_model(key, vocab=3)`.
        drafter, rule, gamma, eos_ids, policy: the arguments of `generate`; no end token by default.
            A policy's memory is part of every path (`decoder_distribution(merge=False)`), so keep
            `steps` small.
        steps: the number of tokens that the distributions are over.
        prompt: one row; by default the token 0.
        sampler, sampling_params: in place of the sampling options: your own sampler, and its
            parameters for one row.
        **options: sampling options, as `generate` has them; temperature 1 by default.

    Raises:
        ValueError: the distributions differ, since the drafter draws from others than its draft
            declares.
        ValueError, FloatingPointError, RuntimeError: the errors of `decoder_distribution` and of
            `generate`.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=3),
        ...     table_model(jax.random.key(2), vocab=3),
        ... )
        >>> certify(target, drafter=draft, gamma=1, steps=3) < 1e-6
        True
    """
    if prompt is None:
        prompt = core.Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    policy = None if policy is None else _row_by_row(policy)
    settings: dict[str, Any] = (
        dict(temperature=1.0, key=jax.random.key(0), max_new_tokens=steps) | options
    )
    method: dict[str, Any] = dict(
        drafter=drafter, rule=rule, gamma=gamma, policy=policy, eos_ids=eos_ids
    )
    prepared = prepare(target, prompt, **method, **settings)
    return certify_prepared(
        prepared if sampler is None else with_sampler(prepared, sampler, sampling_params), steps
    )


def _row_by_row(policy: core.BoundPolicy | core.Policy) -> core.BoundPolicy:
    """Returns the policy, asked for each row as if the row were alone: the rows of a batch are
    paths here.
    """
    functions, params = policy[:2] if isinstance(policy, core.BoundPolicy) else (policy, None)

    def alone(function: Callable, *rows: Any) -> Any:
        def of_one(row: Any) -> Any:
            of_batch = function(*jax.tree.map(lambda leaf: leaf[None], row))  # of one
            return jax.tree.map(lambda leaf: leaf[0], of_batch)

        return jax.vmap(of_one)(rows)

    def max_draft(params: Any, state: Any, gamma: int, room: Int[Array, " N"]) -> Int[Array, " N"]:
        return alone(
            lambda params, state, room: functions.max_draft(params, state, gamma, room),
            params,
            state,
            room,
        )

    update = functools.partial(alone, functions.update)
    shorten = functions.shorten
    if shorten is None:
        shorten = None
    else:
        shorten = functools.partial(alone, shorten)
    return core.BoundPolicy(
        functions._replace(max_draft=max_draft, update=update, shorten=shorten), params
    )


def certify_prepared(prepared: Prepared, steps: int) -> float:
    """Certifies the first `steps` tokens of a generation's one row, as `certify` does.

    Raises:
        ValueError: the distributions differ, since the drafter draws from others than its draft
            declares.
        ValueError, FloatingPointError, RuntimeError: the errors of `decoder_distribution`.
    """
    eos = [token for token in np.asarray(prepared.request.eos)[0].tolist() if token >= 0]
    distribution = decoder_distribution(
        prepared, steps=steps, merge=prepared.request.policy is None
    )
    plain = plain_distribution(
        prepared.target,
        prepared.prompt,
        prepared.sampler,
        prepared.request.sampling_params,
        steps,
        eos,
    )
    distance = total_variation(distribution, plain)
    if distance > SUSPICIOUS and prepared.decoder.exact:
        check_declared(prepared)
    return distance


def with_sampler(
    prepared: Prepared,
    sampler: core.Sampler,
    sampling_params: Any,
    draft_sampling_params: Any = None,
) -> Prepared:
    """Returns the same generation with a sampler of your own.

    Args:
        prepared: the generation, from `prepare`.
        sampler: logits to distributions.
        sampling_params: its parameters, a row for each prompt.
        draft_sampling_params: the drafter's, where they differ.
    """
    decoder = autoregressive(prepared.target.lm, sampler)
    if prepared.drafter is not None:
        policy = prepared.options.policy
        decoder = speculative(
            prepared.target.lm,
            prepared.drafter.functions,
            prepared.options.rule,
            sampler,
            prepared.options.gamma,
            None if policy is None else policy.functions,
        )
    request = prepared.request._replace(
        sampling_params=sampling_params, draft_sampling_params=draft_sampling_params
    )
    return prepared._replace(decoder=decoder, sampler=sampler, request=request)


def total_variation(first: SequenceDistribution, second: SequenceDistribution) -> float:
    """Computes half the sum of the absolute differences: the largest difference between two
    probabilities of any event.

    >>> total_variation({(0,): 0.5, (1,): 0.5}, {(0,): 0.75, (2,): 0.25})
    0.5
    """
    return (
        sum(abs(first.get(x, 0.0) - second.get(x, 0.0)) for x in first.keys() | second.keys()) / 2
    )


def decoder_distribution(
    prepared: Prepared, *, steps: int, limit: int | None = None, merge: bool = True
) -> SequenceDistribution:
    """Enumerates the exact distribution of the first `steps` tokens of a decoder; the top of this
    file has the method.

    Args:
        prepared: a generation of one row, from `prepare`. Its `decoder` may be your own
            (`prepared._replace(decoder=...)`). Its key and its limit on new tokens are not read.
        steps: tokens. Sequences that end before are shorter tuples.
        limit: the limit on new tokens that the decoder is given. By default so many that no draft
            is cut short by it before the last of the `steps` is there; `steps` itself proves the
            cut drafts exact, too.
        merge: whether paths with the same committed tokens are merged after each round, which keeps
            them fewer than the sequences. It assumes that the rest of a state (garbage after the
            lengths, a drafter's memory of past rounds) does not change the distribution. Without,
            nothing is assumed: only paths with the same state are merged.

    Returns:
        The probability of each sequence that has one.

    Raises:
        ValueError: more than one row; a decoder that draws in another way, or twice with one key.
            An array of the state does not have the batch first. The rule's verdict is impossible on
            some path.
        FloatingPointError: the target's logits are not finite on some path.
        RuntimeError: a round that commits nothing, or one whose outcomes cannot be enumerated.

    Example:
        >>> from jaxspec.testing import table_model_from
        >>> toy = table_model_from(jnp.log(jnp.array([0.5, 0.3, 0.2])))
        >>> prompt = core.Prompt(jnp.array([[0]]), jnp.array([1]))
        >>> decoder_distribution(prepare(toy, prompt, temperature=0.0), steps=3)
        {(0, 0, 0): 1.0}
    """
    decoder = prepared.decoder
    prompt = prepared.prompt
    if prompt.tokens.shape[0] != 1 or prompt.length.shape != (1,):
        raise ValueError(
            f"got a prompt of {len(prompt.tokens)} rows: expected the one whose distribution is "
            "asked for"
        )
    if limit is None:
        limit = steps + decoder.gamma
    request = prepared.request._replace(keys=None, max_new_tokens=np.full(1, limit, np.int32))
    vocab = prepared.target.lm.vocab_size
    program = init_program(decoder, token_rows.headroom(limit, decoder.nodes), vocab)
    (prompt, request), tables = token_rows.take_out_shared((prompt, request))
    rows = jax.tree.map(np.asarray, (prompt, request))
    weight = np.ones(1)
    used = nothing_used(1)
    watch = functools.partial(_committed if merge else _everything, steps=steps)
    draws = Draws(steps)
    distribution = SequenceDistribution()
    shared = ((prepared.weights, prepared.before), tables)
    for _ in range(steps + 1):
        ends = Outcomes(program, shared, rows, watch).enumerate(weight)
        used = draws.record(program.sites, ends, used)
        rows, weight, used = _merge(ends.state, ends.weight, used, watch)
        if (rows.failed == core.Failure.RULE).any():
            raise impossible_verdict(prepared, "on a path of nonzero probability")
        live, ended = _retire(rows, weight, steps)
        for tokens, probability in ended.items():
            distribution[tokens] = distribution.get(tokens, 0.0) + probability
        if not live.any():
            return draws.distribution(distribution)
        (rows, weight, used), program = (
            take((rows, weight, used), live),
            step_program(decoder, vocab),
        )
        shared = prepared.weights, tables
    raise RuntimeError(
        f"a row has not ended after {steps} rounds: in some round nothing was committed to it"
    )


def _committed(rows: core.State, steps: int) -> list[np.ndarray]:
    """Returns the first new tokens of each row, and whether it goes on."""
    enough = rows.length - rows.start >= steps
    return [new_tokens(rows)[:, :steps], *map(np.asarray, (rows.done | enough, rows.failed))]


def _everything(rows: core.State, steps: int) -> list[np.ndarray]:
    """Returns everything that a row's future depends on."""
    live = ~_committed(rows, steps)[1]

    def of_live(leaf: np.ndarray) -> np.ndarray:
        return np.where(live.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, np.zeros((), leaf.dtype))

    return [*_committed(rows, steps), *map(of_live, jax.tree.leaves(rows))]


def _merge(
    rows: core.State, weight: Weight, used: Used, watch: Any
) -> tuple[core.State, Weight, Used]:
    """Merges rows that `watch` cannot tell apart: one row stays, with the weight and the used keys
    of all.
    """
    flat = [
        np.ascontiguousarray(leaf).reshape(len(weight), -1) for leaf in watch(rows) if leaf.size
    ]
    row_bytes = np.concatenate(
        [leaf.view(np.uint8).reshape(len(weight), -1) for leaf in flat], axis=1
    )
    _, first, which = np.unique(row_bytes, axis=0, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    return take(rows, first), np.bincount(which, weights=weight), merged(used, which)


def _retire(
    rows: core.State, weight: Weight, steps: int
) -> tuple[np.ndarray, SequenceDistribution]:
    """Returns which rows go on, and the sequences of those that do not."""
    if rows.failed.any():
        raise FloatingPointError(
            "the target's logits are not finite, on a path of nonzero probability"
        )
    tokens, over, _ = _committed(rows, steps)
    tokens, which = np.unique(tokens[over], axis=0, return_inverse=True)
    mass = np.bincount(which.reshape(-1), weights=weight[over], minlength=len(tokens))
    return ~over, {tuple(x[x >= 0].tolist()): float(p) for x, p in zip(tokens, mass, strict=True)}
