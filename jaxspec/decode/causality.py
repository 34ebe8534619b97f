"""Trying a network that is not jaxspec's, once, before it decodes: its shapes, and whether it looks
ahead.

A pass of verification feeds draft tokens after the last committed one. If a network lets a position
see those tokens, its logits differ from plain decoding's. No acceptance rule can make up for that.

`testing.check_model` tries much more, but nobody has to call it, and a network that looks ahead
would write wrong text without an error. An adapter cannot try its function, since the parameters
come later, with `Model`. So `prepare` and `score` try each network once: they are the first to have
both. Networks of jaxspec are causal by construction (`LanguageModel.is_causal`) and skip the trial.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec import sharding
from jaxspec.core import Cache, Forward, LanguageModel, Model, Params, Prompt, programs, token_rows
from jaxspec.core.checks import are_shapes

PAIRS = 4  # of rows
WIDTH = 16  # tokens of a prompt's row, of which READ are real
READ = 3
FED = 3  # tokens after it
SAME = 1e-6  # of the largest logit: what was computed alike in all numbers
# A share of the largest logit. Both rows of a pair are computed alike.
TOLERANCE = 1e-5
NARROW_TOLERANCE = 1e-2

CAUSAL = (
    "A position may read itself and what stands before it. Mask later ones (jnp.tril of [step, "
    "step], or a cache's entries after the token's own), and take no mean, maximum or norm along "
    "a row"
)

FURTHER = "jaxspec.testing.check_model(model) tries more"


class NotCausal(ValueError):
    """The logits after a token depend on what follows it."""


class ShiftsInput(ValueError):
    """The logits after a token do not depend on it, but on those before it: they are one place
    late.
    """


SHIFTED = (
    "the module shifts its input itself, as a teacher-forced decoder does, and predicts each "
    "token at the token's own place. Expected the logits of the token after each place. Read one "
    "place ahead: adapters.from_function(lambda params, tokens: apply(params, jnp.pad(tokens, "
    "((0, 0), (0, 1)), constant_values=1))[:, 1:], vocab_size), with any token that is not the "
    "padding in place of 1"
)


class Ahead(NamedTuple):
    """The logits of pairs of rows that agree up to a token and differ after it; both must be the
    same.

    And those of pairs that differ in one thing that counts.
    """

    padding: Float[Array, "2 PAIRS V"]  # after prompts, whose padding differs
    # after the first of some tokens that are fed, of which the later ones differ
    fed: Float[Array, "2 PAIRS V"]
    # after a token that is fed, which differs, after the same prompt
    own_token: Float[Array, "2 PAIRS V"]
    # after a token that is fed, which is the same, after prompts that differ
    before: Float[Array, "2 PAIRS V"]


def check(model: Model) -> None:
    """Raises ValueError if a user's model looks ahead, or if its functions return other shapes than
    a `LanguageModel`'s.

    It costs a prefill of eight short rows and a pass over three tokens, the first time that a
    model's functions are met. Networks of jaxspec, and parameters that are shapes alone, are not
    tried.
    """
    lm = model.lm
    if lm.is_causal or are_shapes(model.params) or _too_short(lm) or (passed := _passed(lm)):
        return
    check_shapes(model)
    looked_ahead: Ahead = sharding.fetch(look_ahead(lm, model.params))
    if is_narrow(model.params):
        tolerance = NARROW_TOLERANCE
    else:
        tolerance = TOLERANCE
    for change, after, change_of in (
        (difference(*looked_ahead.padding), "a prompt", "the padding that follows it"),
        (difference(*looked_ahead.fed), "a token", "the draft tokens that are fed after it"),
    ):
        if change > tolerance:
            raise NotCausal(
                f"{called(model)} is not causal: its logits after {after} change with {change_of} "
                f"(by {change:.1g} of the largest), so drafted text would not be its own. "
                f"{CAUSAL}. {FURTHER}"
            )
    if shifts_input(np.asarray(looked_ahead.own_token), np.asarray(looked_ahead.before)):
        raise ShiftsInput(
            f"{called(model)} gives logits after a token that do not depend on it: {SHIFTED}. "
            f"{FURTHER}"
        )
    passed.append(True)


def shifts_input(own_token: Float[np.ndarray, "2 n V"], before: Float[np.ndarray, "2 n V"]) -> bool:
    """Tells whether logits ignore the token that they follow, and read those before it.

    A model that ignores both, such as a unigram or one with a zero head, passes.

    >>> same, others = np.ones((2, 1, 3)), np.array([[[1.0, 2.0, 3.0]], [[3.0, 2.0, 1.0]]])
    >>> shifts_input(same, others), shifts_input(others, others), shifts_input(same, same)
    (True, False, False)
    """
    return difference(*own_token) <= SAME and difference(*before) > NARROW_TOLERANCE


@functools.lru_cache(maxsize=64)
def _passed(lm: LanguageModel) -> list[bool]:
    """Returns a list for each model's functions, empty until they have passed: a memory that is
    bounded.
    """
    return []


def _too_short(lm: LanguageModel) -> bool:
    return lm.vocab_size < 2 or (
        lm.limits.max_positions is not None and lm.limits.max_positions < WIDTH + FED
    )


def is_narrow(params: Params) -> bool:
    """Tells whether some parameters are floats of fewer than 32 bits, whose products are rounded
    accordingly.

    >>> is_narrow({"w": jnp.ones(2, jnp.bfloat16), "ids": jnp.arange(2)}), is_narrow(jnp.ones(2))
    (True, False)
    """
    dtypes = {x.dtype for x in jax.tree.leaves(params) if hasattr(x, "dtype")}
    return any(jnp.issubdtype(x, jnp.floating) and x.itemsize < 4 for x in dtypes)


def called(model: Model, role: str = "the model") -> str:
    """Names a model in an error."""
    if model.name:
        return f"{role} ({model.name})"
    return role


def difference(first: Float[np.ndarray, "*rows V"], second: Float[np.ndarray, "*rows V"]) -> float:
    """Returns the largest difference of logits, relative to the largest of them; -inf at one place
    in both is equal.

    >>> difference(np.array([1.0, -4.0, -np.inf]), np.array([2.0, -4.0, -np.inf]))
    0.25
    """
    # A model may rule tokens out by -inf: those are equal where both rows have them.
    pair = np.asarray([first, second], np.float64)
    ruled_out = pair == -np.inf
    if (ruled_out[0] != ruled_out[1]).any():
        return float("inf")
    first, second = np.where(ruled_out, 0.0, pair)
    return float(np.abs(first - second).max() / max(np.abs(pair[~ruled_out]).max(initial=0), 1e-30))


@programs.jit(static_argnames=("lm",))
def look_ahead(lm: LanguageModel, params: Params) -> Ahead:
    """Computes the logits of rows that differ only in what may not be seen."""
    prompt, fed = rows(lm.vocab_size)
    # One compiled program for both questions, on 8 rows of 16 tokens.
    first, cache = lm.prefill(params, prompt, token_rows.reading_room(lm, prompt, FED + 1))
    after, _ = lm.extend(params, cache, fed)
    after_own, _ = lm.extend(params, cache, own_tokens(lm.vocab_size))
    padding, after_fed, own_token = (
        x[:, 0].reshape(2, PAIRS, lm.vocab_size)
        for x in (first.logits, after.logits, after_own.logits)
    )
    before = own_token[0].reshape(PAIRS // 2, 2, lm.vocab_size).swapaxes(0, 1)
    return Ahead(padding, after_fed, own_token, before)


def own_tokens(vocab: int) -> Int[Array, "B FED"]:
    """Makes tokens to feed after `rows`' prompts: another one after the same prompt, the same one
    after two prompts.

    >>> fed = own_tokens(9)[:, 0]
    >>> (fed[:PAIRS] != fed[PAIRS:]).tolist(), (fed[::2] == fed[1::2]).tolist()
    ([True, True, True, True], [True, True, True, True])
    """
    rng = np.random.default_rng(1)
    first = np.repeat(rng.integers(0, vocab, PAIRS // 2), 2)
    second = (first + np.repeat(rng.integers(1, vocab, PAIRS // 2), 2)) % vocab
    tokens = np.concatenate([first, second])[:, None]
    return jnp.asarray(np.broadcast_to(tokens, (2 * PAIRS, FED)), jnp.int32)


def rows(vocab: int) -> tuple[Prompt, Int[Array, "B FED"]]:
    """Makes pairs of prompts that differ in their padding, and of tokens to be fed that differ
    after the first.

    The first rows of all pairs come before the second ones.

    >>> prompt, fed = rows(vocab=50)
    >>> (prompt.tokens[0] == prompt.tokens[PAIRS]).tolist()[:5], (fed[0] == fed[PAIRS]).tolist()
    ([True, True, True, False, False], [True, False, False])
    """
    rng = np.random.default_rng(0)
    first = rng.integers(0, vocab, (PAIRS, WIDTH + FED))
    changed = (first + rng.integers(1, vocab, first.shape)) % vocab  # another token at every place
    column = np.arange(WIDTH + FED)
    second = np.where((column < READ) | (column == WIDTH), first, changed)
    tokens = jnp.asarray(np.concatenate([first, second]), jnp.int32)
    return Prompt(tokens[:, :WIDTH], jnp.full(2 * PAIRS, READ, jnp.int32)), tokens[:, WIDTH:]


def check_shapes(model: Model) -> None:
    """Raises ValueError for functions that return other shapes than a `LanguageModel`'s; nothing is
    computed.
    """
    lm, (prompt, fed) = model.lm, rows(model.lm.vocab_size)
    model = model._replace(params=programs.automatic(model.params))
    room = token_rows.reading_room(lm, prompt, FED + 1)
    real = jnp.full_like(prompt.length, FED)
    shapes = jax.eval_shape(
        lambda: _checked("prefill", lm, lm.prefill(model.params, prompt, room), step=1)
    )
    cache = shapes[1]

    def extend(cache: Cache) -> tuple[Forward, Cache]:
        return _checked("extend", lm, lm.extend(model.params, cache, fed, real=real), step=FED)

    # Only shapes are computed: a wrong structure is found before anything is compiled.
    grown = jax.eval_shape(extend, cache)[1]
    for name, after in (
        ("extend", grown),
        ("rewind", jax.eval_shape(lm.rewind, cache, prompt.length)),
    ):
        old, new = (jax.tree_util.tree_flatten_with_path(x) for x in (cache, after))
        if old[1] != new[1]:
            raise ValueError(
                f"{name} of {called(model)} returned a cache of {new[1]}: expected prefill's "
                f"structure, {old[1]}"
            )
        for (path, x), (_, y) in zip(old[0], new[0], strict=True):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise ValueError(
                    f"{name} of {called(model)} returned a cache{jax.tree_util.keystr(path)} of "
                    f"shape {y.shape} and dtype {y.dtype}: expected {x.shape} and {x.dtype}, as "
                    "prefill gives it. A cache has one shape for as long as a row lasts"
                )


def _checked(name: str, lm: LanguageModel, returned: Any, step: int) -> tuple[Forward, Any]:
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Forward)
    ):
        kinds = [
            type(value).__name__ for value in (returned if type(returned) is tuple else [returned])
        ]
        raise TypeError(f"{name} returned {', '.join(kinds)}: expected (core.Forward, cache)")
    forward, cache = returned
    expected = (2 * PAIRS, step, lm.vocab_size)
    if jnp.shape(forward.logits) != expected:
        fed = f" of {step} tokens" if name == "extend" else ""
        places = ""
        if name != "extend":
            places = ", those after the last token of each prompt"
        raise ValueError(
            f"{name} returned logits of shape {jnp.shape(forward.logits)} for {2 * PAIRS} "
            f"rows{fed}: expected [batch, step, vocab] = {expected}{places}"
        )
    return forward, cache
