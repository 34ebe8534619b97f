"""`jaxspec bench`: how fast a model decodes, plainly and speculatively, beside what theory predicts.

All ways to decode run in one process on the same prompts, compiled and warmed up, taking turns; what is timed
is the jitted program, from prompt ids to the last token (text in and text out are the tokenizer's business).
Every speed comes with its spread, and the report with the machine, the versions and the command.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxspec.cli import render
from jaxspec.cli.generate import DRAFT, TARGET, heldout

if TYPE_CHECKING:  # jax takes a second to import, and --help does not need it
    from jaxspec.base import Model, Prompt
    from jaxspec.decode.loop import Outcome
    from jaxspec.decode.request import Job


class Ask(NamedTuple):
    """What to measure.

    Attributes:
        gammas: guesses a round, one measurement each (none: plain decoding only).
        batches: batch sizes, one measurement each.
        new_tokens: most new tokens per prompt.
        rows: prompts that one timed run decodes, rounded to whole batches.
        repeats: timed runs of each way to decode.
    """

    gammas: tuple[int, ...] = (1, 4, 7)
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 64
    rows: int = 8
    repeats: int = 5

    @property
    def steps(self) -> int:
        """Measurements: for each batch size one per way to decode, and one of alpha for all."""
        return len(self.batches) * (1 + len(self.gammas)) + bool(self.gammas)


def bench(
    target: Annotated[str, typer.Option(help="The model to decode from: a shipped checkpoint or a folder.")] = TARGET,
    draft: Annotated[str, typer.Option(help="The model that guesses.")] = DRAFT,
    shape: Annotated[
        str,
        typer.Option(help="Instead of --target: random weights at a published shape, such as t5-v1_1-base."),
    ] = "",
    draft_shape: Annotated[str, typer.Option(help="The same for the drafter of a --shape.")] = "",
    widen: Annotated[
        int,
        typer.Option(help="Widen the target's feed-forward blocks to this: same text, the cost of the size."),
    ] = 0,
    gamma: Annotated[str, typer.Option("--gamma", "-g", help="Guesses a round, separated by commas.")] = "1,4,7",
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    new_tokens: Annotated[int, typer.Option(help="Most tokens per prompt; with --shape, exactly so many.", min=1)] = 64,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file of prompts, one a line, or .jsonl with inputs; else held-out ones."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Prompts that one timed run decodes.", min=1)] = 8,
    source_tokens: Annotated[int, typer.Option(help="Tokens per random prompt of a --shape.", min=1)] = 64,
    repeats: Annotated[int, typer.Option(help="Timed runs of each way to decode.", min=1)] = 5,
    dtype: Annotated[str, typer.Option(help="Of the computation: float32 or bfloat16.")] = "float32",
    plain_only: Annotated[bool, typer.Option("--plain-only", help="Plain decoding only, no drafter.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and nothing else on standard output.")
    ] = False,
) -> None:
    """Measure the speed, latency and memory of plain and speculative decoding, beside what theory predicts.

    Greedy decoding, whole generations on the device; text in and text out are not timed. Published shapes are
    those of `jaxspec models`:

    jaxspec bench --gamma 4 --batch 1,16

    jaxspec bench --shape t5-v1_1-base --plain-only
    """
    gammas = () if plain_only else numbers(gamma, "--gamma")
    ask = Ask(gammas, numbers(batch, "--batch"), new_tokens, rows, repeats)
    if shape and gammas and not draft_shape:
        raise ValueError(f"--shape {shape} has no drafter: add a --draft-shape, or --plain-only")
    if draft_shape and not shape:
        raise ValueError(f"--draft-shape {draft_shape} is for a --shape: a random drafter guesses nothing right")
    before = process_bytes()
    big, small = _models(target, draft, shape, draft_shape, dtype, drafts=bool(gammas))
    if widen:
        from jaxspec.nets import widen as wider

        big = wider.widen(big, widen)
    needed = max(rows, *ask.batches)
    prompt = random_prompt(big, needed, source_tokens) if shape else _prompts(big, prompts, needed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("bench", total=ask.steps)

        def advance(doing: str) -> None:
            bar.update(task, advance=1, description=doing)

        found = collect(big, small, prompt, ask, eos_ids=() if shape else None, advance=advance)
    found["process"] = {"before": before, "peak": process_bytes(), "device_peak": device_bytes()}
    if as_json:
        print(json.dumps(found))
        return
    out = Console(highlight=False)
    out.print(headline(found), speed_table(found), sep="\n")
    if any("ratio" in row for row in found["results"]):
        out.print(theory_table(found))
    out.print(detail_table(found), *notes(found), sep="\n")


def collect(
    target: Model,
    drafter: Model | None,
    prompt: Prompt,
    ask: Ask,
    *,
    eos_ids: Sequence[int] | None = None,
    advance: Callable[[str], object] = lambda doing: None,
) -> dict[str, Any]:
    """All measurements, greedy.

    Args:
        target: the model to decode from.
        drafter: the model that drafts; None if `ask.gammas` is empty.
        prompt: at least one row; used in turn where a batch needs more.
        ask: what to measure.
        eos_ids: as in `jaxspec.generate`; () makes every row `ask.new_tokens` long.
        advance: called with what has been measured, for a progress bar.

    Returns:
        "environment", "target", "draft", "alpha" (None without a drafter) and "results", one per batch size
        and gamma (0 is plain decoding); times in milliseconds, memory in bytes, spreads as median, min, max.
    """
    from jaxspec.analysis import acceptance, cost

    found: dict[str, Any] = {"environment": cost.environment(), "target": _describe(target)}
    found |= {"draft": None if drafter is None else _describe(drafter), **ask._asdict(), "alpha": None}
    if drafter is not None and ask.gammas:
        (pool,) = _groups(prompt, ask.rows, ask.rows)
        measured = acceptance.measure(target, drafter, pool, max_new_tokens=ask.new_tokens)
        found["alpha"] = {"alpha": measured.alpha, "stderr": measured.stderr, "positions": measured.positions}
        advance("alpha")
    found["results"] = []
    for batch in ask.batches:
        found["results"] += _of_batch(target, drafter, prompt, batch, ask, found["alpha"], eos_ids, advance)
    return found


def _of_batch(
    target: Model,
    drafter: Model | None,
    prompt: Prompt,
    batch: int,
    ask: Ask,
    alpha: dict[str, Any] | None,
    eos_ids: Sequence[int] | None,
    advance: Callable[[str], object],
) -> list[dict[str, Any]]:
    """Plain decoding and every gamma at one batch size."""
    from jaxspec.analysis import cost
    from jaxspec.decode import request

    groups, gammas = _groups(prompt, batch, ask.rows), (0, *ask.gammas)
    models = [model for model in (target, drafter) if model is not None]
    options: dict[str, Any] = dict(temperature=0.0, top_k=None, top_p=None, key=None, accept=None, eos_ids=eos_ids)
    options["max_new_tokens"] = ask.new_tokens
    jobs = [
        [request.prepare(target, group, drafter=drafter, gamma=gamma, **options) for group in groups]
        for gamma in gammas
    ]
    outcomes = [[_run(job) for job in some] for some in jobs]  # compiles
    runs = [functools.partial(_run_all, some) for some in jobs]
    seconds = cost.take_turns(runs, ask.repeats)
    first = cost.take_turns([functools.partial(_start, some[0]) for some in jobs], ask.repeats + 1)[:, 1:]
    results = []
    for index, gamma in enumerate(gammas):
        tokens = sum(int(outcome.length.sum()) for outcome in outcomes[index])
        result: dict[str, Any] = {
            "batch": batch,
            "gamma": gamma,
            "prompts": batch * len(groups),
            "tokens": tokens,
        }
        result["tokens_per_second"] = spread(tokens / seconds[index])
        result["first_token_ms"] = spread(1e3 * first[index])
        result["token_ms"] = latency(jobs[index][0])
        result["memory"] = memory(jobs[index][0], models if gamma else models[:1])
        if gamma and drafter is not None and alpha is not None:
            measured = cost.measure(
                target, drafter, groups[0], gamma=gamma, repeats=ask.repeats, max_new_tokens=ask.new_tokens
            )
            after = seconds - len(groups) * np.median(first, axis=1, keepdims=True)  # without prefill
            result |= _compare(outcomes[0], outcomes[index], seconds[0], seconds[index])
            result["ratio_after_prefill"] = _ratio(after[0], after[index])
            result |= _predict(result["passes_saved"], gamma, alpha["alpha"], measured)
        results.append(result)
        advance(f"batch {batch}, " + (f"gamma {gamma}" if gamma else "plain"))
    return results


def _compare(
    plain: Sequence[Outcome], ours: Sequence[Outcome], plain_seconds: np.ndarray, our_seconds: np.ndarray
) -> dict[str, Any]:
    """Speculative runs against plain ones: speeds (of tokens, should their numbers differ), texts, rounds."""
    same = [a == b for p, o in zip(plain, ours, strict=True) for a, b in zip(_texts(p), _texts(o), strict=True)]
    tokens = [sum(int(outcome.length.sum()) for outcome in outcomes) for outcomes in (plain, ours)]
    rounds = sum(int(outcome.stats.rounds.sum()) for outcome in ours)
    emitted = sum(int((outcome.stats.emitted - 1).sum()) for outcome in ours)
    passes = [sum(int(outcome.stats.rounds.max()) for outcome in outcomes) for outcomes in (plain, ours)]
    return {
        "ratio": _ratio(plain_seconds, our_seconds, tokens[1] / tokens[0]),
        "same_text": sum(same),
        "tokens_per_round": emitted / max(rounds, 1),
        "passes_saved": passes[0] / max(passes[1], 1),
    }


def _predict(passes_saved: float, gamma: int, alpha: float, measured: Any) -> dict[str, Any]:
    """What Theorem 3.8 promises: from the passes that were really saved, and from alpha alone."""
    from jaxspec.analysis import theory

    names = ("target_ms", "verify_ms", "draft_ms", "c", "v")
    return {name: getattr(measured, name) for name in names} | {
        "predicted": passes_saved / (gamma * measured.c + measured.v),
        "predicted_from_alpha": float(theory.improvement(min(alpha, 1.0), gamma, measured.c, measured.v)),
    }


def _ratio(plain: np.ndarray, ours: np.ndarray, tokens: float = 1.0) -> dict[str, float] | None:
    """How many times as fast as plain decoding, repeat by repeat; None if noise leaves no time at all."""
    return spread(tokens * plain / ours) if (plain > 0).all() and (ours > 0).all() else None


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, least and largest.

    >>> spread(np.array([1.0, 4.0, 2.0]))
    {'median': 2.0, 'min': 1.0, 'max': 4.0}
    """
    return {"median": float(np.median(values)), "min": float(np.min(values)), "max": float(np.max(values))}


def latency(job: Job) -> dict[str, float] | None:
    """Milliseconds per token to a reader of the stream: each round's time over the tokens it brought.

    Returns:
        The 50th and 95th percentile over tokens; None if no row goes beyond its first token.
    """
    from jaxspec.decode import loop

    def step(state):
        return loop.advance(job.decoder, job.keys, job.weights, state)

    step(loop.start(*job))  # compiles
    state, taken = loop.start(*job), []
    while not np.asarray(state.done).all():
        began = time.perf_counter()
        state, info = step(state)
        kept = np.asarray(info.kept)
        took = 1e3 * (time.perf_counter() - began)
        taken += [took / n for n in kept.tolist() for _ in range(n)]
    if not taken:
        return None
    return {"p50": float(np.percentile(taken, 50)), "p95": float(np.percentile(taken, 95))}


def memory(job: Job, models: Sequence[Model]) -> dict[str, int | None]:
    """Bytes of the program of one generation, and of what it cannot do without.

    Args:
        job: the generation.
        models: target, and drafter if there is one.

    Returns:
        "program": arguments, results and temporaries by the compiler's own account (None if it gives none);
        "weights"; "caches", the drafter's too; "logits", one block [batch, gamma + 1, vocab] of each model.
    """
    import jax

    from jaxspec import buffers
    from jaxspec.decode import loop

    def begin():
        room = buffers.room(job.max_new_tokens, job.decoder.gamma)
        state = job.decoder.init(job.keys, job.weights, job.prompt, job.request, room)
        return state.cache, state.drafter

    stats = loop.run.lower(*job).compile().memory_analysis()
    program = None
    if stats is not None:
        program = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        program -= stats.alias_size_in_bytes
    positions = len(job.prompt.length) * (job.decoder.gamma + 1)
    logits = 4 * positions * sum(model.lm.vocab_size for model in models)
    return {
        "program": program,
        "weights": _bytes(job.weights),
        "caches": _bytes(jax.eval_shape(begin)),
        "logits": logits,
    }


def random_model(shape: str, dtype: str, seed: int) -> Model:
    """A model of random weights at a published shape: the cost of the real one, and no sense.

    Raises:
        ValueError: no such shape or dtype.
    """
    import jax

    from jaxspec.base import Model
    from jaxspec.model import DTYPES
    from jaxspec.nets import gpt, t5
    from jaxspec.weights import orbax

    sizes = t5.SIZES | gpt.SIZES
    if shape not in sizes:
        raise ValueError(f"no shape {shape!r}{orbax.suggest(shape, sizes)} Expected one of {', '.join(sizes)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {DTYPES}")
    config = dataclasses.replace(sizes[shape], dtype=dtype)
    net: Any = t5 if isinstance(config, t5.T5Config) else gpt

    @jax.jit
    def init(key):
        return orbax.cast(net.init(config, key), dtype)

    return Model(net.language_model(config), init(jax.random.key(seed)), config=config, name=f"random {shape}")


def random_prompt(model: Model, rows: int, tokens: int) -> Prompt:
    """Rows of random token ids, all of one length."""
    from jaxspec import buffers

    ids = np.random.default_rng(0).integers(0, model.lm.vocab_size, (rows, tokens))
    return buffers.pad(ids.tolist())


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Positive integers separated by commas, each once.

    >>> numbers("1,4, 7,4", "--gamma")
    (1, 4, 7)
    """
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{option} is {text!r}: expected positive integers separated by commas")
    return found


def process_bytes() -> int | None:
    """Peak memory of this process so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def device_bytes() -> int | None:
    """Peak memory of the device so far; None on a CPU, whose memory is the process's."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def headline(found: dict[str, Any]) -> Text:
    """What was measured, and on what."""
    sides = [found[side] for side in ("target", "draft") if found[side]]
    about = found["environment"]
    machine = about["cpu"] if about["device"] == "cpu" else about["device"]
    names = " and ".join(f"{side['name']} ({render.count(side['parameters'])})" for side in sides)
    how = f"greedy, {found['new_tokens']} new tokens, {sides[0]['dtype']}"
    return Text(f"{names} · {how} · {machine}, {about['cpus']} CPUs · jax {about['jax']}", "bold")


def speed_table(found: dict[str, Any]) -> Table:
    """Speeds, and whether the texts are the same."""
    table = _table(["batch", "γ", "tokens/s", "min..max", "speed-up", "min..max", "same text"])
    for row in found["results"]:
        speed = row["tokens_per_second"]
        cells = [*_which(row), f"{speed['median']:.1f}", f"{speed['min']:.1f}..{speed['max']:.1f}"]
        if "ratio" in row:
            ratio = row["ratio"]
            cells += [f"{ratio['median']:.2f}×", f"{ratio['min']:.2f}..{ratio['max']:.2f}"]
            cells += [f"{row['same_text']} of {row['prompts']}"]
        table.add_row(*cells)
    return table


def theory_table(found: dict[str, Any]) -> Table:
    """What Theorem 3.8, which is about the time after prefill, makes of the measured costs."""
    heads = ["batch", "γ", "tokens\nper round", "c", "v", "predicted", "predicted\nfrom α", "measured,\nno prefill"]
    table = _table(heads)
    for row in found["results"]:
        if "ratio" in row:
            after = row["ratio_after_prefill"]
            cells = [*_which(row), f"{row['tokens_per_round']:.2f}", f"{row['c']:.3f}", f"{row['v']:.2f}"]
            cells += [f"{row['predicted']:.2f}×", f"{row['predicted_from_alpha']:.2f}×"]
            table.add_row(*cells, f"{after['median']:.2f}×" if after else "–")
    return table


def detail_table(found: dict[str, Any]) -> Table:
    """Latency and memory."""
    heads = [
        "batch",
        "γ",
        "first\ntoken\nms",
        "p50 per\ntoken\nms",
        "p95\n\nms",
        "program",
        "what it\nneeds",
        "times\nthat",
    ]
    table = _table(heads)
    for row in found["results"]:
        used, token = row["memory"], row["token_ms"]
        needs = used["weights"] + used["caches"] + used["logits"]
        cells = [*_which(row), f"{row['first_token_ms']['median']:.1f}"]
        cells += [f"{token['p50']:.2f}", f"{token['p95']:.2f}"] if token else ["–", "–"]
        if used["program"] is None:
            table.add_row(*cells, "–", render.size(needs), "–")
        else:
            table.add_row(*cells, render.size(used["program"]), render.size(needs), f"{used['program'] / needs:.2f}")
    return table


def notes(found: dict[str, Any]) -> list[Text]:
    """What the numbers mean, in sentences."""
    alpha, process = found["alpha"], found["process"]
    lines: list[str] = []
    if alpha:
        about = f"{alpha['alpha']:.3f} ± {alpha['stderr']:.3f} over {alpha['positions']} positions"
        lines.append(f"α = {about}. Predicted: Theorem 3.8 with v, from the passes saved, and from α alone.")
    for row in found["results"]:
        if "ratio" in row and row["ratio"]["median"] < 1:
            cost = row["gamma"] * row["c"] + row["v"]
            lines.append(
                f"Batch {row['batch']}, γ = {row['gamma']}: slower than plain decoding. A round costs "
                f"{cost:.2f} one-token passes of the target (γc + v) and does the work of "
                f"{row['passes_saved']:.2f}."
            )
    peaks = {
        "process": process["peak"],
        "before the models": process["before"],
        "device": process["device_peak"],
    }
    lines.append("A program needs its weights, its caches, and a block of logits [batch, γ + 1, vocabulary] per model.")
    lines.append("Peak memory: " + ", ".join(f"{name} {render.size(n)}" for name, n in peaks.items() if n))
    return [Text(line) for line in lines]


def _which(row: dict[str, Any]) -> list[str]:
    return [f"{row['batch']}", f"{row['gamma']}" if row["gamma"] else "plain"]


def _table(heads: Sequence[str]) -> Table:
    table = Table(box=box.ROUNDED)
    for head in heads:
        table.add_column(head, justify="right", vertical="bottom")
    return table


def _models(
    target: str, draft: str, shape: str, draft_shape: str, dtype: str, drafts: bool
) -> tuple[Model, Model | None]:
    """Target and drafter, loaded or random."""
    if shape:
        return random_model(shape, dtype, seed=0), random_model(draft_shape, dtype, seed=1) if drafts else None
    from jaxspec import model

    return model.load(target, dtype=dtype), model.load(draft, dtype=dtype) if drafts else None


def _prompts(target: Model, file: Path | None, rows: int) -> Prompt:
    """The first prompts of a file, or of the held-out ones, all padded to one bucket."""
    from jaxspec.decode import request

    if file is None:
        texts = heldout("text" if target.lm.start_token is None else "translation", rows)
    else:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:rows]
        texts = [json.loads(line)["input"] for line in lines] if file.suffix == ".jsonl" else lines
    if not texts:
        raise ValueError(f"{file} holds no prompt: expected one a line")
    return request.encode(target, texts)


def _groups(prompt: Prompt, batch: int, rows: int) -> list[Prompt]:
    """About `rows` prompts in whole batches, beginning again where there are too few."""
    have = len(prompt.length)
    index = np.arange(batch * max(1, rows // batch)).reshape(-1, batch) % have
    return [prompt._replace(tokens=prompt.tokens[some], length=prompt.length[some]) for some in index]


def _describe(model: Model) -> dict[str, Any]:
    import jax

    leaves = jax.tree.leaves(model.params)
    dtype = getattr(model.config, "dtype", str(leaves[0].dtype))
    return {"name": model.name, "parameters": sum(x.size for x in leaves), "dtype": dtype}


def _run(job: Job) -> Outcome:
    """One whole generation, on the host."""
    import jax

    from jaxspec.decode import loop

    return jax.tree.map(np.asarray, loop.run(*job))


def _run_all(jobs: Sequence[Job]) -> None:
    from jaxspec.decode import loop

    for job in jobs:
        loop.run(*job).tokens.block_until_ready()


def _start(job: Job) -> None:
    from jaxspec.decode import loop

    loop.start(*job).tokens.block_until_ready()


def _texts(outcome: Outcome) -> list[list[int]]:
    """The real tokens of each row."""
    return [tokens[:length].tolist() for tokens, length in zip(outcome.tokens, outcome.length, strict=True)]


def _bytes(tree: Any) -> int:
    import jax

    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
