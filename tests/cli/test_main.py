"""The parts that all commands share: version, help, errors."""

import inspect
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import jaxspec
from jaxspec.cli import main, options, signals
from jaxspec.decode.chat import ANSWER
from jaxspec.decode.options import NEW_TOKENS

runner = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["batch", "--input", "", "--output", "x"], "--input"),
        (["batch", "--input", "a", "--output="], "--output"),
        (["score", "--input", "a", "--input", ""], "--input"),
        (["generate", "a", "--prompts", ""], "--prompts"),
        (["generate", "a", "--json-schema", ""], "--json-schema"),
        (["transcribe", "a", "", "--target", "x"], "FILE"),
        (["convert", "debian-t5-draft", ""], "TO"),
        (["datastore", "", "--out", "x", "--tokenizer", "y"], "TEXTS"),
        (["train", "debian-t5-small", "--work", ""], "--work"),
    ],
)
def test_a_path_that_is_empty_is_not_this_folder(arguments, name, tmp_path, monkeypatch):
    """As of a shell's variable that is not set: results would be written to where the user is."""
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(main.app, arguments)
    assert (
        result.exit_code == 2
        and f"{name} is empty: expected a path" in result.stderr
        and not [*tmp_path.iterdir()]
    )


def test_version_is_printed():
    result = runner.invoke(main.app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"jaxspec {jaxspec.__version__}\n")


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "jaxspec", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"jaxspec {jaxspec.__version__}\n"
    done = subprocess.run([*command[:-1], "nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and "Usage: jaxspec " in done.stderr


def test_no_arguments_print_help():
    result = runner.invoke(main.app, [])
    for command in ("generate", "train", "models", "convert", "bench"):
        assert command in result.output


ONE_SPELLING = {  # names that more than one command has, under another name nowhere
    "draft": {"drafter", "drafters", "drafts"},
    "gamma": {"gammas", "most"},
    "temperature": {"temperatures", "heat"},
    "batch": {"batches", "batch_size"},
    "task": {"tasks"},
    "rule": {"rules", "accept"},
    "policy": {"policies"},
    "dtype": {"dtypes"},
    "prompts": {"file", "files"},
    "max_new_tokens": {"new_tokens"},
}


@pytest.mark.parametrize("command", list(main.COMMANDS))
def test_every_command_and_option_has_help_in_groups_of_a_glance(command):
    result = runner.invoke(main.app, [command, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    parts = result.output.split("\n\n")
    assert max(len(part.splitlines()) for part in parts) <= 26
    assert f"      jaxspec {command}" in result.output  # an example
    typer_command = main.command(command)
    assert typer_command.help
    assert [p.name for p in typer_command.params if not getattr(p, "help", None)] == []
    assert not {p.name for p in typer_command.params} & set().union(*ONE_SPELLING.values())
    titles = [part.partition(":\n")[0].strip() for part in parts if ":\n  -" in part]
    if len(typer_command.params) >= options.MANY:
        assert titles == [title for title in options.GROUPS if title in titles], (
            "options without a group in GROUPS"
        )
    else:
        assert titles == ["Options"]


def test_the_list_of_commands_is_whole_at_80_columns():
    result = runner.invoke(main.app, ["--help"], env={"COLUMNS": "80"})
    lines = [
        line.split(maxsplit=1) for line in result.output.partition("Commands:\n")[2].splitlines()
    ]
    assert {name: line for name, line in lines} == main.COMMANDS


def default(function, name):
    """Returns a default of a function of jaxspec, or of a command."""
    return inspect.signature(function).parameters[name].default


def test_defaults_are_those_of_python_or_help_says_why():
    in_python = {"chat": ANSWER, "batch": default(jaxspec.generate_many, "max_new_tokens")}
    for command in main.COMMANDS:
        params = {p.name: p for p in main.command(command).params}
        limit = in_python.get(command, NEW_TOKENS)
        if "gamma" in params and params["gamma"].default == 3:
            assert (
                f"Python's default is {default(jaxspec.generate, 'gamma')}" in params["gamma"].help
            ), command
        if "max_new_tokens" in params and params["max_new_tokens"].default != limit:
            assert "fewer than elsewhere (128)" in params["max_new_tokens"].help, command


def test_help_imports_nothing_slow():
    code = (
        "import sys; from jaxspec.cli.main import app\n"
        "for command in ([], ['train'], ['bench']):\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit: pass\n"
        "print([m for m in ('jax', 'flax', 'transformers', 'orbax', 'optax') if m in sys.modules], "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_a_command_whose_reader_has_gone_ends_as_shells_have_it():
    """128 + SIGPIPE, as `seq 99999 | head -1`, and no word about it; 1 would be a verdict of
    `verify`.
    """
    code = (
        "from jaxspec.cli import main; from jaxspec.cli.console import Console\n"
        "app = main.App(name='x', cls=None)\n"
        "@app.command(cls=main.Command)\n"
        "def lines(count: int):\n"
        "    out = Console()\n"
        "    for number in range(count): out.print('line', number)\n"
        "app()"
    )
    # all of it is written when the process ends, or while the command runs
    for count in ("3", "20000"):
        command = [sys.executable, "-c", code, count]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
            running.stdout.close()
            assert (running.stderr.read(), running.wait(timeout=60)) == (b"", 141)


def failing(error):
    app = typer.Typer()

    @app.command(cls=main.Command)
    def fail():
        raise error

    @app.command()
    def other():
        pass

    app.callback()(main.common)
    return app


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("gamma is [red]-1[/red]"), "error: gamma is [red]-1[/red]\n"),
        (
            FileNotFoundError(2, "No such file or directory", "prompts.txt"),
            "error: prompts.txt: No such file or directory\n",
        ),
        (FloatingPointError(), "error: FloatingPointError\n"),
        (ValueError("long " * 50), "error: " + "long " * 50 + "\n"),
    ],
)
def test_an_error_is_one_line_on_stderr(error, line, monkeypatch):
    monkeypatch.delenv("JAXSPEC_DEBUG", raising=False)
    result = runner.invoke(failing(error), ["fail"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", line)


@pytest.mark.parametrize(
    ("arguments", "env"), [(["--debug", "fail"], {}), (["fail"], {"JAXSPEC_DEBUG": "1"})]
)
def test_debugging_shows_the_error_itself(arguments, env):
    error = ValueError("gamma")
    result = runner.invoke(failing(error), arguments, env=env)
    assert result.exception is error


def test_an_error_of_ours_is_not_hidden():
    result = runner.invoke(failing(KeyError("a bug")), ["fail"])
    assert isinstance(result.exception, KeyError)


def test_ctrl_c_is_quiet():
    result = runner.invoke(failing(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (SystemExit(signals.TERMINATED), 143)],
    ids=["Ctrl-C", "kill"],
)
def test_a_command_that_is_told_to_stop_skips_the_end_of_the_interpreter(
    error, code, monkeypatch, capsys
):
    class Left(BaseException):
        pass

    def leave(code):
        raise Left(code)

    def fail():
        print("so far", end="")
        raise error

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signals.signal, "signal", lambda *_: None)
    app = main.App()
    app.command(cls=main.Command)(fail)
    with pytest.raises(Left) as left:
        app([])
    assert left.value.args == (code,) and capsys.readouterr().out == "so far"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "verify"])
def test_ctrl_c_while_a_program_compiles_is_quiet(command, terminal):
    """On a terminal, with nothing compiled beforehand."""
    running = terminal(command)
    running.until({"generate": "compiling", "verify": "enumerating"}[command])
    running.write("\x03")
    assert running.end() == 130
    assert "Traceback" not in running.printed and "rror" not in running.printed
