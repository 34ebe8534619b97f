"""generation_config.json, which lies beside a config.json: tokens that begin and end a text, and
further options.

If the file exists, transformers reads the tokens that begin and end a text from it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.weights.hf_families import FamilyError
from jaxspec.weights.hf_families.common import FORCED, LARGEST, check_id, decoder_vocab
from jaxspec.weights.tensors import CheckpointError

FILE = "generation_config.json"
FORCED_END = "forced_eos_token_id"
# keys that change the text of transformers' `generate` at temperature 0, and the value that does
# not
NOT_READ = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0
    ),
    **dict.fromkeys((FORCED, FORCED_END, "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "stop_strings")),
    "exponential_decay_length_penalty": None,
    "num_beams": 1,
}
ABSENT = {  # the same, of what jaxspec computes in no way
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "token_healing": False,
    **dict.fromkeys(
        ("watermarking_config", "dola_layers", "assistant_ensemble_weight", "max_time")
    ),
    **dict.fromkeys(("constraints", "force_words_ids")),
}
# keys that change it where there are beams
OF_BEAMS = {"length_penalty": 1, "early_stopping": False}
ABSENT_OF_BEAMS = {"num_beam_groups": 1, "diversity_penalty": 0, "renormalize_logits": False}
QUANTISED_CACHE = ("cache_implementation", "quantized")  # other values of the key change no text


class GenerationConfig(NamedTuple):
    """The content of the file, or of config.json if it is missing."""

    path: Path  # the file that was read
    table: dict[str, Any]
    # the keys of config.json that say which token a decoder's row begins with
    starts: dict[str, Any]
    ends: tuple[int, ...]  # the ids that end a text; one that the model lacks never occurs


def read(
    path: Path, table: Mapping[str, Any], generation: Mapping[str, Any] | None
) -> GenerationConfig:
    """Reads the file, or else config.json.

    Args:
        path: the config.json, for messages.
        table: its content.
        generation: the content of the file; None if it is missing.
    """
    if generation is not None:
        path = path.with_name(FILE)
        named = dict(generation)
    else:
        named = (table.get("text_config") or {}) | {
            key: value for key, value in table.items() if value is not None
        }
    ends = named.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [] if ends is None else [ends]
    others = [x for x in ends if type(x) is not int]
    if others:
        raise CheckpointError(
            f"{path}: eos_token_id has {others[0]!r}: expected an id, or a list of ids"
        )
    starts = {key: named.get(key) for key in ("decoder_start_token_id", "bos_token_id")}
    start = starts["decoder_start_token_id"]
    if start is not None:
        try:
            check_id("decoder_start_token_id", start, decoder_vocab(table) or LARGEST)
        except FamilyError as error:
            raise CheckpointError(f"{path}: {error}") from error
    # config.json may lack them, and `family.read` then has its own default.
    if not any(x is not None for x in starts.values()):
        starts = {}
    return GenerationConfig(path, named, starts, tuple(ends))


def tell_of_unread(generation: GenerationConfig, keys: Collection[str]) -> None:
    """Warns of the keys that change greedy text in transformers and that nobody reads here.

    Args:
        generation: the content of the file.
        keys: the keys that the model's family reads.
    """
    path = generation.path
    named = generation.table
    has_beams = named.get("num_beams") not in (None, 1)
    absent = ABSENT | (ABSENT_OF_BEAMS if has_beams else {})
    plain = NOT_READ | (OF_BEAMS if has_beams else {}) | absent
    unread = {
        key: named[key]
        for key, neutral in plain.items()
        if named.get(key) not in (None, neutral, [], {})
    }
    cache, quantised = QUANTISED_CACHE
    if named.get(cache) == quantised:
        unread[cache] = quantised
    unread = {key: value for key, value in unread.items() if key not in keys}
    if not unread:
        return
    computed_nowhere = unread.keys() & {*absent, cache}
    searched = {"num_beams", *OF_BEAMS}
    names = unread.keys()
    options = names - {*searched, FORCED_END, *computed_nowhere}
    no_end = "no end is forced, texts end by themselves or are cut; see sampling.forced_end"
    advice = {
        "pass what `generate` has to it as options": options,
        "pass `beam_search` beams, length_penalty and early_stopping": names & {"num_beams"},
        no_end: names & {FORCED_END},
        f"jaxspec writes the text without {', '.join(sorted(computed_nowhere))}: remove that "
        "from the file, or decode with transformers": computed_nowhere,
    }
    text = "%s asks for %s, which jaxspec does not read from there: %s"
    options = ", ".join(f"{key}={value!r}" for key, value in unread.items())
    logging.getLogger(__name__).warning(
        text, path, options, "; ".join(x for x in advice if advice[x])
    )
