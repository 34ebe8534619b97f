"""A task whose output repeats its input: a description with one word replaced by another.

What copying drafters (`drafters.prompt_lookup`) are for. Made from the English side of the files
that `examples.build` wrote, so held-out texts stay held out.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from data_prep.debian.examples import SUMMARIZE, TRANSLATE, cut
from jaxspec.files import read_jsonl, write_jsonl

_CHARS = range(60, 261)
_WORD = re.compile(r"\b[a-z]{4,12}\b")


def build(data_dir: str | Path) -> dict[str, int]:
    """Writes ``edit.{train,heldout}.jsonl`` beside ``t5.{train,heldout}.jsonl``."""
    counts = {}
    for part in ("train", "heldout"):
        rows = list(edits(read_jsonl(Path(data_dir) / f"t5.{part}.jsonl")))
        write_jsonl(Path(data_dir) / f"edit.{part}.jsonl", rows)
        counts[f"edit.{part}.jsonl"] = len(rows)
    return counts


def edits(rows: Iterator[dict[str, str]]) -> Iterator[dict[str, str]]:
    """One edit of every English text of a fitting length, each text once; the new word is one of
    the text before.

    Which words, is decided by a hash of the text: the same on every machine.

    >>> texts = [
    ...     "a small editor for terminals, in which every word may be replaced",
    ...     "This browser shows pages. " * 3,
    ... ]
    >>> [
    ...     row["input"][:40]
    ...     for row in edits({"input": SUMMARIZE + text, "package": "a"} for text in texts)
    ... ]
    ['replace browser by terminals: This brows']
    """
    other: list[str] = []
    seen: set[str] = set()
    for row in rows:
        text = cut(row["input"].removeprefix(TRANSLATE).removeprefix(SUMMARIZE), _CHARS.stop - 1)
        words = sorted(set(_WORD.findall(text)))
        if len(text) not in _CHARS or not words or text in seen:
            continue
        seen.add(text)
        chance = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        old = words[chance % len(words)]
        fresh = [word for word in other if word not in words]
        other = words
        if fresh:
            new = fresh[(chance >> 20) % len(fresh)]
            output = re.sub(rf"\b{old}\b", new, text)
            prompt = f"replace {old} by {new}: {text}"
            yield {"task": "edit", "input": prompt, "output": output, "package": row["package"]}
