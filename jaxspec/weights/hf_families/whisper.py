"""Whisper (arXiv 2212.04356) and distil-whisper (2311.00430), whose generation_config.json has the
tokens of speech.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

from jaxspec.nets.whisper import SIZES, Speech, WhisperConfig
from jaxspec.weights.hf_families import bart, common
from jaxspec.weights.hf_families.common import Family, FamilyError, count, only

FIELDS = {  # the network's fields: those of config.json
    "vocab_size": "vocab_size",
    "dim": "d_model",
    "ff_dim": "encoder_ffn_dim",
    "heads": "encoder_attention_heads",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "mels": "num_mel_bins",
    "source_positions": "max_source_positions",
    "max_positions": "max_target_positions",
    "start_token": "decoder_start_token_id",
}
# equal in every published model
DECODER = {"ff_dim": "decoder_ffn_dim", "heads": "decoder_attention_heads"}
LISTS = {"suppressed": "suppress_tokens", "suppressed_first": "begin_suppress_tokens"}
NUMBERS = {"no_timestamps": "no_timestamps_token_id", "latest_start": "max_initial_timestamp_index"}
DEFAULTS = ("language", "task")
TABLES = {"language": "lang_to_id", "task": "task_to_id"}  # their ids by "<|en|>" and "transcribe"


KEYS = bart.KEYS | dict.fromkeys(
    ("num_mel_bins", "max_source_positions", "max_target_positions"), count()
)


def read(table: dict) -> WhisperConfig:
    """Reads the network of a config.json."""
    # A scaled embedding, a head of its own, or sides of two widths are in no published model.
    only(table, scale_embedding=False, tie_word_embeddings=True)
    fields = common.read_keys(table, FIELDS, mels=80, source_positions=1500, max_positions=448)
    only(table, **{key: fields[field] for field, key in DECODER.items()})
    return WhisperConfig(
        **fields, activation=common.activation(table.get("activation_function", "gelu"))
    )


def read_generation(config: WhisperConfig, table: dict) -> WhisperConfig:
    """Reads the tokens of languages, tasks and timestamps, and those that are never generated."""
    fields = dict[str, Any]()
    for field, key in LISTS.items():
        fields[field] = _ids(config, key, table.get(key) or ())
    for field, key in NUMBERS.items():
        if table.get(key) is not None:
            (fields[field],) = _ids(config, key, [table[key]]) or (None,)
    for field, key in TABLES.items():
        # An English-only model has neither table.
        names, tokens = _names_and_tokens(config, key, table.get(key) or {})
        fields[f"{field}s"] = names
        fields[f"{field}_tokens"] = tokens
    speech = Speech(**fields, language=table.get("language"), task=table.get("task"))
    # Older files have defaults as [[place, token], ...] of a row's beginning.
    forced = [token for _, token in table.get("forced_decoder_ids") or ()]
    speech = dataclasses.replace(
        speech,
        language=speech.language or _first_name(forced, speech.languages, speech.language_tokens),
        task=speech.task or _first_name(forced, speech.tasks, speech.task_tokens),
    )
    return dataclasses.replace(config, speech=speech)


def _ids(config: WhisperConfig, key: str, values: Collection[Any]) -> tuple[int, ...]:
    """Returns the ids of a list that the model has. Raises FamilyError if they are not ids."""
    if not all(type(x) is int for x in values):
        raise FamilyError(f"{key} is {values!r}: expected ids of tokens")
    # Smaller models keep the lists of larger ones: what they lack cannot be generated anyway.
    return tuple(x for x in values if 0 <= x < config.vocab_size)


def _names_and_tokens(
    config: WhisperConfig, key: str, entries: Any
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Reads a table of tokens by name, such as {"<|en|>": 50259}."""
    if not isinstance(entries, dict):
        raise FamilyError(f"{key} is of type {type(entries).__name__}: expected an object")
    tokens = _ids(config, key, entries.values())
    if len(tokens) < len(entries):
        raise FamilyError(
            f"{key} has ids that the model lacks: expected ids from 0 to {config.vocab_size - 1}"
        )
    names = tuple(name.removeprefix("<|").removesuffix("|>") for name in entries)
    return names, tokens


def _first_name(forced: Sequence[int], names: Sequence[str], tokens: Sequence[int]) -> str | None:
    """Returns the name of the first forced token that has one; None if none has.

    >>> _first_name([7, 5, 6], ["en", "de"], [6, 5])
    'de'
    """
    name_of = dict(zip(tokens, names, strict=True))
    return next((name_of[token] for token in forced if token in name_of), None)


def write_generation(config: WhisperConfig) -> dict[str, Any]:
    """Writes what `read_generation` reads."""
    speech = config.speech
    lists = {key: list(getattr(speech, field)) for field, key in LISTS.items()}
    numbers = {key: getattr(speech, field) for field, key in NUMBERS.items()}
    numbers |= {name: getattr(speech, name) for name in DEFAULTS}
    languages = (f"<|{name}|>" for name in speech.languages)
    tables = {
        "lang_to_id": dict(zip(languages, speech.language_tokens, strict=True)),
        "task_to_id": dict(zip(speech.tasks, speech.task_tokens, strict=True)),
    }
    table = {
        key: value
        for key, value in (lists | numbers | tables).items()
        if value not in (None, [], {})
    }
    return table | {
        "decoder_start_token_id": config.start_token,
        "is_multilingual": bool(speech.languages),
    }


MODULES = bart.MODULES | {
    "embedding": "model.decoder.embed_tokens",
    "position": "model.decoder.embed_positions",
    "encoder_positions": "model.encoder.embed_positions",
    "encoder_conv1": "model.encoder.conv1",  # kernels [out, in, 3] lie as PyTorch's do
    "encoder_conv2": "model.encoder.conv2",
}
WHISPER = Family(
    title="Whisper, distil-whisper",
    model_types=("whisper",),
    architecture="WhisperForConditionalGeneration",
    keys=KEYS,
    read=read,
    names=functools.partial(common.names_by, MODULES),
    canonical=lambda name: name,
    sizes=SIZES,
    copies={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    unwritten=("begin_tokens", "dtype", "end_tokens", "speech"),
    read_generation=read_generation,
    write_generation=write_generation,
    generation_keys=(
        *LISTS.values(),
        *NUMBERS.values(),
        *TABLES.values(),
        *DEFAULTS,
        "forced_decoder_ids",
    ),
)
