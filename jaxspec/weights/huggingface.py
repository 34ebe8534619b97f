"""Hugging Face folders and hub ids: config.json, weights by name, tokenizer; in and out.

Parameters go to the device tensor by tensor, so the host holds about one tensor (one file, of
formats that cannot be read in parts) besides the model. `jaxspec.weights.hf_families` knows the
network that a config.json describes and the names of its tensors; `jaxspec.weights.tensors` reads
the files.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import re
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import sharding
from jaxspec.core import Model, Params
from jaxspec.files import digests, folders
from jaxspec.nets import dtype_of, net_of
from jaxspec.weights import (
    generation_config,
    lora,
    parameters,
    quantisation,
    quantised_files,
    source,
    stacks,
    tensors,
    tied,
    tokenizers,
)
from jaxspec.weights.hf_families import Family, FamilyError, Tensor
from jaxspec.weights.hf_families.common import EMBEDDING, read_object
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.tensors import ArrayShape, CheckpointError, Stored

CONFIG = source.CONFIG
SHARD_BYTES = 5 * 10**9  # of the files that `save` writes, as transformers has it
T = TypeVar("T")


def is_folder(folder: Path) -> bool:
    """Tells whether a folder is a Hugging Face model: it has a config.json."""
    return (folder / CONFIG).is_file()


def restore(
    folder: str | Path,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    adapter: Path | None = None,
) -> tuple[Params, Any]:
    """Reads the parameters of a Hugging Face folder.

    Args:
        folder: holds config.json and weights.
        dtype: the matrices' dtype, "float32", "bfloat16", "int8" or "int4"; other leaves are
            float32.
        mesh: the devices to place the parameters on (`jaxspec.sharding`); None for the default
            device.
        adapter: a LoRA folder to merge into them; None for none.

    Returns:
        The parameters and the network's configuration: whether its head is tied is decided by the
        weights.

    Raises:
        CheckpointError: the model is of another family, or its files are absent, damaged, or
            another model's. Then the message lists missing and unexpected tensors and other shapes,
            before any weights are read.
    """
    folder = Path(folder)
    # A quantised layer has other tensors than the network: it is presented as the matrix before
    # names are compared.
    family, config = read_config(folder)
    table = read_object(folder / CONFIG)
    scheme = quantised_files.scheme_of(table)
    names = traced(folder, CONFIG, family.names, config)
    by_name = _by_tensor(names)
    repeated = tied.repeated_names(family, config, names)
    files = tied.with_repeats(tensors.shards(folder), family, repeated)
    files = quantised_files.unpacked(files, scheme, lambda name: family.canonical(name) in by_name)
    files = tied.by_first_names(files, family, repeated)
    if adapter is not None:
        if scheme is not None:
            raise CheckpointError(
                f"{folder} is quantised, and {adapter} changes it: load the full model, in any "
                "dtype"
            )
        both = None
        if config.tied_head:
            both = (names[EMBEDDING].name, family.head)
        transposed = {name for name, ((_, tensor), *_) in by_name.items() if tensor.transposed}
        files = lora.merge(
            files, lora.open_folder(adapter), family.canonical, transposed.__contains__, both
        )
    if any("text_config" in half for half in (table, table.get("encoder") or {})):
        _tell_of_others(folder, family, files)
    return assemble(folder, family, config, files, dtype, mesh)


def _tell_of_others(folder: Path, family: Family, files: list[tensors.Shard]) -> None:
    """Names the parts of a model beside its text half, which alone is read."""
    names = [name for shard in files for name in shard.shapes if family.canonical(name) is None]
    parts = sorted(
        {name.removeprefix("model.").removeprefix("encoder.").split(".")[0] for name in names}
    )
    tell_of_parts(folder, parts, len(names))


def tell_of_parts(folder: Path, parts: list[str], count: int) -> None:
    """Warns if parts of a model, with `count` tensors, are left out."""
    if parts:
        text = "%s: the text half is read, and not %s (%d tensors): prompts are text"
        logging.getLogger(__name__).warning(text, folder, ", ".join(parts), count)


def assemble(
    folder: Path,
    family: Family,
    config: Any,
    shards: list[tensors.Shard],
    dtype: str,
    mesh: Mesh | None,
    described: str = CONFIG,
) -> tuple[Params, Any]:
    """Reads the parameters that lie in files of tensors, as `restore` returns them; `described`:
    what says which.
    """
    config = dataclasses.replace(config, dtype=quantisation.computation(dtype))
    unused = frozenset(family.unused(config))
    # Experts and heads that lie apart are presented as stacks before names are compared.
    shards = stacks.stacked(shards, family.apart, family.alternate)
    files = [
        _of_model(shard, config).keep(lambda name: family.canonical(name) not in unused)
        for shard in shards
    ]
    repeated = tied.repeated_names(family, config, traced(folder, described, family.names, config))
    config, copies = _without_copies(folder, family, config, files, repeated)
    where = _by_tensor(family.names(config))
    expected = _check(folder, where, config, files, family, copies, described)
    axes = net_of(config).axes(config)
    params = dict[str, jax.Array]()
    for shard in files:
        for name, x in shard.read():
            canonical = family.canonical(name)
            if canonical is None:
                continue
            parameters.check_float(shard.path, name, x.dtype.name)
            # What makers of 4 bits left in full hurts when it is rounded: it gets 8.
            if dtype == "int4" and name in shard.in_full:
                finer = "int8"
            else:
                finer = dtype
            for path, piece in _split(x, expected, where[canonical]) if canonical in where else ():
                params[path] = parameters.place(path, piece, axes, mesh, finer)
    return parameters.nested(params), config


def _of_model(shard: tensors.Shard, config: Any) -> tensors.Shard:
    """Leaves out the modules for multi-token prediction that may lie beside a model: `load_drafter`
    reads these.
    """
    layers = net_of(config).depth(config)

    def is_module(name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        return name.startswith(("mtp.", "model.mtp_layers.")) or (
            layer is not None and int(layer[1]) >= layers
        )

    # A module is further layers, or has names of its own; only eh_proj or mtp tells it from a
    # longer model.
    beside = {name for name in shard.shapes if is_module(name)}
    if not any("eh_proj" in name or "mtp" in name for name in beside):
        return shard
    return shard.keep(lambda name: name not in beside)


def read_config(folder: Path) -> tuple[Family, Any]:
    """Reads the family that config.json names, and the network's configuration as it has it (see
    `_without_copies`).

    Which tokens begin and end a text is taken from where transformers takes it
    (`generation_config`).
    """
    return config_of(source.read_folder(folder), folder / CONFIG)


def config_of(tables: source.SourceFiles, path: Path) -> tuple[Family, Any]:
    """Reads the family and the network of a config.json's table, as `read_config` does.

    Args:
        tables: the content of the JSON files.
        path: the config.json, for messages.
    """
    family, config = source.read(tables, path)
    generation = generation_config.read(path, tables[CONFIG], tables.get(source.GENERATION))
    generation_config.tell_of_unread(generation, family.generation_keys)
    ends = config.end_tokens
    if ends and not any(0 <= token < config.vocab_size for token in ends):
        text = (
            "%s: eos_token_id is %s, and the model has ids from 0 to %d: texts go on to "
            "max_new_tokens"
        )
        where = path.parent if path.name == CONFIG else path
        logging.getLogger(__name__).warning(text, where, list(ends), config.vocab_size - 1)
    return family, config


def save(
    model: Model,
    folder: str | Path,
    *,
    overwrite: bool = False,
    keys: Mapping[str, Any] = types.MappingProxyType({}),
) -> Path:
    """Writes a folder that transformers' `AutoModelForCausalLM` or
    `AutoModelForSeq2SeqLM.from_pretrained` loads.

    Tensors are written in the model's dtype, quantised matrices as float32. A model that was loaded
    in the dtype of its folder is written bit for bit, with the config.json of that folder and what
    has changed since. The folder is written whole or not at all. A limit on a T5's positions is not
    written, since its config.json has no place for it. Besides the file that is being filled, of at
    most `SHARD_BYTES`, the host holds about one tensor. Under `jax.distributed` all processes call
    this, and the first writes.

    Args:
        model: a model of a family in `hf_families`.
        folder: where to.
        overwrite: whether a Hugging Face folder that is there already may be replaced.
        keys: further entries of config.json.

    Raises:
        CheckpointError: `folder` exists already, the disk is full, or transformers has no such
            model.
    """
    folder = Path(folder).expanduser().resolve()
    dtype = _saved_as(model)
    needed = quantisation.count(model.params) * jnp.dtype(dtype).itemsize
    complaint = folders.occupied(folder, "Hugging Face model", overwrite, marker=CONFIG)
    complaint = complaint or folders.no_room(folder, needed)
    if complaint:
        raise CheckpointError(complaint)
    refused = f"{model.name or 'the model'} cannot be saved for transformers"
    # transformers takes these from config.json, and the tokenizer knows them.
    ids = {name: getattr(model.tokenizer, name, None) for name in source.IDS}
    ids = {name: value for name, value in ids.items() if value is not None}
    try:
        family, tables = source.written(model.config, model.source, ids)
    except FamilyError as error:
        raise CheckpointError(f"{refused}: {error}") from error
    absent = (
        family.names(model.config).keys()
        - parameters.flat(model.params, quantisation.is_quantised).keys()
    )
    if absent:
        lacking = (
            f"its parameters lack {min(absent)!r}, as those of a trimmed or mapped vocabulary do"
        )
        raise CheckpointError(f"{refused}: {lacking}. Save the model that it was made of")
    tables[CONFIG] |= {"torch_dtype": dtype, **keys}
    return write_folder(folder, tables, _theirs(model, family), model.tokenizer)


def write_folder(
    folder: Path,
    tables: dict[str, dict],
    named: Iterable[tuple[str, np.ndarray]],
    tokenizer: Any = None,
) -> Path:
    """Writes a folder of JSON files, weights and perhaps a tokenizer, whole or not at all.

    Args:
        tables: the content of the JSON files, by their names; one is config.json.
        named: tensors by their names, one at a time. Under `jax.distributed` all processes go
            through them.
    """
    with parameters.beside(folder) as beside:
        if jax.process_index() > 0:
            # takes part in sending what the first process writes
            collections.deque(named, maxlen=0)
            return folder
        for file, table in tables.items():
            (beside / file).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        write_weights(beside, named)
    return folder


def _theirs(model: Model, family: Family) -> Iterator[tuple[str, np.ndarray]]:
    params = parameters.flat(model.params, is_leaf=quantisation.is_quantised)

    def read(path: str) -> np.ndarray:
        x = params[path]
        return sharding.fetch(
            quantisation.dequantise_matrix(x)
            if quantisation.is_quantised(x)
            else parameters.apart(x)
        )

    for name, parts in _by_tensor(family.names(model.config)).items():
        # Queries, keys and values of a GPT-2 are one tensor: parts in order, joined along the first
        # axis.
        (path, first), *others = parts
        if others:
            tensor = np.concatenate([read(path) for path, _ in parts])
        else:
            tensor = read(path)
        if first.transposed:
            tensor = tensor.swapaxes(-1, -2)
        if first.is_row:
            tensor = tensor[None]
        tensor = np.asarray(tensor, jnp.dtype(_saved_as(model)), order="C")
        yield from stacks.unstacked(name, tensor, family.apart, family.alternate)


def _saved_as(model: Model) -> str:
    """Returns the dtype of the tensors that `save` writes: what quantised matrices stand for needs
    float32.
    """
    if quantisation.has_quantised(model.params):
        return "float32"
    return dtype_of(model.config)


def write_weights(folder: Path, named: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes one file, or several of at most SHARD_BYTES with an index; each is written as soon as
    it is full.
    """
    from safetensors.numpy import save_file

    files = list[Path]()
    weight_map = dict[str, int]()
    total = 0
    for batch in parameters.batches(named, lambda item: item[1].nbytes, SHARD_BYTES):
        file = folder / f"{len(files)}.part"
        save_file(dict(batch), file, metadata={"format": "pt"})
        # safetensors gives its files to their owner alone
        file.chmod((folder / CONFIG).stat().st_mode)
        weight_map |= dict.fromkeys((name for name, _ in batch), len(files))
        total += sum(x.nbytes for _, x in batch)
        files.append(file)
        del batch  # before the next one is filled
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    for file, name in zip(files, names, strict=True):
        file.rename(folder / name)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: names[i] for name, i in weight_map.items()},
    }
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )


def _by_tensor(names: dict[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """Groups our parameters by the tensor that holds them, in the tensor's order."""
    parts: dict[str, list[tuple[str, Tensor]]] = {}
    for path, tensor in names.items():
        parts.setdefault(tensor.name, []).append((path, tensor))
    return {
        name: sorted(members, key=lambda item: item[1].order) for name, members in parts.items()
    }


def _shape(expected: dict[str, ArrayShape], parts: list[tuple[str, Tensor]]) -> ArrayShape:
    path, tensor = parts[0]
    if not expected[path]:  # a number
        return ()
    if tensor.is_row:
        return (1, *expected[path])
    shape = (sum(expected[path][0] for path, _ in parts), *expected[path][1:])
    if tensor.transposed:
        return (*shape[:-2], shape[-1], shape[-2])
    return shape


def _split(
    x: np.ndarray | Stored, expected: dict[str, ArrayShape], parts: list[tuple[str, Tensor]]
) -> Iterator[tuple[str, np.ndarray | Stored]]:
    """Yields the parameters that lie in a tensor."""
    start, (_, tensor) = 0, parts[0]
    # Of a tensor that several share, each has the rows after those of the ones before it.
    for path, _ in parts:
        stop = None
        if len(parts) > 1:
            stop = start + expected[path][0]
        yield path, np.asarray(x)[0] if tensor.is_row else _rows(x, start, stop, tensor.transposed)
        start = stop or 0


def _rows(
    x: np.ndarray | Stored, start: int, stop: int | None, transposed: bool
) -> np.ndarray | Stored:
    """Returns rows of a tensor as it is in PyTorch, or where it is `transposed` columns, turned."""
    if transposed and len(x.shape) == 3:  # experts, each of which is turned when it is read
        shape = (x.shape[0], x.shape[2], x.shape[1])

        def rows(start: int, stop: int | None) -> Any:
            return x[start:stop].swapaxes(1, 2)

        is_quantised = isinstance(x, quantised_files.Quantised)
        if is_quantised:
            return dataclasses.replace(x, shape=shape, rows=rows)
        return Stored(shape, x.dtype, rows)
    if transposed:
        return np.asarray(x).T[start:stop]
    if stop is None:
        return x
    if isinstance(x, quantised_files.Quantised):
        return x.part(start, stop)
    return x[start:stop]


def _without_copies(
    folder: Path, family: Family, config: Any, files: list[tensors.Shard], copies: Mapping[str, str]
) -> tuple[Any, frozenset[str]]:
    """Returns the network that the files hold, and which tensors of theirs repeat another and are
    left out.

    A head that differs from the embedding is the network's own, though config.json call it tied
    (transformers 5 calls every T5's so). What may be copies is read once more, for that; few files
    hold any.
    """
    stored_names = _stored_names(folder, family, files)
    # Files of a model without its head lack what the head adds.
    absent = {field: False for name, field in family.optional.items() if name not in stored_names}
    config = dataclasses.replace(config, **absent)
    copies = {
        copy: original
        for copy, original in copies.items()
        if copy in stored_names and original in stored_names
    }
    contents = _contents(files, {stored_names[name] for pair in copies.items() for name in pair})
    for copy, original in copies.items():
        copy_name = stored_names[copy]
        original_name = stored_names[original]
        if contents[copy_name] == contents[original_name]:
            continue
        if copy != family.head:
            differs = f"{copy_name} differs from {original_name}, which it should repeat"
            raise CheckpointError(
                f"{folder}: {differs} (in umT5 biases do). Convert or download the model again"
            )
        config = dataclasses.replace(config, tied_head=False)
    left_out = set(copies)
    if not config.tied_head:
        left_out.discard(family.head)
    return config, frozenset(left_out)


def _stored_names(folder: Path, family: Family, files: list[tensors.Shard]) -> dict[str, str]:
    """Maps canonical names to the names in the files. Raises CheckpointError for a second name."""
    stored_names: dict[str, str] = {}
    for shard in files:
        for name in shard.shapes:
            canonical = family.canonical(name)
            if canonical is None:
                continue
            earlier = stored_names.setdefault(canonical, name)
            if earlier != name:
                raise CheckpointError(
                    f"{folder} holds {canonical} twice, as {earlier} and as {name}: expected it "
                    "once"
                )
    return stored_names


def _contents(files: list[tensors.Shard], names: set[str]) -> dict[str, tuple[Any, ...]]:
    """Reads tensors and returns the dtype, shape and digest of each.

    Digests, not arrays, are compared: two embeddings of a large model would not fit in memory.
    """
    if not names:
        return {}
    contents = dict[str, tuple[Any, ...]]()
    for shard in files:
        for name, x in shard.read(names):
            digest = digests.of_arrays(x[rows] for rows in tensors.chunks(x))
            contents[name] = (x.dtype.name, x.shape, digest)
    return contents


def _check(
    folder: Path,
    where: dict[str, list[tuple[str, Tensor]]],
    config: Any,
    files: list[tensors.Shard],
    family: Family,
    copies: Container[str],
    described: str,
) -> dict[str, ArrayShape]:
    """Compares names, and then shapes, both in PyTorch's terms, before any weights are read.

    Returns the shapes of our parameters. The whole network is traced for them: not before its names
    are known to be right.
    """
    stored = {name: shape for shard in files for name, shape in shard.shapes.items()}
    shapes = {
        canonical: shape
        for name, shape in stored.items()
        if (canonical := family.canonical(name)) is not None
    }
    # A copy of the embedding is not a tensor of the network.
    shapes = {name: shape for name, shape in shapes.items() if name not in copies}
    wrong = f"{folder}: the weights are not those of the {family.title} of its {described}:"
    complaint = parameters.differences(dict.fromkeys(where), dict.fromkeys(shapes), str)
    if complaint:
        quantised = quantised_files.unread(folder, stored)
        raise CheckpointError(f"{folder}: {quantised}" if quantised else wrong + complaint)
    expected = traced(folder, described, parameters.shapes, config)
    want = {name: _shape(expected, parts) for name, parts in where.items()}
    complaint = parameters.differences(want, shapes)
    if complaint:
        raise CheckpointError(wrong + complaint)
    return expected


def traced(folder: Path, described: str, function: Callable[[Any], T], config: Any) -> T:
    """Calls a function that traces the network of a configuration."""
    try:
        return function(config)
    except Exception as error:  # impossible sizes fail in any way
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{folder}: its {described} describes no network that can be built: {reason}"
        ) from error


def stored_dtype(folder: Path) -> str:
    """Returns the dtype that config.json names, "int8", "int4", "bfloat16" or else "float32"; reads
    no weights.
    """
    read_config(folder)
    table = read_object(folder / CONFIG)
    scheme = quantised_files.scheme_of(table)
    if scheme is not None:
        return scheme.dtype
    tables = (table, table.get("text_config") or {})
    keys = ("dtype", "torch_dtype")
    dtype = next((x[key] for x in tables for key in keys if x.get(key)), None)
    if dtype == "bfloat16":
        return "bfloat16"
    return "float32"


def open_model(folder: Path) -> Reader:
    """Opens a folder; a model of the hub is named by who loads it."""
    return Reader(
        folder,
        folder.resolve().name,
        config=lambda: read_config(folder)[1],
        tokenizer=lambda: tokenizers.load(folder),
        params=lambda dtype, mesh: restore(folder, dtype, mesh),
        stored_dtype=lambda: stored_dtype(folder),
        source=lambda: source.read_folder(folder),
    )


FORMAT = ModelFormat("huggingface", is_folder, open_model)
"""A Hugging Face folder: how it is recognised and opened."""
