"""`jaxspec convert`: any format that `load` reads in, Hugging Face or jaxspec out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import filesize

from jaxspec.cli import console, options
from jaxspec.cli.console import Record
from jaxspec.cli.models import bytes_of
from jaxspec.cli.options import Json

if TYPE_CHECKING:
    from jaxspec.core import Model


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FROM", help="A folder of any format, a shipped checkpoint, or a hub id."
        ),
    ],
    to: Annotated[Path, typer.Argument(metavar="TO", help="The folder to write.")],
    form: Annotated[
        str, options.text("NAME", "huggingface or jaxspec. Default: what FROM is not.", "--format")
    ] = "",
    dtype: Annotated[
        str,
        options.text(
            "DTYPE", "Store float32, bfloat16, or (jaxspec) int8, int4. Default: as in FROM."
        ),
    ] = "",
    adapter: options.Adapter = None,
    overwrite: options.Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a model in the other format, or in another dtype.

    A Hugging Face folder is what transformers' from_pretrained reads; a jaxspec checkpoint loads
    faster, is checked against its hashes, and can hold int8 and int4. A T5X checkpoint of a T5, or a
    Gemma's in Orbax, is read, never written: by default it becomes a Hugging Face folder.

    \b
        jaxspec convert debian-t5-large debian-t5-large-hf
        jaxspec convert meta-llama/Llama-3.2-1B llama-3.2-1b --dtype int8
        jaxspec convert Qwen/Qwen3-8B-AWQ qwen3-8b --dtype int4
        jaxspec convert google/gemma-3-1b-it mine --adapter me/my-adapter
    """
    from jaxspec import files
    from jaxspec.core.checks import one_of
    from jaxspec.files import folders
    from jaxspec.vocab import trim
    from jaxspec.weights import huggingface, orbax, quantisation
    from jaxspec.weights import loading as front
    from jaxspec.weights.loading import HUGGING_FACE, OURS

    if form:
        one_of(form, "--format", (HUGGING_FACE, OURS))
    stored_form, stored_dtype, description = stored(front.find(source))
    if adapter is not None:
        description |= {"adapter": adapter}
    form = form or (OURS if stored_form == HUGGING_FACE else HUGGING_FACE)
    if form == OURS:
        dtypes = orbax.DTYPES
    else:
        dtypes = ("float32", "bfloat16")
    stored_as = dtype or (stored_dtype if stored_dtype in dtypes else "float32")
    if form == HUGGING_FACE and stored_as in quantisation.DTYPES:
        holds = f"a Hugging Face folder holds {' or '.join(dtypes)}"
        raise ValueError(f"--dtype is {stored_as!r}, and {holds}: add --format jaxspec")
    one_of(stored_as, f"--dtype for {form}", dtypes)
    # Only a folder of the same form is replaced.
    title = "checkpoint"
    marker = orbax.MANIFEST
    if form == HUGGING_FACE:
        title = "Hugging Face model"
        marker = huggingface.CONFIG
    complaint = folders.occupied(to.expanduser().resolve(), title, overwrite, marker=marker)
    if complaint:
        raise ValueError(complaint)
    files.check_writable(to)
    with console.status(f"reading {source}"):
        loaded = front.load(source, dtype=stored_as, adapter=adapter)
        model = trim.untrimmed(loaded)
        drafted = trim.draft_tokens(loaded)
    with console.status(f"writing {to}"):
        if form == HUGGING_FACE:
            huggingface.save(model, to, overwrite=overwrite)
        else:
            write(model, to, stored_as, description, overwrite, drafted)
    count = quantisation.count(model.params)
    size = bytes_of(to)
    if as_json:
        report = {
            "folder": to,
            "format": form,
            "dtype": stored_as,
            "parameters": count,
            "bytes": size,
        }
        return console.print_json(report)
    numbers = f"{console.count(count)} parameters, {stored_as}, {filesize.decimal(size)}"
    console.say(console.out(), f"{to}: {numbers}, {form}")


def stored(folder: Path) -> tuple[str, str, Record]:
    """Reads a folder's format, dtype (float32 if we cannot write it) and description."""
    from jaxspec.weights import orbax
    from jaxspec.weights.loading import OURS, format_of

    form = format_of(folder)
    description = {}
    if form.name == OURS:
        description = orbax.read_manifest(folder).about
    return form.name, form.open(folder).stored_dtype(), description


def write(
    model: Model,
    to: Path,
    dtype: str,
    description: Record,
    overwrite: bool,
    draft_tokens: Any = None,
) -> None:
    """Writes a checkpoint of jaxspec's, as `weights.orbax.save`, with the model's own tokenizer."""
    from jaxspec.core import token_ids
    from jaxspec.weights import orbax, quantisation, vocabulary

    # A Hugging Face folder can hold such a model, but not quantised.
    alternative = "--format huggingface"
    if dtype in quantisation.DTYPES:
        alternative += " without that --dtype"
    if model.tokenizer is None:
        raise ValueError(
            f"{model.name} has no tokenizer: put its files into the folder, or give {alternative}"
        )
    config = dataclasses.replace(model.config, dtype="float32")
    ids = token_ids.size(model.tokenizer)
    if ids > config.vocab_size:
        raise ValueError(
            f"{model.name}: the tokenizer has ids up to {ids - 1}, the model only up to "
            f"{config.vocab_size - 1}: take added tokens out of its files, or give {alternative}"
        )
    with vocabulary.written(model.tokenizer) as words:
        orbax.save(
            to,
            model.params,
            config,
            words,
            dtype=dtype,
            overwrite=overwrite,
            name=to.resolve().name,
            draft_tokens=draft_tokens,
            source=model.source,
            description=description | {"converted_from": model.name},
        )
