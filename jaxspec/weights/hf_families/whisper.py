"""Whisper (arXiv 2212.04356) and distil-whisper (2311.00430), whose generation_config.json has the
tokens of speech.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jaxspec.nets.whisper import SIZES, Speech, WhisperConfig
from jaxspec.weights.hf_families import bart, common
from jaxspec.weights.hf_families.common import THEIRS, Family, FamilyError, count, only

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


def write(config: WhisperConfig) -> dict[str, Any]:
    """Writes the config.json of a network."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        **common.write_keys(config, FIELDS),
        **common.write_keys(config, DECODER),
        "activation_function": THEIRS[config.activation],
        "scale_embedding": False,
        "tie_word_embeddings": True,
        # Without them transformers has its own, which a smaller vocabulary lacks.
        **dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id"), next(iter(config.end_tokens), None)
        ),
    }


def read_generation(config: WhisperConfig, table: dict) -> WhisperConfig:
    """Reads the tokens of languages, tasks and timestamps, and those that are never generated."""

    def ids(key: str, values: Any) -> tuple[int, ...]:
        if not all(type(x) is int for x in values):
            raise FamilyError(f"{key} is {values!r}: expected ids of tokens")
        # Smaller models keep the lists of larger ones: what they lack cannot be generated anyway.
        return tuple(x for x in values if 0 <= x < config.vocab_size)

    fields: dict[str, Any] = {field: ids(key, table.get(key) or ()) for field, key in LISTS.items()}
    for field, key in NUMBERS.items():
        if table.get(key) is not None:
            (fields[field],) = ids(key, [table[key]]) or (None,)
    for field, key in TABLES.items():
        # An English-only model has neither table.
        entries = table.get(key) or {}
        if not isinstance(entries, dict):
            raise FamilyError(f"{key} is of type {type(entries).__name__}: expected an object")
        fields[f"{field}s"] = tuple(name.removeprefix("<|").removesuffix("|>") for name in entries)
        fields[f"{field}_tokens"] = ids(key, entries.values())
        if len(fields[f"{field}_tokens"]) < len(entries):
            raise FamilyError(
                f"{key} has ids that the model lacks: expected ids from 0 to "
                f"{config.vocab_size - 1}"
            )
    speech = Speech(**fields, language=table.get("language"), task=table.get("task"))
    # Older files have defaults as [[place, token], ...] of a row's beginning.
    forced = [token for _, token in table.get("forced_decoder_ids") or ()]
    languages = dict(zip(speech.language_tokens, speech.languages, strict=True))
    tasks = dict(zip(speech.task_tokens, speech.tasks, strict=True))
    language = speech.language or next(
        (languages[token] for token in forced if token in languages), None
    )
    task = speech.task or next((tasks[token] for token in forced if token in tasks), None)
    return dataclasses.replace(
        config, speech=dataclasses.replace(speech, language=language, task=task)
    )


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
    write=write,
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
