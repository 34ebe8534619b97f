import json
import re
from pathlib import Path

import lz4.frame
import pytest

from data_prep.debian import edits, examples, index, prompts, tokenizers
from data_prep.debian.index import Record
from jaxspec import files

VIM_EN = """Package: vim
Description-md5: 1a
Description-en: enhanced  vi editor
 Vim is an almost compatible version of
 the UNIX editor Vi.
 .
 It brings:
  * folding and
    Unicode support
  - fonts

"""
VIM_DE = """Package: vim
Description-md5: 1a
Description-de: verbesserter vi-Editor
 Vim ist eine fast kompatible Version des
 UNIX-Editors »Vi«.
 .
 Es bringt mit:
  * Falten und Unicode
  * Schriften
"""


def record(package: str, synopsis: str, *paragraphs: str, language: str = "en") -> Record:
    return Record(package, f"md5 of {package}", language, synopsis, paragraphs)


def family(number: int) -> tuple[str, str]:
    """The indices of a family of two packages, whose stem is four letters."""
    name = "".join(chr(ord("a") + number // 26**place % 26) for place in range(4))
    english = german = ""
    for flavour in ("data", "doc"):
        header = f"Package: {name}-{flavour}\nDescription-md5: {name}{flavour}\n"
        english += header + f"Description-en: tool {name} for {flavour}\n"
        english += f" The program {name} computes numbers and prints its {flavour} nicely.\n"
        german += header + f"Description-de: Werkzeug {name} mit {flavour}\n"
        german += f" Das Programm {name} berechnet Zahlen und druckt sein {flavour} schön.\n"
        if number % 2:
            english += " .\n This paragraph is shared by a great many packages.\n"
            german += " .\n Diesen Absatz teilen sich sehr viele Pakete.\n"
        english, german = english + "\n", german + "\n"
    return english, german


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lists, out = tmp_path_factory.mktemp("lists"), tmp_path_factory.mktemp("out")
    english, german = ("".join(texts) for texts in zip(*map(family, range(300)), strict=True))
    (lists / "mirror_main_i18n_Translation-en.lz4").write_bytes(
        lz4.frame.compress(english.encode())
    )
    (lists / "mirror_main_i18n_Translation-de").write_text(german, encoding="utf-8")
    counts = examples.build(lists, out)
    assert counts == {path.name: len(list(files.read_jsonl(path))) for path in out.iterdir()}
    return out


@pytest.mark.parametrize("name", ["x_i18n_Translation-de", "x_i18n_Translation-de.lz4"])
def test_records_read_the_same_from_plain_and_compressed_indices(tmp_path: Path, name: str):
    data = VIM_DE.encode()
    (tmp_path / name).write_bytes(lz4.frame.compress(data) if name.endswith(".lz4") else data)
    [path] = index.index_files(tmp_path, "de")
    paragraphs = (
        "Vim ist eine fast kompatible Version des UNIX-Editors »Vi«.",
        "Es bringt mit: * Falten und Unicode * Schriften",
    )
    assert list(index.read_records(path)) == [
        Record("vim", "1a", "de", "verbesserter vi-Editor", paragraphs)
    ]


def test_list_items_are_joined_and_every_bullet_becomes_a_star():
    [vim] = index.parse_records(VIM_EN.splitlines())
    assert vim.synopsis == "enhanced vi editor"
    assert vim.paragraphs[1] == "It brings: * folding and Unicode support * fonts"


def test_a_record_without_a_description_is_passed_over():
    text = "Package: a\nDescription-md5: 1\n\n" + VIM_EN
    assert [record.package for record in index.parse_records(text.splitlines())] == ["vim"]


def test_translations_align_the_synopsis_and_each_paragraph():
    [english], [german] = (
        list(index.parse_records(text.splitlines())) for text in (VIM_EN, VIM_DE)
    )
    pairs = [
        (example.input, example.output)
        for example in examples.translation_examples([english], [german])
    ]
    assert pairs == [
        ("translate English to German: " + source, target)
        for source, target in zip(
            (english.synopsis, *english.paragraphs),
            (german.synopsis, *german.paragraphs),
            strict=True,
        )
    ]


@pytest.mark.parametrize(
    "german",
    [
        # another number of paragraphs
        record("vim", "der Editor Vim", "Erster.", "Zweiter.", language="de"),
        # not translated
        record("vim", "an enhanced editor", "A modal editor of text.", language="de"),
        record("vim", "x" * 100, "y" * 100, language="de"),  # far too long to be its translation
        # another description
        record("emacs", "ein besserer Editor", "Ein Editor für Texte.", language="de"),
    ],
)
def test_what_is_no_translation_gives_no_pair(german: Record):
    english = record("vim", "an enhanced editor", "A modal editor of text.")
    assert list(examples.translation_examples([english], [german])) == []


def test_an_english_text_keeps_its_most_frequent_translation():
    answers = ["ein schneller Editor", "ein flinker Editor", "ein flinker Editor"]
    english = [record(f"editor{i}", "a quick editor") for i in range(3)]
    german = [record(f"editor{i}", answer, language="de") for i, answer in enumerate(answers)]
    assert [example.output for example in examples.translation_examples(english, german)] == [
        "ein flinker Editor"
    ]


def test_synopses_and_documents_come_once_per_text():
    body = "A sentence that is long enough to be worth a summary."
    records = [
        record("a", "one", body),
        record("b", "one", body),
        record("c", "two", body),
        record("d", "none"),
    ]
    assert [(example.input, example.output) for example in examples.synopsis_examples(records)] == [
        ("summarize: " + body, "one")
    ]
    assert [example.output for example in examples.documents(records)] == [
        f"one\n{body}",
        f"two\n{body}",
    ]


def test_a_long_description_is_cut_at_the_end_of_a_sentence():
    body = "This sentence has words. " * 60
    [example] = examples.synopsis_examples([record("a", "words", body.strip())])
    text = example.input.removeprefix(examples.SUMMARIZE)
    assert text.endswith("words.")
    assert 750 < len(text) <= 800


def test_the_split_has_no_family_and_no_text_on_both_sides(built: Path):
    for model, fields in (("t5", ("input", "output")), ("gpt", ("text",))):
        train, heldout = (
            list(files.read_jsonl(built / f"{model}.{part}.jsonl")) for part in ("train", "heldout")
        )
        families = [{examples.stem(row["package"]) for row in rows} for rows in (train, heldout)]
        assert families[1]
        assert families[0].isdisjoint(families[1])
        for field in fields:
            assert {row[field] for row in train}.isdisjoint(row[field] for row in heldout)


def test_other_releases_add_training_texts_and_none_that_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        examples, "heldout_stems", lambda packages: frozenset({"rrr"} & set(packages))
    )

    def write(name: str, *packages: tuple[str, str, str]) -> None:
        (tmp_path / name).mkdir()
        for language, column in (("en", 1), ("de", 2)):
            text = "".join(
                f"Package: {p[0]}\nDescription-md5: {p[0]}{len(p[1])}\nDescription-{language}: "
                f"{p[column]}\n\n"
                for p in packages
            )
            (tmp_path / name / f"m_i18n_Translation-{language}").write_text(text, encoding="utf-8")

    names = [chr(97 + i) * 3 for i in range(26)]
    write(
        "own",
        *(
            (name, f"the program {name} is a tool", f"das Programm {name} ist ein Werkzeug")
            for name in names
        ),
    )
    write(
        "others",
        ("aaa", "the program aaa is a newer tool", "das Programm aaa ist ein neueres Werkzeug"),
        ("rrr-data", "the program rrr with its data", "das Programm rrr mit seinen Daten"),
        # renamed, with a stop
        ("aaa-doc", "The program rrr is a tool.", "Das Programm rrr ist ein Werkzeug."),
    )
    examples.build(tmp_path / "own", tmp_path)
    assert {r["package"] for r in files.read_jsonl(tmp_path / "t5.heldout.jsonl")} == {"rrr"}
    counts = examples.build_releases(tmp_path / "own", tmp_path / "others", tmp_path)
    rows = list(files.read_jsonl(tmp_path / "t5-releases.train.jsonl"))
    before = list(files.read_jsonl(tmp_path / "t5.train.jsonl"))
    assert counts == {"t5-releases.train.jsonl": len(rows)} and all(row in rows for row in before)
    assert [row["output"] for row in rows if row not in before] == [
        "das Programm aaa ist ein neueres Werkzeug"
    ]


def test_a_heldout_example_with_any_part_seen_in_training_is_dropped():
    kept, seen = "a paragraph of its own", "a paragraph of many packages"
    held = [
        examples.Example("text", "a", "a", "held-a", (kept,)),
        examples.Example("text", "b", "b", "held-b", (kept, seen)),
    ]
    train = examples.Example("text", "c", "c", "free-a", (seen,))
    assert examples.split([*held, train], frozenset({"held"}), {seen}) == examples.Split(
        [train], held[:1]
    )


def test_heldout_families_are_the_stated_share_and_never_giants():
    small = [f"{number:05d}tool" for number in range(4000)]
    names = ["x" + name.translate(str.maketrans("0123456789", "abcdefghij")) for name in small]
    giants = [f"python3-module{number}" for number in range(4000)]
    stems = examples.heldout_stems(names + giants, share=0.03)
    assert 0.02 < len(stems) / len(names + giants) < 0.04
    assert stems == examples.heldout_stems(reversed(names + giants), share=0.03)
    assert "python" not in examples.heldout_stems(names + giants, share=0.5)


def test_the_split_does_not_depend_on_the_machine():
    assert examples.heldout_stems((chr(97 + i) * 3 for i in range(26)), share=0.2) == {
        "eee",
        "hhh",
        "ooo",
        "rrr",
        "uuu",
        "zzz",
    }


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path):
    def rows():
        yield {"text": "new"}
        raise KeyError("the source broke")

    files.write_jsonl(tmp_path / "a.jsonl", [{"text": "ältere Zeile"}])
    with pytest.raises(KeyError):
        files.write_jsonl(tmp_path / "a.jsonl", rows())
    assert list(files.read_jsonl(tmp_path / "a.jsonl")) == [{"text": "ältere Zeile"}]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_missing_index_says_how_to_get_it(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"Translation-en.*fetch\("):
        examples.build(tmp_path, tmp_path / "out")


def test_fetch_without_apt_get_says_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="Debian or Ubuntu"):
        index.fetch(tmp_path)


@pytest.mark.parametrize(
    ("script", "error"), [("exit 0", FileNotFoundError), ("echo no net >&2; exit 100", OSError)]
)
def test_fetch_says_when_nothing_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type
):
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(error, match="no net" if error is OSError else "mirror"):
        index.fetch(tmp_path / "lists")


def test_fetch_asks_apt_get_for_the_languages_and_lists_what_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lists = tmp_path / "lists"
    apt_get = tmp_path / "apt-get"
    apt_get.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/args\n: > {lists}/m_i18n_Translation-en.lz4\n'
    )
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [path.name for path in index.fetch(lists, ["en"])] == ["m_i18n_Translation-en.lz4"]
    assert (
        tmp_path / "args"
    ).read_text() == f"update -o Acquire::Languages=en -o Dir::State::Lists={lists}\n"


def test_fetch_asks_for_other_releases_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    apt_get = tmp_path / "apt-get"
    apt_get.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/args\n: > {tmp_path}/m_i18n_Translation-en.lz4\n'
    )
    apt_get.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    index.fetch(tmp_path, ["en"], releases=["trixie", "sid"])
    sources = tmp_path / "sources.list"
    assert (
        f"-o Dir::Etc::sourcelist={sources} -o Dir::Etc::sourceparts=-"
        in (tmp_path / "args").read_text()
    )
    assert [line.split()[-2:] for line in sources.read_text().splitlines()] == [
        ["trixie", "main"],
        ["sid", "main"],
    ]


def test_prompts_are_varied_and_continue_character_for_character(built: Path, tmp_path: Path):
    text = "A synopsis of some words\n" + "Then the body goes on with many different words. " * 20
    [row] = prompts.continuations([{"text": text, "package": "a"}])
    assert len(row["input"]) <= 60
    assert text.startswith(row["input"] + row["reference"])
    written = edits.build(built)
    assert written["edit.train.jsonl"] > 0
    counts = prompts.write_prompts(built, tmp_path, count=3)
    assert counts["synopsis.jsonl"] > 0
    assert {path.name for path in tmp_path.iterdir()} == set(counts)


def test_an_edit_replaces_every_occurrence_of_a_word_and_nothing_else():
    texts = [
        "The little editor edits little texts, and every little editor does so in its own way, "
        "they say.",
        "Another paragraph of sufficient length, whose words are there to be put into others, "
        "like this.",
    ]
    rows = list(
        edits.edits(
            {"input": examples.SUMMARIZE + text, "package": "a"} for text in reversed(texts)
        )
    )
    [row] = rows  # the first has no words to take
    old, new, text = re.fullmatch(r"replace (\w+) by (\w+): (.*)", row["input"]).groups()
    assert text == texts[0] and new in texts[1] and new not in text
    assert (
        row["output"].split()
        == [re.sub(rf"\b{old}\b", new, word) for word in text.split()]
        != text.split()
    )


def test_choosing_prompts_prefers_new_families_and_skips_near_duplicates():
    def row(package: str, text: str) -> dict[str, str]:
        return {"input": text, "reference": "", "package": package}

    rows = [
        row("a-1", "red green blue"),
        row("a-2", "red green blue teal"),
        row("a-3", "one two"),
        row("b", "north"),
    ]
    for order in (rows, rows[::-1]):
        chosen = prompts.choose(order, 3)
        assert {examples.stem(prompt["package"]) for prompt in chosen[:2]} == {"a", "b"}
        assert len(chosen) == 3
        assert not {"a-1", "a-2"} <= {prompt["package"] for prompt in chosen}


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    words = [
        "Größe",
        "Straße",
        "editor",
        "Paket",
        "»Vi«",
        "number",
        "enthält",
        "files",
        "summarize:",
        "translate",
    ]
    return [" ".join(words[(i * step + step) % 10] for step in range(1, 8)) for i in range(10)] * 50


def test_the_unigram_tokenizer_loses_nothing_and_ends_with_eos(sentences: list[str]):
    tokenizer = tokenizers.train_unigram(sentences, vocabulary=259 + 102)
    assert tokenizer.get_vocab_size() == 259 + 102
    assert [tokenizer.id_to_token(i) for i in (0, 1, 2, 3)] == ["<pad>", "</s>", "<unk>", "<0x00>"]
    for text in ("Größe und Straße", "a snowman ☃ and 中文.", "it spells <0x41> out"):
        ids = tokenizer.encode(text).ids
        assert ids[-1] == 1
        assert 2 not in ids
        assert tokenizer.decode(ids) == text


def test_the_byte_tokenizer_is_lossless_and_adds_nothing(sentences: list[str]):
    tokenizer = tokenizers.train_byte_bpe(sentences, vocabulary=280)
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    for text in ("  two spaces\nand a line ☃", "Größe"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("train", [tokenizers.train_unigram, tokenizers.train_byte_bpe])
def test_too_little_text_for_the_vocabulary_is_an_error(train, sentences: list[str]):
    with pytest.raises(ValueError, match="more text, or fewer ids"):
        train(sentences, 5000)


def test_a_saved_tokenizer_is_a_folder_of_two_complete_files(tmp_path: Path, sentences: list[str]):
    tokenizer = tokenizers.train_byte_bpe(sentences, vocabulary=280)
    tokenizers.save_tokenizer(tokenizer, tmp_path / "tok", {"eos_token": "<|endoftext|>"})
    assert {path.name for path in (tmp_path / "tok").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (
        json.loads((tmp_path / "tok" / "tokenizer_config.json").read_text())["eos_token"]
        == "<|endoftext|>"
    )
