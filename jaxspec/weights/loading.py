"""Loading a model, and where to find the shipped ones."""

from __future__ import annotations

import copyreg
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec import sharding
from jaxspec.core import Model, checks
from jaxspec.core.checks import check_names, suggest
from jaxspec.files import folders
from jaxspec.nets import axes_of, net_of
from jaxspec.vocab.languages import with_languages
from jaxspec.vocab.trim import draft_tokens, trim_vocabulary, untrimmed
from jaxspec.weights import (
    gemma_orbax,
    gguf,
    hub,
    huggingface,
    lora,
    orbax,
    quantisation,
    t5x,
    tokenizers,
)
from jaxspec.weights.orbax import MANIFEST
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.shipped import shipped
from jaxspec.weights.tensors import CheckpointError

DTYPES = orbax.DTYPES
COMPUTED = ("float32", "bfloat16")  # around quantised matrices
FORMATS: tuple[ModelFormat, ...] = (  # a path is of the first that it matches
    gguf.FORMAT,
    orbax.FORMAT,
    gemma_orbax.FORMAT,
    t5x.FORMAT,
    huggingface.FORMAT,
)
# The format that is written.
OURS = orbax.FORMAT.name
HUGGING_FACE = huggingface.FORMAT.name
# models that the hub also finds by the last part of their names, which here can only be a folder's
HUB_NAMES = (
    *(f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")),
    *(f"google-t5/{name}" for name in ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b")),
)
OPTIONS = (
    *("dtype", "compute", "mesh", "revision", "chat_template", "adapter"),
    *("source_language", "target_language"),
)
OTHER_NAMES = {  # arguments of transformers' from_pretrained: what to do instead
    "attn_implementation": "attention is that of jaxspec.nets",
    "cache_dir": "huggingface_hub has its cache where HF_HOME says",
    "device_map": 'it is called mesh, such as mesh="model=8", of so many devices; by default the '
    "first one",
    "gguf_file": "give the path of the GGUF file itself as source",
    "load_in_4bit": 'it is called dtype="int4"',
    "load_in_8bit": 'it is called dtype="int8"',
    "local_files_only": "set HF_HUB_OFFLINE=1",
    "low_cpu_mem_usage": "weights are always read one after the other",
    "model_name": "it is called source, the first argument",
    "pretrained_model_name_or_path": "it is called source, the first argument",
    "quantization_config": 'give dtype="int8" or dtype="int4"',
    "subfolder": "give the path of the folder itself as source",
    "token": "set HF_TOKEN, or log in with huggingface_hub",
    "torch_dtype": 'it is called dtype: "float32", "bfloat16", "int8" or "int4"',
    "tp_plan": 'it is called mesh, such as mesh="model=8"',
    "trust_remote_code": "code that a model brings is never run",
}
SLOW_FROM = 100_000_000  # parameters; smaller models fit caches
SLOWER = (
    "%s is loaded as %s, which on a CPU saves memory, but not time: with models of this size "
    "float32 is faster"
)


def load(
    source: str | Path,
    *,
    dtype: DTypeLike = "float32",
    compute: DTypeLike | None = None,
    mesh: Mesh | str | None = None,
    revision: str | None = None,
    chat_template: str | Path | None = None,
    adapter: str | Path | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    **others: Any,
) -> Model:
    """Loads a model: a checkpoint of jaxspec's, of T5X's or of Gemma's in Orbax, a Hugging Face
    folder or hub id, or a GGUF file.

        target = jaxspec.load("checkpoints/debian-t5-base") draft = jaxspec.load("debian-t5-small",
        dtype="bfloat16") llama = jaxspec.load("meta-llama/Llama-3.2-1B", dtype="bfloat16") large =
        jaxspec.load("meta-llama/Llama-3.1-70B", dtype="bfloat16", mesh="model=8") flan =
        jaxspec.load("flan_t5_xl/checkpoint_1138000", dtype="bfloat16") # of T5X, or the folder of a
        run gemma = jaxspec.load("gemma-3-270m-q4_k_m.gguf") # of llama.cpp, with the tokenizer that
        it holds; kaggle = jaxspec.load("gemma3-1b-it") # an Orbax folder of Kaggle's

    Args:
        source: a folder, a GGUF file, the name of a shipped checkpoint, with or without
            "checkpoints/" in front, or a hub id, owner/name. What exists here goes before a shipped
            checkpoint of the same name, and this before the hub, which is asked for nothing else
            (`jaxspec.weights.hf_families` lists what can be loaded from there).
        dtype: dtype of matrices in memory and of the computation: "float32", "bfloat16", "int8" or
            "int4", or as jnp.bfloat16. Norm scales, biases and logits are float32 always. int8
            matrices have a scale per output; int4 ones have one per 128 columns of it, with int8
            embeddings and heads. They stay so in memory (`jaxspec.nets.quantised`). What is rounded
            away is lost: the model is another one. Files that hold such matrices are taken as they
            are (`jaxspec.weights.quantised_files`).
        compute: with int8 or int4 matrices, the dtype of activations and caches: "float32" or
            "bfloat16". By default float32 on a CPU, and bfloat16 on a GPU or TPU.
        mesh: devices to split the model over, and batches that it decodes: "data=2,model=4", or a
            mesh with either axis; see `jaxspec.sharding`. Give target and drafter the same. By
            default the model lies on one device.
        revision: a branch, a tag or a commit of a model of the hub. By default the main branch.
        chat_template: the path of a file with a chat template (Jinja, as transformers has it), or
            the template's text. It replaces the one that the model brings, if it brings any.
        adapter: a LoRA folder of PEFT's, or its hub id, to merge into the matrices of a Hugging
            Face folder or hub id (`jaxspec.weights.lora`). What cannot be merged is refused by
            name.
        source_language, target_language: languages of a model that translates; see
            `jaxspec.with_languages`.
        **others: none; options of other libraries are refused with their names here.

    Returns:
        The model. Each matrix of its parameters has the given dtype; its config says the dtype of
        the computation. Its tokenizer is None if the folder has no tokenizer; prompt it with token
        ids. `jaxspec.weights.t5x` lists the properties of a network that a T5X checkpoint leaves
        open. A drafter's checkpoint may say which tokens it drafts (`weights.orbax.save`). Its head
        is then trimmed to these (`jaxspec.trim_vocabulary`, which `jaxspec.vocab.trim.untrimmed`
        undoes).

    Raises:
        CheckpointError: the model is missing, damaged, or of a family that jaxspec does not have.
        ValueError: another dtype. The mesh is impossible. The chat template cannot be read.
            `revision` is given for a source that is not on the hub, or `compute` without matrices
            of int8 or int4.
        TypeError: the source is not a path, or an option is unknown.

    >>> load("debian-t5-base", dtype="float8")
    Traceback (most recent call last):
    ValueError: dtype is 'float8': expected one of float32, bfloat16, int8, int4
    """
    check_names(others, OPTIONS, OTHER_NAMES)
    dtype, computed = dtype_names(dtype, compute)
    if mesh is not None:
        mesh = sharding.mesh(mesh)
    folder = find(source, revision)
    hub.refuse_adapter(folder, source)
    reader = format_of(folder).open(folder)
    tokenizer = None
    if chat_template is not None:  # a wrong one is refused before any weights are read
        tokenizer = tokenizers.with_template(reader.tokenizer(), chat_template, str(source))
    if adapter is not None:
        reader = _with_adapter(reader, adapter, folder)
    (params, config), drafted = reader.params(dtype, mesh), reader.draft_tokens()
    if chat_template is None:
        tokenizer = reader.tokenizer()
    config = dataclasses.replace(config, dtype=computed)
    name = str(source) if is_hub_id(source) else reader.name
    if (
        dtype != "float32"
        and jax.default_backend() == "cpu"
        and quantisation.count(params) >= SLOW_FROM
    ):
        logging.getLogger(__name__).warning(SLOWER, name, dtype)
    model = of_network(config, (), params, tokenizer, name, reader.source())
    if source_language is not None or target_language is not None:
        model = with_languages(model, source_language, target_language)
    if drafted is None:
        return model
    model = _trimmed(model, drafted, name)
    if mesh is None:
        return model
    # Rows of the head were taken on the mesh: the trimmed one is split anew.
    places = sharding.parameters(model.params, axes_of(config), mesh)
    return model._replace(params=jax.tree.map(sharding.put, model.params, places))


def _with_adapter(reader: Reader, adapter: str | Path, folder: Path) -> Reader:
    """Returns a reader of a model into which an adapter is merged."""
    form = format_of(folder)
    if form is not huggingface.FORMAT:
        text = f"adapter is given, and {folder} is a model in the format {form.name!r}"
        raise ValueError(
            f"{text}: expected a Hugging Face folder or hub id, as the adapter's own base is"
        )
    path = find_adapter(adapter)
    return reader._replace(
        params=lambda dtype, mesh: huggingface.restore(folder, dtype, mesh, path)
    )


def find_adapter(adapter: str | Path) -> Path:
    """Returns the folder of a LoRA adapter, downloaded first if it is on the hub."""
    path = Path(adapter).expanduser()
    if path.exists():
        return path
    if not is_hub_id(adapter):
        raise CheckpointError(
            f"adapter is {adapter!s}: expected a folder with an {lora.CONFIG}, or a hub id"
        )
    return hub.download(str(adapter), files=hub.ADAPTER_FILES, is_adapter=True)


def dtype_name(dtype: Any, option: str = "dtype", names: tuple[str, ...] = DTYPES) -> str:
    """Returns the name of a dtype that a model can be loaded in, or that another `option` takes.

    >>> dtype_name(jnp.bfloat16)
    'bfloat16'
    """
    try:
        if isinstance(dtype, str):
            name = dtype
        elif dtype is None:
            name = str(None)
        else:
            name = jnp.dtype(dtype).name
    except TypeError:  # another library's
        name = str(dtype).removeprefix("torch.")
    if name not in names:
        short = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32"}.get(name)
        advice = f". Did you mean {short!r}?" if short else ""
        raise ValueError(f"{option} is {name!r}: expected one of {', '.join(names)}{advice}")
    return name


def dtype_names(dtype: Any, compute: Any = None) -> tuple[str, str]:
    """Returns the names of the dtypes of a model's matrices and of its computation, as `load` takes
    them.

    >>> dtype_names("int8", jnp.bfloat16), dtype_names("bfloat16")
    (('int8', 'bfloat16'), ('bfloat16', 'bfloat16'))
    >>> dtype_names("bfloat16", "float32")
    Traceback (most recent call last):
    ValueError: compute is 'float32' and dtype 'bfloat16', which is computed in as it is: expected dtype="int8" or \
dtype="int4" with it
    """
    dtype = dtype_name(dtype)
    if compute is None:
        return dtype, quantisation.computation(dtype)
    compute = dtype_name(compute, "compute", COMPUTED)
    if dtype not in quantisation.DTYPES:
        computed = f"compute is {compute!r} and dtype {dtype!r}, which is computed in as it is"
        raise ValueError(f'{computed}: expected dtype="int8" or dtype="int4" with it')
    return dtype, compute


def _pickled(model: Model) -> tuple[Any, ...]:
    """Reduces a model to what pickle stores: its values, and the configuration that its functions
    are made of anew.
    """
    ids = draft_tokens(model)
    if model.lm.inside is None:
        taps = ()
    else:
        taps = model.lm.inside.taps
    make: Callable[..., Model] = of_network if ids is None else _trimmed
    parts = model.params, model.tokenizer, model.name, model.source
    values: tuple[Any, ...] = model.config, taps, *parts
    if ids is not None:
        values = untrimmed(model), ids, model.name, model.params
    try:
        remade = make(*values)
    except TypeError:  # the configuration is that of no network
        remade = None
    if remade is not None and remade.lm == model.lm:
        return make, values
    # It pickles functions by value, so a model of any functions goes through it.
    if "cloudpickle" in sys._getframe(1).f_globals.get("__name__", ""):
        return Model, tuple(model)
    reason = (
        f"{model.name or 'this model'} does not pickle, as its functions are not those of its "
        "configuration alone"
    )
    raise TypeError(
        f"{reason}: send what it is made of, such as what jaxspec.load takes, and make it there"
    )


def of_network(
    config: Any,
    taps: tuple[int, ...],
    params: Any,
    tokenizer: Any,
    name: str,
    source: Mapping[str, Mapping[str, Any]] | None = None,
) -> Model:
    """Makes a model of its network's configuration.

    Args:
        config: the configuration.
        taps: the layers whose outputs passes also give (`with_taps`); empty: none.
        params, tokenizer, name, source: the fields of the `Model`.
    """
    # n-gram tables have no layers
    lm = net_of(config).language_model(config, *([taps] if taps else []))
    return Model(lm, params, tokenizer, config, name, source)


def _trimmed(model: Model, ids: Any, name: str, params: Any = None) -> Model:
    trimmed = trim_vocabulary(model, ids=ids)._replace(name=name)
    if params is None:
        return trimmed
    return trimmed._replace(params=params)


copyreg.pickle(Model, _pickled)  # type: ignore[arg-type]


def with_taps(target: Model, taps: Sequence[int]) -> Model:
    """Makes a model's passes also give the outputs of some of its layers: what EAGLE-3 and DFlash
    read.

    `load_drafter` does this where a head asks for it. A program that reads no taps computes none.

    Args:
        target: a model with a network of jaxspec.
        taps: layers; 0 is the output of the first one. See `nets.stack.check_taps`.

    Raises:
        ValueError: the model has a network of your own, or no such layer.

    >>> target = with_taps(load("debian-t5-base"), (0, 1))
    >>> target.lm.inside.taps
    (0, 1)
    """
    try:
        lm = net_of(target.config).language_model(target.config, taps)
    except TypeError as error:
        name = target.name or "the model"
        raise ValueError(f"{name} has no layers to tap: {checks.OWN_NETWORK}") from error
    return target._replace(lm=lm)


def format_of(path: Path) -> ModelFormat:
    """Returns the format of a folder or file. Any other path is read as jaxspec's format, whose
    reader explains the error.

    >>> format_of(shipped()["debian-t5-base"]).name
    'jaxspec'
    """
    return next((form for form in FORMATS if form.matches(path)), orbax.FORMAT)


def local(
    source: str | Path, shipped: Mapping[str, Path], revision: str | None = None
) -> Path | None:
    """Returns the path that `source` is, or the shipped folder that it names, bare or after
    "checkpoints/".

    A `revision` is refused then: ignored, it would be a model that was not asked for.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"source is of type {type(source).__name__}: expected a folder, a file, or the name of "
            "a model"
        )
    if not str(source):  # of a shell's unset variable; as a path it would be this folder
        raise CheckpointError(
            "the name of the model is empty: expected a folder, a file, or the name of a model"
        )
    path = Path(source).expanduser()
    folders.recover(path)  # a checkpoint whose replacement was killed
    if not path.exists():
        path = shipped.get(path.name) if _is_bare(path) else None
    if path is not None and revision is not None:
        raise ValueError(
            f"revision is {revision!r}, but {source} is {path}: only models of the hub have "
            "revisions"
        )
    return path


def _is_bare(path: Path) -> bool:
    return path.parts[-2:-1] in ((), ("checkpoints",)) and not path.is_absolute()


def find(source: str | Path, revision: str | None = None) -> Path:
    """Finds the folder that `source` means; a model of the hub is downloaded first."""
    names = shipped()
    # What is here goes before what is shipped, and both before the hub.
    existing = local(source, names, revision)
    if existing is not None:
        return existing
    path = Path(source)
    if _is_bare(path) and path.name in shipped(huggingface.CONFIG):
        ways = "jaxspec.load_drafter(..., target=...), or as --draft NAME on the command line"
        raise CheckpointError(
            f"{source} is a drafter, which reads its target's hidden states: load it by {ways}"
        )
    advice = next(
        (f": did you mean {name!r}?" for name in HUB_NAMES if name.endswith(f"/{source}")), ""
    )
    missing = f"no checkpoint at {source}{advice or suggest(path.name, names) or '.'}"
    if not is_hub_id(source):
        raise CheckpointError(f"{missing} {_choices()}")
    try:
        return hub.download(str(source), revision)
    except CheckpointError as error:
        raise CheckpointError(f"{missing} {_choices()}. As a hub id: {error}") from error


def is_hub_id(source: str | Path) -> bool:
    """Tells whether `source` can only mean owner/name: no such path exists.

    >>> is_hub_id("google/t5-v1_1-small"), is_hub_id("checkpoints/debian"), is_hub_id("gpt2")
    (True, False, False)
    """
    owner = str(source).partition("/")[0]
    looks = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)) is not None
    return (
        looks
        and owner != "checkpoints"
        and not str(source).endswith(".gguf")
        and not Path(owner).is_dir()
    )


def _choices() -> str:
    names = ", ".join(sorted(shipped())) or "none in this installation"
    paths = (
        f"a folder with a {MANIFEST}, a {huggingface.CONFIG} or a checkpoint of T5X's or Gemma's, "
        "a GGUF file"
    )
    hub_id = "the id of a model of the Hugging Face hub (owner/name)"
    return f"Expected {paths}, the name of a shipped checkpoint ({names}), or {hub_id}"
