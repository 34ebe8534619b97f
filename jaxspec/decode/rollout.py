"""Generation inside a program of your own: under `jit`, `vmap`, `scan` or a training step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxspec import buffers, noise
from jaxspec.base import Keys, Prompt, Request, Weights
from jaxspec.decode import inputs, loop
from jaxspec.decode.request import Job, drafter_lms


class Arguments(NamedTuple):
    """What `Decoder.init` takes.

    Attributes:
        weights, prompt: of both models; what is read.
        request: keys, limits, end tokens and sampling parameters of each row.
        headroom: tokens that a row may grow by.
    """

    weights: Weights
    prompt: Prompt
    request: Request
    headroom: int


def rollout(
    job: Job,
    *,
    weights: Weights | None = None,
    prompt: Prompt | None = None,
    key: Key[Array, ""] | Keys | None = None,
) -> loop.Outcome:
    """`generate` as a pure function of arrays, which may be traced: for `jit`, `vmap` and training loops.

    The job is prepared once, outside, where the options and an example of the prompts are checked; all of its arrays
    are its own unless given here. Nothing is read on the host, so there is no text, and what would be an error is a
    value: `Outcome.failed`. No gradient flows through the tokens.

    Args:
        job: what `jaxspec.prepare` returned.
        weights: parameters, such as `job.weights._replace(target=params)`; by default the job's.
        prompt: rows of token ids, as many as the job has prompts; by default the job's.
        key: one key, or one per row; by default the job's.

    Returns:
        Tokens [rows, max_new_tokens' bucket], how many of each row are real, counts and rounds.

    Raises:
        TypeError: the job, the weights, the prompt or the key is something else.
        ValueError: while tracing: the prompt has another number of rows, or more positions than the model with the
            job's limit.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> job = jaxspec.prepare(model, prompt, drafter=model, gamma=3, max_new_tokens=8, temperature=1.0,
        ...                       key=jax.random.key(0))
        >>> sample = jax.jit(lambda key: jaxspec.rollout(job, key=key).length)
        >>> sample(jax.random.key(7)).tolist()
        [8]
    """
    given = arguments(job, weights=weights, prompt=prompt, key=key)
    constant = jax.lax.stop_gradient(given.weights)
    return loop.generation(job.decoder, constant, given.prompt, given.request, job.max_new_tokens)


def arguments(
    job: Job,
    *,
    weights: Weights | None = None,
    prompt: Prompt | None = None,
    key: Key[Array, ""] | Keys | None = None,
) -> Arguments:
    """What `job.decoder.init` takes, for a loop of your own over `job.decoder.step`; see `rollout`."""
    if not isinstance(job, Job):
        raise TypeError(f"the job is of type {type(job).__name__}: expected what jaxspec.prepare returned")
    if not isinstance(weights, Weights | None):
        raise TypeError(f"weights is of type {type(weights).__name__}: expected job.weights._replace(target=params)")
    if not isinstance(prompt, Prompt | None):
        raise TypeError(f"prompt is of type {type(prompt).__name__}: expected a jaxspec.Prompt of token ids")
    weights = job.weights if weights is None else weights
    prompt = job.prompt if prompt is None else Prompt(*map(jnp.asarray, prompt))
    rows, width = prompt.tokens.shape
    if rows != len(job.prompt.length) or prompt.length.shape != (rows,):
        raise ValueError(
            f"got prompt tokens of shape {prompt.tokens.shape} and lengths of shape {prompt.length.shape}: expected "
            f"{len(job.prompt.length)} rows, as the job was prepared with"
        )
    request = job.request
    if prompt is not job.prompt:  # whose lengths may not be known; those of the job's own were checked
        new = int(np.max(np.asarray(request.limit)))
        drafting = [("drafter", lm) for lm in (drafter_lms(job.drafter) if job.drafter is not None else ())]
        for who, lm in (("target", job.target.lm), *drafting):
            if lm.start_token is None and lm.max_positions is not None and width + new > lm.max_positions:
                raise ValueError(
                    f"prompts of {width} tokens, padding included, and {new} new ones need more positions than the "
                    f"{who}'s {lm.max_positions}: cut the prompts' padding, or lower max_new_tokens"
                )
    if key is not None:
        request = request._replace(keys=noise.row_keys(inputs.key_of(key), len(request.limit)))
    return Arguments(weights, prompt, request, buffers.headroom(job.max_new_tokens, job.decoder.nodes))
