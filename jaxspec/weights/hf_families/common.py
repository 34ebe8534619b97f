"""The type of a family, and the helpers that all of them read a config.json with."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxspec.nets import net_of

EMBEDDING = "embedding/embedding"  # our parameter, of every network
# every family's tensor of a head of its own; of a tied one, some files hold it as a copy
HEAD = "lm_head.weight"


class FamilyError(ValueError):
    """A config.json does not describe a network of jaxspec; the message has its value and the
    expected one.
    """


class Tensor(NamedTuple):
    """The place of a parameter of ours in a Hugging Face checkpoint."""

    name: str
    # whether it, or each matrix of a stack, is stored [in, out]; ours are [out, in]
    transposed: bool = False
    # parameters in one tensor follow each other on its (untransposed) first axis, in this order
    order: int = 0
    is_row: bool = False  # whether a vector of ours is stored as a matrix of one row


LEAVES = {"bias": "bias"} | dict.fromkeys(
    ("weight", "scale", "embedding", "table", "matrix", "kernel"), "weight"
)
"""The ends of our parameters' paths, and those of PyTorch's names."""
_NUMBER = re.compile(r"(?<=_)\d+(?=/)")


def named(
    paths: Iterable[str], table: Mapping[str, str], leaves: Mapping[str, str] = LEAVES
) -> dict[str, Tensor]:
    """Says where parameters lie.

    Args:
        paths: the parameters' paths.
        table: names of their modules, or of themselves, by path; {} stands for a number. Modules
            with one name are parts of one tensor, in the table's order.
        leaves: the end of the name of a module's parameter, by that of its path.

    Raises:
        FamilyError: the table lacks a module.

    >>> table = {
    ...     "layers_{}/ff/out": "model.layers.{}.mlp.down_proj",
    ...     "layers_{}/sinks": "model.layers.{}.sinks",
    ... }
    >>> [
    ...     tensor.name
    ...     for tensor in named(["layers_3/ff/out/weight", "layers_3/sinks"], table).values()
    ... ]
    ['model.layers.3.mlp.down_proj.weight', 'model.layers.3.sinks']
    """
    tensors = {}
    order = {entry: number for number, entry in enumerate(table)}
    for path in paths:
        pattern = _NUMBER.sub("{}", path)
        module, _, leaf = pattern.rpartition("/")
        # A parameter's own entry goes before its module's: stacks of experts have no ".weight".
        entry = pattern if pattern in table else module
        if entry not in table:
            raise FamilyError(f"the format has no name for the parameter {path}")
        end = ""
        if entry != pattern:
            end = f".{leaves.get(leaf, leaf)}"
        tensors[path] = Tensor(
            f"{table[entry]}{end}".format(*_NUMBER.findall(path)), order=order[entry]
        )
    return tensors


def names_by(table: Mapping[str, str], config: Any) -> dict[str, Tensor]:
    """Says where each parameter of a network lies, as `named` does."""
    return named(net_of(config).paths(config), table)


class Family(NamedTuple):
    """A kind of model that Hugging Face checkpoints come in.

    Attributes:
        title: for people.
        model_types: the values of "model_type" in config.json.
        keys: the checks of the keys that `read` reads, by their names.
        read: config.json -> configuration of the network. Raises ValueError where the network would
            compute something else.
        architecture: the class of its models in transformers.
        names: configuration -> {path of our parameter: where it lies}.
        canonical: name of a tensor -> its name in `names`; None if the tensor is not a parameter.
        sizes: {name: configuration} of published models.
        write: configuration -> config.json; of a configuration that the family cannot express,
            anything. None, as of most: a model is written with the config.json that it was read
            from (`weights.source`).
        unwritten: fields of a configuration that config.json has no place for:
            `weights.huggingface.save` writes the end tokens beside it, and tensors have dtypes.
            copies: {name of a tensor that some files hold twice: name of the tensor that it
            repeats}. Whether it does is checked before it is left out. A tied head is not among
            them: see `HEAD`.
        unused: configuration -> names of tensors that a file may hold, and that the network does
            not use.
        read_generation: (configuration, generation_config.json) -> the configuration with the
            family's own entries. The configuration has its end tokens.
        write_generation: configuration -> the entries that `read_generation` reads.
        generation_keys: the keys of these entries.
        head: the name of a head's own tensor.
        apart, alternate: the names of what files hold expert by expert, or head by head, and how
            two projections lie in one matrix: see `stacks.stacked`.
        text: config.json -> a config.json of the part that is read, where a model also sees or hears.
        optional: {name of a tensor that some files lack: the field of a configuration that is then
            False}.
    """

    title: str
    model_types: tuple[str, ...]
    architecture: str
    keys: Mapping[str, Key]
    read: Callable[[dict], Any]
    names: Callable[[Any], dict[str, Tensor]]
    canonical: Callable[[str], str | None]
    sizes: Mapping[str, Any]
    write: Callable[[Any], dict] | None = None
    copies: Mapping[str, str] = MappingProxyType({})
    unwritten: tuple[str, ...] = ("dtype", "end_tokens")
    unused: Callable[[Any], Collection[str]] = lambda config: ()
    apart: tuple[str, ...] = ()
    alternate: bool = False
    read_generation: Callable[[Any, dict], Any] = lambda config, table: config
    write_generation: Callable[[Any], dict[str, Any]] = lambda config: {}
    generation_keys: Collection[str] = ()
    head: str = HEAD
    optional: Mapping[str, str] = MappingProxyType({})
    text: Callable[[Mapping[str, Any]], dict] = dict


ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "relu": "relu"},
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu"),
    **dict.fromkeys(("gelu", "gelu_python"), "gelu_erf"),
    "relu2": "relu2",
}
THEIRS = {activation: name for name, activation in reversed(ACTIVATIONS.items())} | {
    "xielu": "xielu"
}


def activation(name: str) -> str:
    """Returns our name of an activation.

    >>> activation("gelu_new")
    'gelu'
    """
    if name not in ACTIVATIONS:
        raise FamilyError(f"the activation is {name!r}: expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


LARGEST = 2**31 - 1  # of a count: sizes are int32

Key = Callable[[str, Any], None]
"""The check of a key of config.json: (its name, its value) -> None. Raises FamilyError."""


def count(least: int = 1, limit: int = LARGEST) -> Key:
    """Makes the check of an integer.

    >>> count()("hidden_size", "64")
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: hidden_size is '64': expected a positive integer
    """
    sign = "positive" if least == 1 else "non-negative"

    def check(name: str, value: Any) -> None:
        # type, not isinstance: True and False are ints in Python, but not in JSON.
        if type(value) is not int or not least <= value <= LARGEST:
            raise FamilyError(f"{name} is {value!r}: expected a {sign} integer")
        if value > limit:
            raise FamilyError(f"{name} is {value}: expected at most {limit:,}")

    return check


def number(*, or_zero: bool = False) -> Key:
    """Makes the check of a positive number; `or_zero`: 0 is a value, too.

    >>> number()("rms_norm_eps", 0)
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: rms_norm_eps is 0: expected a positive number
    """

    def check(name: str, value: Any) -> None:
        is_number = type(value) in (int, float)
        if is_number and value == 0 and or_zero:
            return
        if not is_number or not 0 < value < float("inf"):
            raise FamilyError(f"{name} is {value!r}: expected a positive number")

    return check


def flag() -> Key:
    """Makes the check of true or false."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise FamilyError(f"{name} is {value!r}: expected true or false")

    return check


def table_of(keys: Mapping[str, Key]) -> Key:
    """Makes the check of an object inside of a config.json, and of its keys."""

    def check_table(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise FamilyError(f"{name} is of type {type(value).__name__}: expected an object")
        check(value, keys)

    return check_table


def check(table: Mapping[str, Any], keys: Mapping[str, Key]) -> None:
    """Raises FamilyError for a wrong value of one of the keys. null counts as missing.

    >>> check({"hidden_size": None, "tie_word_embeddings": 1}, {"tie_word_embeddings": flag()})
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: tie_word_embeddings is 1: expected true or false
    """
    for name, key in keys.items():
        if table.get(name) is not None:
            key(name, table[name])


# Lists and tables are made with an entry for each, before any tensor is looked at.
MOST_LAYERS = 10_000
MOST_HEAD_DIM = 2**16


def need(table: Mapping[str, Any], key: str) -> Any:
    """Returns an entry that has no default.

    >>> need({"hidden_size": 64}, "vocab_size")
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: it lacks 'vocab_size'
    """
    if table.get(key) is None:
        raise FamilyError(f"it lacks {key!r}")
    return table[key]


def read_keys(table: Mapping[str, Any], keys: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """Reads entries into fields of a network. null counts as missing; a field without a default is
    required.

    >>> read_keys({"n_embd": 64, "n_head": None}, {"dim": "n_embd", "heads": "n_head"}, heads=4)
    {'dim': 64, 'heads': 4}
    """
    fields = {}
    for field, key in keys.items():
        if field not in defaults:
            value = need(table, key)
        else:
            value = table.get(key)
        default = defaults.get(field)
        convert = {bool: bool, float: float}.get(type(default))
        if value is None:
            fields[field] = default
        elif convert:
            fields[field] = convert(value)
        else:
            fields[field] = value
    return fields


def write_keys(form: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Writes what `read_keys` reads, of a network's short form."""
    return {key: getattr(form, field) for field, key in keys.items()}


def with_start(table: dict[str, Any]) -> dict[str, Any]:
    """Fills in the token that a decoder's row begins with, in transformers' order of keys, as far
    as one is named.

    >>> with_start({"pad_token_id": 0, "bos_token_id": 2})["decoder_start_token_id"]
    2
    """
    starts = (table.get(key) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    return table | {
        "decoder_start_token_id": next((token for token in starts if token is not None), None)
    }


def decoder_vocab(table: Mapping[str, Any]) -> int | None:
    """Returns the size of a decoder's vocabulary: vocab_size, unless the two sides of a Marian have
    embeddings apart.

    >>> decoder_vocab(
    ...     {"vocab_size": 61, "decoder_vocab_size": 67, "share_encoder_decoder_embeddings": False}
    ... )
    67
    """
    apart = table.get("share_encoder_decoder_embeddings") is False
    return (table.get("decoder_vocab_size") if apart else None) or table.get("vocab_size")


def check_id(key: str, value: Any, vocab: int) -> int:
    """Returns an id of a vocabulary.

    >>> check_id("forced_bos_token_id", "5", 61)
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: forced_bos_token_id is '5': expected an id from 0 to 60
    """
    if type(value) is not int or not 0 <= value < vocab:
        raise FamilyError(f"{key} is {value!r}: expected an id from 0 to {vocab - 1}")
    return value


FORCED = "forced_bos_token_id"


def read_begin(config: Any, table: Mapping[str, Any]) -> Any:
    """Reads the token that follows the start token in every row."""
    begin = ()
    if table.get(FORCED) is not None:
        begin = (check_id(FORCED, table[FORCED], config.vocab_size),)
    return dataclasses.replace(config, begin_tokens=begin)


def write_begin(config: Any) -> dict[str, Any]:
    """Writes what `read_begin` reads."""
    if len(config.begin_tokens) > 1:
        raise FamilyError(
            f"begin_tokens is {config.begin_tokens}: expected one at most, which is {FORCED}"
        )
    if config.begin_tokens:
        return {FORCED: config.begin_tokens[0]}
    return {}


BEGINNING: dict[str, Any] = dict(
    read_generation=read_begin, write_generation=write_begin, generation_keys=(FORCED,)
)
"""The fields of a family that reads its rows' beginning, and nothing else, from
generation_config.json.
"""


def only(table: Mapping, **expected: Any) -> None:
    """Raises FamilyError for values that ask for a computation that the network lacks. null counts
    as missing.

    >>> only({"scale_attn_weights": False}, scale_attn_weights=True)
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: scale_attn_weights is False: only True is supported
    """
    for key, value in expected.items():
        if table.get(key) not in (None, value):
            raise FamilyError(f"{key} is {table[key]!r}: only {value!r} is supported")


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply ({error})") from None
    if not isinstance(table, dict):
        raise FamilyError(f"it is of type {type(table).__name__}, expected an object")
    return table
