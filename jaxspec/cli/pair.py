"""A command's target and drafter: all options are checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import typer

from jaxspec import files, sharding
from jaxspec.cli import names
from jaxspec.cli.options import (
    TARGET,
    Adapter,
    ChatTemplate,
    DraftDtype,
    Dtype,
    Languages,
    Mesh,
    described,
    refuse,
    seed_number,
    text,
    typed,
)
from jaxspec.core import BoundDrafter, Model
from jaxspec.decode import prefix
from jaxspec.decode.options import NEW_TOKENS, OPTIONS
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.files import digests
from jaxspec.weights import loading

COST_REPEATS = 9  # timings of each pass for a policy; few, since the user waits for them
NONE = "none"  # the name of a drafter that means plain decoding
DRAFTS = "What drafts: a model or head, or a call of jaxspec.drafters (prompt_lookup); none."
GAMMA = f"3 suits the shipped pair; Python's default is {OPTIONS['gamma'].default}."


class Pair(NamedTuple):
    """The options of the commands that generate: models, drafting, and where a text ends."""

    target: Annotated[
        str, text("MODEL", "A shipped model, a folder, a hub id or a .gguf file.")
    ] = TARGET
    draft: Annotated[str | None, text("NAME", DRAFTS, "--draft", "-d")] = None
    gamma: Annotated[int, described(OPTIONS["gamma"], GAMMA)] = 3
    policy: Annotated[
        str, text("NAME", "How many to draft: adaptive, heuristic, confidence=0.4, ...")
    ] = ""
    rule: Annotated[
        str, text("NAME", "Which drafts are accepted: rejection, block, lenient=0.3, ...")
    ] = ""
    max_new_tokens: Annotated[int, OPTIONS["max_new_tokens"]] = NEW_TOKENS
    stop: Annotated[list[str] | None, described(OPTIONS["stop"], "May be repeated.")] = None
    seed: Annotated[int, seed_number("Seed of sampling; the same seed gives the same text.")] = 0
    dtype: Dtype = "float32"
    draft_dtype: DraftDtype = ""
    mesh: Mesh = None
    chat_template: ChatTemplate = None
    adapter: Adapter = None
    languages: Languages = Languages()


def checked(
    pair: Pair,
    others: dict[str, Any],
    *,
    default: str | None = None,
    context: typer.Context | None = None,
) -> tuple[Pair, dict[str, Any]]:
    """Checks all options of a generation before a model is loaded.

    Args:
        pair: the options of the pair.
        others: further options of `jaxspec.generate`.
        default: the drafter's name if none was given; None: the target's usual one.
        context: the typed options. If --max-new-tokens is not among them, `jaxspec.generate` fits
            the limit to the models. None: the limit is the pair's, and it is unknown whether
            --gamma was typed.

    Returns:
        The pair with its drafter's name in today's spelling, None for plain decoding; and all
        options for `jaxspec.generate`, except the drafter and token ids.
    """
    from jaxspec.cli.old_names import new_spelling

    names.check_model(pair.target, pair.dtype)
    draft = default if pair.draft is None else new_spelling(pair.draft)
    if draft is None:
        draft = names.default_drafter(pair.target)
    pair = pair._replace(draft=None if draft == NONE else draft)
    if pair.draft is not None:
        if pair.draft_dtype:
            names.check_dtype(pair.draft_dtype, "draft_dtype")
        names.check_drafter(pair.draft, pair.draft_dtype or pair.dtype)
    else:
        unread = [name for name in ("rule", "draft_dtype") if getattr(pair, name)]
        if context is not None and pair.gamma:  # gamma 0 is plain decoding, too
            unread += typed(context, ("gamma",))
        refuse(unread, "plain decoding (no --draft)")
    generation = {
        "gamma": pair.gamma,
        "rule": names.rule(pair.rule) if pair.rule else None,
        "policy": names.policy(pair.policy) if pair.policy else None,
        "max_new_tokens": pair.max_new_tokens,
        "key": jax.random.key(pair.seed),
        **others,
    }
    names.check_options(pair.draft is not None, **generation)
    if context is not None and not typed(context, ("max_new_tokens",)):
        generation["max_new_tokens"] = None
    return pair, generation


def described_models(pair: Pair) -> dict[str, list[Any]]:
    """Describes the models of a job for its manifest: each one's name, and its files' digests."""
    models = {"target": [pair.target, names.file_digests(pair.target)]}
    if pair.adapter is not None:
        models["adapter"] = [pair.adapter, digests.of_files(loading.find_adapter(pair.adapter))]
    if pair.draft is not None:
        models["draft"] = [pair.draft, names.file_digests(pair.draft)]
    return models


def load(pair: Pair) -> tuple[Model, Model | BoundDrafter | None]:
    """Loads the target and the drafter, None for plain decoding."""
    mesh = None if pair.mesh is None else sharding.mesh(pair.mesh)
    options: dict[str, Any] = {
        "chat_template": pair.chat_template,
        "adapter": pair.adapter,
        **pair.languages._asdict(),
    }
    target = names.model(pair.target, pair.dtype, mesh, **options)
    if pair.draft is None:
        return target, None
    dtype = pair.draft_dtype or pair.dtype
    return target, names.drafter(pair.draft, target, dtype=dtype, mesh=mesh)


def prefix_text(option: str | None) -> str | None:
    """Returns the text of --prefix: the option itself, or the contents of the file it names.

    Drops the line break at the end of a file.
    """
    if option is None:
        return None
    try:
        is_file = Path(option).is_file()
    except OSError:  # the text is too long for a file name
        is_file = False
    text = option
    if is_file:
        text = files.read_text(option).removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError(
            f"--prefix {option} is empty: expected a text that the prompts follow, or a file of one"
        )
    return text


def read_prefix(
    target: Model, drafter: Model | BoundDrafter | None, text: str, chat: bool
) -> SharedPrefix:
    """Prefills the prefix of all prompts: a text, or in a `chat` the system message."""
    shared: Any = system_message(text) if chat else text
    return prefix(target, shared, drafter=drafter)


def system_message(text: str | None) -> Sequence[dict[str, str]]:
    """Returns the first messages of a chat: the system message, or none."""
    if text is None:
        return []
    return [{"role": "system", "content": text}]
