"""Translation pairs out of packages: catalogues, manuals, and what is held out."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from data_prep.debian import catalogues
from jaxspec.files import read_jsonl, write_jsonl

SAVED = ("_Save all of the open files", "Alle offenen Dateien _speichern")
PLURAL = (
    "a file was removed now\0all files were removed now",
    "eine Datei wurde entfernt\0alle Dateien wurden entfernt",
)
HELD = ("This sentence is held out", "Dieser Satz wird zurückgehalten")
ENGLISH = (
    '<body><h1 id="a">How to write a letter</h1><p id="b">Choose a new <b>document</b>.</p><p>Only '
    "in English.</p>"
)
GERMAN = (
    '<body><h1 id="a">Wie man einen Brief schreibt</h1><p id="b">Wählen Sie ein neues '
    "<b>Dokument</b>.</p>"
)


def catalogue(*pairs: tuple[str, str]) -> bytes:
    """A ``.mo`` file: a header, the table of the sources, that of the translations, and the
    strings.
    """
    texts = [text.encode() for pair in zip(*pairs, strict=True) for text in pair]
    start = 28 + 8 * len(texts)
    tables = body = b""
    for text in texts:
        tables += struct.pack("<2I", len(text), start + len(body))
        body += text + b"\0"
    return (
        struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, 0) + tables + body
    )


def test_messages_have_no_contexts_and_no_access_keys():
    read = list(
        catalogues.messages(
            catalogue(("", "Language: de"), ("menu\x04" + SAVED[0], SAVED[1]), PLURAL)
        )
    )
    assert read == [
        ("Save all of the open files", "Alle offenen Dateien speichern"),
        ("a file was removed now", "eine Datei wurde entfernt"),
        ("all files were removed now", "alle Dateien wurden entfernt"),
    ]


def test_paragraphs_align_by_sequence_or_by_id():
    english, german = catalogues.blocks(ENGLISH), catalogues.blocks(GERMAN)
    pairs = list(catalogues.align(english, german))
    assert pairs == [
        ("How to write a letter", "Wie man einen Brief schreibt"),
        ("Choose a new document.", "Wählen Sie ein neues Dokument."),
    ]
    assert list(catalogues.align([("p", "a"), ("p", "b")], [("p", "c")])) == []


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is Debian's")
def test_build_leaves_out_what_is_held_out(tmp_path: Path):
    package = tmp_path / "tool"
    for path, content in {
        "DEBIAN/control": b"Package: tool\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b.c>\nDescription: x\n",
        "usr/share/locale/de/LC_MESSAGES/tool.mo": catalogue(
            ("", "x"), SAVED, HELD, ("%s of all files", "%s Dateien")
        ),
        "usr/share/help/en-US/page.html": ENGLISH.encode(),
        "usr/share/help/de/page.html": GERMAN.encode(),
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(content)
    subprocess.run(
        ["dpkg-deb", "--build", str(package), str(tmp_path / "tool_1_all.deb")], check=True
    )
    write_jsonl(
        tmp_path / "t5.heldout.jsonl",
        [{"input": "summarize: This sentence is held out!", "output": "x"}],
    )
    assert catalogues.build(tmp_path, tmp_path) == {"t5-catalogues.train.jsonl": 3}
    rows = list(read_jsonl(tmp_path / "t5-catalogues.train.jsonl"))
    assert rows[0] == {
        "task": "translation",
        "input": "translate English to German: Save all of the open files",
        "output": "Alle offenen Dateien speichern",
        "package": "tool",
    }
