"""`jaxspec generate`: prompts in, text and statistics out."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxspec.cli import render
from jaxspec.cli.render import Comparison, Counts, Round

if TYPE_CHECKING:
    import numpy as np

    from jaxspec.base import Model, Prompt, Stats
    from jaxspec.decode import Generation

TARGET, DRAFT = "debian-t5-base", "debian-t5-small"
REPEATS = 5  # of each side of a comparison; the median counts
PATIENCE = 3.0  # seconds to wait for a pipe on standard input that nobody asked to read
CPU_CACHE = 100e6  # bytes of parameters that some cache of a CPU may hold


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to decode with; `generate`'s options describe the fields."""

    target: str
    draft: str | None
    gamma: int
    temperature: float
    top_k: int | None
    top_p: float | None
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...]
    dtype: str


class Session(NamedTuple):
    """Models and prompts, ready to decode; prompts are padded alike, and so share compiled programs.

    Attributes:
        settings, target, drafter, texts: what was asked for.
        prompt: the texts as token ids, on the host.
        keys: the data of one random key per prompt.
    """

    settings: Settings
    target: Model
    drafter: Model | None
    texts: list[str]
    prompt: Prompt
    keys: np.ndarray

    def options(self) -> dict[str, Any]:
        """The arguments of `jaxspec.generate` that are the same for every prompt."""
        s = self.settings
        sampling = dict(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p)
        return dict(drafter=self.drafter, gamma=s.gamma, max_new_tokens=s.max_new_tokens, **sampling)

    def rows(self, start: int, stop: int) -> tuple[Prompt, Any]:
        """Some of the prompts, and their keys: a row's text is the same in any batch."""
        import jax

        prompt = jax.tree.map(lambda x: x[start:stop], self.prompt)
        return prompt, jax.random.wrap_key_data(jax.numpy.asarray(self.keys[start:stop]))


class Decoded(NamedTuple):
    """What became of one prompt."""

    text: str
    tokens: list[int]
    rounds: list[Round]
    counts: Counts


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to generate from; - reads standard input, one prompt a line.")
    ] = None,
    target: Annotated[str, typer.Option(help="Whose text it is: a shipped checkpoint, or a folder.")] = TARGET,
    draft: Annotated[
        str | None,
        typer.Option(help="Who guesses, or none. By default the small sibling of a shipped target."),
    ] = None,
    gamma: Annotated[int, typer.Option("--gamma", "-g", help="Guesses a round.")] = 5,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens that hold this probability.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens per prompt.")] = 96,
    seed: Annotated[int, typer.Option(help="Of sampling; the same seed gives the same text.")] = 0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="A string that ends the text and is cut from it; may be repeated."),
    ] = None,
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="A file of prompts, one a line; - is standard input.")
    ] = None,
    count: Annotated[int, typer.Option(help="How many held-out prompts to take where none are given.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of the computation: float32 or bfloat16.")] = "float32",
    batch: Annotated[
        bool, typer.Option("--batch", help="All prompts in one batch, instead of one after the other.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Show each round: guesses, the rejected one, its correction.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly, too; compare texts and speeds, and theory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Generate text with speculative decoding, and say what it took.

    Without a prompt it decodes held-out ones that come with jaxspec: translations for an encoder-decoder
    (by default the shipped T5 pair), beginnings of texts for a decoder-only model. A T5's task prefix is
    part of the prompt:

        jaxspec generate "translate English to German: A fast editor."

        jaxspec generate --target debian-gpt-base --temperature 1 --trace
    """
    draft = _draft_name(target, draft)
    settings = Settings(target, draft, gamma, temperature, top_k, top_p, max_new_tokens, seed, tuple(stop or ()), dtype)
    if compare and (draft is None or gamma == 0):
        raise ValueError("--compare is of speculative with plain decoding: it needs a --draft and a --gamma")
    given = _given_prompts(prompt, file)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status("loading the models"):
        session = _open(settings, given, count)
    with err.status("compiling (kept for the next call)"):
        _warm_up(session, len(session.texts) if batch else 1, by_rounds=bool(stop) or not (batch or as_json))
    if as_json:
        decoded = _decode_all(session, batch)
    else:
        out.print(_headline(session), "\n")
        decoded = _show(session, out, batch, trace)
        _print_counts(session, decoded, out)
    found = None
    if compare and session.drafter is not None:
        with err.status("comparing with plain decoding"):
            found = _compare(session, session.drafter, len(session.texts) if batch else 1)
    if as_json:
        print(json.dumps(_report(session, decoded, found, trace), ensure_ascii=False))
    elif found is not None:
        out.print("", render.comparison_table(found), *render.comparison_lines(found), sep="\n")


def _draft_name(target: str, draft: str | None) -> str | None:
    """The drafter asked for; that of a shipped target where nothing is said."""
    from jaxspec.model import shipped

    if draft is not None:
        return None if draft == "none" else draft
    if target == TARGET:
        return DRAFT
    sibling = Path(target).name.removesuffix("-base") + "-small"
    if target.endswith("-base") and sibling in shipped():
        return sibling
    raise ValueError(f"--target {target} needs a --draft: a smaller model with its vocabulary, or none")


def _given_prompts(prompt: str | None, file: str | None) -> list[str]:
    """The prompts of the command line, a file or standard input; none if there are none."""
    if prompt is not None and file is not None:
        raise ValueError("got a PROMPT and a --file: expected one of them")
    if prompt is not None and prompt != "-":
        return [prompt]
    file = prompt if file is None else file
    if file is None:
        return _lines(_piped())
    where = "standard input" if file == "-" else file
    try:
        prompts = _lines(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text: {error}") from error
    if not prompts:
        raise ValueError(f"{where} holds no prompt: expected one a line")
    return prompts


def _lines(text: str) -> list[str]:
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _piped() -> str:
    """What is piped into a command that was given no prompt.

    A pipe is no proof that somebody writes to it (build systems leave theirs open for ever), so one that
    stays silent is given up on, aloud.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return sys.stdin.read()  # not a file: somebody's replacement for one
    if stat.S_ISCHR(mode):
        return ""  # /dev/null
    waits = (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and sys.platform != "win32"
    if waits and not select.select([sys.stdin], [], [], PATIENCE)[0]:
        print(
            "standard input is a silent pipe: taking held-out prompts (`-` would wait for it)",
            file=sys.stderr,
        )
        return ""
    return sys.stdin.read()


def _open(settings: Settings, given: list[str], count: int) -> Session:
    """Loads the models, and the held-out prompts if none are given."""
    import jax
    import numpy as np

    from jaxspec import model, noise
    from jaxspec.decode import request

    target = model.load(settings.target, dtype=settings.dtype)
    drafter = model.load(settings.draft, dtype=settings.dtype) if settings.draft else None
    texts = given or heldout("text" if target.lm.start_token is None else "translation", count)
    keys = jax.random.key_data(noise.row_keys(jax.random.key(settings.seed), len(texts)))
    prompt, keys = jax.tree.map(np.asarray, (request.encode(target, texts), keys))
    session = Session(settings, target, drafter, texts, prompt, keys)
    _job(session, 0, len(texts))  # refuses bad settings before anything is compiled
    return session


def heldout(task: str, count: int) -> list[str]:
    """The first prompts of those that come with jaxspec, for a task: translation, synopsis or text."""
    if count < 1:
        raise ValueError(f"count is {count}: expected at least 1")
    file = importlib.resources.files("jaxspec") / "data" / "heldout" / f"{task}.jsonl"
    rows = file.read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(row)["input"] for row in rows]


def _job(session: Session, start: int, stop: int, **changed: Any) -> Any:
    from jaxspec.decode import request

    prompt, keys = session.rows(start, stop)
    rest: dict[str, Any] = dict(accept=None, key=keys, eos_ids=None)
    return request.prepare(session.target, prompt, **(session.options() | rest | changed))


def _warm_up(session: Session, rows: int, by_rounds: bool) -> None:
    """Compiles what decoding `rows` prompts at a time will run; decodes next to nothing."""
    import jax
    import jax.numpy as jnp

    from jaxspec.decode import loop

    job = _job(session, 0, rows)
    if by_rounds:
        state = loop.start(*job)
        jax.block_until_ready(loop.advance(job.decoder, job.keys, job.weights, state))
    else:
        one_round = job.request._replace(limit=jnp.minimum(job.request.limit, 2))  # the first is prefill's
        jax.block_until_ready(loop.run(*job._replace(request=one_round)))


def _decode_all(session: Session, batch: bool) -> list[Decoded]:
    """Decodes without showing anything."""
    step = len(session.texts) if batch else 1
    return [row for start in range(0, len(session.texts), step) for row in _decode(session, start, start + step)]


def _decode(session: Session, start: int, stop: int) -> list[Decoded]:
    """Some of the prompts as one batch; its seconds are shared out by tokens."""
    import jaxspec

    prompt, keys = session.rows(start, stop)
    began = time.perf_counter()
    out = jaxspec.generate(session.target, prompt, key=keys, stop=session.settings.stop, **session.options())
    seconds = time.perf_counter() - began
    share = seconds / max(1, int(out.lengths.sum()))
    return [_decoded(out, row, share * int(out.lengths[row])) for row in range(len(out.texts))]


def _decoded(out: Generation, row: int, seconds: float) -> Decoded:
    tokens = out.tokens[row, : out.lengths[row]].tolist()
    rounds, at = [Round([], tokens[:1], [], 0)], 1
    for draft, length, accepted, kept in zip(*(x[row].tolist() for x in out.trace), strict=True):
        if kept:
            rounds.append(Round(tokens[:at], tokens[at : at + kept], draft[:length], accepted))
            at += kept
    return Decoded(out.texts[row], tokens, rounds, _counts(out.stats, row, seconds))


def _show(session: Session, out: Console, batch: bool, trace: bool) -> list[Decoded]:
    """Decodes and prints, text as it appears unless all prompts are one batch."""
    if trace:
        out.print(render.legend(_colour(out)), "\n")
    if not batch:
        stream = _stream_trace if trace else _stream_text
        return [stream(session, index, out) for index in range(len(session.texts))]
    decoded = _decode_all(session, batch)
    for text, row in zip(session.texts, decoded, strict=True):
        if trace:
            out.print(Text(text, "dim"))
            for number, step in enumerate(row.rounds):
                out.print(_trace_line(session, number, step, out))
            out.print()
        else:
            out.print(_exchange(session, text, row.text, "", render.counts_note(row.counts)), "")
    return decoded


def _stream_text(session: Session, index: int, out: Console) -> Decoded:
    """Decodes one prompt, its text growing round by round."""
    text, shown = session.texts[index], ""
    with Live(console=out, auto_refresh=False, transient=True, vertical_overflow="visible") as live:

        def show(piece: Any, _: Round) -> None:
            nonlocal shown
            live.update(_exchange(session, text, shown, piece.text), refresh=out.is_terminal)
            shown += piece.text

        decoded = _stream(session, index, show)
    out.print(_exchange(session, text, decoded.text, "", render.counts_note(decoded.counts)), "")
    return decoded


def _stream_trace(session: Session, index: int, out: Console) -> Decoded:
    """Decodes one prompt, printing each round as it ends."""
    out.print(Text(session.texts[index], "dim"))
    numbers: Iterator[int] = iter(range(sys.maxsize))
    decoded = _stream(session, index, lambda _, step: out.print(_trace_line(session, next(numbers), step, out)))
    out.print()
    return decoded


def _stream(session: Session, index: int, show: Callable[[Any, Round], None]) -> Decoded:
    """Decodes one prompt round by round; the time that `show` takes is not counted."""
    import jaxspec

    prompt, key = session.rows(index, index + 1)
    pieces = jaxspec.stream(session.target, prompt, key=key, stop=session.settings.stop, **session.options())
    text, tokens, rounds, seconds = "", [], [], 0.0
    while True:
        began = time.perf_counter()
        piece = next(pieces, None)
        seconds += time.perf_counter() - began
        if piece is None:
            break
        rounds.append(Round(list(tokens), piece.tokens, piece.draft, piece.num_accepted))
        text, stats = text + piece.text, piece.stats
        tokens += piece.tokens
        show(piece, rounds[-1])
    return Decoded(text, tokens, rounds, _counts(stats, 0, seconds))


def _counts(stats: Stats, row: int, seconds: float) -> Counts:
    return Counts(prompts=1, seconds=seconds, **{name: int(x[row]) for name, x in stats._asdict().items()})


def _colour(out: Console) -> bool:
    return out.is_terminal and not out.no_color


def _trace_line(session: Session, number: int, step: Round, out: Console) -> Text:
    return render.trace(session.target.tokenizer, number, step, width=out.width, colour=_colour(out))


def _exchange(session: Session, prompt: str, settled: str, fresh: str, note: Text | None = None) -> Any:
    return render.exchange(prompt, settled, fresh, session.target.lm.start_token is None, note)


def _headline(session: Session) -> Text:
    import jax

    def name(model: Model) -> str:
        return f"{model.name} ({render.count(sum(x.size for x in jax.tree.leaves(model.params)))})"

    s = session.settings
    drafted = "plain decoding"
    if session.drafter is not None:
        drafted = f"{s.gamma} guesses a round from {name(session.drafter)}"
    law = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}, seed {s.seed}"
    device = jax.devices()[0].device_kind
    return Text(f"{name(session.target)} · {drafted} · {law} · {s.dtype} on {device}", "bold")


def _print_counts(session: Session, decoded: Sequence[Decoded], out: Console) -> None:
    counts = render.total([row.counts for row in decoded])
    out.print(render.counts_table(counts))
    draft = session.drafter.name if session.drafter is not None and session.settings.gamma else None
    out.print(Text(render.counts_sentence(counts, session.target.name, draft)))


def _compare(session: Session, drafter: Model, rows: int) -> Comparison:
    """Both ways of decoding in turn, `rows` prompts at a time, and what theory says to it."""
    import jax
    import numpy as np

    from jaxspec.analysis import acceptance, cost, theory

    s, target, starts = session.settings, session.target, range(0, len(session.texts), rows)
    sides = [[_job(session, at, at + rows, drafter=d) for at in starts] for d in (drafter, None)]
    runs = [functools.partial(_run, jobs) for jobs in sides]
    texts = [run() for run in runs]  # also compiles
    seconds = np.median(cost.take_turns(runs, REPEATS), axis=1)
    speeds = [float(sum(map(len, said)) / t) for said, t in zip(texts, seconds, strict=True)]
    where = _first_difference(session, *texts) if s.temperature == 0 else None
    options = session.options()
    gamma = options.pop("gamma")
    prompt, keys = session.rows(0, len(session.texts))
    alpha = acceptance.measure(target, prompts=prompt, key=keys, **options).alpha
    costs = cost.measure(
        target,
        drafter,
        session.rows(0, rows)[0],
        gamma=gamma,
        repeats=REPEATS,
        max_new_tokens=s.max_new_tokens,
    )
    size = sum(x.nbytes for x in jax.tree.leaves(target.params))
    return Comparison(
        gamma=gamma,
        speculative=speeds[0],
        plain=speeds[1],
        identical=where is None if s.temperature == 0 else None,
        difference=where,
        alpha=alpha,
        c=costs.c,
        v=costs.v,
        expected=float(theory.expected_tokens(alpha, gamma)),
        predicted=float(theory.improvement(alpha, gamma, costs.c, costs.v)),
        cached=jax.default_backend() == "cpu" and size < CPU_CACHE,
    )


def _run(jobs: Sequence[Any]) -> list[list[int]]:
    """The new tokens of every prompt of some jobs."""
    import numpy as np

    from jaxspec.decode import loop

    outcomes = [loop.run(*job) for job in jobs]
    rows = [(t, n) for o in outcomes for t, n in zip(np.asarray(o.tokens), np.asarray(o.length), strict=True)]
    return [tokens[:length].tolist() for tokens, length in rows]


def _first_difference(session: Session, ours: list[list[int]], plain: list[list[int]]) -> str | None:
    """Where speculative and plain text part, in words; None if they do not."""
    differ = [index for index, (a, b) in enumerate(zip(ours, plain, strict=True)) if a != b]
    if not differ:
        return None
    index = differ[0]
    a, b = ours[index], plain[index]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    names = [render.spell(session.target.tokenizer, a[:at], text[at : at + 1]) or ["nothing"] for text in (a, b)]
    return (
        f"{len(differ)} of {len(ours)} prompts; first in prompt {index + 1}, token {at + 1}: {names[0][0]!r} "
        f"where plain decoding has {names[1][0]!r}. Passes of other widths round otherwise: is it a near tie?"
    )


def _report(session: Session, decoded: list[Decoded], found: Comparison | None, trace: bool) -> dict[str, Any]:
    """What --json prints."""
    from jaxspec.analysis import cost

    counts = [row.counts for row in decoded]
    about = cost.environment()
    report: dict[str, Any] = {
        "prompts": session.texts,
        "texts": [row.text for row in decoded],
        "tokens": [row.tokens for row in decoded],
        "stats": {
            **{field: [getattr(c, field) for c in counts] for field in ("rounds", "drafted", "accepted", "emitted")},
            "total": _with_rates(render.total(counts)),
        },
        "settings": dataclasses.asdict(session.settings),
        "versions": {name: about[name] for name in ("jaxspec", "jax", "jaxlib", "python")},
        "device": {name: about[name] for name in ("device", "devices", "cpu", "cpus", "platform")},
    }
    if trace:
        report["rounds"] = [[_round(step) for step in row.rounds] for row in decoded]
    if found is not None:
        report["compare"] = {**found._asdict(), "ratio": found.ratio}
    return report


def _with_rates(counts: Counts) -> dict[str, float]:
    rates = {name: getattr(counts, name) for name in ("acceptance_rate", "tokens_per_round", "tokens_per_second")}
    return {**counts._asdict(), **rates}


def _round(step: Round) -> dict[str, Any]:
    return {"tokens": step.new, "draft": step.draft, "accepted": step.num_accepted}
