"""`jaxspec generate`: prompts in, text and statistics out."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from jaxspec.cli import beams as searching
from jaxspec.cli import compare as comparing
from jaxspec.cli import console, drafter_names, names, options, show
from jaxspec.cli import prompts as given_prompts
from jaxspec.cli import session as sessions
from jaxspec.cli.beams import Search
from jaxspec.cli.counts import Decoded, row_report, totals, totals_report, whole_report
from jaxspec.cli.decoding import decode_all
from jaxspec.cli.options import JsonLines, flag, group_of, number, sampling_options, text
from jaxspec.cli.session import Session, Settings


@group_of("settings", Settings)
@group_of("search", Search)
@sampling_options
def generate(
    settings: Settings,
    search: Search,
    prompt: Annotated[str | None, typer.Argument(help="What to generate from; - reads standard input.")] = None,
    prompts: Annotated[str | None, text("FILE", "Prompts, one a line, or .jsonl with inputs.")] = None,
    count: Annotated[int, number("Held-out prompts, if none are given.")] = 8,
    chat: Annotated[bool, flag("Use the model's chat template.", "--chat")] = False,
    trace: Annotated[bool, flag("Show each round and its draft tokens.", "--trace")] = False,
    compare: Annotated[bool, flag("Decode plainly, too; compare texts and speeds.", "--compare")] = False,
    check: Annotated[bool, flag("First measure how often a draft head is right.", "--check")] = False,
    as_json: JsonLines = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Generate text with speculative decoding, and show what it took.

    Without a prompt it decodes held-out ones. A T5's task prefix is part of a prompt. As JSON each prompt of a file has
    a line as soon as its batch ends, and all together the last one.

    \b
        jaxspec generate "translate English to German: A fast editor."
        jaxspec generate --temperature 1 --trace
        jaxspec generate --compare
        jaxspec generate --prompts prompts.txt --batch 8 --json
    """
    names.check_model(settings.target, settings.dtype)
    draft = settings.draft
    if draft is None:  # a pass over the drafted beams pays on accelerators only
        draft = "none" if search.beams else drafter_names.default(settings.target)
    settings = settings._replace(draft=None if draft == "none" else draft)
    if compare and (settings.draft is None or settings.gamma == 0):
        raise ValueError("--compare is of speculative with plain decoding: it needs a --draft and a --gamma")
    if compare and settings.stop:
        raise ValueError("--compare times texts to their end tokens, and a --stop would not end them: leave one out")
    if search.beams:
        searching.check(search, settings, sampling, {"--trace": trace, "--compare": compare})
    else:
        options.refuse([name for name in options.given.get() if name in Search._fields], "generate without --beams")
    texts, lines = given_prompts.given(prompt, prompts), as_json and (prompts is not None or prompt == "-")
    sessions.check(settings, sampling)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    with err.status("loading the models"):
        session = sessions.open_session(settings, sampling, texts, count, chat)
    if check:
        _check(session, err)
    if search.beams:
        searching.run(session, search, as_json, lines, show.headline(session), out)
        return
    with err.status("measuring what passes cost"):
        session = sessions.with_costs(session)
    with err.status("compiling (stored for the next call)"):
        sessions.warm_up(session, by_rounds=settings.batch == 1 and not as_json)
    if as_json:
        decoded, rows = _decode(session, trace, lines)
    else:
        out.print(show.headline(session))
        decoded = show.show(session, out, trace)
        drafter = settings.draft if session.prepared.drafter is not None else None
        out.print(Text(totals(decoded, session.prepared.target.name, drafter)))
    found = None
    if compare:
        with err.status("comparing with plain decoding"):
            found = comparing.compare(session)
    if as_json:
        whole = totals_report(session, sampling, decoded, found)
        console.print_json(whole if lines else whole_report(rows, whole))
    elif found is not None:
        comparing.show(*found, session, out)


def _decode(session: Session, trace: bool, lines: bool) -> tuple[list[Decoded], list[dict[str, Any]]]:
    """Decodes all prompts; their reports are printed as batches end, if each is to be a line."""
    decoded, rows = [], []
    for prompt, row in zip(session.texts, decode_all(session), strict=True):
        decoded.append(row)
        rows.append(row_report(prompt, row, trace))
        if lines:
            console.print_json(rows[-1])
    return decoded, rows


def _check(session: Session, err: Console) -> None:
    """Measures a head's acceptance rate, and says what it is."""
    from jaxspec.core import Model
    from jaxspec.draft_heads import load

    made, name = session.prepared.options["drafter"], session.settings.draft
    if made is None or isinstance(made, Model) or made.target is None:
        raise ValueError(f"--check is of drafters that read hidden states, as head:DIR: --draft is {name}")
    with err.status("checking the head"):
        rate = load.check_acceptance(made, name=str(name))
    err.print(Text(f"{name}: {rate:.0%} of first draft tokens accepted at temperature 0", "dim"))
