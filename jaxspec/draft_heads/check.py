"""Checks whether a drafter was made for its target, and if it seems not to be, what to look at.

The text is exact with any drafter. Weights of another model, or weights that are read in another
way than they were trained, show in the acceptance rate alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec import nets
from jaxspec.core import BoundDrafter, Model, Params, Prompt, token_rows
from jaxspec.decode import generate
from jaxspec.draft_heads import kind_of, shapes_of
from jaxspec.drafters.hidden_states import DraftHead, inside_of
from jaxspec.weights import loading, parameters

TEXTS = (  # to measure on, where none are given
    "The capital of France is",
    "This package contains the documentation of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "It was late in the evening when",
    "To install the program, first",
    "In mathematics, a prime number is",
)
# A greedy acceptance rate of the first draft token below that of any drafter made for its target:
# heads trained for minutes have 0.15 and more, weights of another model next to nothing. Layers
# that are off by one may cost too little to be seen: `debian-gpt-eagle` has 0.39 with those that it
# was trained on, and 0.40 with the ones after them.
TOO_LOW = 0.1
# mean cosine of two embeddings' rows: copies have 1, those of other vocabularies about 0
ALIKE = 0.5
SAMPLED = 512  # rows of an embedding to compare


class ChangedReading(NamedTuple):
    """A drafter that reads its weights in another way."""

    part: str  # what to look at if it helps
    description: str
    config: Any
    params: Params


def bound(config: Any, params: Params, target: Model, trimmed: Model | None = None) -> BoundDrafter:
    """Makes the drafter of a network's configuration and parameters, with the taps that it
    reads.
    """
    head_kind = kind_of(config)
    network = DraftHead(head_kind.head(config), params)
    taps = network.network.requirements.taps
    if taps:
        target = loading.with_taps(target, taps)
    return head_kind.drafter(network, target, trimmed)


def check_acceptance(
    drafter: BoundDrafter,
    prompts: Sequence[str] | Prompt | None = None,
    *,
    tokens: int = 32,
    name: str = "it",
    network: Callable[[], tuple[Any, Params]] | None = None,
) -> float:
    """Measures how often a drafter's first draft token is accepted, at temperature 0; warns if that
    is too seldom.

    For a drafter of trees it measures how often any of the first draft tokens is accepted. With a
    `network`, the warning names the settings to look at. The drafter is then measured again with
    other taps, norms, scales and positions. Its embedding is compared with the target's.

    Args:
        prompts: to continue; None: a few English texts, or single tokens for a target without a
            tokenizer.
        tokens: how many to generate for each.
        name: the drafter's name, for the warning.
        network: returns its configuration and parameters (`read_head`); it is called only if the
            rate is low.

    Returns:
        The acceptance rate.
    """
    target = drafter.target
    assert target is not None
    if prompts is None:
        few = np.linspace(0, target.lm.vocab_size - 1, len(TEXTS)).astype(int)
        if target.tokenizer is not None:
            prompts = list(TEXTS)
        else:
            prompts = token_rows.pad([[int(i)] for i in few])
    rate, drafted = _acceptance(drafter, prompts, tokens)
    if rate < TOO_LOW:
        if network is None:
            advice = "This one may be another model's, or count layers in another way (taps=)"
        else:
            advice = diagnose(*network(), target, rate, prompts, tokens)
        warnings.warn(
            f"{name} has {rate:.0%} of its first draft tokens accepted (of {drafted}, at "
            f"temperature 0). A drafter made for its target has more than {TOO_LOW:.0%}. {advice}",
            stacklevel=3,
        )
    return rate


def _acceptance(
    drafter: BoundDrafter, prompts: Sequence[str] | Prompt, tokens: int
) -> tuple[float, int]:
    """Measures the acceptance rate of first draft tokens; also returns their number."""
    options: dict[str, Any] = {} if drafter.functions.tree else {"gamma": 1}
    assert drafter.target is not None
    trace = generate(
        drafter.target, prompts, drafter=drafter, max_new_tokens=tokens, **options
    ).trace
    drafted = int(np.sum(np.greater(trace.num_tested, 0)))
    return int(np.sum(np.greater(trace.num_accepted, 0))) / max(1, drafted), drafted


def diagnose(
    config: Any,
    params: Params,
    target: Model,
    rate: float,
    prompts: Sequence[str] | Prompt,
    tokens: int,
) -> str:
    """Measures a drafter with each of its `changes`; returns a table of the rates, and what to look
    at.

    Each generates `tokens` tokens for each prompt, as was done to measure `rate`, its acceptance
    rate as it is.
    """
    tried = list(changes(config, params, target))
    measured = [_acceptance(bound(x.config, x.params, target), prompts, tokens)[0] for x in tried]
    lines = [
        _line(x.description, f"{of_change:.0%}")
        for x, of_change in zip(tried, measured, strict=True)
    ]
    cosine = embedding_likeness(params, target)
    if cosine is not None:
        lines.append(
            _line("mean cosine of rows of its embedding and the target's", f"{cosine:.2f}")
        )
    best = max(range(len(tried)), key=measured.__getitem__, default=None)
    if best is not None and measured[best] >= max(TOO_LOW, 2 * rate):
        advice = f"look at its {tried[best].part}: {tried[best].description}"
    elif cosine is not None and cosine < ALIKE:
        # an embedding may be trained, so a change that helps says more
        advice = (
            "look at the tokenizer: rows of its own embedding are not those of the target's tokens"
        )
    else:
        advice = (
            "no change of how it is read helps: look at the tokenizer, or expect that it is "
            "another model's"
        )
    return "\n".join(
        ["Tried again with changes:", _line("as it is", f"{rate:.0%}"), *lines, f"So {advice}."]
    )


def _line(description: str, value: str) -> str:
    return f"  {description:<56} {value:>4}"


def changes(config: Any, params: Params, target: Model) -> Iterator[ChangedReading]:
    """Yields a drafter's weights read in other ways that fit them.

    Layers are numbered one up and one down, each setting of the network is turned over, norms get
    the 1 that some files leave out, and embeddings the scale that the target's have or none.
    Weights stay; norms that a change adds are ones.
    """
    layers = nets.decoder_layers(target.config)
    settings = vars(config)
    for by in (1, -1):
        taps = settings.get("taps", ())
        if taps and all(0 <= tap + by < layers for tap in taps):
            moved = tuple(tap + by for tap in taps)
            yield from _changed(
                "taps", f"taps {list(moved)} in place of {list(taps)}", config, params, taps=moved
            )
        if "exit" in settings and 0 < settings["exit"] + by < layers:
            layer = settings["exit"] + by
            yield from _changed(
                "taps", f"exit {layer} in place of {layer - by}", config, params, exit=layer
            )
    for name, value in settings.items():
        if isinstance(value, bool) and _changes_drafts(config, name):
            suspect = "norms" if "norm" in name else "settings"
            options = {name: not value}
            yield from _changed(
                suspect, f"{name} {not value} in place of {value}", config, params, **options
            )
    scales = {path: x for path, x in parameters.flat(params).items() if path.endswith("scale")}
    if scales and sum(
        float(np.mean(np.asarray(x, np.float32))) for x in scales.values()
    ) < 0.5 * len(scales):
        shifted = parameters.flat(params) | {path: x + 1 for path, x in scales.items()}
        yield ChangedReading(
            "norms", "1 added to the weights of norms", config, parameters.nested(shifted)
        )
    scale = settings.get("embedding_scale")
    if scale is not None:
        for changed_scale in {1.0, nets.embedding_scale(target.config)} - {scale}:
            text = f"embedding_scale {changed_scale:g} in place of {scale:g}"
            yield from _changed("scales", text, config, params, embedding_scale=changed_scale)
    back = settings.get("positions_back")
    if back is not None:
        text = f"positions_back {3 - back} in place of {back}"
        yield from _changed("position", text, config, params, positions_back=3 - back)


def _changes_drafts(config: Any, name: str) -> bool:
    """Tells whether a setting can matter to this network: others would be measured for nothing."""
    if "windows" in name:
        return bool(config.layer.windows)
    if name.startswith("norm_"):  # EAGLE-1 has no norms
        return bool(vars(config).get("taps"))
    return name != "confidence_reads_token"


def _changed(
    suspect: str, description: str, config: Any, params: Params, **options: Any
) -> Iterator[ChangedReading]:
    """Yields a configuration with other options, if it is valid and the weights fit it."""
    try:
        changed = dataclasses.replace(config, **options)
    except ValueError:
        return
    expected = shapes_of(changed)
    leaves = parameters.flat(params)
    if any(not path.endswith("scale") for path in leaves.keys() ^ expected.keys()):
        return
    if any(leaves[path].shape != expected[path].shape for path in leaves.keys() & expected.keys()):
        return
    fitted = {
        path: leaves[path] if path in leaves else jnp.ones(x.shape, x.dtype)
        for path, x in expected.items()
    }
    yield ChangedReading(suspect, description, changed, parameters.nested(fitted))


def embedding_likeness(params: Params, target: Model) -> float | None:
    """Computes the mean cosine of rows of a drafter's own embedding with the target's rows of the
    same ids.

    Drafters begin with a copy of the target's embedding, as a rule. None: the network lacks the
    head, or its width differs.
    """
    embedding = parameters.flat(params).get("embedding/embedding")
    inside = inside_of(target)
    if embedding is None or embedding.shape != (target.lm.vocab_size, inside.width):
        return None
    ids = np.linspace(0, len(embedding) - 1, min(len(embedding), SAMPLED)).astype(np.int32)
    rows = (
        np.asarray(embedding[ids], np.float32),
        np.asarray(inside.embed(target.params, jnp.asarray(ids)[None])[0], np.float32),
    )
    drafter_rows, target_rows = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6) for x in rows
    )
    return float(np.mean(np.sum(drafter_rows * target_rows, axis=1)))
