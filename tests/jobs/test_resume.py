"""The folder of a job: which job it is of, in which files its rows are, and what a kill leaves."""

import json

import pytest

from jaxspec.jobs.resume import Chunks, InputShard, Output, manifest_of

ROWS = [
    {"number": number, "text": f"{number}: \u00fc\u2028", "log_probs": [-0.1, None]}
    for number in (5, 1, 7, 3)
]


def write(path, rows):
    """Makes a journal of some rows, each of a line of its own."""
    path.write_text("".join(json.dumps([row]) + "\n" for row in rows))


@pytest.fixture
def output(tmp_path):
    """A job of one chunk of eight lines, four of which are in its journal."""
    output = Output(tmp_path, InputShard(), 8)
    write(output.journal(0), ROWS)
    return output


def numbers(chunks):
    return [row["number"] for row in chunks.rows()]


def test_a_journal_has_its_rows_in_order(output):
    chunks = Chunks(output, 8)
    assert list(chunks.rows()) == sorted(ROWS, key=lambda row: row["number"])
    assert [number in chunks for number in (5, 6)] == [True, False]


def test_wherever_a_journal_is_cut_its_last_row_is_dropped_and_it_goes_on(output):
    journal = output.journal(0)
    content = journal.read_bytes()
    lines = content.splitlines(keepends=True)
    for size in range(len(content) - len(lines[-1]), len(content)):
        journal.write_bytes(content[:size])
        cut = Chunks(output, 8)
        assert numbers(cut) == [1, 5, 7]
        cut.add(ROWS[3])
        cut.close()
        assert numbers(cut) == numbers(Chunks(output, 8)) == [1, 3, 5, 7]


def test_a_line_that_is_damaged_anywhere_is_dropped(output):
    """Also where it is no longer one line: the others stay."""
    journal = output.journal(0)
    content = journal.read_bytes()
    start = content.index(b"\n") + 1
    end = content.index(b"\n", start) + 1
    for place in range(start, end):
        for damaged in (b"\0", b"\n"):
            if content[place : place + 1] != damaged:
                journal.write_bytes(content[:place] + damaged + content[place + 1 :])
                # without its line break, what is left of two rows is one line
                whole_lines = [3, 5, 7] if place < end - 1 else [3, 5]
                assert numbers(Chunks(output, 8)) == whole_lines


def test_a_chunk_is_written_when_all_its_lines_are_done(tmp_path):
    """In any order; lines that are skipped count as done, and a chunk of these alone is empty."""
    output, there = Output(tmp_path, InputShard(1, 2), 2), []
    chunks = Chunks(output, 7)
    for place, is_skipped in ((2, False), (1, False), (3, True), (6, False), (0, False), (4, True)):
        number = 2 * place + 1
        if is_skipped:
            chunks.skip(number)
        else:
            chunks.add({"number": number})
        assert is_skipped or number in chunks
        there.append([int(path.stem[-6:]) for path in sorted(tmp_path.glob("part-*"))])
    assert there == [[], [], [1], [1, 3], [0, 1, 3], [0, 1, 3]] and not chunks.is_complete
    chunks.skip(11)
    assert chunks.is_complete and not list(tmp_path.glob("journal-*"))
    rows = [
        [json.loads(line)["number"] for line in output.path(n).read_text().splitlines()]
        for n in range(4)
    ]
    assert rows == [[1, 3], [5], [], [13]]


def test_chunks_go_on_with_the_rows_that_are_in_files(tmp_path):
    output = Output(tmp_path, InputShard(), 3)
    chunks = Chunks(output, 8)
    for number in (0, 3, 1, 2, 7):
        chunks.add({"number": number})
    chunks.close()
    write(output.journal(0), [{"number": 0}])  # as if it had been killed before this was deleted
    again = Chunks(output, 8)
    assert (again.num_done, [n for n in range(8) if n in again]) == (5, [0, 1, 2, 3, 7])
    assert [row["number"] for row in again.rows()] == [0, 1, 2, 3, 7]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "journal-00000-of-00001-000001",
        "journal-00000-of-00001-000002",
        "part-00000-of-00001-000000.jsonl",
    ]
    for number in (4, 5, 6):
        again.add({"number": number})
    again.close()
    assert again.is_complete and [row["number"] for row in again.rows()] == list(range(8))


def test_a_chunk_that_was_to_be_written_is_written_first(tmp_path):
    """Its rows were all done, and the disk then full, or the process killed."""
    output = Output(tmp_path, InputShard(), 2)
    write(output.journal(0), [{"number": 1}, {"number": 0}])
    assert Chunks(output, 3).num_done == 2
    assert [path.name for path in tmp_path.iterdir()] == ["part-00000-of-00001-000000.jsonl"]


def test_another_job_is_refused_by_its_first_difference(tmp_path):
    """A name of a file need not be text in any encoding."""
    output = Output(tmp_path, InputShard(), 8)
    first, last, new = (
        {"file": name, "bytes": 3} for name in ("Gr\udcfc\udcdfe.wav", "c.wav", "b.wav")
    )
    output.begin({"sounds": [first, last], "shard": 0})
    output.begin({"sounds": [first, last], "shard": 0})
    with pytest.raises(
        ValueError, match=r"\(sounds: number 1: file is 'c.wav' there and 'b.wav' here\)"
    ):
        output.begin({"sounds": [first, new, last], "shard": 0})
    with pytest.raises(
        ValueError,
        match=r"\(sounds: number 1 is \{'file': 'c.wav', 'bytes': 3\} there and None here\)",
    ):
        output.begin({"sounds": [first], "shard": 0})


def test_a_job_is_begun_once_and_goes_on_with_what_it_began_with(tmp_path):
    output = Output(tmp_path / "out", InputShard(), 4)
    manifest = manifest_of(output, {"target": ["a", {}]}, {"seed": 1}, input=[])
    output.check(resume=False)
    assert not output.folder.exists()
    with output.begun(manifest, 2, resume=False) as chunks:
        chunks.add({"number": 1})
        with pytest.raises(OSError, match="is using this folder"):
            output.check(resume=True)
    # as when another process begins the job after `check`
    with (
        pytest.raises(ValueError, match="holds a job already: give --resume"),
        output.begun(manifest, 2, resume=False),
    ):
        pass
    with output.begun(manifest, 2, resume=True) as chunks:
        assert [number in chunks for number in (0, 1)] == [False, True]
    changed = manifest_of(output, {"target": ["a", {}]}, {"seed": 2}, input=[])
    with (
        pytest.raises(ValueError, match=r"another job \(options: seed is 1 there and 2 here"),
        output.begun(changed, 2, resume=True),
    ):
        pass
