"""Jobs: a row's text is that of `generate`, whatever slots it is decoded in, and nothing else is
lost or repeated.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, policies, rules
from jaxspec.core import LanguageModel, Model, Prompt
from jaxspec.decode import device_memory
from jaxspec.decode.request import prepare
from jaxspec.jobs import slots
from jaxspec.jobs.input_files import Source
from jaxspec.jobs.prompts import limits_of
from jaxspec.jobs.resume import InputShard
from jaxspec.nets import adapters, decoder, t5
from jaxspec.testing import word_tokenizer
from tests.drafters.cases import CASES, LARGE_MODEL, LARGE_TARGET
from tests.marks import marked
from tests.small import tiny_gpt, tiny_t5

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, 6, size).tolist() for size in RNG.integers(1, 20, 13)]
LIMITS = RNG.integers(1, 17, len(PROMPTS)).astype(np.int32)
KEY = jax.random.key(3)
OPTIONS = dict(gamma=2, max_new_tokens=16, key=KEY, temperature=0.8, eos_ids=[4])
LARGE = {name: case.large for name, case in CASES.items() if case.large is not None}
REQUESTS = [
    dict(prompt=prompt, max_new_tokens=int(n)) for prompt, n in zip(PROMPTS, LIMITS, strict=True)
]


def texts_of(rows):
    """What a job yields of each prompt, in their order."""
    rows = sorted(rows, key=lambda row: row.number)
    return [(row.tokens, row.rounds, row.drafted, row.accepted) for row in rows]


def expected(target, prompts, limits, **options):
    """The same by `generate`, all prompts in one batch."""
    out = jaxspec.generate(
        target, prompts, **options | {"max_new_tokens": np.asarray(limits, np.int32)}
    )
    stats = out.stats
    counts = zip(
        stats.rounds.tolist(), stats.drafted.tolist(), stats.accepted.tolist(), strict=True
    )
    tokens = [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    return [(row, *count) for row, count in zip(tokens, counts, strict=True)]


# Their states are of parts that others of these have, too.
ALIKE = (
    "n-gram argmax",
    "samples without back-off",
    "uniform",
    "retrieval",
    "sequences",
    "a cascade",
)
ALIKE += ("prompt_lookup, a tree",)


@pytest.mark.parametrize(
    "name", marked(LARGE, slow={*LARGE} - {"prompt_lookup", "suffix"}, exhaustive=ALIKE)
)
def test_a_job_has_the_texts_of_generate(name):
    """Thirteen prompts in four slots: the rows of every drafter's state are replaced several
    times.
    """
    options = OPTIONS | {"drafter": LARGE[name]}
    rows = list(jaxspec.generate_many(LARGE_TARGET, REQUESTS, slots=4, group=2, **options))
    assert texts_of(rows) == expected(LARGE_TARGET, PROMPTS, LIMITS, **options)
    assert {row.finish for row in rows} == {"eos", "length"}
    assert all((row.tokens[-1] == 4) == (row.finish == "eos") for row in rows)


@pytest.mark.parametrize("drafter", [None, pytest.param(LARGE_MODEL, marks=pytest.mark.slow)])
def test_neither_slots_nor_order_nor_mates_change_a_text(drafter):
    options = OPTIONS | {"drafter": drafter, "rule": rules.block()}
    run = functools.partial(jaxspec.generate_many, LARGE_TARGET, **options)
    reference = texts_of(run(REQUESTS, slots=13))
    numbered = [request | {"number": n} for n, request in enumerate(REQUESTS)]
    assert texts_of(run(numbered[::-1], slots=3, group=1)) == reference
    assert texts_of(run(numbered[4:9], slots=4, group=4)) == reference[4:9]
    assert texts_of([*run(numbered[::2], slots=2), *run(numbered[1::2], slots=2)]) == reference


def test_results_come_as_rows_finish_or_in_order():
    requests = [
        dict(id=f"row {n}", prompt=[1, 2], max_new_tokens=limit)
        for n, limit in enumerate([16, 1, 2, 1, 1])
    ]
    options = dict(max_new_tokens=16, eos_ids=(), slots=2, group=1)
    assert [row.id for row in jaxspec.generate_many(LARGE_TARGET, requests, **options)][
        -1
    ] == "row 0"
    ordered = list(jaxspec.generate_many(LARGE_TARGET, requests, in_order=True, **options))
    assert [(row.id, len(row.tokens)) for row in ordered] == [
        (f"row {n}", size) for n, size in enumerate([16, 1, 2, 1, 1])
    ]


def test_prompts_are_read_as_they_are_needed_and_nothing_more_is_compiled():
    read = 0

    def source():
        nonlocal read
        for _ in range(10):
            for prompt in PROMPTS:
                read += 1
                yield prompt

    rows = jaxspec.generate_many(
        LARGE_TARGET, source(), drafter=LARGE_MODEL, slots=4, max_prompt_tokens=32, **OPTIONS
    )
    for _ in range(13):
        next(rows)
    assert read < 50
    programs = (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    )
    assert len(list(rows)) == 117
    assert (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    ) == programs


@pytest.mark.parametrize("drafts", marked(["a model", "the last answers"], slow=["a model"]))
def test_other_weights_of_the_same_shapes_compile_nothing(drafts, caplog):
    """Between two jobs target and drafter have learnt; log probabilities are those of a job's own
    weights.
    """
    policies_of_epochs = [
        LARGE_TARGET._replace(params=jnp.asarray(LARGE_TARGET.params * heat)) for heat in (1.0, 1.5)
    ]
    answers, rooms = [[1, 2]], len(PROMPTS) * 17
    options = OPTIONS | dict(slots=3, log_probs=True, in_order=True)
    for epoch, target in enumerate(policies_of_epochs):
        drafter = (
            drafters.model(target)
            if drafts == "a model"
            else drafters.suffix(texts=answers, room=rooms)
        )
        with jax.log_compiles(), caplog.at_level("WARNING"):
            caplog.clear()
            rows = list(jaxspec.generate_many(target, REQUESTS, drafter=drafter, **options))
            compiled = [
                record.message
                for record in caplog.records
                if record.message.startswith("Compiling")
            ]
        assert epoch == 0 or compiled == []
        answers = [row.tokens for row in rows]
    alike = OPTIONS | dict(drafter=drafter, max_new_tokens=LIMITS, log_probs=True)
    out = jaxspec.generate(target, PROMPTS, **alike)
    assert answers == [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]
    for row, expected_row in zip(rows, out.log_probs.sampled, strict=True):
        np.testing.assert_allclose(
            row.log_probs.sampled, expected_row[: len(row.tokens)], atol=1e-5
        )


def test_wider_prompts_wait_for_wider_slots():
    prompts = [[1, 2, 3], *[[1] * 9] * 15, [2] * 40, [3]]
    rows = list(
        jaxspec.generate_many(LARGE_TARGET, prompts, slots=2, drafter=LARGE_MODEL, **OPTIONS)
    )
    assert texts_of(rows) == expected(
        LARGE_TARGET, prompts, [16] * len(prompts), drafter=LARGE_MODEL, **OPTIONS
    )


@pytest.mark.parametrize("drafts", marked(["a model", "prompt_lookup"], slow=["a model"]))
def test_an_encoder_decoder_reads_prompts_of_several_widths(drafts):
    config = tiny_t5()
    target, draft = (
        Model(t5.language_model(config), t5.init(config, jax.random.key(seed)), None, config)
        for seed in (0, 1)
    )
    prompts = [RNG.integers(1, 32, size).tolist() for size in (3, 20, 5, 18, 1)]
    options = OPTIONS | {
        "drafter": draft if drafts == "a model" else drafters.prompt_lookup(),
        "temperature": 1.0,
    }
    rows = list(jaxspec.generate_many(target, prompts, slots=3, **options))
    assert texts_of(rows) == expected(target, prompts, [16] * 5, **options)


WORDS = ["<unk>", "</s>", "the", "old", "cat", "sat"]
SPEAKER = Model(LARGE_TARGET.lm, LARGE_TARGET.params, word_tokenizer(WORDS))


def test_a_stop_string_ends_a_row_as_in_generate():
    texts = ["the old cat", "sat the", "cat", "old old", "the cat sat the"]
    options = OPTIONS | {
        "eos_ids": (),
        "stop": ["cat sat", "old the"],
        "drafter": LARGE_MODEL,
        "max_new_tokens": 40,
    }
    out = jaxspec.generate(SPEAKER, texts, **options)
    rows = list(jaxspec.generate_many(SPEAKER, texts, slots=2, in_order=True, **options))
    assert [row.text for row in rows] == out.texts
    assert [row.tokens for row in rows] == [
        t[:n].tolist() for t, n in zip(out.tokens, out.lengths, strict=True)
    ]
    assert {row.finish for row in rows} >= {"stop"}
    counts = [(row.rounds, row.drafted, row.accepted) for row in rows]
    assert counts == list(
        zip(
            *(getattr(out.stats, n).tolist() for n in ("rounds", "drafted", "accepted")),
            strict=True,
        )
    )
    seen = []
    assert (
        list(
            jaxspec.generate_many(
                SPEAKER, texts, slots=2, in_order=True, progress=seen.append, **options
            )
        )
        == rows
    )
    assert seen[-1].to_dict()["metrics"] == out.to_dict()["metrics"]


@pytest.mark.parametrize(
    "name", ["n-gram samples", pytest.param("a tree", marks=pytest.mark.slow), None]
)
def test_metrics_of_a_job_are_those_of_generate(name):
    """Rows of several blocks of rounds, in slots that are refilled; nothing is left over from a
    slot's former row.
    """
    options = OPTIONS | {
        "drafter": None if name is None else LARGE[name],
        "max_new_tokens": 90,
        "eos_ids": (),
    }
    requests = [
        request | {"max_new_tokens": 90 if n % 4 == 0 else 3} for n, request in enumerate(REQUESTS)
    ]
    limits = np.array([request["max_new_tokens"] for request in requests], np.int32)
    seen = []
    rows = list(
        jaxspec.generate_many(
            LARGE_TARGET, requests, slots=3, group=1, progress=seen.append, **options
        )
    )
    out = jaxspec.generate(LARGE_TARGET, PROMPTS, **options | {"max_new_tokens": limits})
    assert seen[-1].to_dict()["metrics"] == out.to_dict()["metrics"]
    assert json.loads(json.dumps(seen[-1].to_dict()))["rounds"] == out.stats.rounds.sum()
    for row in rows:
        counts = row.to_dict().get("acceptance_histogram", [])
        assert (
            sum(counts) == (row.rounds if name else 0)
            and np.dot(counts, range(len(counts))) == row.accepted
        )
    assert (name is None) == all("acceptance_histogram" not in row.to_dict() for row in rows)


def test_log_probabilities_are_those_of_generate():
    options = OPTIONS | {"drafter": LARGE_MODEL, "top_log_probs": 2}
    out = jaxspec.generate(LARGE_TARGET, PROMPTS, **options | {"max_new_tokens": LIMITS})
    rows = jaxspec.generate_many(LARGE_TARGET, REQUESTS, slots=3, in_order=True, **options)
    for row, record in zip(rows, out.records(), strict=True):
        wanted = {
            name: record[name] for name in ("raw_log_probs", "sampled_log_probs", "top_log_probs")
        }
        for name, values in wanted.items():
            np.testing.assert_allclose(
                np.array(row.to_dict()[name], float), np.array(values, float), atol=1e-5
            )
        assert (row.to_dict()["top_tokens"], row.finish) == (record["top_tokens"], record["finish"])


def test_a_policy_has_a_state_in_each_row():
    options = OPTIONS | {
        "drafter": LARGE_MODEL,
        "policy": policies.heuristic(start=1, grow=1),
        "gamma": 3,
    }
    rows = list(jaxspec.generate_many(LARGE_TARGET, REQUESTS, slots=3, **options))
    assert texts_of(rows) == expected(LARGE_TARGET, PROMPTS, LIMITS, **options)


def test_wrong_prompts_are_errors_of_their_own():
    prompts = [
        [1, 2],
        [],
        [9],
        "text",
        {"prompt": [1], "eos_token_id": 3},
        {"id": "x"},
        {"prompt": [2], "max_new_tokens": 99},
        [1, 2.5],
    ]
    rows = list(
        jaxspec.generate_many(
            LARGE_TARGET, prompts, slots=2, on_error="yield", in_order=True, max_new_tokens=4
        )
    )
    assert [row.finish for row in rows] == ["length", *["failure"] * 7]
    said = [
        "empty",
        "expected ids from 0 to 5",
        "no tokenizer",
        "'eos_token_id'",
        "either prompt or messages",
        "from 1 to 4",
    ]
    said.append("the prompt is a list of more than integers")
    assert all(word in row.error for word, row in zip(said, rows[1:], strict=True)), [
        row.error for row in rows
    ]
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        list(jaxspec.generate_many(LARGE_TARGET, prompts, slots=2, max_new_tokens=4))


def test_many_wrong_prompts_in_a_row_end_nothing():
    prompts = [[1], *[[]] * 300, [2]]
    rows = list(
        jaxspec.generate_many(
            LARGE_TARGET, prompts, slots=2, on_error="yield", in_order=True, max_new_tokens=4
        )
    )
    assert [row.number for row in rows] == list(range(302))
    assert [row.number for row in rows if row.error is None] == [0, 301]


def test_an_error_of_the_iterable_comes_after_the_results_before_it():
    def prompts():
        yield from ([n] for n in range(5))
        raise OSError("the source is gone")

    rows, job = [], jaxspec.generate_many(LARGE_TARGET, prompts(), slots=2, max_new_tokens=4)
    with pytest.raises(OSError, match="the source is gone"):
        rows += job  # keeps what comes before
    assert sorted(row.number for row in rows) == list(range(5))


def test_a_prompt_that_memory_has_no_room_for_ends_nothing(monkeypatch):
    """A wide row that not even a slot of its own has room for; slots that no prompt fits into are
    refused.
    """
    prompts, options = (
        [[1], [2] * 50_000, [3]],
        dict(on_error="yield", in_order=True, max_new_tokens=4, eos_ids=()),
    )
    drafter = LARGE["a tree"]
    monkeypatch.setattr(
        device_memory.psutil, "virtual_memory", lambda: types.SimpleNamespace(total=400_000)
    )
    rows = list(jaxspec.generate_many(LARGE_TARGET, prompts, drafter=drafter, slots=8, **options))
    assert [row.finish for row in rows] == ["length", "failure", "length"]
    assert "slots=1 of" in rows[1].error and "of memory" in rows[1].error
    monkeypatch.setattr(
        device_memory.psutil, "virtual_memory", lambda: types.SimpleNamespace(total=4_000)
    )
    with pytest.raises(ValueError, match=r"slots=8 of .* of memory"):
        list(jaxspec.generate_many(LARGE_TARGET, prompts, drafter=drafter, slots=8, **options))


@pytest.mark.parametrize("too_long", ["error", "truncate", "skip"])
def test_long_prompts_are_refused_cut_or_left_out(too_long):
    prompts = [[1, 2], [0, 1, 2, 3, 4, 5], [3]]
    skipped = []
    options = dict(
        max_prompt_tokens=4, too_long=too_long, skipped=skipped.append, max_new_tokens=4, eos_ids=()
    )
    rows = list(
        jaxspec.generate_many(LARGE_TARGET, prompts, in_order=True, on_error="yield", **options)
    )
    assert [row.number for row in rows] == ([0, 2] if too_long == "skip" else [0, 1, 2])
    assert skipped == ([1] if too_long == "skip" else [])
    if too_long == "error":
        assert rows[1].error.startswith(
            "the prompt has 6 tokens: expected at most 4, with 4 new ones. Shorten it"
        )
    if too_long == "truncate":
        assert rows[1].prompt_tokens == 4
        assert (
            rows[1].tokens
            == jaxspec.generate(LARGE_TARGET, [[2, 3, 4, 5]], max_new_tokens=4, eos_ids=())
            .tokens[0]
            .tolist()
        )


def test_a_row_that_fails_does_not_end_the_job():
    def broken(params, cache, tokens, positions):
        logits = jnp.zeros((*tokens.shape, 6)) + params
        return jnp.where(tokens[..., None] == 5, jnp.nan, logits.at[..., 2].add(1.0)), cache

    lm: LanguageModel = adapters.from_function(broken, 6, empty_cache=lambda batch, capacity: ())
    model = Model(lm, jnp.float32(0))
    rows = list(
        jaxspec.generate_many(
            model, [[1], [5], [2]], in_order=True, on_error="yield", max_new_tokens=4
        )
    )
    assert [row.finish for row in rows] == ["length", "failure", "length"]
    assert "not finite" in rows[1].error
    with pytest.raises(FloatingPointError, match="prompt 1: the target's logits are not finite"):
        list(jaxspec.generate_many(model, [[1], [5], [2]], max_new_tokens=4))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(slots=0), "slots is 0"),
        (dict(slots=2, group=3), "group is 3"),
        (dict(num_samples=2), "at a temperature above 0"),
        (dict(temperature=[0.0, 1.0]), "temperature has a value for each"),
        (dict(key=jax.random.split(KEY)), "key has a value for each"),
        (dict(too_long="cut"), "too_long is 'cut'"),
        (dict(on_error="ignore"), "on_error is 'ignore'"),
        (dict(max_prompt_tokens=0), "max_prompt_tokens is 0"),
        (dict(max_prompt_tokens="8"), "max_prompt_tokens is '8'"),
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(max_ahead=0), "max_ahead is 0"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_read(options, said):
    def prompts():
        raise AssertionError("was read")
        yield

    with pytest.raises((ValueError, TypeError), match=said):
        jaxspec.generate_many(LARGE_TARGET, prompts(), **options)


@pytest.mark.parametrize("prompts", [{"id": "a", "prompt": [1]}, Prompt([[1]], [1]), b"text", 3])
def test_one_prompt_that_is_no_list_is_refused(prompts):
    with pytest.raises(TypeError, match="expected an iterable of prompts, such as a list of dicts"):
        jaxspec.generate_many(LARGE_TARGET, prompts)


def test_a_key_of_either_kind_is_one_key():
    run = functools.partial(jaxspec.generate_many, LARGE_TARGET, PROMPTS[:2], slots=2)
    rows = [
        texts_of(run(**OPTIONS | {"key": make(3)})) for make in (jax.random.key, jax.random.PRNGKey)
    ]
    assert rows[0] == rows[1]


def test_results_that_wait_for_one_before_them_are_bounded():
    """In order, with one long row in front: at most `max_ahead` prompts are begun, and read a
    little further.
    """
    read, done = 0, []

    def source():
        nonlocal read
        for read in range(60):
            yield dict(prompt=[1, 2], max_new_tokens=16 if read == 0 else 1)

    options = OPTIONS | dict(
        eos_ids=(), slots=2, group=1, in_order=True, max_ahead=6, progress=done.append
    )
    policy = policies.constant(0)
    rows = jaxspec.generate_many(
        LARGE_TARGET, source(), drafter=LARGE_MODEL, policy=policy, **options
    )
    assert next(rows).number == 0
    assert read <= 6 + 2 * 8
    assert max(progress.done for progress in done) <= 6
    assert [row.number for row in rows] == list(range(1, 60))


def test_fewer_prompts_than_slots_compile_nothing_more():
    options = OPTIONS | dict(drafter=LARGE_MODEL, slots=5, max_prompt_tokens=16, group=2)
    short = [request for request in REQUESTS if len(request["prompt"]) <= 16]  # of one width
    few = [list(jaxspec.generate_many(LARGE_TARGET, short[:1], **options))]
    programs = (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    )
    few += [list(jaxspec.generate_many(LARGE_TARGET, short[:count], **options)) for count in (3, 7)]
    assert (
        slots.prefill.num_programs(),
        slots.run_rounds.num_programs(),
        slots.insert.num_programs(),
    ) == programs
    assert [len(rows) for rows in few] == [1, 3, 7]


def test_a_row_that_stopped_before_it_failed_has_stopped():
    """The logits after token 5 are no numbers, and 4 comes before it: in one block of rounds, or in
    `generate`.
    """

    def counting(params, cache, tokens, positions):
        logits = jax.nn.one_hot(tokens + 1, 6) + params
        return jnp.where(tokens[..., None] == 5, jnp.nan, logits), cache

    lm = adapters.from_function(counting, 6, empty_cache=lambda batch, capacity: ())
    model = Model(lm, jnp.float32(0), word_tokenizer(WORDS))
    options = dict(max_new_tokens=8, eos_ids=(), stop=["cat"])
    (row,) = jaxspec.generate_many(model, [[2]], **options)
    assert (row.finish, row.error, row.tokens, row.text) == ("stop", None, [3, 4], "old ")
    assert jaxspec.generate(model, [[2]], **options).records()[0]["finish"] == "stop"
    (row,) = jaxspec.generate_many(model, [[2]], on_error="yield", **options | {"stop": ["the"]})
    assert (row.finish, row.tokens) == ("failure", [3, 4, 5])


def test_a_shard_reads_its_lines_wherever_it_begins(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"line {n}\n\n" for n in range(7)))
    for index, numbers in ((0, [0, 3, 6]), (1, [1, 4]), (2, [2, 5])):
        source = Source([path], shard=InputShard(index, 3))
        assert source.count(source.survey().lines) == len(numbers)
        lines = list(source.prompts())
        assert [(line.number, line.fields["prompt"]) for line in lines] == [
            (n, f"line {n}") for n in numbers
        ]
        assert [line.where for line in lines] == [f"prompts.txt: line {2 * n + 1}" for n in numbers]
        assert [line.number for line in source.prompts(numbers[:1])] == numbers[1:]


def test_a_byte_order_mark_is_no_part_of_a_prompt_but_at_the_beginning(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert [line.fields["prompt"] for line in Source([path]).prompts()] == ["one", "\ufefftwo"]


ROWS = 100  # of a job that is killed
COMMAND = [
    sys.executable,
    "-m",
    "jaxspec",
    "batch",
    "--target",
    "debian-t5-small",
    "--draft",
    "prompt_lookup",
]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(1, 2), pytest.param((3, 7), marks=pytest.mark.exhaustive)])
def test_a_job_that_is_killed_writes_what_one_that_was_not_does(tmp_path, kills):
    """kill -9 some times before the first chunk, from the loading of libraries on, and then in the
    middle.

    The files are the same, byte for byte, after every kill those that are there, and in the end
    all. No row that was done at a kill is decoded again.
    """
    path, environment = tmp_path / "prompts.jsonl", dict(os.environ, PYTHONWARNINGS="ignore")
    prompts = [
        f"translate English to German: This package has {n} small tools." for n in range(ROWS)
    ]
    path.write_text(
        "".join(
            json.dumps({"id": f"a{n}", "prompt": prompt}) + "\n" for n, prompt in enumerate(prompts)
        )
    )
    shared = ["--input", str(path), "-n", "16", "-t", "0.7", "--slots", "4", "--chunk", "5"]
    shared += ["--max-prompt-tokens", "32"]  # every program is the same

    def start(folder, *options, stdout=subprocess.DEVNULL):
        command = [*COMMAND, *shared, "--output", str(tmp_path / folder), *options]
        return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.DEVNULL)

    def done():
        """The numbers of the rows in files, as often as they are there."""
        chunks = [
            json.loads(line)["number"]
            for chunk in written("killed")
            for line in chunk.read_text().splitlines()
        ]
        whole = {
            chunk.name.removesuffix(".jsonl").removeprefix("part") for chunk in written("killed")
        }
        journals = [
            p
            for p in (tmp_path / "killed").glob("journal-*")
            if p.name.removeprefix("journal") not in whole
        ]
        lines = [line for path in journals for line in path.read_text().splitlines(keepends=True)]
        return sorted(
            [*chunks, *(json.loads(line)[0]["number"] for line in lines if line.endswith("\n"))]
        )

    def written(folder):
        return sorted((tmp_path / folder).glob("part-*"))

    def wait_for(process, folder, chunks):
        while len(written(folder)) < chunks and process.poll() is None:
            time.sleep(0.002)

    began, whole = time.monotonic(), start("whole")
    wait_for(whole, "whole", 1)
    # of loading, and of compiling what the next ones find compiled
    seconds = time.monotonic() - began
    assert whole.wait() == 0
    rng = np.random.default_rng(0)
    early = [(0, delay) for delay in rng.uniform(0, seconds / 2, kills[0])]
    places = np.sort(rng.choice(np.arange(1, ROWS // 5 - 4), kills[1], replace=False)).tolist()
    # so many chunks, and then so many seconds
    late = list(zip(places, rng.uniform(0, 0.05, kills[1]), strict=True))
    codes, rows = [], []
    for index, (chunks, delay) in enumerate([*early, *late]):
        process = start("killed", *(["--resume"] if index else []))
        wait_for(process, "killed", chunks)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        codes.append(process.wait())
        for chunk in written("killed"):  # whole, whenever it was
            assert chunk.read_bytes() == (tmp_path / "whole" / chunk.name).read_bytes()
        before, rows = rows, done()
        assert set(before) <= set(rows) and len(set(rows)) == len(rows)
    assert set(codes) <= {0, -signal.SIGKILL} and 2 * codes.count(-signal.SIGKILL) > len(codes), (
        codes
    )
    last = start("killed", "--resume", "--json", stdout=subprocess.PIPE)
    assert (
        json.loads(last.communicate()[0])["run"]["done"] == ROWS - len(rows)
        and last.returncode == 0
    )
    names = [
        [path.name for path in sorted((tmp_path / folder).glob("[!.]*"))]
        for folder in ("killed", "whole")
    ]
    assert names[0] == names[1]  # nothing half-written has stayed
    for name in names[0]:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_a_job_on_a_mesh_writes_what_one_device_does(tmp_path):
    """On simulated devices; and the models have the same digest, so that a job may go on
    elsewhere.
    """
    path = tmp_path / "prompts.txt"
    path.write_text(
        "".join(
            f"translate English to German: This package has {n} small tools.\n" for n in range(9)
        )
    )
    shared = [
        "--input",
        str(path),
        "-n",
        "16",
        "-t",
        "0.7",
        "--rule",
        "coupled",
        "--slots",
        "4",
        "--max-prompt-tokens",
        "32",
    ]
    written = []
    for name, mesh in (("one", []), ("mesh", ["--mesh", "data=2,model=2"])):
        devices = "--xla_force_host_platform_device_count=4" if mesh else ""
        flags = dict(
            XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {devices}", PYTHONWARNINGS="ignore"
        )
        command = [*COMMAND, *shared, "--output", str(tmp_path / name), *mesh]
        subprocess.run(command, env=os.environ | flags, check=True, stderr=subprocess.DEVNULL)
        manifest = json.loads(next((tmp_path / name).glob("manifest-*")).read_text())
        written.append(
            [manifest["models"], *[part.read_text() for part in (tmp_path / name).glob("part-*")]]
        )
    assert written[0] == written[1]
    assert len(written[0][1].splitlines()) == 9


@pytest.mark.parametrize("name", ["a tree", pytest.param("suffix", marks=pytest.mark.slow)])
def test_a_job_with_a_prefix_has_the_texts_of_whole_prompts(name):
    """Rows of several widths, some cut after the prefix, in slots that are refilled."""
    shared, options = [5, 1, 2], OPTIONS | {"drafter": LARGE[name]}
    prefix = jaxspec.prefix(LARGE_TARGET, shared, drafter=LARGE[name])
    arguments = dict(slots=4, group=2, max_prompt_tokens=18, too_long="truncate", prefix=prefix)
    rows = list(jaxspec.generate_many(LARGE_TARGET, REQUESTS, **arguments, **options))
    assert texts_of(rows) == expected(
        LARGE_TARGET, [shared + row[-15:] for row in PROMPTS], LIMITS, **options
    )
    assert max(row.prompt_tokens for row in rows) == 18
    with pytest.raises(ValueError, match="the prompt is empty"):
        list(jaxspec.generate_many(LARGE_TARGET, [[]], **arguments, **options))


def test_slots_are_no_wider_than_what_a_model_reads():
    """However long the prompts are that a job says it takes."""
    config = tiny_gpt(max_positions=48)
    target = Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), config=config
    )
    prepared = prepare(target, [[0]], max_new_tokens=4)
    assert limits_of(prepared, 4, 10**6, "error").prompt == 47
    assert limits_of(prepared, 4, None, "error").prompt is None
