"""The output of `generate`: texts or traces, live; counts and comparisons in words and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxspec import nets, sharding, trace
from jaxspec.cli import console, prefill
from jaxspec.cli.console import Console, Record
from jaxspec.cli.pair import Pair
from jaxspec.core import BoundDrafter, Model, Stats
from jaxspec.decode.request import Prepared
from jaxspec.trace import terminal
from jaxspec.vocab import trim
from jaxspec.weights import quantisation

if TYPE_CHECKING:
    from jaxspec.analysis.result import BenchResult

REPEATS = 5  # runs of each side of a comparison, interleaved
CPU_CACHE = 100e6  # bytes of parameters that the caches of a large CPU may hold
IDLE = 1.25  # one-token passes: a verify pass below this cost runs on idle compute
REPORTED = (
    "text",
    "tokens",
    "finish",
    "raw_log_probs",
    "sampled_log_probs",
    "top_tokens",
    "top_log_probs",
)
Records = Iterable[Record]  # the records of a prompt: see `generate._decoded`


def headline(prepared: Prepared, pair: Pair) -> Text:
    """Names the models, the drafter and the device, and the axes that a mesh cannot split."""

    target = prepared.target
    drafter = prepared.options.drafter
    drafting = "plain decoding" if drafter is None else _drafting(drafter, pair)
    temperature = prepared.options.sampling.get("temperature") or 0
    distribution = "greedy"
    if temperature != 0:
        distribution = f"temperature {temperature:g}, seed {pair.seed}"
    device = jax.devices()[0].device_kind
    if pair.mesh:
        device += f" ({pair.mesh})"
    parts = [_sized(target), drafting, distribution, f"{pair.dtype} on {device}"]
    lines = [Text(" · ".join(parts), "bold")]
    mesh = sharding.mesh_of(target.params)
    for model in (target, drafter):
        if mesh is None or not isinstance(model, Model) or model.config is None:
            continue
        axes = sharding.kept_whole(nets.axes_of(model.config), mesh)
        if axes:
            lines.append(Text(f"{model.name}: whole on every device: {', '.join(axes)}"))
    if not prepared.decoder.exact:
        lines.append(
            Text(
                f"The rule {pair.rule} is inexact: the text need not have the target's "
                "distribution.",
                "yellow",
            )
        )
    return Text("\n").join([*lines, Text()])


def _sized(model: Model) -> str:
    """Names a model, with its number of parameters."""
    count = quantisation.count(trim.untrimmed(model).params)
    return f"{model.name} ({console.count(count)})"


def _drafting(drafter: Model | BoundDrafter, pair: Pair) -> str:
    """Describes the draft of a round: how many tokens, from which drafter, by which policy."""
    name = str(pair.draft)
    limit = pair.gamma
    if isinstance(drafter, Model):
        name = _sized(drafter)
    elif drafter.functions.tree:
        limit = drafter.functions.tree.nodes
    described = f"{limit} draft tokens a round from {name}"
    if pair.policy:
        described = f"up to {described}, {pair.policy}"
    if pair.draft_dtype not in ("", pair.dtype):
        described += f", in {pair.draft_dtype}"
    return described


def show_text(prompt: str, records: Records, target: Model, out: Console) -> Record:
    """Prints a prompt with its text, live if records are streamed; returns the last record."""
    continues = target.lm.limits.start_token is None
    shown = ""
    record = {}
    # The live view is transient; the whole text is printed in the end.
    with Live(console=out, auto_refresh=False, transient=True, vertical_overflow="visible") as live:
        for record in records:
            if out.is_terminal:
                fresh = record["text"][len(shown) :]
                live.update(exchange(prompt, shown, fresh, continues), refresh=True)
            shown = record["text"]
    out.print(exchange(prompt, shown, "", continues, note(record)), "")
    return record


def show_trace(prompt: str, records: Records, target: Model, out: Console) -> Record:
    """Prints a line for each round, live if records are streamed; returns the last record."""
    colour = out.is_terminal and not out.no_color
    out.print(Text(prompt, "dim"))
    printed = 0
    record = {}
    for record in records:
        for step in record["trace"][printed:]:
            out.print(
                terminal.trace(target.tokenizer, printed, step, width=out.width, colour=colour)
            )
            printed += 1
    out.print()
    return record


def labels(prompt: str) -> tuple[str, str, str]:
    """Returns labels for a prompt and its answer, and the prompt without a T5 task prefix.

    >>> labels("translate English to German: A new cat."), labels("summarize: A long story.")[:2]
    (('English', 'German', 'A new cat.'), ('text', 'summary'))
    """
    task = re.match(r"translate (\w+) to (\w+): ", prompt)
    if task:
        return task[1], task[2], prompt[task.end() :]
    if prompt.startswith("summarize: "):
        return "text", "summary", prompt.removeprefix("summarize: ")
    return "prompt", "answer", prompt


def exchange(
    prompt: str, settled: str, fresh: str, continues: bool, last: Text | None = None
) -> RenderableType:
    """Lays out a prompt, its text so far (`fresh` is from the last round), and a last line.

    The text of a decoder-only model `continues` the prompt; an encoder-decoder's answers it.
    """
    text = Text.assemble(settled, (fresh, "bold cyan"))
    source, answer, body = labels(prompt)
    rows = [(source, Text(body, "dim")), (answer, text)]
    if continues:
        rows = [("text", Text.assemble((prompt, "dim"), text))]
    if last is not None:
        rows.append(("", last))
    return _grid(rows, "left")


def hypotheses(prompt: str, records: Sequence[Record]) -> RenderableType:
    """Lays out a prompt and the texts that a search found, with their scores."""
    source, _, body = labels(prompt)
    rows = [(source, Text(body, "dim"))]
    rows += [(f"{record['score']:.4f}", Text(record["text"])) for record in records]
    return _grid(rows, "right")


def _grid(rows: Iterable[tuple[str, Text]], justify: Any) -> Table:
    """Lays out texts beside their labels."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, justify=justify)
    grid.add_column(ratio=1)
    for row in rows:
        grid.add_row(*row)
    return grid


def total(records: Sequence[Record]) -> Record:
    """Returns the totals and ratios of prompts. No round makes a prompt's first token.

    >>> total([{"rounds": 4, "drafted": 20, "accepted": 12, "emitted": 17, "seconds": 0.5}])[
    ...     "tokens_per_round"
    ... ]
    4.0
    """
    measured = [name for name in prefill.BY_ROW if name in records[0]]
    sums = {
        name: sum(record[name] for record in records)
        for name in (*Stats._fields, "seconds", *measured)
    }
    later = sums["emitted"] - len(records)  # tokens of rounds
    seconds = sums["seconds"]
    counts = {"prompts": len(records)} | sums | {
        "acceptance_rate": sums["accepted"] / max(1, sums["drafted"]),
        "tokens_per_round": later / max(1, sums["rounds"]),
        "tokens_per_second": _per_second(sums["emitted"], seconds),
    }  # fmt: skip
    if not measured:
        return counts
    decode = seconds - sums["prefill_seconds"]
    return counts | {
        "decode_seconds": decode,
        "prefill_tokens_per_second": _per_second(sums["read_tokens"], sums["prefill_seconds"]),
        "decode_tokens_per_second": _per_second(later, decode),
    }


def _per_second(tokens: int, seconds: float) -> float:
    if seconds > 0:
        return tokens / seconds
    return 0.0


def note(record: Record) -> Text:
    """Writes the counts of one prompt in one dim line."""
    counts = total([record])
    parts = [f"{counts['emitted']} tokens", f"{counts['rounds']} rounds"]
    if counts["drafted"]:
        parts += [
            f"{counts['tokens_per_round']:.1f} tokens a round",
            f"{counts['acceptance_rate']:.0%} accepted",
        ]
    if "read_tokens" in counts:
        parts.append(f"{counts['read_tokens']} tokens read in {counts['prefill_seconds']:.2f} s")
        parts.append(f"then {counts['decode_tokens_per_second']:.0f} tokens/s")
    else:
        parts.append(f"{counts['tokens_per_second']:.0f} tokens/s")
    return Text(" · ".join(parts), "dim italic")


def totals_sentence(counts: Record, target: str, draft: str | None) -> str:
    """Returns a sentence about all prompts: the source of their tokens, and the speed."""
    later = counts["emitted"] - counts["prompts"]
    prompts = counts["prompts"]
    first = "the first of them by reading the prompt"
    if prompts > 1:
        first = f"{prompts} of them, each prompt's first, by reading the prompts"
    speed = f"{counts['emitted']} tokens at {counts['tokens_per_second']:.1f} tokens/s: {first};"
    if draft is None:
        return f"{speed} the other {later} by one pass of {target} each (plain decoding)."
    return (
        f"{speed} the other {later} in {counts['rounds']} rounds, {counts['tokens_per_round']:.2f} "
        f"tokens a round. A round is one pass of {target} over {draft}'s draft tokens: of "
        f"{counts['drafted']} drafted, {counts['accepted']} were accepted "
        f"({counts['acceptance_rate']:.1%})."
    )


def halves_sentence(counts: Record) -> str:
    """Returns the times of prefill and of decoding; prefill makes each prompt's first token.

    >>> counts = {"rounds": 4, "drafted": 20, "accepted": 12, "emitted": 17, "seconds": 0.75}
    >>> print(halves_sentence(total([counts | {"read_tokens": 100, "prefill_seconds": 0.25}])))
    Prefill: 100 tokens in 0.25 s (400.0 tokens/s). Decode: 16 tokens in 0.50 s (32.0 tokens/s).
    """
    return (
        f"Prefill: {counts['read_tokens']:,} tokens in {counts['prefill_seconds']:.2f} s "
        f"({counts['prefill_tokens_per_second']:,.1f} tokens/s). "
        f"Decode: {counts['emitted'] - counts['prompts']:,} tokens in "
        f"{counts['decode_seconds']:.2f} s "
        f"({counts['decode_tokens_per_second']:,.1f} tokens/s)."
    )


def row_report(prompt: str, record: Record, trace: bool) -> Record:
    """Reports one prompt for JSON; `trace` adds the rounds."""
    report = {"prompt": prompt} | {name: record[name] for name in REPORTED if name in record}
    report["stats"] = {
        name: record[name] for name in (*Stats._fields, *prefill.BY_ROW) if name in record
    }
    if trace:
        report["rounds"] = [
            {"tokens": step.new, "draft": step.draft, "accepted": step.num_accepted}
            | ({} if step.parent is None else {"parent": step.parent, "path": step.path})
            | ({} if step.numbers is None else {"numbers": step.numbers})
            for step in record["trace"]
        ]
    return report


def totals_report(
    prepared: Prepared,
    settings: Record,
    records: Sequence[Record],
    results: tuple[BenchResult, BenchResult] | None,
) -> Record:
    """Reports all prompts together for JSON; `results` come from --compare."""
    from jaxspec.analysis import environment

    machine = environment.current()
    report: Record = {
        "exact": prepared.decoder.exact,
        "stats": {"total": total(records)},
        "settings": settings,
        "versions": {
            name: getattr(machine, name) for name in ("jaxspec", "jax", "jaxlib", "python")
        },
        "device": {
            name: getattr(machine, name)
            for name in ("device", "devices", "cpu", "cpus", "platform")
        },
    }
    if results is not None:
        report["compare"] = dict(zip(("plain", "speculative"), results, strict=True))
    return report


def whole_report(
    prompts: Sequence[str], records: Sequence[Record], trace: bool, totals: Record
) -> Record:
    """Joins the reports of single prompts, as lists, with the totals."""
    rows = [row_report(*row, trace) for row in zip(prompts, records, strict=True)]
    lists = {f"{name}s": [row[name] for row in rows] for name in ("prompt", "text")} | {
        name: [row[name] for row in rows] for name in (*REPORTED[1:], "rounds") if name in rows[0]
    }
    counts = {name: [row["stats"][name] for row in rows] for name in rows[0]["stats"]}
    return {**lists, **totals, "stats": counts | totals["stats"]}


def compare(
    prepared: Prepared,
    pair: Pair,
    batch: int,
    quantities: Sequence[str] = ("speed", "alpha", "costs"),
) -> tuple[BenchResult, BenchResult]:
    """Times plain and speculative decoding of prompts, a batch at a time."""
    from jaxspec.analysis import bench
    from jaxspec.analysis.result import setting_of

    texts = len(prepared.prompt.length)
    # bench decodes whole prompts, without a shared prefix
    setting = setting_of(prepared.replace(prefix=None), "prompts", min(batch, texts))
    setting = setting._replace(name=pair.draft or "", policy_name=pair.policy)
    config = bench.Config(
        num_prompts=texts, repeats=REPEATS, seed=pair.seed, quantities=tuple(quantities)
    )
    plain, speculative = bench.run(prepared.target, [setting], config=config)
    if speculative.error is not None:
        raise FloatingPointError(speculative.error)
    return plain, speculative


def in_a_sentence(prepared: Prepared, pair: Pair, batch: int) -> str:
    """Times speculative and plain decoding, interleaved, and reports their ratio."""
    _, result = compare(prepared, pair, batch, ["speed"])
    ratio = result.speed
    assert ratio is not None
    speed = (
        f"{ratio.median:.2f} times the speed of plain decoding, interleaved ({ratio.min:.2f} to "
        f"{ratio.max:.2f})"
    )
    if result.same_text is None:
        if result.setting.exact:
            return f"{speed}; the texts are samples of the same distribution."
        return f"{speed}."
    same = f"{result.same_text} of {result.texts} texts are the same"
    return f"{speed}; {'the same texts' if result.same_text == result.texts else same}."


def show_comparison(
    plain: BenchResult, speculative: BenchResult, prepared: Prepared, out: Console
) -> None:
    """Prints both speeds, what theory promises, whether the texts agree, and whether it pays."""
    from jaxspec.analysis import environment, table

    size = sum(leaf.nbytes for leaf in jax.tree.leaves(prepared.weights.target))
    cached = jax.default_backend() == "cpu" and size < CPU_CACHE
    assert speculative.environment is not None
    out.print("", Text(environment.line(speculative.environment), "bold"), sep="\n")
    out.print(*table.tables([plain, speculative], (table.SPEED, table.THEORY), out.width), sep="\n")
    out.print(
        agreement(speculative, prepared.target.tokenizer),
        Text(conclusion(speculative, cached)),
        sep="\n",
    )


def agreement(result: BenchResult, tokenizer: Any) -> Text:
    """Says whether the texts are the same, and where they first differ."""
    if result.same_text is None:
        if result.setting.exact:
            why = "they are samples, and have one distribution"
        else:
            why = "the rule is inexact"
        return Text(f"The texts need not be the same: {why}.")
    if result.difference is None:
        return Text("Greedy texts: identical.", "green")
    text, position, speculative, plain = result.difference
    longest = max(len(speculative), len(plain))

    def last_of(tokens: Sequence[int]) -> str:
        if len(tokens) < longest:  # a text that has ended has no token there
            return "nothing"
        return trace.spell(tokenizer, list(tokens[:-1]), list(tokens[-1:]))[0]

    return Text(
        f"Greedy texts: different. {result.texts - result.same_text} of {result.texts} prompts; "
        f"first in prompt {text + 1}, token {position + 1}: {last_of(speculative)!r} where plain "
        f"decoding has {last_of(plain)!r}. Passes of other widths round otherwise: is it a near "
        "tie?",
        "yellow",
    )


def conclusion(result: BenchResult, cached: bool) -> str:
    """Says whether speculation pays, and if not, why; `cached`: the target fits a CPU's cache."""
    speed = result.speed
    assert speed is not None
    if speed.min < 1 <= speed.median:
        return (
            f"Speculative decoding had {speed.min:.2f} to {speed.max:.2f} times the speed of plain "
            "decoding in these runs: that shows no difference."
        )
    if speed.median >= 1:
        return f"Speculative decoding is {speed.median:.2f} times as fast here."
    costs = result.costs
    rate = result.tokens_per_round
    promised = None if result.predicted is None else result.predicted.rounds
    if costs is None or rate is None or promised is None or result.setting.policy:
        return "Speculative decoding is slower here."
    gamma = result.setting.gamma
    v = costs.v.median
    drafting = gamma * costs.c.median
    cost = drafting + v + costs.search
    described = (
        f"a round yields {rate.value:.2f} tokens and takes the time of {cost:.2f} one-token passes"
    )
    if promised >= 1:  # by theory the rounds alone would pay
        return (
            f"Speculative decoding is slower here, though {described}: reading prompts twice and "
            "short texts cost it."
        )
    why = ""
    if cached and v > IDLE:
        why = (
            ", for a model that fits a CPU's cache leaves no compute idle to check draft tokens "
            "with"
        )
    return (
        f"Speculative decoding is slower here: {described}, {v:.2f} to check {gamma + 1} tokens "
        f"(v) and {drafting:.2f} to draft {gamma} (γc){why}."
    )
