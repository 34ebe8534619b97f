"""`jaxspec compare`: where the greedy texts of two models part, and which layer differs first."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxspec.cli import console, names
from jaxspec.cli import prompts as prompt_files
from jaxspec.cli.options import DTYPES, Json, NewTokens, Prompts, number, text


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="The model that errors are relative to.")],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="The other one; by default A.")
    ] = None,
    dtype: Annotated[str, text("DTYPE", f"A's: {DTYPES}")] = "float32",
    dtype_b: Annotated[str, text("DTYPE", "B's; by default A's.", "--dtype-b")] = "",
    prompts: Prompts = None,
    count: Annotated[int, number("How many prompts.")] = 8,
    max_new_tokens: NewTokens = 64,
    as_json: Json = False,
) -> None:
    """Compare the greedy texts, logits and layers of two models of one vocabulary.

    Shows each prompt's first token that differs, how close a choice it was for either model, and
    the largest error of the logits. Then the relative error after each layer.

    \b
        jaxspec compare debian-t5-base --dtype-b int4
        jaxspec compare my-model converted/my-model --prompts texts.txt
    """
    b = b or a
    dtype_b = dtype_b or dtype
    if (a, dtype) == (b, dtype_b):
        raise ValueError(
            f"A and B are both {a} in {dtype}: give another model as B, or another --dtype-b"
        )
    names.check_model(a, dtype)
    names.check_model(b, dtype_b)
    texts = None
    if prompts is not None:
        texts = prompt_files.from_file(prompts, count)
    from jaxspec.analysis import numerics

    first = names.model(a, dtype)
    second = names.model(b, dtype_b)
    comparison = numerics.compare(
        first._replace(name=a),
        second._replace(name=b),
        texts or prompt_files.heldout_for(first, count),
        max_new_tokens=max_new_tokens,
    )
    if as_json:
        console.print_json(comparison)
        return
    out = console.out()
    for table in comparison.tables():
        console.show(out, table)
    console.say(out, comparison.summary)
