"""`jaxspec generate`: what it prints, as text and as JSON, and what it refuses, with tables for
models.
"""

import json
import re

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli import convert, generate
from jaxspec.cli.main import app
from jaxspec.cli.prompts import heldout
from jaxspec.drafters.lookups import datastore
from jaxspec.weights import loading as model_loading

SMALL = ("-n", "12")
PROMPT = heldout("translation", 1)[0]


def test_several_texts_of_a_prompt_are_those_of_the_library(zoo, report, refused):
    reported = report(PROMPT, "--num-samples", "2", "-t", "5", "--batch", "2")
    target, draft = zoo["debian-t5-large"], zoo["debian-t5-draft"]
    options = dict(
        drafter=draft,
        gamma=3,
        max_new_tokens=12,
        num_samples=2,
        temperature=5.0,
        key=jax.random.key(0),
    )
    out = jaxspec.generate(target, [PROMPT], **options)
    assert reported["texts"] == out.texts and reported["prompts"] == [PROMPT] * 2
    assert "--num-samples is 2 at temperature 0" in refused(PROMPT, "--num-samples", "2")


def test_json_is_what_the_library_returns(zoo, report):
    reported = report(PROMPT)
    out = jaxspec.generate(
        zoo["debian-t5-large"], [PROMPT], drafter=zoo["debian-t5-draft"], gamma=3, max_new_tokens=12
    )
    assert reported["prompts"] == [PROMPT]
    assert reported["texts"] == out.texts
    assert reported["tokens"] == [out.tokens[0, : out.lengths[0]].tolist()]
    for name, values in out.stats._asdict().items():
        assert reported["stats"][name] == values.tolist()
    total = reported["stats"]["total"]
    assert total["emitted"] == len(reported["tokens"][0])
    assert total["drafted"] > 0
    assert total["acceptance_rate"] == total["accepted"] / total["drafted"]
    assert reported["settings"]["draft"] == "debian-t5-draft"
    assert reported["versions"]["jax"] == jax.__version__
    assert reported["device"]["device"] == "cpu"


def test_log_probs_and_reasons_are_in_the_json(zoo, report, refused):
    target, draft = zoo["debian-t5-large"], zoo["debian-t5-draft"]
    out = jaxspec.generate(
        target, [PROMPT], drafter=draft, gamma=3, max_new_tokens=12, top_log_probs=2
    )
    reported, record = report(PROMPT, "--top-log-probs", "2"), out.records()[0]
    for name in ("tokens", "finish", "sampled_log_probs", "top_tokens"):
        assert reported[name] == [record[name]]
    for name in ("raw_log_probs", "top_log_probs"):
        np.testing.assert_allclose(reported[name], [record[name]], atol=1e-5)
    assert "raw_log_probs" not in report(PROMPT)
    assert "as JSON only: add --json" in refused(PROMPT, "--log-probs")


def test_penalties_and_bans_reach_the_library(zoo, report):
    reported = report(
        PROMPT,
        "--repetition-penalty",
        "1.5",
        "--frequency-penalty",
        "0.5",
        "--ban",
        "3",
        "--ban",
        "4",
    )
    out = jaxspec.generate(
        zoo["debian-t5-large"], [PROMPT], drafter=zoo["debian-t5-draft"], gamma=3, max_new_tokens=12,
        repetition_penalty=1.5, frequency_penalty=0.5, banned=[3, 4],
    )  # fmt: skip
    assert (
        reported["tokens"] == [out.tokens[0, : out.lengths[0]].tolist()] != report(PROMPT)["tokens"]
    )
    assert not {3, 4} & set(reported["tokens"][0])


def test_texts_match_the_pattern_of_an_option(zoo, report, tmp_path):
    options = dict(drafter=zoo["debian-t5-draft"], gamma=3, max_new_tokens=12)
    out = jaxspec.generate(zoo["debian-t5-large"], [PROMPT], choices=["das und", "der"], **options)
    assert report(PROMPT, "--choices", "das und,der")["texts"] == out.texts
    file = tmp_path / "schema.json"
    file.write_text('{"const": 7}', "utf-8")  # of which the vocabulary has no token
    assert re.fullmatch("das( und)+", report(PROMPT, "--regex", "das( und)+")["texts"][0])
    for schema in (str(file), file.read_text("utf-8")):
        with pytest.raises(AssertionError, match="matches no text of this tokenizer's tokens"):
            report(PROMPT, "--json-schema", schema)


def test_a_chat_is_what_the_template_makes_of_a_prompt(zoo, report, monkeypatch):
    template = (
        "{% for m in messages %}das {{ m.content }}{% endfor %}{% if add_generation_prompt %} "
        "und{% endif %}"
    )
    monkeypatch.setattr(zoo["debian-t5-large"].tokenizer, "chat_template", template)
    reported, spelt = (
        report("alte Hund", "--chat"),
        jaxspec.Prompt(np.array([[5, 6, 8, 11]]), np.array([4])),
    )
    out = jaxspec.generate(
        zoo["debian-t5-large"], spelt, drafter=zoo["debian-t5-draft"], gamma=3, max_new_tokens=12
    )  # no end token after what the template has
    assert reported["prompts"] == ["alte Hund"]
    assert reported["tokens"] == [out.tokens[0, : out.lengths[0]].tolist()]


@pytest.mark.parametrize("given", ["das alte Hund", "a file"])
def test_prompts_follow_a_prefix_that_is_a_text_or_a_file(zoo, given, report, refused, tmp_path):
    target, draft = zoo["debian-gpt-base"], zoo["debian-gpt-small"]
    (tmp_path / "shared.txt").write_text("das alte Hund\n")
    given = str(tmp_path / "shared.txt") if given == "a file" else given
    names = ("--target", target.name, "--draft", draft.name)
    reported = report("neue Katze", "--prefix", given, *names, "--stats")
    whole = target.tokenizer(["das alte Hund", "neue Katze"])["input_ids"]
    out = jaxspec.generate(target, [whole[0] + whole[1]], drafter=draft, gamma=3, max_new_tokens=12)
    assert reported["tokens"] == [out.tokens[0, : out.lengths[0]].tolist()]
    # the prefix's last token is read again
    assert reported["stats"]["read_tokens"] == [1 + len(whole[1])]
    assert "is an encoder-decoder, whose encoder reads each prompt as a whole" in refused(
        "a", "--prefix", given
    )
    assert "does not read --prefix" in refused("a", "--prefix", given, *names, "--beams", "2")
    assert "--prefix  is empty" in refused("a", "--prefix", "", *names)


def test_a_chats_prefix_is_the_systems_message(zoo, report, monkeypatch):
    messages = (
        "{% for m in messages %}{% if not loop.first %} {% endif %}{{ m.content }}{% endfor %}"
    )
    template = messages + "{% if add_generation_prompt %} und{% endif %}"
    target = zoo["debian-gpt-base"]
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    names = ("--target", target.name, "--draft", "prompt_lookup", "--policy", "adaptive")
    reported = report("alte Hund", "--chat", "--prefix", "das", *names)
    messages = [{"role": "system", "content": "das"}, {"role": "user", "content": "alte Hund"}]
    assert (
        reported["tokens"]
        == jaxspec.generate(target, [messages], max_new_tokens=12).tokens.tolist()
    )


@pytest.mark.parametrize("draft", ["prompt_lookup", "fallback(prompt_lookup, 'debian-t5-draft')"])
def test_drafters_and_policies_by_name(report, draft):
    reported = report(PROMPT, "--draft", draft, "--policy", "adaptive=0.1")
    assert reported["texts"] == report(PROMPT)["texts"]
    assert (
        reported["settings"]["draft"] == draft and reported["settings"]["policy"] == "adaptive=0.1"
    )


def test_a_datastore_must_be_of_the_targets_vocabulary(zoo, report, refused, tmp_path):
    for name in ("debian-t5-large", "stranger"):
        vocabulary = datastore.vocabulary_of(zoo[name].tokenizer)
        store = datastore.build([[5, 6, 8, 1]], vocab_size=18, begin=[0], vocabulary=vocabulary)
        datastore.save(tmp_path / name, store, {})
    assert (
        report(PROMPT, "--draft", f"retrieval('{tmp_path / 'debian-t5-large'}')")["texts"]
        == report(PROMPT)["texts"]
    )
    stranger = f"retrieval('{tmp_path / 'stranger'}')"
    for drafter in (stranger, f"fallback(prompt_lookup, {stranger})"):
        said = refused(PROMPT, "--draft", drafter)
        assert "built with another vocabulary than that of debian-t5-large" in said


def test_plain_decoding_has_the_same_text_and_no_draft_tokens(report):
    plain, speculative = report(PROMPT, "--draft", "none"), report(PROMPT)
    assert plain["texts"] == speculative["texts"]
    assert plain["stats"]["drafted"] == [0]
    assert plain["settings"]["draft"] is None


def test_without_prompts_it_takes_held_out_ones(report):
    reported = report()
    assert reported["prompts"] == heldout("translation", 2)
    assert all(p.startswith("translate English to German: ") for p in reported["prompts"])


def test_a_decoder_only_target_continues_held_out_texts_with_its_small_sibling(report):
    reported = report("--target", "debian-gpt-base")
    assert reported["prompts"] == heldout("text", 2)
    assert reported["settings"]["draft"] == "debian-gpt-small"


def test_what_is_piped_in_is_decoded(run):
    *rows, totals = map(json.loads, run("-", "--json", input=f"{PROMPT}\n\n{PROMPT}").splitlines())
    assert [row["prompt"] for row in rows] == [PROMPT, PROMPT] and totals["stats"]["total"][
        "prompts"
    ] == 2


@pytest.mark.parametrize(("mode", "batch"), [("--json", 1), ("--json", 2), ("--trace", 2)])
def test_what_was_done_is_printed_before_an_interruption(
    mode, batch, report, run, invoke, monkeypatch, tmp_path
):
    """Two prompts of four are done then; the first call compiles."""
    texts, calls = heldout("translation", 4), iter(range(1 + 2 // batch))
    complete, wanted = (
        generate.complete,
        report()["texts"] if mode == "--json" else run(mode, "--batch", "2"),
    )
    (tmp_path / "prompts.txt").write_text("\n".join(texts))

    def interrupted(*arguments):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return complete(*arguments)

    monkeypatch.setattr(generate, "complete", interrupted)
    result = invoke(
        "--prompts", str(tmp_path / "prompts.txt"), mode, "--batch", str(batch), "--count", "4"
    )
    assert result.exit_code == 130
    if mode == "--json":
        rows = list(map(json.loads, result.stdout.splitlines()))
        assert [(row["prompt"], row["text"]) for row in rows] == list(
            zip(texts, wanted, strict=False)
        )
    else:
        assert wanted.startswith(result.stdout) and texts[1][:60] in result.stdout


def test_lines_of_a_file_are_the_columns_of_one_report(report, run, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(heldout("translation", 2)))
    together, options = (
        report("--trace"),
        ("--prompts", str(tmp_path / "prompts.txt"), "--trace", "--json"),
    )
    *rows, totals = map(json.loads, run(*options).splitlines())
    for single, many in (
        ("prompt", "prompts"),
        ("text", "texts"),
        ("tokens", "tokens"),
        ("rounds", "rounds"),
    ):
        assert [row[single] for row in rows] == together[many]
    assert {name: [row["stats"][name] for row in rows] for name in rows[0]["stats"]} == {
        name: value for name, value in together["stats"].items() if name != "total"
    }
    assert set(totals) == {"exact", "stats", "settings", "versions", "device"}
    *rows, totals = map(json.loads, run(*options[:2], "--beams", "2", "--json").splitlines())
    assert [record for row in rows for record in row["hypotheses"]] == report("--beams", "2")[
        "hypotheses"
    ]


def test_a_target_without_a_sibling_drafts_by_a_look_up(zoo, report, invoke):
    result = invoke(PROMPT, "--target", "stranger", "--json")
    reported = json.loads(result.stdout)
    assert reported["settings"]["draft"] == "prompt_lookup"
    assert "No model is known that drafts for stranger: prompt_lookup drafts" in " ".join(
        result.stderr.split()
    )
    assert reported["texts"] == report(PROMPT, "--target", "stranger", "--draft", "none")["texts"]


@pytest.mark.parametrize("seed", ["-1", str(2**32), str(2**64)])
def test_a_seed_that_no_key_has_is_refused(seed, invoke):
    result = invoke(PROMPT, "--seed", seed)
    assert result.exit_code == 2 and "Invalid value for '--seed'" in result.stderr


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_characters(charset, report, invoke, tmp_path):
    """JSON is the same; text has escapes in their place."""
    prompt = "translate English to German: “cat” 😀"
    expected = report(prompt)

    def shown(*arguments):
        result = CliRunner(charset=charset).invoke(
            app, ["generate", *SMALL, prompt, *arguments], input=b""
        )
        assert result.exit_code == 0
        return result.stdout_bytes.decode(charset)

    reported = json.loads(shown("--json"))
    assert all(reported[name] == expected[name] for name in ("prompts", "texts", "tokens"))
    assert "\\u201ccat\\u201d \\U0001f600" in shown("--draft", "none")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "a", "--rule", "blok"], "--rule is 'blok'"),
        (["generate", "a", "--gamma", "-1"], "--gamma is -1"),
        (["generate", "a", "--policy", "clever"], "--policy is 'clever'"),
        (["generate", "a", "--temperature", "-1"], "--temperature is -1"),
        (["generate", "a", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["generate", "a", "--draft", "tree('debian-t5-draft', 2, 1)"], "expected tree(draft,"),
        (
            ["generate", "a", "--draft", "fallback(prompt_lookup, 'debian-t5-draf')"],
            "no checkpoint at debian-t5-draf",
        ),
        (["generate", "a", "--draft", "load_drafter('nowhere')"], "no checkpoint at nowhere"),
        (["generate", "a", "--draft", "retrieval('nowhere')"], "no datastore at nowhere"),
        (["generate", "a", "--draft-dtype", "bf16"], "--draft-dtype is 'bf16'"),
        (["bench", "--rule", "blok"], "--rule is 'blok'"),
        (["bench", "--policy", "clever"], "--policy is 'clever'"),
        (["bench", "--temperature", "-1"], "--temperature is '-1'"),
        (["bench", "--batch", "0"], "--batch is '0'"),
        (["bench", "--draft", "debian-t5-draft,sufix(3)"], "did you mean 'suffix'?"),
        (["bench", "--prompts", "nowhere.txt"], "nowhere.txt: No such file"),
        (
            ["bench", "--measure", "speed,latent"],
            "--measure is 'latent': expected one of speed, latency, compile",
        ),
        (["bench", "--markdown", "--json"], "got --markdown and --json: expected one of them"),
        (
            ["bench", "--target", "random:t5-v1_1-small", "--prompts", "file"],
            "random weights does not read --prompts",
        ),
        (
            ["bench", "--draft", "none", "--rule", "block", "--policy", "heuristic"],
            "does not read --policy, --rule",
        ),
        (["verify", "--count", "4"], "verify without a pair does not read --count: leave it out"),
        (
            ["bench", "--draft", "none,none", "--rule", "block"],
            "plain decoding (--draft none) does not read --rule",
        ),
        (["plan", "--alpha", "0.5", "--c", "-1"], "--c is -1.0: expected at least 0"),
        (["bench", "--task", "songs"], "task is 'songs': expected one of"),
        (["plan", "--temperature", "-1"], "--temperature is -1"),
        (["plan", "--target", "stranger"], "--target stranger needs a --draft"),
        (["plan", "--prompts", "nowhere.txt"], "nowhere.txt: No such file"),
        (["verify", "--target", "stranger"], "--target stranger needs a --draft"),
        (["convert", "debian-t5-large", "file/to"], "Not a directory"),
        (["convert", "debian-t5-large", "."], "exists: give --overwrite"),
    ],
)
def test_what_can_be_known_is_refused_before_any_model_is_loaded(
    arguments, said, loading, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("no measurement\n\n")
    monkeypatch.setattr(model_loading, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    if arguments[0] == "convert":
        monkeypatch.setattr(convert, "stored", lambda folder: (model_loading.OURS, "float32", {}))
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split())


@pytest.mark.parametrize("mode", [(), ("--batch", "2")])
def test_text_and_counts_are_printed(mode, report, run):
    reported, shown = report(), run(*mode)
    assert "English" in shown
    for text in reported["texts"]:
        assert text in shown
    assert f"of {reported['stats']['total']['drafted']} drafted" in " ".join(shown.split())
    assert "2 of them, each prompt's first, by reading the prompts" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [((), "; the same texts."), (("-t", "1"), "samples of the same distribution.")],
)
def test_without_a_prompt_plain_decoding_is_timed_beside_it(options, said, invoke, run):
    assert " times the speed of plain decoding, interleaved (" in run(*options) and said in run(
        *options
    )
    assert run(*options).rstrip().splitlines()[-2:] == generate.NEXT.splitlines()  # what to do next
    assert max(map(len, generate.NEXT.splitlines())) < 80
    for arguments in (("a",), ("--draft", "none"), ("--json",)):
        assert "interleaved (" not in invoke(*arguments).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "--gamma", "-1"], "--gamma is -1"),
        (["a", "-n", "0"], "--max-new-tokens is 0"),
        (["a", "-t", "-1"], "--temperature is -1"),
        (["a", "-t", "nan"], "temperature is nan"),
        (["a", "--top-p", "0", "-t", "1"], "--top-p is 0"),
        (
            ["a", "--top-p", "1.5", "-t", "1"],
            "--top-p is 1.5: expected a number in (0, 1]; without it",
        ),
        (["a", "--top-k", "0", "-t", "1"], "--top-k is 0"),
        (["a", "--min-p", "2", "-t", "1"], "--min-p is 2"),
        (["a", "--repetition-penalty", "0"], "--repetition-penalty is 0"),
        (["a", "--ban", "99"], "--ban has 99"),
        (["a", "--regex", "a(?=b)"], "--regex is 'a(?=b)', with"),
        (["a", "--json-schema", '{"not": {}}'], "--json-schema has not at #"),
        (["a", "--json-schema", "/no/such/file"], "/no/such/file: No such file"),
        (
            ["a", "--json-schema", '{"a": ' * 100_000],
            "--json-schema is not JSON (maximum recursion depth",
        ),
        (["a", "--beams", "2", "--choices", "a"], "does not read --choices: leave it out"),
        (["a", "--target", "nowhere", "--draft", "none"], "no checkpoint at nowhere"),
        (["a", "--target", "nowhere"], "no checkpoint at nowhere"),
        (
            ["a", "--check"],
            "--check is of heads, which read hidden states: --draft is debian-t5-draft",
        ),
        (
            ["a", "--target", "someone/something", "--draft", "none"],
            "no checkpoint at someone/something",
        ),
        (["a", "--draft", "stranger"], "different tokenizers"),
        (["a", "--draft", "debian-gpt-small"], "both must be of one kind"),
        (["das " * 600, "--target", "debian-gpt-base"], "positions"),
        (["a", "--prompts", "b"], "expected one of them"),
        (["--prompts", "/no/such/file"], "/no/such/file: No such file"),
        (["-"], "standard input holds no prompt"),
        (["a", "--compare", "--draft", "none"], "--compare"),
        (["a", "--compare", "--gamma", "0"], "--compare"),
        (
            ["a", "--compare", "--stop", "der"],
            "--compare times texts to their end tokens, and a --stop would not",
        ),
        (["a", "--mesh", "rows=2"], "the mesh is 'rows=2': expected sizes, 1 or more, of the axes"),
        (["a", "--mesh", "model=4096"], "has 4096 devices, but jax sees"),
        (
            ["a", "--chat"],
            "debian-t5-large has no chat template: give text, or a model that is tuned to chat",
        ),
        (["a", "--rule", "clever"], "--rule is 'clever': expected one of rejection"),
        (["a", "--policy", "clever"], "--policy is 'clever': expected one of constant, heuristic"),
        (["a", "--policy", "constant"], "constant=3"),
        (["a", "--policy", "confidence=high"], "'high' is not a number"),
        (["a", "--policy", "confidence=2"], "--policy is 'confidence=2': threshold is 2.0"),
        (["a", "--rule", "lenient=7"], "--rule is 'lenient=7': lenience is 7.0"),
        (["a", "--draft", ""], "the drafter is '': expected the name of a model"),
        (["a", "--draft", "load_drafter()"], "missing a required argument: 'source'"),
        (
            ["a", "--draft", "prompt_lookp"],
            "no drafter 'prompt_lookp': did you mean 'prompt_lookup'?",
        ),
    ],
)
def test_bad_input_is_one_clear_line(arguments, said, refused):
    assert said in refused(*arguments)


def test_logits_that_are_not_finite_are_refused(refused):
    assert "not finite" in refused("--target", "broken", "--draft", "none", "--json")


def test_a_file_that_is_no_text(tmp_path, refused):
    file = tmp_path / "prompts.bin"
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused("--prompts", str(file))


def test_a_schema_that_is_no_object(tmp_path, refused):
    file = tmp_path / "schema.json"
    file.write_text("[3]")
    assert "--json-schema is [3]: expected a dict, the JSON text of an object" in refused(
        "a", "--json-schema", str(file)
    )


@pytest.mark.slow
def test_beams_are_the_librarys(zoo, report, run):
    options = ("--beams", "3", "--length-penalty", "0.6", "--draft", "debian-t5-draft")
    reported = report(PROMPT, *options, "--top-log-probs", "2")
    models = dict(target=zoo["debian-t5-large"], drafter=zoo["debian-t5-draft"])
    out = jaxspec.beam_search(
        prompts=[PROMPT],
        beams=3,
        length_penalty=0.6,
        gamma=3,
        max_new_tokens=12,
        top_log_probs=2,
        **models,
    )
    assert reported["hypotheses"] == out.records()
    assert [
        reported["settings"][name] for name in ("beams", "length_penalty", "early_stopping")
    ] == [3, 0.6, "no"]
    shown = run(PROMPT, *options)
    assert (
        f"{out.scores[0, 0]:.4f} {out.texts[0][0]}" in shown
        and f"in {out.passes[0]} passes" in shown
    )


def test_what_only_a_search_reads_is_refused_without_one(refused):
    said = refused(PROMPT, "--early-stopping", "sometimes", "--length-penalty", "2")
    assert (
        "generate without --beams does not read --length-penalty, --early-stopping: leave them out"
        in said
    )
    assert "does not read --length-penalty: leave it out" in refused(
        PROMPT, "--length-penalty", "0.5"
    )


def test_ngram_tables_by_name_are_of_other_commands(refused):
    said = refused(PROMPT, "--draft", "bigram")
    assert "bigram is made of held-out texts in `jaxspec bench` only" in said
    assert "take fewer prompts" not in said


def test_beams_refuse_what_samples(refused):
    assert "does not read --trace, --temperature" in refused(
        PROMPT, "--beams", "2", "--temperature", "1", "--trace"
    )
    assert "takes a model that drafts, not prompt_lookup" in refused(
        PROMPT, "--beams", "2", "--draft", "prompt_lookup"
    )
    assert "--early-stopping is 'maybe'" in refused(
        PROMPT, "--beams", "2", "--early-stopping", "maybe"
    )
    assert "expected a number from 1 to 18" in refused(PROMPT, "--beams", "19")
