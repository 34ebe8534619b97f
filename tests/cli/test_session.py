"""Decoding at once and round by round: whole rounds, the same samples, and texts that end at a stop string."""

import pytest


@pytest.mark.parametrize("mode", [(), ("--batch",)])
def test_rounds_are_reported_whole(mode, report):
    found = report("--trace", "-t", "1", *mode)
    for rounds, tokens, count in zip(found["rounds"], found["tokens"], found["stats"]["rounds"], strict=True):
        assert [t for step in rounds for t in step["tokens"]] == tokens
        assert len(rounds) == count + 1
        for step in rounds[1:]:
            kept = min(step["accepted"], len(step["tokens"]))
            assert step["tokens"][:kept] == step["draft"][:kept]


def test_a_samples_text_depends_on_the_seed_alone(report):
    one, batch, other = report("-t", "1"), report("-t", "1", "--batch"), report("-t", "1", "--seed", "1")
    assert one["tokens"] == batch["tokens"]
    assert one["tokens"] != other["tokens"]


def test_text_ends_before_a_stop_string(report, run):
    wholes = report()["texts"]
    row, whole = next((i, text) for i, text in enumerate(wholes) if " " in text)
    stop = whole.split(" ")[1]
    cut = whole[: whole.index(stop)]
    assert report("--stop", stop)["texts"][row] == cut
    assert whole not in run("--stop", stop)
