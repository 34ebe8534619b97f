"""`jaxspec chat`, with messages that are piped in, and on a terminal."""

import io
import json
import re
import sys
from pathlib import Path

import jax
import pytest
from jinja2 import TemplateError
from rich.console import Console
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli import entries
from jaxspec.cli.chat import TASKS, Writer
from jaxspec.cli.main import app
from jaxspec.cli.options import TARGET
from jaxspec.testing import word_tokenizer

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
    answer = jaxspec.generate(
        target, [{"role": "user", "content": "alte Hund"}], max_new_tokens=6
    ).texts[0]
    counts = (
        r"\d tokens, \d\.\d\d a round, (?:compiled in|first after) \S+ s(?:, then \S+ a second)?, (\d+) of (\d+) "
        "prompt tokens read before"
    )
    turns = re.findall(rf"(.*)\n{counts}\n", result.stdout)
    assert [turns[0][0], turns[2][0]] == [answer] * 2 and len(turns) == 3
    assert [int(turn[1]) for turn in turns][::2] == [0, 0] and 0 < int(turns[1][1]) < int(
        turns[1][2]
    )


def test_sampling_has_a_key_for_each_turn(zoo, talk):
    result = talk("alte Hund\n", "--temperature", "1", "--seed", "3")
    key = jax.random.fold_in(jax.random.key(3), 0)
    options = dict(
        max_new_tokens=6, temperature=1.0, key=key, drafter=zoo["debian-gpt-small"], gamma=3
    )
    answer = jaxspec.generate(
        zoo["debian-gpt-base"], [{"role": "user", "content": "alte Hund"}], **options
    ).texts[0]
    assert result.stdout.startswith(answer), result.output


def test_the_shipped_models_do_their_task_with_each_message(loading, zoo, monkeypatch):
    """Without any option: the default target has few positions, and no template of its own."""
    seen = []
    for name in ("debian-t5-large", "debian-gpt-base"):
        monkeypatch.setattr(zoo[name].tokenizer, "chat_template", None, raising=False)
    monkeypatch.setattr(
        sys.modules["jaxspec.decode.chat"],  # the package has a function of this name
        "chat_ids",
        lambda target, messages, **_: seen.append(target) or [3],
    )
    for name, task in TASKS.items():
        if name not in zoo or name == "debian-gpt-small":
            continue
        result = CliRunner().invoke(
            app, ["chat", *(() if name == TARGET else ("--target", name))], input="Hund\n"
        )
        assert result.exit_code == 0, result.output
        assert f"{name} is not tuned to chat: {task.description}." in result.stderr
        assert seen[-1].tokenizer.chat_template == task.template
        assert zoo[name].tokenizer.chat_template is None, "the model itself stays as it is"


def test_templates_of_tasks_write_what_the_models_were_trained_on():
    words = word_tokenizer(["<unk>", "</s>"], chat_template=TASKS["debian-t5-large"].template)
    asked, answered = (
        {"role": "user", "content": " A file. "},
        {"role": "assistant", "content": "x"},
    )
    written = words.apply_chat_template([asked, answered, asked], tokenize=False)
    assert written == "translate English to German: A file.</s>"
    with pytest.raises(TemplateError, match="it reads no system message"):
        words.apply_chat_template([{"role": "system", "content": "x"}, asked], tokenize=False)
    words.chat_template = TASKS["debian-gpt-base"].template
    assert (
        words.apply_chat_template([asked, answered, asked], tokenize=False) == "A file. x A file."
    )


def test_a_model_without_a_template_is_refused(loading, zoo):
    result = CliRunner().invoke(
        app, ["chat", "--target", "stranger", "--draft", "none"], input="a\n"
    )
    assert result.exit_code == 2 and "has no chat template" in result.stderr


def test_a_message_that_cannot_be_answered_does_not_end_the_chat(talk):
    result = talk("Hund " * 700 + "\nalte Hund\n")
    assert result.exit_code == 0, result.output
    assert (
        "error: a prompt of " in result.stderr
        and "0 of 4 prompt tokens read before" in result.stdout
    )


def conversation(path):
    """Reads the contents that /save wrote."""
    return [message["content"] for message in json.loads(path.read_text())]


def test_commands_change_the_conversation(zoo, talk, tmp_path):
    saved, other, unread = (
        tmp_path / name for name in ("a chat.json", "another.json", "notes.txt")
    )
    unread.write_text("no conversation")
    lines = [
        f"/save {saved}",
        "alte Hund",
        "/retry",
        f"/save {saved}",
        "/reset",
        "/system das",
        "das Haus",
        f"/save {other}",
    ]
    lines += [
        f"/load {saved}",
        "neue",
        f"/save {saved}",
        f"/save {unread}",
        "/load nowhere",
        "/load",
    ]
    lines += ["/what now", "/save_as a", "/help", "/quit", "alte Hund"]
    result = talk("\n".join(lines))
    assert result.exit_code == 0, result.output
    first, again, *_ = re.findall(r"(.*)\n\d tokens, ", result.stdout)
    assert again == first and result.stdout.count("prompt tokens read before") == 4
    assert conversation(saved)[:3] == ["alte Hund", first, "neue"] and len(conversation(saved)) == 4
    assert conversation(other)[:2] == ["das", "das Haus"]
    assert unread.read_text() == "no conversation"
    told = result.stderr.splitlines()
    assert (
        "error: there is no /what: try /help, /retry, /system, /reset, /save, /load, /quit" in told
    )
    assert any(line.startswith("error: there is no /save_as: try /help, ") for line in told)
    assert f"error: {unread} is not a conversation, for it is not JSON" in result.stderr
    assert {
        "error: nowhere: No such file or directory",
        "error: /load has no FILE: expected /load FILE",
    } <= set(told)
    assert all(usage in result.stderr for usage in entries.COMMANDS)


def test_a_sampled_answer_is_another_one_when_it_is_tried_again(zoo, talk):
    result = talk("alte Hund\n/retry\n", "--temperature", "1", "--seed", "3")
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), 1)
    options = dict(
        max_new_tokens=6, temperature=1.0, key=key, drafter=zoo["debian-gpt-small"], gamma=3
    )
    answer = jaxspec.generate(
        zoo["debian-gpt-base"], [{"role": "user", "content": "alte Hund"}], **options
    ).texts[0]
    assert re.findall(r"(.*)\n\d tokens?, ", result.stdout)[1] == answer, result.output


def test_a_message_may_have_several_lines(zoo, talk, tmp_path):
    path = tmp_path / "chat.json"
    result = talk(
        f'"""alte\n\n/quit"""\nalte\\\nHund\n"""das"""\n/usr/bin das\n/save {path}\n"""das'
    )
    assert conversation(path)[::2] == ["alte\n\n/quit", "alte\nHund", "das", "/usr/bin das"]
    assert (
        result.exit_code == 0
        and 'begins with """ and has no other """ at its end: it was left out' in result.stderr
    )


def test_bytes_that_are_not_text_do_not_end_a_chat(talk):
    result = talk(b"\xef\xbb\xbfalte Hund\nHund\xff\ndas Haus\n")
    assert result.exit_code == 0 and result.stdout.count("prompt tokens read before") == 2, (
        result.output
    )
    (line,) = [line for line in result.stderr.splitlines() if "error" in line]
    assert (
        line
        == "error: the message is not UTF-8 text (it has the byte 0xff at character 4): it was "
        "left out"
    )


def test_a_template_is_read_from_a_file(loading, zoo, tmp_path, invoke):
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    result = CliRunner().invoke(
        app, ["chat", *MODELS, "--chat-template", str(template)], input="alte Hund\n"
    )
    assert result.exit_code == 0 and "0 of 4 prompt tokens" in result.stdout, result.output
    result = invoke("alte Hund", "--chat-template", str(template))
    assert (
        result.exit_code == 2
        and "--chat-template is for prompts that are messages: add --chat" in result.stderr
    )


@pytest.mark.parametrize("pieces", [["one two three four"], ["one", " two", " three", " four"]])
def test_answers_are_broken_between_words(pieces):
    printed = io.StringIO()
    writer = Writer(
        Console(file=printed, force_terminal=True, width=9, soft_wrap=True, color_system=None)
    )
    for piece in [*pieces, "\n\n  five 日本語 six", " a-word-that-is-long end"]:
        writer.write(piece)
    lines = ["one two", "three", "four", "", "  five", "日本語", "six", "a-word-that-is-long end"]
    # the terminal breaks the long word, whose rest leaves room
    assert printed.getvalue().splitlines() == lines


def test_a_file_has_answers_as_they_are():
    printed = io.StringIO()
    Writer(Console(file=printed, width=9, soft_wrap=True)).write("one two three four")
    assert printed.getvalue() == "one two three four"


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_then_the_chat(terminal, tmp_path):
    model = Path(__file__).parents[2] / "checkpoints" / "debian-gpt-small"
    if not model.is_dir():
        pytest.skip("the checkpoint is not here")
    (tmp_path / "template").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    options = (
        "--target",
        str(model),
        "--draft",
        "none",
        "--chat-template",
        "template",
        "-t",
        "2",
        "-n",
        "400",
    )
    chat, prompt = terminal("chat", *options), "1m>"
    chat.until("/help lists commands")
    chat.until(prompt)
    chat.write("It can\r")
    chat.until("compiling")
    chat.write("\x03")
    chat.until("ended by Ctrl-C")
    chat.until(prompt)
    chat.write("\x1b[200~It\ncan\x1b[201~\r")  # a paste
    chat.until("a round, compiled in ")
    # broken between words
    assert max(len(line.rstrip()) for line in chat.until("read before").splitlines()) < 80
    chat.until(prompt)
    chat.write("never sent")
    chat.until("never sent")
    chat.write("\x03")
    chat.write("/save saved.json\r")
    chat.until("4 messages are in saved.json")
    chat.until(prompt)
    assert conversation(tmp_path / "saved.json")[::2] == ["It can", "It\ncan"]
    chat.write("\x03")
    assert chat.end() == 130 and "Traceback" not in chat.printed
