"""`jaxspec chat`, with messages that are piped in."""

import re

import jax
import pytest
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli.main import app

TEMPLATE = "{% for m in messages %}das {{ m.content }} {% endfor %}und"
MODELS = ("--target", "debian-gpt-base", "--draft", "debian-gpt-small", "-n", "6")


@pytest.fixture
def talk(loading, zoo, monkeypatch):
    """Runs `jaxspec chat` on the zoo's decoders."""
    for name in ("debian-gpt-base", "debian-gpt-small"):
        monkeypatch.setattr(zoo[name].tokenizer, "chat_template", TEMPLATE)
    return lambda typed, *options: CliRunner().invoke(app, ["chat", *MODELS, *options], input=typed)


def test_lines_are_answered_and_counted(zoo, talk):
    result = talk("alte Hund\n\n  das Haus\n/reset\nalte Hund\n")
    assert result.exit_code == 0, result.output
    target = zoo["debian-gpt-base"]
    answer = jaxspec.generate(target, [{"role": "user", "content": "alte Hund"}], max_new_tokens=6).texts[0]
    counts = (
        r"\d tokens, \d\.\d\d a round, first after \S+ s, then \S+ a second, (\d+) of (\d+) prompt tokens read before"
    )
    turns = re.findall(rf"(.*)\n{counts}\n", result.stdout)
    assert [turns[0][0], turns[2][0]] == [answer] * 2 and len(turns) == 3
    assert [int(turn[1]) for turn in turns][::2] == [0, 0] and 0 < int(turns[1][1]) < int(turns[1][2])


def test_sampling_has_a_key_for_each_turn(zoo, talk):
    result = talk("alte Hund\n", "--temperature", "1", "--seed", "3")
    key = jax.random.fold_in(jax.random.key(3), 0)
    options = dict(max_new_tokens=6, temperature=1.0, key=key, drafter=zoo["debian-gpt-small"], gamma=3)
    answer = jaxspec.generate(zoo["debian-gpt-base"], [{"role": "user", "content": "alte Hund"}], **options).texts[0]
    assert result.stdout.startswith(answer), result.output


def test_a_model_without_a_template_is_refused(loading, zoo):
    result = CliRunner().invoke(app, ["chat", "--target", "stranger", "--draft", "none"], input="a\n")
    assert result.exit_code == 2 and "has no chat template" in result.stderr


def test_a_message_that_cannot_be_answered_does_not_end_the_chat(talk):
    result = talk("Hund " * 700 + "\nalte Hund\n")
    assert result.exit_code == 0, result.output
    assert "error: a prompt of " in result.stderr and "0 of 4 prompt tokens read before" in result.stdout
