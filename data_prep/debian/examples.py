"""Training text from Debian's package descriptions: translation, summarisation and language
modelling.

English descriptions, their German translations and their one-line synopses are the two tasks of a
small T5; the descriptions themselves are the text of a small GPT. `build` turns the indices (see
`index`) into four files of JSON lines, split into training and held-out packages.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.progress import Progress

from data_prep.debian.index import LANGUAGES, Record, index_files, read_records
from jaxspec.files import read_jsonl, write_jsonl

TRANSLATE = "translate English to German: "
SUMMARIZE = "summarize: "

HELDOUT_SHARE = 0.03
# A family such as python3-* or librust-*: holding one out would take a whole kind of text from
# training.
GIANT_STEM_SHARE = 0.005

_ENGLISH_CHARS = range(10, 401)
_GERMAN_CHARS = range(1, 500)
_LENGTH_RATIO = (0.4, 2.5)
_SUMMARY_INPUT_CHARS = 800
_SHORTEST_BODY = 40


class Example(NamedTuple):
    """A text pair of one task (T5), or, where ``input`` is ``output``, one document (GPT).

    ``parts`` are the paragraphs it is made of: what must not be seen in training when it is held
    out.
    """

    task: str
    input: str
    output: str
    package: str
    parts: tuple[str, ...]


class Split(NamedTuple):
    """Examples to train on and examples held out."""

    train: list[Example]
    heldout: list[Example]


def stem(package: str) -> str:
    """The family a package belongs to: its name up to the first hyphen or digit.

    >>> [stem(name) for name in ("libreoffice-writer", "vim", "python3-numpy", "0ad-data")]
    ['libreoffice', 'vim', 'python', '0ad']
    """
    match = re.match(r"[^-0-9]+", package)
    return match.group() if match else package.split("-", 1)[0]


def heldout_stems(packages: Iterable[str], share: float = HELDOUT_SHARE) -> frozenset[str]:
    """Chooses the held-out families by the hash of their name, the same on every machine."""
    counts = Counter(stem(package) for package in packages)
    limit = max(1, GIANT_STEM_SHARE * counts.total())
    eligible = {name: count for name, count in counts.items() if count <= limit}
    threshold = share * counts.total() / max(1, sum(eligible.values()))
    return frozenset(name for name in eligible if _unit_hash(name) < threshold)


def _unit_hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def translation_examples(english: Iterable[Record], german: Iterable[Record]) -> Iterator[Example]:
    """Aligns the synopsis and the paragraphs of descriptions that have as many paragraphs in both
    languages.

    An English text with several German ones keeps the most frequent, so that the task has one
    answer.
    """
    translated = {record.md5: record for record in german}
    votes: dict[str, Counter[str]] = {}
    owner: dict[str, str] = {}
    for record in english:
        other = translated.get(record.md5)
        for source, target in _aligned(record, other) if other else ():
            votes.setdefault(source, Counter())[target] += 1
            owner.setdefault(source, record.package)
    for source, targets in votes.items():
        target = targets.most_common(1)[0][0]
        yield Example("translation", TRANSLATE + source, target, owner[source], (source, target))


def _aligned(english: Record, german: Record) -> Iterator[tuple[str, str]]:
    if len(english.paragraphs) != len(german.paragraphs):
        return
    pairs = [
        (english.synopsis, german.synopsis),
        *zip(english.paragraphs, german.paragraphs, strict=True),
    ]
    yield from (pair for pair in pairs if _is_translation(*pair))


def _is_translation(source: str, target: str) -> bool:
    if source == target or len(source) not in _ENGLISH_CHARS or len(target) not in _GERMAN_CHARS:
        return False
    low, high = _LENGTH_RATIO
    letters = sum(char.isalpha() or char == " " for char in source)
    return (
        low <= len(target) / len(source) <= high
        and letters >= 0.7 * len(source)
        and "<trans>" not in target
    )


def synopsis_examples(records: Iterable[Record]) -> Iterator[Example]:
    """Pairs the start of every description with its synopsis, once per text."""
    seen: set[str] = set()
    for record in records:
        body = cut(" ".join(record.paragraphs), _SUMMARY_INPUT_CHARS)
        if len(body) >= _SHORTEST_BODY and body not in seen:
            seen.add(body)
            parts = (record.synopsis, *record.paragraphs)
            yield Example("synopsis", SUMMARIZE + body, record.synopsis, record.package, parts)


def documents(records: Iterable[Record]) -> Iterator[Example]:
    """One document per description: the synopsis, then a line per paragraph; once per text."""
    seen: set[str] = set()
    for record in records:
        parts = (record.synopsis, *record.paragraphs)
        text = "\n".join(parts)
        if record.paragraphs and text not in seen:
            seen.add(text)
            yield Example("text", text, text, record.package, parts)


def cut(text: str, limit: int) -> str:
    """Shortens a text to a number of characters, at a sentence's end past the first third, else a
    word's.

    >>> cut("One two. Three four five.", 20), cut("One two three four", 10)
    ('One two.', 'One two')
    """
    if len(text) <= limit:
        return text
    head = text[: limit + 1]
    sentence = max(head.rfind(mark + " ") for mark in ".!?") + 1
    if sentence >= limit // 3:
        return head[:sentence]
    return head[: max(head.rfind(" "), 0)] or text[:limit]


def split(examples: Iterable[Example], stems: frozenset[str], train_texts: set[str]) -> Split:
    """Divides examples by family, and drops held-out ones with any text of a training package or
    example.
    """
    examples = list(examples)
    train = [example for example in examples if stem(example.package) not in stems]
    # Beyond the packages' texts: a cut description, or a translation voted in from a held-out
    # package.
    seen = train_texts.union(text for example in train for text in (example.input, example.output))
    heldout = [
        example
        for example in examples
        if stem(example.package) in stems
        and seen.isdisjoint((example.input, example.output, *example.parts))
    ]
    return Split(train, heldout)


def build(lists_dir: str | Path, out_dir: str | Path) -> dict[str, int]:
    """Turns description indices into ``{t5,gpt}.{train,heldout}.jsonl``."""
    with Progress() as progress:
        english, german = (_load(lists_dir, language, progress) for language in LANGUAGES)
        stems = heldout_stems({record.package for record in english})
        train_texts = {
            text
            for record in english + german
            if stem(record.package) not in stems
            for text in (record.synopsis, *record.paragraphs)
        }
        step = progress.add_task("build", total=3)
        splits = []
        for examples in (
            translation_examples(english, german),
            synopsis_examples(english),
            documents(english),
        ):
            splits.append(split(examples, stems, train_texts))
            progress.advance(step)
    pairs, summaries, corpus = splits
    return _write(Path(out_dir), pairs, summaries, corpus)


def build_releases(
    lists_dir: str | Path, others_dir: str | Path, out_dir: str | Path
) -> dict[str, int]:
    """Writes ``t5-releases.train.jsonl``: the training examples of `build`, and those that other
    releases add.

    What `build` held out stays held out: by the families of `lists_dir`, and by text, since another
    release may have the same text in another package.
    """
    with Progress() as progress:
        english, german = (_load(lists_dir, language, progress) for language in LANGUAGES)
        stems = heldout_stems({record.package for record in english})
        english, german = (
            _once([*first, *_load(others_dir, language, progress)])
            for first, language in zip((english, german), LANGUAGES, strict=True)
        )
    held = {
        _letters(row[key])
        for row in read_jsonl(Path(out_dir) / "t5.heldout.jsonl")
        for key in ("input", "output")
    }
    rows = []
    for examples in (translation_examples(english, german), synopsis_examples(english)):
        for example in examples:
            texts = map(_letters, (example.input, example.output))
            if stem(example.package) not in stems and held.isdisjoint(texts):
                rows.append(_t5_row(example))
    name = "t5-releases.train.jsonl"
    write_jsonl(Path(out_dir) / name, rows)
    return {name: len(rows)}


def _letters(text: str) -> str:
    """Letters and digits alone, in lower case: equal for texts that differ in spaces, quotation
    marks or stops.
    """
    return "".join(filter(str.isalnum, text.lower()))


def _once(records: Iterable[Record]) -> list[Record]:
    """The first record of each package and checksum."""
    by_key: dict[tuple[str, str], Record] = {}
    for record in records:
        by_key.setdefault((record.package, record.md5), record)
    return list(by_key.values())


def _load(lists_dir: str | Path, language: str, progress: Progress) -> list[Record]:
    """Reads all indices of a language; a description in several of them (security updates) counts
    once.
    """
    paths = progress.track(index_files(lists_dir, language), description=f"read {language}")
    return _once(record for path in paths for record in read_records(path))


def _write(out_dir: Path, pairs: Split, summaries: Split, corpus: Split) -> dict[str, int]:
    counts = {}
    for part in Split._fields:
        t5 = [
            _t5_row(example) for source in (pairs, summaries) for example in getattr(source, part)
        ]
        gpt = [_gpt_row(example) for example in getattr(corpus, part)]
        for model, rows in (("t5", t5), ("gpt", gpt)):
            name = f"{model}.{part}.jsonl"
            write_jsonl(out_dir / name, rows)
            counts[name] = len(rows)
    return counts


def _t5_row(example: Example) -> dict[str, str]:
    return {
        "task": example.task,
        "input": example.input,
        "output": example.output,
        "package": example.package,
    }


def _gpt_row(example: Example) -> dict[str, str]:
    return {"text": example.output, "package": example.package}
