"""Generation inside a program of your own: under `jit`, `vmap`, `scan` or a training step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from jaxspec.core import (
    Before,
    Keys,
    LanguageModel,
    LogProbs,
    Params,
    Prompt,
    Request,
    Sampler,
    Weights,
    noise,
    programs,
    token_rows,
)
from jaxspec.core.checks import check_type, key_of
from jaxspec.decode import loop, teacher_forcing
from jaxspec.decode.prompts import arrays_of, check_prompt
from jaxspec.decode.request import Prepared, check_positions


class Arguments(NamedTuple):
    """The arguments of `Decoder.init`.

    Attributes:
        weights, prompt: the parameters of both models, and the rows to read.
        request: keys, limits, end tokens and sampling parameters of each row.
        headroom: tokens that a row may grow by.
        before: the part of all prompts that was read before.
    """

    weights: Weights
    prompt: Prompt
    request: Request
    headroom: int
    before: Before | None = None


def rollout(
    prepared: Prepared,
    *,
    weights: Weights | None = None,
    prompt: Prompt | None = None,
    key: Key[Array, ""] | Keys | None = None,
) -> loop.Outcome:
    """`generate` as a pure function of arrays, which may be traced: for `jit`, `vmap` and training
    loops.

    The generation is prepared once, outside, where the options and an example of the prompts are
    checked; arguments given here replace its arrays. Nothing is read on the host, so a rollout has no
    text, and failures are values: `Outcome.failed`.

    Tokens are constants for `jax.grad`. `Outcome.log_probs` (with `log_probs=True`) have the
    gradient of teacher forcing: the gradient of log p(token | tokens before it) in the target's
    parameters. JAX computes it by one more pass over the finished rows, and only if it is asked
    for. It is the same for all drafters. The drafter's parameters have the gradient 0, since they
    change no probability of the target. `jax.jvp` is refused by JAX.

    Args:
        prepared: a generation, as `jaxspec.prepare` returns it.
        weights: parameters, such as `prepared.weights._replace(target=params)`; by default the
            generation's.
        prompt: rows of token ids, as many as the generation has prompts; by default the
            generation's.
        key: one key, or one per row; by default the generation's.

    Returns:
        Tokens [rows, max_new_tokens' bucket], how many of each row are real, counts and rounds.

    Raises:
        TypeError: the generation, the weights, the prompt or the key is something else.
        ValueError: while tracing: the prompt has another number of rows, or more positions than the
            model with the generation's limit. A prompt that is not traced is also refused if it is
            empty or has other ids. In `jax.grad`: the target's pass over the finished rows cannot
            be differentiated.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> prepared = jaxspec.prepare(
        ...     model,
        ...     prompt,
        ...     drafter=model,
        ...     gamma=3,
        ...     max_new_tokens=8,
        ...     temperature=1.0,
        ...     key=jax.random.key(0),
        ... )
        >>> sample = jax.jit(lambda key: jaxspec.rollout(prepared, key=key).length)
        >>> sample(jax.random.key(7)).tolist()
        [8]
    """
    begin = arguments(prepared, weights=weights, prompt=prompt, key=key)
    loop.check_fits(prepared)
    # A training loop would otherwise store the whole loop for a gradient, which a loop of unknown
    # length cannot have.
    constant, fixed_prompt, request = jax.lax.stop_gradient(
        (begin.weights, begin.prompt, begin.request)
    )
    outcome = loop.generation(
        prepared.decoder, constant, fixed_prompt, request, prepared.max_new_tokens, begin.before
    )
    if outcome.log_probs is None:
        return outcome
    differentiable = Differentiable(
        begin.weights.target, begin.prompt, begin.request.sampling_params
    )
    reported = _with_gradient(
        prepared.target.lm,
        prepared.sampler,
        differentiable,
        (outcome.tokens, outcome.length),
        outcome.log_probs,
    )
    return outcome._replace(log_probs=reported)


class Differentiable(NamedTuple):
    """The values that log probabilities of given tokens depend on."""

    params: Params
    prompt: Prompt
    sampling_params: Any


NewTokens = tuple[Int[Array, "B T"], Int[Array, " B"]]
"""The new tokens of each row, and how many of them are real."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradient(
    lm: LanguageModel, sampler: Sampler, inputs: Differentiable, new: NewTokens, reported: LogProbs
) -> LogProbs:
    """Returns the log probabilities that a generation has reported, with the gradient of teacher
    forcing.
    """
    return reported


def _forward(
    lm: LanguageModel, sampler: Sampler, inputs: Differentiable, new: NewTokens, reported: LogProbs
) -> tuple[LogProbs, Any]:
    return reported, (inputs, new, reported.top_tokens)


def _backward(
    lm: LanguageModel, sampler: Sampler, residuals: Any, gradient: LogProbs
) -> tuple[Any, None, None]:
    inputs, new, top_tokens = residuals

    def computed(inputs: Differentiable) -> LogProbs:
        return teacher_forcing.log_probs_of(lm, sampler, *inputs, *new, top_tokens)

    try:
        return jax.vjp(computed, inputs)[1](gradient)[0], None, None
    except (ValueError, NotImplementedError) as error:
        if programs.has_explicit_context():
            raise ValueError(
                "log probabilities of rollout have no gradient under jax.set_mesh with Explicit "
                "axes: take the gradient outside of it, or make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,) * len(names)"
            ) from error
        raise ValueError(
            "log probabilities of rollout have no gradient here, since the target's pass over the "
            f"finished rows cannot be differentiated: {error}. Make the target's functions "
            "differentiable in reverse (no while_loop or kernel without a gradient), or compute "
            "the log probabilities of rollout(...).tokens by a pass of your own"
        ) from error


_with_gradient.defvjp(_forward, _backward)


def arguments(
    prepared: Prepared,
    *,
    weights: Weights | None = None,
    prompt: Prompt | None = None,
    key: Key[Array, ""] | Keys | None = None,
) -> Arguments:
    """Returns the arguments of `prepared.decoder.init`, for your own loop over `decoder.step`."""
    check_type(prepared, Prepared, "the generation", "what jaxspec.prepare returned")
    check_type(weights, Weights | None, "weights", "prepared.weights._replace(target=params)")
    check_type(prompt, Prompt | None, "prompt", "a jaxspec.Prompt of token ids")
    if prepared.before is not None and not (weights is None and prompt is None):
        raise ValueError(
            "the generation was prepared with a prefix, which belongs to its weights and prompts: "
            "prepare it without one to give others"
        )
    if weights is None:
        weights = prepared.weights
    if prompt is None:
        prompt = prepared.prompt
    else:
        prompt = arrays_of(prompt)
    request = prepared.request
    rows = len(prepared.prompt.length)
    if prompt is not prepared.prompt:
        check_prompt(prompt, prepared.target.lm)
        if len(prompt.length) != rows:
            shape = prompt.tokens.shape
            raise ValueError(
                f"got prompt tokens of shape {shape}: expected {rows} rows, as the generation has"
            )
        # Lengths may be traced; the prompts' width bounds them.
        limit = np.asarray(request.max_new_tokens)
        check_positions(prepared.target, prepared.drafter, prompt, limit, padded=True)
    if jax.tree.structure(weights) != jax.tree.structure(prepared.weights):
        raise ValueError(
            f"weights have the structure {jax.tree.structure(weights)!s:.200}: expected that of "
            "prepared.weights"
        )
    if key is not None:
        request = request._replace(keys=noise.row_keys(key_of(key), len(request.max_new_tokens)))
    headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
    return Arguments(weights, prompt, request, headroom, prepared.before)
