"""Generation inside a program of your own: under `jit`, `vmap`, `scan` or a training step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from jaxspec.core import Before, Keys, Prompt, Request, Weights, noise, token_rows
from jaxspec.decode import encoding, inputs, loop
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
    """`generate` as a pure function of arrays, which may be traced: for `jit`, `vmap` and training loops.

    The generation is prepared once, outside, where the options and an example of the prompts are checked; all of its
    arrays are its own unless given here. Nothing is read on the host, so there is no text, and what would be an error
    is a value: `Outcome.failed`. No gradient flows through the tokens.

    Args:
        prepared: a generation, as `jaxspec.prepare` returns it.
        weights: parameters, such as `prepared.weights._replace(target=params)`; by default the generation's.
        prompt: rows of token ids, as many as the generation has prompts; by default the generation's.
        key: one key, or one per row; by default the generation's.

    Returns:
        Tokens [rows, max_new_tokens' bucket], how many of each row are real, counts and rounds.

    Raises:
        TypeError: the generation, the weights, the prompt or the key is something else.
        ValueError: while tracing: the prompt has another number of rows, or more positions than the model with the
            generation's limit. A prompt that is not traced is also refused if it is empty or has other ids.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> prepared = jaxspec.prepare(model, prompt, drafter=model, gamma=3, max_new_tokens=8, temperature=1.0,
        ...                       key=jax.random.key(0))
        >>> sample = jax.jit(lambda key: jaxspec.rollout(prepared, key=key).length)
        >>> sample(jax.random.key(7)).tolist()
        [8]
    """
    begin = arguments(prepared, weights=weights, prompt=prompt, key=key)
    loop.check_fits(prepared)
    # Sampling has no gradient; a training loop would otherwise store the whole loop for one.
    constant = jax.lax.stop_gradient(begin.weights)
    return loop.generation(
        prepared.decoder, constant, begin.prompt, begin.request, prepared.max_new_tokens, begin.before
    )


def arguments(
    prepared: Prepared,
    *,
    weights: Weights | None = None,
    prompt: Prompt | None = None,
    key: Key[Array, ""] | Keys | None = None,
) -> Arguments:
    """Returns what `prepared.decoder.init` takes, for a loop of your own over `decoder.step`; see `rollout`."""
    inputs.check_type(prepared, Prepared, "the generation", "what jaxspec.prepare returned")
    inputs.check_type(weights, Weights | None, "weights", "prepared.weights._replace(target=params)")
    inputs.check_type(prompt, Prompt | None, "prompt", "a jaxspec.Prompt of token ids")
    if prepared.before is not None and not (weights is None and prompt is None):
        raise ValueError(
            "the generation was prepared with a prefix, which belongs to its weights and prompts: prepare it "
            "without one to give others"
        )
    weights = prepared.weights if weights is None else weights
    prompt = prepared.prompt if prompt is None else encoding.arrays_of(prompt)
    request, rows = prepared.request, len(prepared.prompt.length)
    if prompt is not prepared.prompt:
        encoding.check_prompt(prompt, prepared.target.lm)
        if len(prompt.length) != rows:
            shape = prompt.tokens.shape
            raise ValueError(f"got prompt tokens of shape {shape}: expected {rows} rows, as the generation has")
        # Lengths may be traced; the prompts' width bounds them.
        limit = np.asarray(request.max_new_tokens)
        check_positions(prepared.target, prepared.drafter, prompt, limit, padded=True)
    if jax.tree.structure(weights) != jax.tree.structure(prepared.weights):
        raise ValueError(
            f"weights have the structure {jax.tree.structure(weights)!s:.200}: expected that of prepared.weights"
        )
    if key is not None:
        request = request._replace(keys=noise.row_keys(inputs.key_of(key), len(request.max_new_tokens)))
    headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
    return Arguments(weights, prompt, request, headroom, prepared.before)
