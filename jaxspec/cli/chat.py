"""`jaxspec chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.cells import cell_len
from rich.text import Text

from jaxspec import files
from jaxspec.cli import console, entries, signals
from jaxspec.cli import pair as pairs
from jaxspec.cli.console import Console
from jaxspec.cli.options import group_of, sampling_options, text
from jaxspec.cli.pair import Pair
from jaxspec.cli.prefill import LONG
from jaxspec.core import Model
from jaxspec.decode.chat import Chat
from jaxspec.decode.chat import chat as begin
from jaxspec.decode.output import Piece

WITHOUT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('it reads no system message') }}{% "
    "endif %}"
)
TRANSLATING = (
    WITHOUT_SYSTEM + "translate English to German: {{ messages[-1]['content'] | trim }}</s>"
)
CONTINUING = (
    "{% for message in messages %}{{ ' ' if not loop.first }}{{ message['content'] | trim }}{% "
    "endfor %}"
)


class MessageTask(NamedTuple):
    """The use of a shipped model in a chat, although it is not tuned to chat."""

    template: str  # a chat template
    description: str  # what the model does with each message, for the user


TRANSLATION = MessageTask(TRANSLATING, "it translates each message from English to German")
CONTINUATION = MessageTask(
    CONTINUING, "it continues what you write, in the style of a package's description"
)
TASKS = {  # by the names of shipped models without a chat template
    "debian-t5-large": TRANSLATION,
    "debian-t5-base": TRANSLATION,
    "debian-t5-small": TRANSLATION,
    "debian-gpt-base": CONTINUATION,
    "debian-gpt-small": CONTINUATION,
}


@group_of("pair", Pair, max_new_tokens=512)
@sampling_options
def chat(
    pair: Pair,
    context: typer.Context,
    system: Annotated[str | None, text("TEXT", "The system's message.")] = None,
    *,
    generation: dict[str, Any],
) -> None:
    """Talk with a model: each line is a message, and its answer is printed as it comes.

    The chat keeps what it has read of the conversation. A line after each answer says what the
    answer took. Ctrl-C ends an answer; Ctrl-D, or Ctrl-C where nothing is typed, ends the chat. A
    message of several lines stands between two \"\"\", or its lines end with a backslash. /help
    lists commands that save, load, retry and more.

    The shipped models are not tuned to chat: debian-t5-large, the default, translates each message
    to German.

    \b
        jaxspec chat
        jaxspec chat --target google/gemma-3-1b-it --draft google/gemma-3-270m-it
        jaxspec chat --target model.gguf -d prompt_lookup --system "Be brief."
    """
    pair, options = pairs.checked(pair, generation, context=context)
    out = Console(highlight=False, soft_wrap=True)
    with console.status("loading the models"):
        target, drafter = pairs.load(pair)
        target, task = _with_task(target)
        talk = begin(target, drafter=drafter, system=system, stop=pair.stop or (), **options)
    if task is not None:
        console.note(f"{target.name} is not tuned to chat: {task.description}.", "dim")
    is_typed = sys.stdin.isatty()
    if is_typed:
        drafts = f" with {pair.draft}" if pair.draft else ""
        console.note(
            f"{pair.target}{drafts}. /help lists commands; Ctrl-C ends an answer, Ctrl-D the chat.",
            "dim",
        )
    is_greedy = not generation.get("temperature")
    try:
        for entry in entries.typed() if is_typed else entries.piped(sys.stdin.buffer):
            if entry.command in ("quit", "exit"):
                return
            try:
                entries.check(entry)
                if entry.command in ("", "retry"):
                    is_retry = entry.command == "retry"
                    pieces = talk.retry() if is_retry else talk.send(entry.text)
                    console.say(out, _answer(talk, pieces, is_typed, out), "dim")
                    out.print()
                    if is_retry and is_greedy:
                        console.note(
                            "The answer is greedy, and so the same again: --temperature 1 samples.",
                        )
                else:
                    console.note(command(talk, entry))
            # The chat goes on after an error, such as a conversation that is too long.
            except (ValueError, OSError, FloatingPointError) as error:
                console.note(f"error: {console.message(error)}", "red")
                console.note("")
    except ValueError as error:  # a pipe that ended inside a message
        console.note(f"error: {console.message(error)}", "red")


def _with_task(target: Model) -> tuple[Model, MessageTask | None]:
    """Gives a shipped model without a chat template its task's template; returns both."""
    from jaxspec.weights import tokenizers

    task = TASKS.get(target.name)
    has_template = getattr(target.tokenizer, "chat_template", None) is not None
    if task is None or target.tokenizer is None or has_template:
        return target, None
    tokenizer = tokenizers.with_template(copy.copy(target.tokenizer), task.template, target.name)
    return target._replace(tokenizer=tokenizer), task


def command(talk: Chat, entry: entries.Entry) -> str:
    """Runs a command; returns the message to print."""
    name, argument = entry
    if name == "help":
        width = max(map(len, entries.COMMANDS))
        return "\n".join(f"{usage:{width}}  {does}" for usage, does in entries.COMMANDS.items())
    if name == "reset":
        talk.reset()
        return "The conversation begins anew."
    if name == "system":
        systems = [message for message in talk.messages[:1] if message["role"] == "system"]
        if not argument:
            if systems:
                return str(systems[0]["content"])
            return "There is no system's message."
        talk.messages[: len(systems)] = pairs.system_message(argument)
        return "The next answers follow this system's message."
    if name in ("save", "load") and not argument:
        raise ValueError(f"/{name} has no FILE: expected /{name} FILE")
    if name == "save":
        path = Path(argument).expanduser()
        if path.exists():
            load(path)  # replaces only another conversation
        files.write_text(path, [json.dumps(talk.messages, ensure_ascii=False, indent=1), "\n"])
        return f"{len(talk.messages)} messages are in {path}."
    if name == "load":
        messages = load(Path(argument).expanduser())
        talk.messages[:] = messages
        return f"The conversation has {len(messages)} messages now."
    raise ValueError(
        f"there is no /{name}: try {', '.join(usage.split()[0] for usage in entries.COMMANDS)}"
    )


def load(path: Path) -> list[dict[str, Any]]:
    """Reads a conversation that /save wrote: a JSON list of messages with roles."""
    try:
        messages = json.loads(files.read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a conversation, for it is not JSON ({error})") from None
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and "role" in m for m in messages
    ):
        raise ValueError(
            f"{path} is not a conversation: expected a JSON list of messages, each with a role"
        )
    return messages


def _answer(talk: Chat, pieces: Iterator[Piece], is_typed: bool, out: Console) -> str:
    """Prints an answer as it comes; returns its statistics in words.

    Compile time is listed separately: the program of the first round is compiled along with the
    round.
    """
    start = time.perf_counter()
    unread = talk.prompt_tokens - talk.reused_tokens
    status = contextlib.nullcontext()
    if talk.is_new_shape:
        status = console.status("compiling (stored for the next call)")
    elif unread > LONG:
        status = console.status(f"reading {unread:,} tokens")
    writer = Writer(out)
    later_tokens = 0  # tokens after the first pieces
    with _interruption(is_typed) as interruption:
        with status:
            first_pieces = [next(pieces)]
            # The second piece compiles the program of the rounds.
            if talk.is_new_shape and not first_pieces[0].done and not interruption.is_set():
                first_pieces.append(next(pieces))
        first = time.perf_counter() - start
        for piece in first_pieces:
            writer.write(piece.text)
        piece = first_pieces[-1]
        while not piece.done and not interruption.is_set():
            piece = next(pieces)
            later_tokens += len(piece.tokens)
            writer.write(piece.text)
    seconds = time.perf_counter() - start - first
    pieces.close()  # type: ignore[attr-defined]  # the chat then keeps the tokens read so far
    out.print()
    emitted = int(piece.stats.emitted[0])
    parts = [
        f"{emitted} token{'s' * (emitted != 1)}",
        f"{float(piece.stats.tokens_per_round[0]):.2f} a round",
    ]
    if talk.is_new_shape:
        parts.append(f"compiled in {first:.1f} s")
    else:
        parts.append(f"first after {first:.2f} s")
    if later_tokens:
        parts.append(f"then {later_tokens / seconds:.1f} a second")
    parts.append(f"{talk.reused_tokens} of {talk.prompt_tokens} prompt tokens read before")
    if not piece.done:
        parts.append("ended by Ctrl-C")
    return ", ".join(parts)


@contextlib.contextmanager
def _interruption(is_typed: bool) -> Iterator[threading.Event]:
    """Makes the first Ctrl-C set an event, so that the round can end; a second one raises.

    With a pipe every Ctrl-C raises, since no further message can be typed.
    """
    event = threading.Event()

    def interrupt() -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    with signals.answered(signal.SIGINT, interrupt, is_typed):
        yield event


class Writer:
    """Prints text as it comes; on a terminal, lines are broken between words."""

    def __init__(self, out: Console):
        self._out = out
        self._column = 0
        self._space = ""

    def write(self, text: str) -> None:
        """Prints a piece, except its last space: the next word may begin a new line instead."""
        if self._out.is_terminal:  # place line breaks, spaces and words one by one
            text = "".join(map(self._placed, re.findall(r"\n|[^\S\n]+|\S+", text)))
        self._out.print(Text(text), end="")
        self._out.file.flush()

    def _placed(self, piece: str) -> str:
        """Returns the text to print for a piece: spaces with the next word, or a line break."""
        if piece == "\n":  # spaces before it are dropped
            self._column = 0
            self._space = ""
            return piece
        if piece.isspace():
            self._space += piece
            return ""
        size = cell_len(piece)
        space = self._space.expandtabs(8)
        if self._column and self._column + len(space) + size > self._out.width:
            self._column = 0
            space = ""
            self._space = "\n"
        self._column += len(space) + size
        if self._column > self._out.width:  # the terminal breaks a long word
            self._column %= self._out.width
        lead = self._space
        self._space = ""
        return lead + piece
