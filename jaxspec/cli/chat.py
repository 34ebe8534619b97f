"""`jaxspec chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from jaxspec import files
from jaxspec.cli import pair
from jaxspec.cli.options import TARGET, group_of, number, sampling_options, seed_number, text
from jaxspec.cli.prefill import LONG
from jaxspec.decode.chat import Chat
from jaxspec.decode.chat import chat as begin

RESET = "/reset"  # a line that begins the conversation anew


class Settings(NamedTuple):
    """The options of `chat`, but for those of sampling."""

    target: Annotated[str, text("MODEL", "A model tuned to chat: a folder, a hub id, a .gguf file.")] = TARGET
    draft: Annotated[str | None, text("NAME", "What drafts, as in `jaxspec generate`.", "--draft", "-d")] = None
    gamma: Annotated[int, text("N", "Draft tokens a round; with a --policy, at most.", "--gamma", "-g")] = 3
    policy: Annotated[str, text("NAME", "How many to draft: confidence=0.4, heuristic, entropy.")] = ""
    rule: Annotated[str, text("NAME", "Which are accepted: rejection, block, ...")] = ""
    system: Annotated[str | None, text("TEXT", "The system's message.")] = None
    max_new_tokens: Annotated[int, number("Most tokens of an answer.", "--max-new-tokens", "-n")] = 512
    stop: Annotated[list[str] | None, text("TEXT", "Ends an answer; may be repeated.")] = None
    seed: Annotated[int, seed_number("Of sampling; the same seed gives the same answers.")] = 0
    dtype: Annotated[str, text("DTYPE", "float32, bfloat16, int8, int4, or int8/bfloat16.")] = "float32"
    draft_dtype: Annotated[str, text("DTYPE", "The drafter's, if it is another.")] = ""
    mesh: Annotated[str | None, text("MESH", "Devices to split the models over: model=4.")] = None


@group_of("settings", Settings)
@sampling_options
def chat(settings: Settings, *, sampling: dict[str, Any]) -> None:
    """Talk with a model: each line of the input is a message, and its answer is printed as it comes.

    Both parties keep what they have read of the conversation. A line after each answer says how many tokens it has, how
    many of them came with each pass of the model, how long the first took, how fast the others came, and how much of
    the conversation was read before. /reset begins anew; the end of the input (Ctrl-D) ends the chat.

    \b
        jaxspec chat --target google/gemma-3-1b-it --draft google/gemma-3-270m-it
        jaxspec chat --target model.gguf --draft prompt_lookup --system "Answer in one sentence."
    """
    draft = pair.draft_name(settings)
    generation = pair.checked_options(settings, draft, sampling)
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False)
    with err.status("loading the models"):
        target, drafter = pair.load(settings, draft)
        talk = begin(target, drafter=drafter, system=settings.system, stop=settings.stop or (), **generation)
    for line in _lines(err):
        if line == RESET:
            talk.reset()
            continue
        try:
            out.print(Text(_answer(talk, line, out, err), "dim"), "", sep="\n")
        except ValueError as error:  # a conversation that is too long, or that the template refuses
            err.print(Text(f"error: {error}", "red"), "", sep="\n")


def _lines(err: Console) -> Iterator[str]:
    """Yields what is typed, or piped in, line by line; blank ones are left out."""
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():  # in the encoding of files
        sys.stdin.reconfigure(encoding=files.ENCODING, errors="strict")
    while True:
        if sys.stdin.isatty():
            err.print(Text("> ", "bold"), end="")
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def _answer(talk: Chat, message: str, out: Console, err: Console) -> str:
    """Prints an answer as it comes; returns what it took, in words."""
    start, piece, pieces = time.perf_counter(), None, talk.send(message)
    unread = talk.prompt_tokens - talk.reused_tokens
    with err.status(f"reading {unread:,} tokens") if unread > LONG else contextlib.nullcontext():
        begun = [next(pieces)]
    first = time.perf_counter() - start
    for piece in itertools.chain(begun, pieces):
        out.print(Text(piece.text), end="")
        out.file.flush()
    seconds = time.perf_counter() - start - first
    assert piece is not None
    emitted, rounds = int(piece.stats.emitted[0]), int(piece.stats.rounds[0])
    out.print()
    parts = [f"{emitted} tokens", f"{float(piece.stats.tokens_per_round[0]):.2f} a round"]
    parts += [f"first after {first:.2f} s"] + [f"then {(emitted - 1) / seconds:.1f} a second"] * (rounds > 0)
    return ", ".join([*parts, f"{talk.reused_tokens} of {talk.prompt_tokens} prompt tokens read before"])
