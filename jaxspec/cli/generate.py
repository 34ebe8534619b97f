"""`jaxspec generate`: prompts in, text and statistics out."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import typer
from rich.text import Text

from jaxspec import trace as tracing
from jaxspec.cli import console, names, options, show
from jaxspec.cli import pair as pairs
from jaxspec.cli import prompts as prompting
from jaxspec.cli.console import Console, Record
from jaxspec.cli.options import flag, generation_options, group_of, number, text
from jaxspec.cli.pair import COST_REPEATS, Pair
from jaxspec.cli.prefill import WatchedPrefill, cut, read_tokens
from jaxspec.core import Model
from jaxspec.core.checks import one_of
from jaxspec.decode import beam_search, loop
from jaxspec.decode.batches import Batch, in_batches
from jaxspec.decode.generate import complete, pieces
from jaxspec.decode.options import OPTIONS, Options, gathered
from jaxspec.decode.output import BeamSearch
from jaxspec.decode.request import Prepared, prepare
from jaxspec.trace import TokensView, TracedRound, terminal

NEXT = """\
Your own model: jaxspec generate --target FOLDER_OR_HUB_ID "a prompt"
Its speed here: jaxspec bench, with the same --target; all else: jaxspec --help"""
STOPS = {"no": False, "yes": True, "never": "never"}
NOT_WITH_BEAMS = (
    *("policy", "rule", "stop", "prefix", "ban"),
    *("trace", "numbers", "compare", "stats"),
)
# options of a generation that a beam search takes, too
SEARCHED = [name for name in (beam_search.__kwdefaults__ or ()) if name in Options._fields]


class GenerateSettings(NamedTuple):
    """The options of `generate`, except sampling, beam search and output."""

    pair: Pair = Pair()
    batch: Annotated[int, number("Prompts decoded at a time.")] = 1
    prefix: Annotated[str | None, OPTIONS["prefix"]] = None
    ban: Annotated[
        list[int] | None, text("ID", "A token id that is never generated; repeatable.")
    ] = None
    chat: Annotated[bool, flag("Use the model's chat template.", "--chat")] = False


class BeamOptions(NamedTuple):
    """Options of a beam search, with the command line's spelling of `jaxspec.beam_search`'s."""

    beams: Annotated[int | None, number("Search for the N best texts.")] = None
    length_penalty: Annotated[
        float, text("P", "With --beams: the score is divided by length ** P.")
    ] = 1.0
    early_stopping: Annotated[str, text("WHEN", "With --beams: no, yes or never.")] = "no"


class Shown(NamedTuple):
    """Options of the output."""

    trace: Annotated[bool, flag("Show each round and its draft tokens.", "--trace")] = False
    numbers: Annotated[bool, flag("With --trace: q, p, r of each draft token.", "--numbers")] = (
        False
    )
    compare: Annotated[
        bool, flag("Decode plainly, too; compare texts and speeds.", "--compare")
    ] = False
    stats: Annotated[bool, flag("Show prefill and decode apart.", "--stats")] = False
    as_json: Annotated[bool, flag("Print JSON; of a file, a line a prompt.", "--json")] = False


@group_of("settings", GenerateSettings)
@group_of("search", BeamOptions)
@group_of("shown", Shown)
@generation_options
def generate(
    settings: GenerateSettings,
    search: BeamOptions,
    shown: Shown,
    prompt: Annotated[
        str | None, typer.Argument(help="What to generate from; - reads standard input.")
    ] = None,
    prompts: Annotated[
        str | None, text("FILE", "Prompts, one a line, or .jsonl with prompts.")
    ] = None,
    count: Annotated[
        int | None, number("Only the first N prompts of a file or held-out ones.")
    ] = None,
    check: Annotated[
        bool, flag("First measure how often a draft head is right.", "--check")
    ] = False,
    *,
    generation: dict[str, Any],
    context: typer.Context,
) -> None:
    """Generate text with speculative decoding, and show what it took.

    Without a prompt it decodes held-out ones, and times plain decoding beside it. A T5's task
    prefix is part of a prompt. As JSON each prompt of a file has a line as soon as its batch ends,
    and all together the last one.

    \b
        jaxspec generate "translate English to German: A fast editor."
        jaxspec generate --trace --compare
        jaxspec generate --prompts prompts.txt --batch 8 --json
    """
    # With beams a draft pays on accelerators only, so the default is plain decoding.
    default = pairs.NONE if search.beams else None
    pair, arguments = pairs.checked(settings.pair, generation, default=default, context=context)
    settings = settings._replace(pair=pair, prefix=pairs.prefix_text(settings.prefix))
    _refuse(settings, search, shown, generation, context)
    texts = prompting.from_arguments(prompt, prompts, count)
    as_lines = shown.as_json and (prompts is not None or prompt == "-")
    is_example = not (texts or shown.compare or pair.stop)
    report = options.flat(settings) | {"temperature": 0.0} | generation
    with console.status("loading the models"):
        texts, prepared = _load(
            settings, arguments | {"trace_numbers": shown.numbers}, texts, count
        )
    if check:
        _check_head(prepared, pair)
    if search.beams:
        return _search(texts, prepared, settings, search, shown.as_json, as_lines)
    with console.status("measuring what passes cost"):
        prepared = _with_costs(prepared, settings)
    out = console.out()
    # A comparison uses the program of a whole generation; streaming first would compile two more.
    is_timed = shown.compare or (is_example and prepared.drafter is not None)
    streamed = settings.batch == 1 and not shown.as_json and not is_timed
    decoded = _decoded(prepared, settings, shown.stats, streamed, console.err())
    records = _shown(zip(texts, decoded, strict=True), prepared, pair, shown, as_lines, out)
    results = None
    if shown.compare:
        with console.status("comparing with plain decoding"):
            results = show.compare(prepared, pair, settings.batch)
    if shown.as_json:
        totals = show.totals_report(prepared, report, records, results)
        if not as_lines:
            totals = show.whole_report(texts, records, shown.trace, totals)
        console.print_json(totals)
    elif results is not None:
        show.show_comparison(*results, prepared, out)
    elif is_timed:
        with console.status("timing plain decoding beside it"):
            sentence = show.in_a_sentence(prepared, pair, settings.batch)
        out.print("", Text(sentence, "bold"), "", Text(NEXT, "dim"), sep="\n")
    return None


def _refuse(
    settings: GenerateSettings,
    search: BeamOptions,
    shown: Shown,
    generation: dict[str, Any],
    context: typer.Context,
) -> None:
    """Raises ValueError if options would be ignored or contradict each other."""
    pair = settings.pair
    is_plain = pair.draft is None or pair.gamma == 0
    if shown.compare and is_plain:
        raise ValueError(
            "--compare compares drafted with plain decoding: it needs a --draft, and a --gamma "
            "above 0"
        )
    if shown.compare and pair.stop:
        raise ValueError(
            "--compare times texts to their end tokens, and a --stop would not end them: leave one "
            "out"
        )
    if shown.numbers and not shown.trace:
        raise ValueError("--numbers are shown with the rounds of a trace: add --trace")
    if shown.numbers and is_plain:
        raise ValueError(
            "--numbers are those of draft tokens: it needs a --draft, and a --gamma above 0"
        )
    if gathered(generation).reported is not None and not shown.as_json:
        raise ValueError("--log-probs and --top-log-probs are reported as JSON only: add --json")
    num_samples = generation["num_samples"]
    if num_samples > 1 and not generation.get("temperature") and not search.beams:
        raise ValueError(
            f"--num-samples is {num_samples} at temperature 0, where all texts are one: set -t"
        )
    if pair.chat_template is not None and not settings.chat:
        raise ValueError("--chat-template is for prompts that are messages: add --chat")
    if search.beams:
        sampled = [name for name in generation if name not in SEARCHED]
        unread = options.typed(context, (*NOT_WITH_BEAMS, *sampled))
        options.refuse(unread, "--beams, which does not sample, and shows no rounds,")
        one_of(search.early_stopping, "--early-stopping", STOPS)
    else:
        unread = options.typed(context, BeamOptions._fields)
        options.refuse(unread, "generate without --beams")


def _decoded(
    prepared: Prepared, settings: GenerateSettings, stats: bool, streamed: bool, err: Console
) -> Iterator[Iterable[Record]]:
    """Compiles, then decodes a batch at a time, or one prompt round by round (`streamed`).

    Yields:
        The records of each prompt: an entry of `Generation.records` plus "seconds" and "trace", the
        rounds. If prefill is timed separately, also "prefill_seconds", a part of the seconds, and
        "read_tokens". A prompt that is decoded round by round has a record after each round; other
        prompts have only the last.
    """
    stop = settings.pair.stop or ()
    prefill = WatchedPrefill(prepared, err)
    begin = prefill if stats or prefill.is_watched else None
    with err.status("compiling (stored for the next call)"):
        _warm_up(prepared, settings, streamed, begin and begin.quietly)
    for group in in_batches(prepared, settings.batch):  # all of one shape, for one program
        if streamed:
            yield _stream(group.prepared, stop, begin)
        else:
            yield from ((record,) for record in _complete(group, stop, begin))


def _shown(
    rows: Iterable[tuple[str, show.Records]],
    prepared: Prepared,
    pair: Pair,
    shown: Shown,
    as_lines: bool,
    out: Console,
) -> list[Record]:
    """Returns the last record of each prompt. Prints texts or rounds, then the totals; or prints a
    line of JSON for each prompt of a file.
    """
    if shown.as_json:
        records = []
        for prompt, (record,) in rows:
            records.append(record)
            if as_lines:
                console.print_json(show.row_report(prompt, record, shown.trace))
        return records
    out.print(show.headline(prepared, pair))
    print_row = show.show_text
    if shown.trace:
        print_row = show.show_trace
        colour = out.is_terminal and not out.no_color
        out.print(terminal.legend(colour, with_numbers=shown.numbers), "\n")
    records = [print_row(*row, prepared.target, out) for row in rows]
    totals = show.total(records)
    drafter = None if prepared.drafter is None else pair.draft
    out.print(Text(show.totals_sentence(totals, prepared.target.name, drafter)))
    if shown.stats:
        out.print(Text(show.halves_sentence(totals)))
    return records


def _load(
    settings: GenerateSettings, generation: dict[str, Any], texts: list[str], count: int | None
) -> tuple[list[str], Prepared]:
    """Loads the models; returns the prompts (held-out ones by default) and their generation."""
    target, drafter = pairs.load(settings.pair)
    if not texts:
        if count is None:
            texts = prompting.examples_for(target)
        else:
            texts = prompting.heldout_for(target, count)
    generation = dict(generation)
    num_samples = generation.pop("num_samples", 1)
    texts = [text for text in texts for _ in range(num_samples)]  # a row per sample
    if settings.ban:
        generation["banned"] = tuple(settings.ban)
    prompts: Any = texts
    if settings.chat:
        prompts = [
            [*pairs.system_message(settings.prefix), {"role": "user", "content": text}]
            for text in texts
        ]
    if settings.prefix is not None:
        generation["prefix"] = pairs.read_prefix(target, drafter, settings.prefix, settings.chat)
    return texts, prepare(target, prompts, drafter=drafter, **generation)


def _check_head(prepared: Prepared, pair: Pair) -> None:
    """Measures a head's acceptance rate, and prints it."""
    from jaxspec.draft_heads import by_name, load
    from jaxspec.draft_heads.check import check_acceptance

    drafter = prepared.options.drafter
    name = str(pair.draft)
    if drafter is None or isinstance(drafter, Model) or drafter.target is None:
        raise ValueError(f"--check is of heads, which read hidden states: --draft is {name}")
    target = drafter.target
    with console.status("checking the head"):
        network = None
        if not by_name.is_call(name):  # a head alone, whose folder describes its network
            network = functools.partial(load.read_head, name, target=target)
        rate = check_acceptance(drafter, name=name, network=network)
    console.note(f"{name}: {rate:.0%} of first draft tokens accepted at temperature 0", "dim")


def _with_costs(prepared: Prepared, settings: GenerateSettings) -> Prepared:
    """Gives the policy `adaptive` the measured costs of passes; other policies need none."""
    from jaxspec.analysis.cost import agreement, policy_costs

    if settings.pair.policy.partition("=")[0] != "adaptive" or prepared.drafter is None:
        return prepared
    batch = next(in_batches(prepared, settings.batch)).prepared
    costs = policy_costs(batch, repeats=COST_REPEATS)
    rows = len(batch.request.max_new_tokens)
    together = agreement("batch", rows, prepared.is_sampled, prepared.options.rule)
    return prepared.replace(
        policy=names.policy(settings.pair.policy, **costs._asdict(), together=together)
    )


def _warm_up(
    prepared: Prepared, settings: GenerateSettings, streamed: bool, begin: loop.Begin | None = None
) -> None:
    """Compiles by decoding a few tokens of the first batch, so that timings exclude it."""
    first = cut(next(in_batches(prepared, settings.batch)).prepared)
    limit = jnp.minimum(first.request.max_new_tokens, 2 + first.decoder.gamma)
    first = first._replace(request=first.request._replace(max_new_tokens=limit))
    if streamed:
        list(pieces(first, settings.pair.stop or (), begin=begin or loop.prefill))
    else:
        complete(first, settings.pair.stop or (), begin)


def _complete(group: Batch, stop: Sequence[str], begin: WatchedPrefill | None) -> list[Record]:
    """Decodes a batch; divides prefill's seconds by tokens read, the rest by new tokens."""
    start = time.perf_counter()
    generation = complete(group.prepared, stop, begin)
    seconds = time.perf_counter() - start
    records = generation.records()[: group.real]  # without the rows that fill up the batch
    read = read_tokens(group.prepared)[: group.real]
    prefill = 0.0 if begin is None else begin.seconds
    share = (seconds - prefill) / max(1, sum(len(record["tokens"]) for record in records))
    for row, record in enumerate(records):
        prefill_seconds = float(prefill * read[row] / read.sum())
        record["seconds"] = share * len(record["tokens"]) + prefill_seconds
        if begin is not None:
            record |= {"read_tokens": int(read[row]), "prefill_seconds": prefill_seconds}
        record["trace"] = tracing.of_row(record["tokens"], generation.trace, row)
    return records


def _stream(
    prepared: Prepared, stop: Sequence[str], begin: WatchedPrefill | None
) -> Iterator[Record]:
    """Decodes one prompt round by round, yielding its record; excludes the consumer's time."""
    running = pieces(prepared, stop, begin=begin or loop.prefill)
    record: Record = {"text": "", "tokens": [], "seconds": 0.0, "trace": []}
    while True:
        # The clock stands still between pieces, while the consumer prints.
        start = time.perf_counter()
        piece = next(running, None)
        record["seconds"] += time.perf_counter() - start
        if piece is None:
            return
        step = TracedRound(
            before=TokensView(record["tokens"], len(record["tokens"])),
            new=piece.tokens,
            draft=piece.draft,
            num_accepted=piece.num_accepted,
            parent=piece.parent,
            path=piece.path,
            numbers=None if piece.numbers is None else tracing.numbers_of(piece.numbers),
        )
        record["trace"].append(step)
        record["tokens"] += piece.tokens
        record["text"] += piece.text
        record |= {name: int(count[0]) for name, count in piece.stats._asdict().items()}
        if begin is not None:
            record |= {
                "read_tokens": int(read_tokens(prepared)[0]),
                "prefill_seconds": begin.seconds,
            }
        yield record


def _search(
    texts: list[str],
    prepared: Prepared,
    settings: GenerateSettings,
    search: BeamOptions,
    as_json: bool,
    as_lines: bool,
) -> None:
    """Searches a batch at a time; prints hypotheses and totals as text, JSON or JSON lines."""
    out = console.out()
    drafter = prepared.options.drafter
    if drafter is not None and not isinstance(drafter, Model):
        raise ValueError(
            f"--beams takes a model that drafts, not {settings.pair.draft}: or --draft none"
        )
    shared = search._asdict() | {"early_stopping": STOPS[search.early_stopping]}
    groups = list(in_batches(prepared, settings.batch))
    _beams_of(groups[0].prepared, shared)  # compiles
    if not as_json:
        out.print(show.headline(prepared, settings.pair), "", sep="\n")
    hypotheses: list[list[Record]] = []  # texts of each prompt, the best first
    seconds = 0.0
    for group in groups:
        start = time.perf_counter()
        result = _beams_of(group.prepared, shared)
        seconds += time.perf_counter() - start
        for row in range(group.real):
            number = len(hypotheses)  # of the prompt among all; records count rows of the batch
            hypotheses.append(
                [record | {"row": number} for record in result.records() if record["row"] == row]
            )
            if as_lines:
                console.print_json({"prompt": texts[number], "hypotheses": hypotheses[-1]})
            elif not as_json:
                out.print(show.hypotheses(texts[number], hypotheses[-1]), "")
    totals = {"seconds": seconds, "settings": options.flat(settings) | search._asdict()}
    if as_lines:
        console.print_json(totals)
    elif as_json:
        console.print_json(
            {"prompts": texts, "hypotheses": [record for row in hypotheses for record in row]}
            | totals
        )
    else:
        # prefill makes the first step
        steps = sum(best["steps"] - 1 for best, *_ in hypotheses)
        passes = sum(best["passes"] for best, *_ in hypotheses)
        per_pass = steps / max(passes, 1)
        out.print(
            f"{steps} steps after prefill's in {passes} passes ({per_pass:.2f} each), "
            f"{seconds:.2f} s"
        )


def _beams_of(batch: Prepared, shared: Record) -> BeamSearch:
    """Searches with the prompts of a batch, each to its limit."""
    generation = {name: getattr(batch.options, name) for name in SEARCHED}
    return beam_search(batch.target, batch.prompt, **generation, **shared)
