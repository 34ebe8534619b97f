"""From the front door's arguments to arrays: every check of user input, every message about it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import accept as accept_rules
from jaxspec import buffers, drafters, noise, sharding
from jaxspec.base import (
    AcceptRule,
    Decoder,
    Drafter,
    Keys,
    LanguageModel,
    Model,
    Policy,
    Prompt,
    Request,
    Warp,
    Weights,
)
from jaxspec.decode.autoregressive import autoregressive
from jaxspec.decode.speculative import speculative
from jaxspec.decode.warping import Warping, check_ids, per_row, plan


class Job(NamedTuple):
    """Everything that `loop.run` and `loop.start` take."""

    decoder: Decoder
    keys: Keys
    weights: Weights
    prompt: Prompt
    request: Request
    max_new_tokens: int  # the output buffer: a bucket at least as large as any row's limit


def prepare(
    target: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    drafter: Model | Drafter | None = None,
    gamma: int = 5,
    accept: AcceptRule | None = None,
    policy: Policy | None = None,
    max_new_tokens: Any = 128,
    key: Any = None,
    eos_ids: Sequence[int] | None = None,
    **options: Unpack[Warping],
) -> Job:
    """Checks and converts; see `generate` for the arguments, their defaults and the errors."""
    if not isinstance(target, Model):
        raise TypeError(f"target is a {type(target).__name__}: expected a jaxspec.Model, as jaxspec.load returns it")
    if not isinstance(gamma, int) or gamma < 0:
        raise ValueError(f"gamma is {gamma!r}: expected an integer, 0 (plain decoding) or more")
    if not isinstance(policy, Policy | None):
        raise TypeError(f"policy is a {type(policy).__name__}: expected one of jaxspec.policies, or None")
    prompt = encode(target, prompts)
    batch = prompt.tokens.shape[0]
    limit = per_row(max_new_tokens, batch, "max_new_tokens", np.int32)
    if limit.min() < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens!r}: expected at least 1")
    # A rule may be any function; ours are `accept.Rule`s.
    soft = getattr(accept, "reads_soft", False) or (policy is not None and policy.reads_soft)
    warp, controls, draft_controls = plan(target, batch, soft, **options)
    if key is None:
        if np.any(np.asarray(controls.temperature) > 0):
            raise ValueError("key is required when temperature is not 0: pass key=jax.random.key(0), for example")
        key = jax.random.key(0)  # nothing is drawn at temperature 0
    weights, decoder = _decoder(target, drafter, gamma, accept, warp, policy)
    _check_positions(target.lm, "the target", prompt, int(limit.max()))
    if drafter is not None and decoder.gamma:
        for lm in drafter_lms(drafter):
            _check_positions(lm, "the drafter", prompt, int(limit.max()))
    values = _policy_values(policy, batch) if decoder.gamma else None
    request = Request(controls, jnp.asarray(limit), _eos(target, eos_ids), draft_controls, values)
    keys = noise.row_keys(key, batch)
    if (mesh := sharding.mesh_of(weights)) is not None:
        weights = sharding.place(weights, None, mesh)
        keys, prompt, request = sharding.place((keys, prompt, request), batch, mesh)
    return Job(decoder, keys, weights, prompt, request, buffers.bucket(int(limit.max())))


def encode(target: Model, prompts: Sequence[str] | str | Prompt) -> Prompt:
    """Strings, or a Prompt of token ids, as a checked Prompt in a bucket."""
    if isinstance(prompts, Prompt):
        _check_ids(prompts, target.lm.vocab_size)
        width = buffers.bucket(prompts.tokens.shape[1])
        tokens = jnp.pad(jnp.asarray(prompts.tokens, jnp.int32), ((0, 0), (0, width - prompts.tokens.shape[1])))
        return Prompt(tokens, jnp.asarray(prompts.length, jnp.int32))
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if target.tokenizer is None:
        raise ValueError("this model has no tokenizer: give a jaxspec.Prompt of token ids instead of text")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"prompt {index} is a {type(text).__name__}: expected text, or one jaxspec.Prompt for all")
        if not text.strip():
            raise ValueError(f"prompt {index} is empty: a prompt needs at least one token")
    prompt = buffers.pad(target.tokenizer(texts)["input_ids"] if texts else [])
    _check_ids(prompt, target.lm.vocab_size)  # a tokenizer may have ids that a model was never given
    return prompt


def _check_ids(prompt: Prompt, vocab: int) -> None:
    tokens, length = np.asarray(prompt.tokens), np.asarray(prompt.length)
    if tokens.ndim != 2 or length.shape != tokens.shape[:1]:
        raise ValueError(
            f"got prompt tokens of shape {tokens.shape} and lengths of shape {length.shape}: expected [batch, prompt] "
            "and [batch]"
        )
    if tokens.shape[0] == 0:
        raise ValueError("got no prompts: expected at least one")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"prompt tokens have dtype {tokens.dtype}: expected integers")
    for index, (row, n) in enumerate(zip(tokens, length, strict=True)):
        if n < 1:
            raise ValueError(f"prompt {index} is empty: a prompt needs at least one token")
        if n > len(row):
            raise ValueError(f"prompt {index} has length {n}, but its row holds {len(row)} tokens")
        outside = row[:n][(row[:n] < 0) | (row[:n] >= vocab)]
        if outside.size:
            raise ValueError(f"prompt {index} has token id {outside[0]}: expected ids from 0 to {vocab - 1}")


def _policy_values(policy: Policy | None, batch: int) -> Any:
    """The policy's parameters with a row for each prompt."""
    if policy is None:
        return None

    def rows(value: Any) -> Any:
        array = np.asarray(value)
        if array.ndim and array.shape[0] not in (1, batch):
            raise ValueError(f"the policy has a value for each of {array.shape[0]} rows, but there are {batch} prompts")
        return jnp.asarray(np.broadcast_to(array, (batch, *array.shape[1:])))

    return jax.tree.map(rows, policy.params)


def _decoder(
    target: Model,
    drafter: Model | Drafter | None,
    gamma: int,
    accept: AcceptRule | None,
    warp: Warp,
    policy: Policy | None,
) -> tuple[Weights, Decoder]:
    if policy is not None:
        policy = policy._replace(params=None)
    if policy is not None and drafter is None:
        raise ValueError("got a policy and no drafter: a policy chooses how many tokens a drafter guesses")
    if drafter is None or gamma == 0:
        return Weights(target.params), autoregressive(target.lm, warp)
    rule = accept_rules.rejection() if accept is None else accept
    if isinstance(drafter, Drafter):
        for model in drafter.models:
            _check_pair(target, model)
        made = speculative(target.lm, drafter._replace(params=None, models=()), rule, warp, gamma, policy)
        return Weights(target.params, drafter.params), made
    if not isinstance(drafter, Model):
        raise TypeError(f"drafter is a {type(drafter).__name__}: expected a jaxspec.Model, a Drafter, or None")
    _check_pair(target, drafter)
    drafts = drafters.model(drafter.lm, True) if getattr(rule, "plain_noise", False) else drafters.model(drafter.lm)
    made = speculative(target.lm, drafts, rule, warp, gamma, policy)
    return Weights(target.params, drafter.params), made


def drafter_lms(drafter: Model | Drafter) -> list[LanguageModel]:
    """The language models that draft."""
    own = [] if drafter.lm is None else [drafter.lm]
    return own if isinstance(drafter, Model) else own + [model.lm for model in drafter.models]


def _check_pair(target: Model, draft: Model) -> None:
    ours, theirs = _called("the target", target), _called("the drafter", draft)
    if (target.lm.start_token is None) != (draft.lm.start_token is None):
        kinds = ["an encoder-decoder" if m.lm.start_token is not None else "decoder-only" for m in (target, draft)]
        raise ValueError(f"{ours} is {kinds[0]} and {theirs} {kinds[1]}: both must be of one kind")
    if target.tokenizer is None or draft.tokenizer is None:
        if target.lm.vocab_size != draft.lm.vocab_size:
            raise ValueError(
                f"{ours} has {target.lm.vocab_size} token ids and {theirs} {draft.lm.vocab_size}, and without "
                "two tokenizers there is no telling whether the ids they share mean the same"
            )
        return
    first = first_difference(target.tokenizer, draft.tokenizer)
    if first is not None:
        index, word, other = first
        raise ValueError(
            f"{ours} and {theirs} have different tokenizers: id {index} is {word!r} for the target and {other!r} for "
            "the drafter. A drafter must share its target's vocabulary"
        )


def _called(who: str, model: Model) -> str:
    return f"{who} ({model.name})" if model.name else who


@functools.lru_cache(maxsize=16)  # a vocabulary of 256k takes a second, and every call of `generate` asks
def first_difference(ours: Any, theirs: Any) -> tuple[int, str, str] | None:
    """The first token id below both sizes that two tokenizers do not agree on, and what each calls it."""
    if ours is theirs:
        return None
    count = min(len(ours), len(theirs))
    pairs = zip(ours.convert_ids_to_tokens(range(count)), theirs.convert_ids_to_tokens(range(count)), strict=True)
    return next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None)


def _check_positions(lm: LanguageModel, who: str, prompt: Prompt, new: int) -> None:
    longest = int(np.max(np.asarray(prompt.length)))
    if lm.start_token is not None:
        if lm.max_prompt is not None and longest > lm.max_prompt:
            raise ValueError(f"a prompt has {longest} tokens, but {who} reads at most {lm.max_prompt}")
        longest = 1
    if lm.max_positions is not None and longest + new > lm.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens and {new} new ones need {longest + new} positions, but {who} has "
            f"{lm.max_positions}: shorten the prompt or lower max_new_tokens"
        )


def _eos(target: Model, eos_ids: Sequence[int] | None):
    if eos_ids is None:
        known = None if target.tokenizer is None else target.tokenizer.eos_token_id
        ends = list(getattr(target.config, "end_tokens", ()))
        eos_ids = ends or ([] if known is None else [known])
    check_ids(eos_ids, "eos_ids", target.lm.vocab_size)
    return jnp.asarray(list(eos_ids) or [-1], jnp.int32)
