"""Drafters in the spelling of earlier versions are translated, and a line says the new one."""

import pytest

from jaxspec.cli.old_names import new_manifest, new_spelling, translated
from jaxspec.draft_heads import by_name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("prompt_lookup=2", "prompt_lookup(3, 2)"),
        ("prompt_lookup=5", "prompt_lookup(5, 5)"),
        ("head:z-lab/Qwen3-8B-DFlash-b16", "load_drafter('z-lab/Qwen3-8B-DFlash-b16')"),
        ("share:a", "share_vocabulary('a')"),
        ("trim=512:a", "trim_vocabulary('a', size=512)"),
        ("trim=512:quantised", "trim_vocabulary(quantised, size=512)"),
        ("trim=512:head:a", "load_drafter('a', head=trim_vocabulary(target, size=512))"),
        ("trim=512:saturated_exit", "saturated_exit(head=trim_vocabulary(target, size=512))"),
        (
            "trim=512:skip_layers=1:",
            "skip_layers((1,), (), head=trim_vocabulary(target, size=512))",
        ),
        ("tree:a", "tree('a')"),
        ("tree=4x2-mixed:a", "tree('a', (4, 2), draw='mixed')"),
        ("tree=2x1:head:a", "tree(load_drafter('a'), (2, 1))"),
        ("tree_of_two=2x1:a:bigram", "tree(['a', bigram], (2, 1))"),
        ("dynamic_tree=32:a", "dynamic_tree('a', 32)"),
        ("sequences:a", "sequences('a')"),
        (
            "cascade=2:a:cascade:b:prompt_lookup",
            "cascade('a', cascade('b', prompt_lookup), gamma=2)",
        ),
        ("horizontal_cascade=1:a:prompt_lookup", "horizontal_cascade('a', prompt_lookup, 1)"),
        ("parallel=9x3:a", "parallel('a', 9, 3)"),
        ("early_exit=4", "early_exit(4)"),
        ("saturated_exit=2x5", "saturated_exit(2, 5)"),
        ("quantised=4", "quantised(bits=4)"),
        ("skip_layers=5x7:6", "skip_layers((5, 7), (6,))"),
        ("windowed=512x4", "windowed(512, 4)"),
        ("retrieval:store", "retrieval('store')"),
        ("greedy:a", "greedy('a')"),
        ("trigram", "ngram(order=3)"),
        ("without_backoff=1:a+4-gram", "fallback(without_backoff('a', 1), ngram(order=4))"),
        ("prompt_lookup+a", "fallback(prompt_lookup, 'a')"),
    ],
)
def test_the_old_spelling_is_translated(old, new, capsys):
    assert new_spelling(old) == new
    assert f'--draft {old} is now spelt --draft "{new}" (the' in capsys.readouterr().err
    by_name.parse(new)  # which reads it
    assert translated(new) == new


@pytest.mark.parametrize(
    "name",
    [
        "none",
        "debian-t5-draft",
        "z-lab/Qwen3-8B-DFlash-b16",
        "random:gpt2",
        "prompt_lookup",
        "bigram",
        "retrieval",
        "model=4",
        "head",
        "tree('a=b:c', (4, 2), draw='mixed')",
    ],
)
def test_other_names_stay(name, capsys):
    assert new_spelling(name) == name and not capsys.readouterr().err


def test_a_path_that_exists_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a+b").mkdir()
    assert translated("a+b") == "a+b"
    assert translated("greedy:a+c") == "fallback(greedy('a'), 'c')"


def test_the_manifest_of_an_old_job_is_todays():
    digests = {"a": {"weights": "12"}}
    batch = {"models": {"target": ["t", {}], "draft": ["greedy:a", digests]}, "options": {"n": 1}}
    assert new_manifest(batch)["models"]["draft"] == ["greedy('a')", digests]
    transcribe = {"models": {"t": {}, "greedy:a": digests}, "options": {"draft": "greedy:a"}}
    assert new_manifest(transcribe) == {
        "models": {"t": {}, "greedy('a')": digests},
        "options": {"draft": "greedy('a')"},
    }
    plain = {"models": {"target": ["t", {}]}, "options": {"draft": None}, "shard": 0}
    assert new_manifest(plain) == plain
    damaged = {"options": {"draft": "greedy:a"}}
    assert new_manifest(damaged) == damaged
