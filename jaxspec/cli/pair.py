"""A target and its drafter by a command's options: checked before anything is loaded, then loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import jax

from jaxspec import files, sharding
from jaxspec.cli import drafter_names, names
from jaxspec.cli.options import (
    PREFIX,
    TARGET,
    ChatTemplate,
    Draft,
    DraftDType,
    DType,
    Gamma,
    MeshShape,
    Policy,
    Rule,
    Stop,
    flag,
    number,
    refuse,
    seed_number,
    text,
)
from jaxspec.decode import prefix

if TYPE_CHECKING:
    from jaxspec.core import BoundDrafter, Model
    from jaxspec.decode.shared_prefix import SharedPrefix

NONE = "none"  # as the name of a drafter: plain decoding


class PairSettings(Protocol):
    """The options that the commands which generate have in common."""

    @property
    def target(self) -> str: ...
    @property
    def draft(self) -> str | None: ...
    @property
    def gamma(self) -> int: ...
    @property
    def policy(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def draft_dtype(self) -> str: ...
    @property
    def mesh(self) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...


class Settings(NamedTuple):
    """The options of `generate`, but for those of sampling."""

    target: Annotated[str, text("MODEL", "A shipped model, a folder, a hub id or a .gguf file.")] = TARGET
    draft: Draft = None
    gamma: Gamma = 3
    policy: Policy = ""
    rule: Rule = ""
    max_new_tokens: Annotated[int, text("N", "Most new tokens of each prompt.", "--max-new-tokens", "-n")] = 128
    num_samples: Annotated[int, number("Texts of each prompt; they need a temperature.")] = 1
    batch: Annotated[int, number("Prompts decoded at a time.")] = 1
    stop: Stop = None
    prefix: Annotated[str | None, text("TEXT|FILE", PREFIX)] = None
    ban: Annotated[list[int] | None, text("ID", "A token id that is never generated; repeatable.")] = None
    log_probs: Annotated[bool, flag("With --json: log probabilities of the tokens.", "--log-probs")] = False
    top_log_probs: Annotated[int | None, number("With --json: also the N best tokens at each place.", least=0)] = None
    seed: Annotated[int, seed_number("Seed of sampling; the same seed gives the same text.")] = 0
    dtype: DType = "float32"
    draft_dtype: DraftDType = ""
    mesh: MeshShape = None
    chat: Annotated[bool, flag("Use the model's chat template.", "--chat")] = False
    chat_template: ChatTemplate = None


def draft_name(settings: PairSettings, default: str | None = None) -> str | None:
    """Returns the name of the drafter, by default the target's usual one; None for plain decoding.

    Raises:
        ValueError: there is no such target.
    """
    names.check_model(settings.target, settings.dtype)
    draft = settings.draft
    if draft is None:
        draft = drafter_names.default(settings.target) if default is None else default
    return None if draft == NONE else draft


def checked_options(settings: PairSettings, draft: str | None, sampling: dict[str, Any]) -> dict[str, Any]:
    """Checks the drafter's name and all options; returns those of `jaxspec.generate`, but for drafter and token ids.

    Raises:
        ValueError: there is no such drafter, or an option is wrong whatever the models are.
    """
    if draft is not None:
        drafter_names.check(draft, settings.draft_dtype or settings.dtype)
    elif settings.rule or settings.draft_dtype:
        refuse([name for name in ("rule", "draft_dtype") if getattr(settings, name)], "plain decoding (no --draft)")
    generation = {
        "gamma": settings.gamma,
        "rule": names.rule(settings.rule) if settings.rule else None,
        "policy": names.policy(settings.policy) if settings.policy else None,
        "max_new_tokens": settings.max_new_tokens,
        "key": jax.random.key(settings.seed),
        **sampling,
    }
    names.check_options(draft is not None, **generation)
    return generation


def load(settings: PairSettings, draft: str | None) -> tuple[Model, Model | BoundDrafter | None]:
    """Loads the target, and the drafter if there is one."""
    mesh = None if settings.mesh is None else sharding.mesh(settings.mesh)
    target = names.model(settings.target, settings.dtype, mesh, chat_template=settings.chat_template)
    if draft is None:
        return target, None
    load_draft = functools.partial(names.model, dtype=settings.draft_dtype or settings.dtype, mesh=mesh)
    return target, drafter_names.drafter(draft, load_draft, target)


def prefix_text(option: str) -> str:
    """Returns what all prompts follow: the text itself, or that of the file that is so called.

    The line break with which a file ends is no part of it.

    Raises:
        ValueError: there is no text.
    """
    try:
        is_file = Path(option).is_file()
    except OSError:  # a name that is too long is none
        is_file = False
    text = files.read_text(option).removesuffix("\n").removesuffix("\r") if is_file else option
    if not text:
        raise ValueError(f"--prefix {option} is empty: expected a text that the prompts follow, or a file of one")
    return text


def read_prefix(target: Model, drafter: Model | BoundDrafter | None, text: str, chat: bool) -> SharedPrefix:
    """Reads what all prompts follow: a text, or, of a `chat`, the system's message."""
    shared: Any = system_message(text) if chat else text
    return prefix(target, shared, drafter=drafter)


def system_message(text: str | None) -> Sequence[dict[str, str]]:
    """Returns the messages with which a chat begins: the system's, if there is one."""
    return [] if text is None else [{"role": "system", "content": text}]
