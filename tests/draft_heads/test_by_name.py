"""Drafters by their names: a name is the Python call, read and never evaluated."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxspec
from jaxspec import drafters
from jaxspec.draft_heads import by_name
from jaxspec.draft_heads.load import is_head
from jaxspec.drafters.lookups import datastore
from jaxspec.testing import table_model
from jaxspec.weights.tensors import CheckpointError

TARGET = table_model(jax.random.key(1), vocab=5)._replace(name="target")
MODELS = {
    "a": table_model(jax.random.key(2), vocab=5)._replace(name="a"),
    "b": table_model(jax.random.key(3), vocab=5)._replace(name="b"),
}
TEXTS = [[0, 1, 2, 1, 3, 2, 1], [2, 1, 4]]


def make(written, target=TARGET, **options):
    """Makes a drafter; its models are those of `MODELS`."""
    return drafters.by_name(written, target, load=lambda name, _: MODELS[name], **options)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("prompt_lookup", drafters.prompt_lookup()),
        ("prompt_lookup()", drafters.prompt_lookup()),
        (" prompt_lookup(3, shortest=2) ", drafters.prompt_lookup(3, 2)),
        ("suffix(4, factor=0.5, share=True)", drafters.suffix(4, factor=0.5, share=True)),
        ("tree('a', (2, 1), draw='mixed')", drafters.tree(MODELS["a"], (2, 1), draw="mixed")),
        ("tree(['a', model('b')], (2, 1))", drafters.tree([*MODELS.values()], (2, 1))),
        ("tree(model(target), [2, 1])", drafters.tree(TARGET, (2, 1))),
        (
            "fallback(prompt_lookup, greedy('a'))",
            drafters.fallback(drafters.prompt_lookup(), drafters.greedy(MODELS["a"])),
        ),
        (
            "cascade('a', cascade('b', prompt_lookup), gamma=2)",
            drafters.cascade(
                MODELS["a"], drafters.cascade(MODELS["b"], drafters.prompt_lookup()), gamma=2
            ),
        ),
        ("token_recycling(((0,), (1,), (0, 0)))", drafters.token_recycling([(0,), (1,), (0, 0)])),
        ("model('a', coupled=True)", drafters.model(MODELS["a"], coupled=True)),
    ],
)
def test_a_name_is_the_call(written, expected):
    drafter = make(written)
    assert (drafter.name, drafter.functions) == (expected.name, expected.functions)
    assert drafter.models == expected.models


def test_a_drafter_that_only_samples_from_a_model_is_the_model():
    assert make("a") is MODELS["a"]
    assert make("model('a')") is MODELS["a"]
    assert make("model(model('a'))") is MODELS["a"]


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        ("early_exit(1)", "early_exit(target, 1)"),
        ("early_exit(layers=1)", "early_exit(layers=1, target=target)"),
        ("skip_layers((0,), ())", "skip_layers(target, (0,), ())"),
        ("windowed", "windowed(target)"),
        ("windowed(32, 2)", "windowed(target, 32, sinks=2)"),
        ("saturated_exit(1, 2)", "saturated_exit(target, 1, 2)"),
        (
            "early_exit(1, head=trim_vocabulary(target, size=9))",
            "early_exit(target, 1, head=trim_vocabulary(target, size=9))",
        ),
    ],
)
def test_the_target_may_be_left_out(short, whole):
    target = jaxspec.load("debian-gpt-base")
    first = drafters.by_name(short, target)
    second = drafters.by_name(whole, target)
    assert first.target is target
    assert (first.functions, first.name) == (second.functions, second.name)


def test_another_model_may_stand_for_the_target():
    target = jaxspec.load("debian-gpt-base")
    drafter = drafters.by_name("windowed('debian-gpt-small', 32)", target)
    assert drafter.target.name == "debian-gpt-small"


def test_the_inner_drafter_of_a_cascade_drafts_for_its_model():
    target = jaxspec.load("debian-gpt-base")
    drafter = drafters.by_name("cascade('debian-gpt-small', windowed(32))", target)
    assert drafter.name == "cascade(debian-gpt-small, windowed(32, 4))"
    assert drafter.models[0].name == "debian-gpt-small"
    (inner,) = [call for call in _calls("cascade('a', windowed)") if call.factory == "windowed"]
    assert inner.bound.arguments == {"target": by_name.Implied.TARGET}


def _calls(written):
    parsed = by_name.parse(written)
    return [parsed, *(x for x in parsed.bound.arguments.values() if isinstance(x, by_name.Call))]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("bigram", lambda: drafters.bigram(TEXTS, TARGET)),
        ("bigram(references)", lambda: drafters.bigram(TEXTS, TARGET)),
        ("ngram(order=3)", lambda: drafters.ngram(TEXTS, TARGET, order=3)),
        ("ngram(references, target, order=3)", lambda: drafters.ngram(TEXTS, TARGET, order=3)),
        ("retrieval", lambda: drafters.retrieval(TEXTS, TARGET)),
        ("retrieval(shortest=1)", lambda: drafters.retrieval(TEXTS, TARGET, shortest=1)),
        (
            "cascade('a', bigram, gamma=2)",
            lambda: drafters.cascade(MODELS["a"], drafters.bigram(TEXTS, TARGET), gamma=2),
        ),
    ],
)
def test_tables_and_datastores_are_made_of_references(written, expected):
    drafter, same = make(written, references=lambda: TEXTS), expected()
    leaves = jax.tree.leaves((drafter.params, same.params))
    half = len(leaves) // 2
    assert all((a == b).all() for a, b in zip(leaves[:half], leaves[half:], strict=True))
    assert drafter.name == same.name
    with pytest.raises(ValueError, match="no held-out texts are left to make a"):
        make(written, references=list)
    with pytest.raises(ValueError, match="is made of held-out texts in `jaxspec bench` only"):
        make(written)


def test_texts_and_a_datastore_of_them_draft_the_same():
    store = datastore.build(TEXTS, vocab_size=5)
    built = drafters.retrieval(TEXTS, TARGET).params
    assert (built.tokens == store.tokens).all() and (built.suffixes == store.suffixes).all()
    with pytest.raises(ValueError, match="got texts, and no target"):
        drafters.retrieval(TEXTS)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("", "the drafter is '': expected the name of a model"),
        ("prompt_lookp", "no drafter 'prompt_lookp': did you mean 'prompt_lookup'?"),
        (
            "tree(modle('a'), (2, 1))",
            "at column 6 there is no drafter 'modle': did you mean 'model'?",
        ),
        ("open('/etc/passwd')", "at column 1 there is no drafter 'open': expected one of"),
        ("by_name('a')", "there is no drafter 'by_name'"),
        ("prompt_lookup(2", "'(' was never closed (column 14)"),
        ("prompt_lookup(2) + 1", "at column 1 got prompt_lookup(2) + 1: expected a drafter"),
        ("greedy(debian-t5-draft)", "at column 8 got debian - t5 - draft: expected a drafter"),
        ("greedy('a').params", "at column 1 got greedy('a').params"),
        ("prompt_lookup(*[1])", "at column 15 got *[1]"),
        ("prompt_lookup(**{'longest': 1})", "prompt_lookup has **: expected each keyword"),
        ("prompt_lookup(longest=1, longest=2)", "prompt_lookup has an argument twice"),
        ("prompt_lookup(last=1)", "'last': expected prompt_lookup(longest=3, shortest=1, *, cand"),
        (
            "early_exit()",
            "missing a required argument: 'layers': expected early_exit(target, layers",
        ),
        ("windowed(1, 2, 3)", "too many positional arguments: expected windowed(target, window="),
        ("eagle('a')", "head of eagle has no name: load_drafter('NAME') loads a head"),
        ("prompt_lookup('a')", "longest is 'a'"),
        ("tree('a', (2, 1), draw='often')", "draw is 'often'"),
        ("cascade(prompt_lookup, 'a')", "expected cascade(draft, inner, *, gamma=3"),
        ("greedy(3)", "expected greedy(draft)"),
    ],
)
def test_what_is_no_such_call_is_refused_with_its_place(written, message):
    with pytest.raises(ValueError) as error:
        make(written)
    assert message in str(error.value)


def test_nothing_is_evaluated(tmp_path):
    file = tmp_path / "made"
    for written in (
        f"greedy(open('{file}', 'w'))",
        f"__import__('pathlib').Path('{file}').touch()",
        f"greedy([open('{file}', 'w') for x in (1,)])",
        f"greedy(lambda: open('{file}', 'w'))",
    ):
        with pytest.raises(ValueError):
            make(written)
    assert not file.exists()


def test_a_new_drafter_needs_nothing_but_its_name(monkeypatch):
    """It takes the target and models as its signature says."""

    def noisy(target: jaxspec.Model, draft: jaxspec.Model, times: int = 1):
        calls.append((target, draft, times))
        return drafters.fallback(*[drafters.prompt_lookup()] * times, draft)

    calls = []
    monkeypatch.setattr(drafters, "noisy", noisy, raising=False)
    monkeypatch.setattr(drafters, "__all__", [*drafters.__all__, "noisy"])
    drafter = make("noisy(target, 'a', 2)")
    assert calls == [(TARGET, MODELS["a"], 2)] and drafter.name == "prompt_lookup+prompt_lookup+a"
    out = jaxspec.generate(TARGET, [[3, 1]], drafter="noisy(draft=target)", max_new_tokens=6)
    assert calls[1:] == [(TARGET, TARGET, 1)]
    assert (
        out.tokens.tolist() == jaxspec.generate(TARGET, [[3, 1]], max_new_tokens=6).tokens.tolist()
    )
    with pytest.raises(ValueError, match=r"no drafter 'nosy': did you mean 'noisy'\?"):
        make("nosy")
    with pytest.raises(ValueError, match=r"expected noisy\(target, draft, times=1\)"):
        make("noisy()")


def test_files_say_whether_a_name_is_a_head(tmp_path):
    target = jaxspec.load("debian-gpt-base")
    for name in ("debian-gpt-eagle", "debian-gpt-kangaroo", "debian-gpt-heads"):
        assert is_head(name)
        drafter = drafters.by_name(name, target)
        assert drafter.name == jaxspec.load_drafter(name, target=target).name == name
    assert not is_head("debian-gpt-small")
    assert drafters.by_name("debian-gpt-small", target).name == "debian-gpt-small"
    tree = drafters.by_name("tree('debian-gpt-eagle', (2, 1))", target)
    assert tree.name == "tree(4 nodes, debian-gpt-eagle)"
    (tmp_path / "config.json").write_text("{}")  # it has no weights: loading says so
    assert not is_head(str(tmp_path))
    with pytest.raises(CheckpointError, match="no checkpoint at nobody"):
        drafters.by_name("greedy('nobody')", target)


def test_parts_are_what_files_are_read_for():
    parsed = by_name.parse(
        "fallback(retrieval('s'), tree(['a', 'b'], draw='top'), load_drafter('h'))"
    )
    assert [(part.name, part.kind) for part in by_name.parts(parsed)] == [
        ("s", "datastore"),
        ("a", "model"),
        ("b", "model"),
        ("h", "head"),
    ]


@pytest.mark.parametrize("name", ["tree(1)", "a model (copy)", "a+b", "x=y:z"])
def test_a_path_that_exists_is_a_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert by_name.parse(name) == by_name.Named(name)
    assert not by_name.is_call(name)


def test_every_way_to_generate_takes_a_name():
    plain = jaxspec.generate(TARGET, [[3, 1]], max_new_tokens=6).tokens.tolist()
    options = {"drafter": "tree(model(target), (2, 1))", "max_new_tokens": 6}
    out = jaxspec.generate(TARGET, [[3, 1]], **options)
    assert out.tokens.tolist() == plain and out.stats.rounds.tolist() == [2]
    prepared = jaxspec.prepare(TARGET, [[3, 1]], **options)
    assert prepared.drafter.name == "tree(4 nodes, target)"
    assert prepared.plain().drafter is None
    assert prepared.replace(drafter="uniform").drafter.name == "uniform"
    pieces = list(jaxspec.stream(TARGET, [[3, 1]], **options))
    assert [token for piece in pieces for token in piece.tokens] == plain[0]
    (row,) = jaxspec.generate_many(TARGET, [[3, 1]], slots=1, **options)
    assert row.tokens == plain[0]
    beams = jaxspec.beam_search(
        TARGET, [[3, 1]], beams=2, drafter="model(target)", max_new_tokens=6
    )
    assert (
        beams.tokens == jaxspec.beam_search(TARGET, [[3, 1]], beams=2, max_new_tokens=6).tokens
    ).all()
    with pytest.raises(ValueError, match="did you mean 'uniform'"):
        jaxspec.generate(TARGET, [[3, 1]], drafter="unifom")
    with pytest.raises(ValueError, match="for plain decoding, give None"):
        jaxspec.generate(TARGET, [[3, 1]], drafter="none")


def written(folder, table, shapes, file="model.safetensors"):
    """Writes a config.json and tensors of zeros."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(table))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / file)
    return str(folder)


def test_published_heads_are_heads_and_a_module_beside_a_model_is_the_model(published, tmp_path):
    for number, case in enumerate(published.values()):
        if case.file.endswith(".safetensors"):
            folder = written(tmp_path / str(number), case.table, case.shapes, case.file)
            assert is_head(folder) != case.beside_target, case.table


@pytest.mark.parametrize(
    "feed_forward", ["mlp.up_proj", "block_sparse_moe.gate", "feed_forward.w1"]
)
@pytest.mark.parametrize("module", ["", "model.layers.1.eh_proj.weight", "mtp.fc.weight"])
def test_a_whole_model_is_no_head(feed_forward, module, tmp_path):
    layer = ("self_attn.q_proj", "input_layernorm", "post_attention_layernorm", feed_forward)
    names = [f"model.layers.0.{part}.weight" for part in layer]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    names += [module] if module else []
    assert not is_head(written(tmp_path / "model", {"model_type": "x"}, dict.fromkeys(names, (2,))))
