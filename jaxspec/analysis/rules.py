"""Acceptance rules side by side: what each is worth on a pair, and what each costs.

Axis letters as in `jaxspec.base`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from jaxspec import noise
from jaxspec import warp as warps
from jaxspec.accept import Proposals, Rule, iterated
from jaxspec.analysis import acceptance, cost, replay
from jaxspec.analysis.estimate import Ratio
from jaxspec.base import Draft, Keys, Law, Model, Prompt
from jaxspec.decode import generate, request


def worth(
    target: Model,
    drafter: Model,
    prompts: Sequence[str] | str | Prompt,
    rules: Sequence[Rule],
    *,
    gamma: int,
    temperature: float,
    key: Any,
    max_new_tokens: int = 64,
    batch: int = 16,
    several: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """The acceptance rate and the tokens per round of each rule.

    Exact rules are replayed on one set of texts (`analysis.replay`), so they are compared on the same positions. For
    inexact ones tokens per round come from decoding with them, whose text is their own; alpha is about the target's.

    Args:
        target, drafter, prompts: rows are the unit of the errors.
        gamma, temperature, key, max_new_tokens: as in `jaxspec.generate`.
        batch: rows at a time.
        several: numbers K of independent guesses of one token: a row each for `accept.iterated`, whose alpha is the
            probability that one of the K is kept.

    Returns:
        By rule: "rule", "exact", "gamma", "temperature", "alpha" (None for a rule that at temperature 0 keeps guesses
        which differ from the text) and "tokens_per_round" (None for `iterated`, which judges one position), the last
        two as value, stderr, low and high (95%).

    Example:
        >>> from jaxspec import accept
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1], [2, 0]]), jnp.array([2, 1]))
        >>> options = dict(gamma=3, temperature=1.0, key=jax.random.key(0), max_new_tokens=9)
        >>> worth(model, model, prompt, [accept.rejection()], **options)[0]["tokens_per_round"]["value"]
        4.0
    """
    options: dict[str, Any] = dict(temperature=temperature, max_new_tokens=max_new_tokens, key=key)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = replay.record(Path(folder) / "store", target, drafter, prompts, batch=batch, **options)
        for rule in rules:
            found = None
            if not (rule.reads_soft and temperature == 0):
                found = replay.evaluate(store, rule, gamma=gamma)
            if found is not None and found.own_text:
                tokens = found.tokens_per_round
            else:
                tokens = _decoded(target, prompts, batch, drafter=drafter, gamma=gamma, accept=rule, **options)
            row: dict[str, Any] = {"rule": rule.name, "exact": rule.exact, "gamma": gamma, "temperature": temperature}
            row["alpha"] = None if found is None else found.alpha.to_dict()
            rows.append(row | {"tokens_per_round": tokens.to_dict()})
        kept = replay.alpha_of_several(store, max(several)) if several else []
    about: dict[str, Any] = {"exact": True, "gamma": gamma, "temperature": temperature, "tokens_per_round": None}
    return rows + [{"rule": iterated_name(count), "alpha": kept[count - 1].to_dict()} | about for count in several]


def costs(
    rules: Sequence[Rule],
    *,
    vocab: int,
    batch: int,
    gamma: int,
    repeats: int,
    alike: bool = False,
    several: Sequence[int] = (),
) -> dict[str, np.ndarray]:
    """Seconds of one verdict of each rule, compiled and called by itself, by name; "laws" is the softmax before it.

    Args:
        rules: taking turns.
        vocab, batch, gamma: V, B and G.
        repeats: of each.
        alike: whether draft and target are one, so that the rule may keep all; otherwise their logits differ by noise.
        several: numbers K of independent guesses of one token: a row each for `accept.iterated`, which judges them at
            one position, where a rule judges gamma guesses at gamma positions.

    Example:
        >>> from jaxspec import accept
        >>> taken = costs([accept.rejection()], vocab=9, batch=2, gamma=3, repeats=4)
        >>> {name: seconds.shape for name, seconds in taken.items()}
        {'laws': (4,), 'rejection': (4,)}
    """
    keys, position = noise.row_keys(jax.random.key(0), batch), jnp.full(batch, 9, jnp.int32)
    logits, draft_logits = _logits(jax.random.key(1), batch, gamma, vocab, jnp.array(alike))
    controls = warps.Controls(jnp.ones(batch), jnp.full(batch, vocab), jnp.ones(batch))
    to_law = jax.jit(warps.sampling())
    target, q = to_law(controls, logits), to_law(controls, draft_logits).log_probs
    assert q is not None
    calls: dict[str, Callable[[], object]] = {"laws": _call(to_law, controls, logits)}
    for rule in rules:
        draft = _draft(keys, position, q, rule.plain_noise)
        calls[rule.name] = _call(jax.jit(rule.judge), keys, position, draft, target)
    assert target.log_probs is not None
    for count in several:
        proposals = _proposals(keys, position, q[:, 0], count)
        calls[iterated_name(count)] = _call(jax.jit(iterated), keys, position, proposals, Law(target.log_probs[:, :1]))
    return dict(zip(calls, cost.take_turns(list(calls.values()), repeats), strict=True))


def iterated_name(count: int) -> str:
    """What a row of `accept.iterated` is called.

    >>> iterated_name(1), iterated_name(4)
    ('iterated, 1 sample', 'iterated, 4 samples')
    """
    return f"iterated, {count} sample{'s' if count > 1 else ''}"


def of_pass(target: Model, prompt: Prompt, *, gamma: int, repeats: int) -> cost.Cost:
    """What a pass of the target costs at the batch of the prompt (its own drafter, so draft and target are one)."""
    return cost.measure(target, target, prompt, gamma=gamma, repeats=repeats, inner=2)


def _decoded(target: Model, prompts: Sequence[str] | str | Prompt, batch: int, key: Any, **options: Any) -> Ratio:
    """Tokens per round of decoding."""
    prompt = request.encode(target, prompts)
    keys, stats = noise.row_keys(key, len(prompt.length)), []
    for group in acceptance.in_batches(prompt, batch):
        out = generate(target, group.prompt, key=keys[group.rows], **options)
        stats.append(jax.tree.map(lambda x, real=group.real: x[:real], out.stats))
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *stats)
    return Ratio(whole.emitted - 1, whole.rounds)


def _call(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """A call that waits for its result; compiled."""

    def call() -> object:
        return jax.block_until_ready(function(*arguments))

    call()
    return call


@functools.partial(jax.jit, static_argnames=("batch", "gamma", "vocab"))
def _logits(
    key: Key[Array, ""], batch: int, gamma: int, vocab: int, alike: Bool[Array, ""]
) -> tuple[Float[Array, "B G+1 V"], Float[Array, "B G V"]]:
    ours, theirs = jax.random.split(key)
    target = 3 * jax.random.normal(ours, (batch, gamma + 1, vocab))
    off = 0.7 * jax.random.normal(theirs, (batch, gamma, vocab))
    return target, target[:, :-1] + jnp.where(alike, 0.0, off)


@functools.partial(jax.jit, static_argnames=("plain_noise",))
def _draft(keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B G V"], plain_noise: bool) -> Draft:
    """What `drafters.model` hands on: guesses with their laws, or with the noise that they were drawn with."""
    purpose, gamma = noise.Purpose.TOKEN if plain_noise else noise.Purpose.DRAFT, log_probs.shape[1]

    def one(i: Int[Array, ""]) -> Float[Array, "B V"]:
        return noise.gumbel(noise.at(keys, position + i, purpose), log_probs.shape[2])

    gumbel = jnp.moveaxis(jax.lax.map(one, jnp.arange(gamma, dtype=jnp.int32)), 0, 1)
    tokens, length = noise.first_largest(log_probs + gumbel), jnp.full_like(position, gamma)
    if plain_noise:
        return Draft(tokens, None, length, gumbel=gumbel)
    return Draft(tokens, log_probs, length)


@functools.partial(jax.jit, static_argnames=("count",))
def _proposals(keys: Keys, position: Int[Array, " B"], log_probs: Float[Array, "B V"], count: int) -> Proposals:
    """K independent draws from one law."""
    at = noise.at(keys, position, noise.Purpose.DRAFT)
    each = [jax.vmap(lambda key, k=k: jax.random.fold_in(key, k))(at) for k in range(count)]
    tokens = jnp.stack([noise.categorical(key, log_probs) for key in each], axis=1)
    return Proposals(tokens, jnp.repeat(log_probs[:, None], count, axis=1), jnp.full_like(position, count))
