"""Reads a chat's input: messages of one or several lines, and commands that begin with a slash."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxspec import files

COMMANDS = {  # with what each takes and does
    "/help": "lists these commands",
    "/retry": "answers the last message again",
    "/system TEXT": "sets the system's message; without TEXT it shows the one there is",
    "/reset": "begins anew, with the same system's message",
    "/save FILE": "writes the conversation to a JSON file",
    "/load FILE": "goes on with the conversation of a file",
    "/quit": "ends the chat, as /exit and Ctrl-D do",
}
QUOTES = '"""'  # around a message of several lines


class Entry(NamedTuple):
    """One entry: a command without its slash and what follows it, or "" and a message."""

    command: str
    text: str


def entry_of(written: str) -> Entry:
    r"""Reads an entry: a message, whose lines may be joined by quotes or backslashes, or a command
    in one line.

    A path is not a command, since its first word has a second slash. Case does not matter.

    >>> entry_of("/save  my chat.json"), entry_of("/usr/bin is a folder").command
    (Entry(command='save', text='my chat.json'), '')
    >>> [entry_of(text).command for text in ("/Help", "/save-as\ta", "/?", "/2 of them")]
    ['help', 'save-as', '?', '']
    >>> entry_of(QUOTES + "/help\nis a command" + QUOTES).text, entry_of("one\\\ntwo").text
    ('/help\nis a command', 'one\ntwo')
    """
    written = written.strip()
    command = re.fullmatch(r"/([A-Za-z?][^\s/]*)(?:[ \t]+(.*))?", written)
    if command:
        return Entry(command[1].lower(), (command[2] or "").strip())
    if written.startswith(QUOTES):
        written = written.removeprefix(QUOTES).removesuffix(QUOTES)
    else:
        written = written.replace("\\\n", "\n")
    return Entry("", written.strip())


def is_unfinished(written: str) -> bool:
    r"""Returns whether an entry continues on the next line: open quotes, or a backslash at the end.

    >>> [
    ...     is_unfinished(text)
    ...     for text in (QUOTES + "one", QUOTES + "one\n" + QUOTES, "one\\", "one\ntwo")
    ... ]
    [True, False, True, False]
    """
    written = written.strip()
    if written.startswith(QUOTES):
        return len(written) < 2 * len(QUOTES) or not written.endswith(QUOTES)
    return written.endswith("\\")


def check(entry: Entry) -> None:
    """Raises ValueError if an entry was not UTF-8: its reader made surrogates of other bytes."""
    try:
        entry.text.encode()
    except UnicodeEncodeError as error:
        byte = f"0x{ord(entry.text[error.start]) & 0xFF:02x}"
        where = f"it has the byte {byte} at character {error.start}"
        raise ValueError(f"the message is not UTF-8 text ({where}): it was left out") from None


def piped(lines: Iterable[bytes]) -> Iterator[Entry]:
    """Yields the entries of a pipe or a file, one a line unless it continues. Skips blank lines."""
    written = ""
    for line in lines:
        written += line.decode(files.ENCODING, "surrogateescape").rstrip("\r\n")
        if is_unfinished(written):
            written += "\n"
        else:
            if written.strip():
                yield entry_of(written)
            written = ""
    if written.strip().startswith(QUOTES):
        raise ValueError(
            f"the last message begins with {QUOTES} and has no other {QUOTES} at its end: it was "
            "left out"
        )
    if written.strip():
        yield entry_of(written.rstrip().removesuffix("\\"))


def typed() -> Iterator[Entry]:
    """Yields entries typed at a terminal, in a line editor with a history.

    A paste of several lines is one entry. Ctrl-C clears the line; on an empty line it raises
    KeyboardInterrupt.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output.defaults import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def end(event: KeyPressEvent) -> None:
        if is_unfinished(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("c-c")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    editor: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        output=create_output(sys.stderr),  # answers alone are the output
    )
    while True:
        try:
            written = editor.prompt(handle_sigint=False)
        except EOFError:
            return
        if written.strip():
            yield entry_of(written)
