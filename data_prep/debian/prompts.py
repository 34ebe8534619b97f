"""Small held-out prompt files, to ship with the package: a few hundred varied rows per task.

Rows come from the files that `examples.build` wrote, so every one belongs to a held-out package and
shares no synopsis or paragraph with a training package.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from data_prep.debian.examples import TRANSLATE, cut, stem
from jaxspec.files import read_jsonl, write_jsonl

# Two texts with more than this share of their words in common count as near-duplicates.
_ALIKE = 0.6
_TRANSLATION_CHARS = range(30, 251)
_PROMPT_CHARS = 60
_CONTINUATION_CHARS = 600
_SHORTEST_CONTINUATION = 100

Row = dict[str, str]


def write_prompts(data_dir: str | Path, out_dir: str | Path, count: int = 300) -> dict[str, int]:
    """Writes ``{translation,synopsis,edit,text}.jsonl`` with rows ``{"input", "reference",
    "package"}``.
    """
    pairs = list(read_jsonl(Path(data_dir) / "t5.heldout.jsonl"))
    sources = {
        "translation": (
            _pair(row) for row in pairs if row["task"] == "translation" and _is_body_text(row)
        ),
        "synopsis": (_pair(row) for row in pairs if row["task"] == "synopsis"),
        "edit": map(_pair, read_jsonl(Path(data_dir) / "edit.heldout.jsonl")),
        "text": continuations(read_jsonl(Path(data_dir) / "gpt.heldout.jsonl")),
    }
    counts = {}
    for task, rows in sources.items():
        chosen = choose(rows, count)
        write_jsonl(Path(out_dir) / f"{task}.jsonl", chosen)
        counts[f"{task}.jsonl"] = len(chosen)
    return counts


def choose(rows: Iterable[Row], count: int) -> list[Row]:
    """Chooses varied rows, the same for the same rows in any order.

    Every package family gives one row before any gives a second; near-duplicates of chosen rows are
    left out.
    """
    ordered = sorted(rows, key=lambda row: hashlib.sha256(row["input"].encode()).digest())
    turn: Counter[str] = Counter()
    queue = []
    for row in ordered:
        family = stem(row["package"])
        queue.append((turn[family], row))
        turn[family] += 1
    queue.sort(key=lambda entry: entry[0])  # stable: by hash within a turn
    chosen: list[Row] = []
    seen: list[set[str]] = []
    for _, row in queue:
        words = _words(row)
        if len(chosen) < count and not any(_alike(words, other) for other in seen):
            chosen.append(row)
            seen.append(words)
    return chosen


def continuations(documents: Iterable[Row]) -> Iterator[Row]:
    """Splits documents at a word's end; ``input + reference`` is exactly the start of the
    document.
    """
    for row in documents:
        text = row["text"]
        border = max(text.rfind(space, 0, _PROMPT_CHARS + 1) for space in " \n")
        rest = cut(text[max(border, 0) :], _CONTINUATION_CHARS)
        if border > 0 and len(rest) >= _SHORTEST_CONTINUATION:
            yield {"input": text[:border], "reference": rest, "package": row["package"]}


def _pair(row: Row) -> Row:
    return {"input": row["input"], "reference": row["output"], "package": row["package"]}


def _is_body_text(row: Row) -> bool:
    """Tells whether the English side is a running paragraph; synopses have no full stop, by
    Debian's custom.
    """
    text = row["input"].removeprefix(TRANSLATE)
    return len(text) in _TRANSLATION_CHARS and text[-1] in ".!?" and "* " not in text


def _words(row: Row) -> set[str]:
    prompt = row["input"].split(": ", 1)[-1]
    return set(re.findall(r"\w+", f"{prompt} {row['reference']}".casefold()))


def _alike(words: set[str], other: set[str]) -> bool:
    return len(words & other) > _ALIKE * min(len(words), len(other))
