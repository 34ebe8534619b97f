"""From `generate`'s options of sampling to a warp and its controls: which stages there are, and their traced values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxspec import warp
from jaxspec.base import Model, Stage, Warp
from jaxspec.warp import Controls


class Warping(TypedDict, total=False):
    """Options that shape the law that is sampled from; `generate` describes them."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    logit_bias: Any
    banned: Sequence[int]
    draft_temperature: Any


class Plan(NamedTuple):
    """A warp, and what it is called with.

    Attributes:
        warp: with the stages that were asked for and no others.
        controls: its values.
        draft_controls: the drafter's own; None if they are the same.
    """

    warp: Warp
    controls: Controls
    draft_controls: Controls | None


def plan(
    target: Model,
    batch: int,
    soft: bool = False,
    *,
    temperature: Any = 0.0,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    logit_bias: Any = None,
    banned: Sequence[int] = (),
    draft_temperature: Any = None,
) -> Plan:
    """Checks and converts; see `generate` for the options and their defaults.

    Args:
        target: whose law it is; ids past its tokenizer's are never said.
        batch: number of prompts.
        soft: whether laws at temperature 0 must say what is second best; see `Law.soft`.

    Raises:
        ValueError: an option out of range; every token ruled out.
    """
    vocab = target.lm.vocab_size
    ids = vocab if target.tokenizer is None else min(len(target.tokenizer), vocab)
    temperatures = _temperatures(temperature, batch, "temperature")
    ks = _top_k(top_k, batch, vocab)
    values: dict[str, Any] = dict(
        temperature=temperatures,
        top_k=ks,
        top_p=_top_p(top_p, batch),
        min_p=_min_p(min_p, batch),
        bias=_bias(logit_bias, banned, batch, vocab, ids),
        repetition=_repetition(repetition_penalty, batch),
        **_occurrence(presence_penalty, frequency_penalty, batch),
    )
    controls = Controls(**jax.tree.map(jnp.asarray, values))
    greedy = np.ndim(temperature) == 0 and temperatures[0] == 0
    if greedy:
        end = warp.greedy(soft=True) if soft else warp.greedy()
    else:
        bound = None if top_k is None else min(vocab, 1 << (int(ks.max()) - 1).bit_length())
        end = warp.sampling(bound, top_p is not None, min_p is not None, soft)
    whole = warp.chain(*_stages(controls), to=end)
    if ids < vocab:
        whole = warp.only(whole, ids)
    if draft_temperature is None:
        return Plan(whole, controls, None)
    own = np.where(temperatures > 0, _temperatures(draft_temperature, batch, "draft_temperature"), temperatures)
    return Plan(whole, controls, None if greedy else controls._replace(temperature=jnp.asarray(own)))


def per_row(value: Any, batch: int, name: str, dtype: Any) -> np.ndarray:
    """A number, or one per prompt, as an array [batch]."""
    array = np.asarray(value)
    if array.dtype.kind not in ("iuf" if np.issubdtype(dtype, np.floating) else "iu"):
        raise ValueError(f"{name} is {value!r}: expected a number, or one per prompt")
    if array.shape not in ((), (batch,)):
        raise ValueError(f"{name} has shape {array.shape} for {batch} prompts: expected a number, or one per prompt")
    return np.broadcast_to(array.astype(dtype), (batch,))


def check_ids(ids: Sequence[int], name: str, vocab: int) -> None:
    """Refuses what is not the id of a token."""
    for token in ids:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab:
            raise ValueError(f"{name} has {token}: expected ids from 0 to {vocab - 1}")


def _stages(controls: Controls) -> list[Stage]:
    stages: list[Stage] = []
    if controls.bias is not None:
        stages.append(warp.logit_bias)
    if controls.repetition is not None:
        stages.append(warp.repetition_penalty)
    if controls.presence is not None:
        stages.append(warp.presence_and_frequency_penalties)
    return stages


def _temperatures(value: Any, batch: int, name: str) -> np.ndarray:
    temperatures = per_row(value, batch, name, np.float32)
    if not np.all(temperatures >= 0) or np.any(np.isinf(temperatures)):
        raise ValueError(f"{name} is {value!r}: expected 0 (greedy) or a positive number")
    return temperatures


def _top_k(value: Any, batch: int, vocab: int) -> np.ndarray:
    ks = per_row(vocab if value is None else value, batch, "top_k", np.int32)
    if ks.min() < 1:
        raise ValueError(f"top_k is {value!r}: expected at least 1, or None to keep every token")
    return ks


def _top_p(value: Any, batch: int) -> np.ndarray:
    ps = per_row(1.0 if value is None else value, batch, "top_p", np.float32)
    if not np.all((ps > 0) & (ps <= 1)):
        raise ValueError(f"top_p is {value!r}: expected a number in (0, 1], or None to keep every token")
    return ps


def _min_p(value: Any, batch: int) -> np.ndarray | None:
    if value is None:
        return None
    ps = per_row(value, batch, "min_p", np.float32)
    if not np.all((ps >= 0) & (ps <= 1)):
        raise ValueError(f"min_p is {value!r}: expected a number in [0, 1], or None to keep every token")
    return ps


def _repetition(value: Any, batch: int) -> np.ndarray | None:
    if value is None:
        return None
    penalties = per_row(value, batch, "repetition_penalty", np.float32)
    if not np.all(penalties > 0) or np.any(np.isinf(penalties)):
        raise ValueError(f"repetition_penalty is {value!r}: expected a positive number (1 is none), or None")
    return penalties


def _occurrence(presence: Any, frequency: Any, batch: int) -> dict[str, np.ndarray]:
    """Both penalties, where either is asked for."""
    given = {"presence": presence, "frequency": frequency}
    if all(value is None for value in given.values()):
        return {}
    found = {}
    for name, value in given.items():
        found[name] = per_row(0.0 if value is None else value, batch, f"{name}_penalty", np.float32)
        if not np.all(np.isfinite(found[name])):
            raise ValueError(f"{name}_penalty is {value!r}: expected a finite number (0 is none), or None")
    return found


def _bias(bias: Any, banned: Sequence[int], batch: int, vocab: int, ids: int) -> Float[np.ndarray, "B V"] | None:
    """Biases and bans as one array, so that other ids compile nothing."""
    banned = list(banned)
    if bias is None and not banned:
        return None
    check_ids(banned, "banned", vocab)
    whole = np.zeros((batch, vocab), np.float32)
    if isinstance(bias, Mapping):
        check_ids(list(bias), "logit_bias", vocab)
        whole[:, list(bias)] = list(bias.values())
    elif bias is not None:
        array = np.asarray(bias, np.float32)
        if array.shape not in ((vocab,), (batch, vocab)):
            raise ValueError(
                f"logit_bias has shape {array.shape}: expected {{id: bias}}, or an array of shape ({vocab},) or "
                f"({batch}, {vocab})"
            )
        whole[:] = array
    bad = whole[np.isnan(whole) | np.isposinf(whole)]
    if bad.size:
        raise ValueError(f"logit_bias has {bad[0]}: expected finite numbers, or -inf to ban a token")
    whole[:, banned] = -np.inf
    silent = np.flatnonzero(np.isneginf(whole[:, :ids]).all(axis=1))
    if silent.size:
        raise ValueError(f"logit_bias and banned rule out all {ids} tokens for prompt {silent[0]}: leave at least one")
    return whole
