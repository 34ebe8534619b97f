"""`jaxspec generate --beams`: the best texts of each prompt, with their scores."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.exchange import labels
from jaxspec.cli.options import number, text
from jaxspec.cli.session import Session, Settings

if TYPE_CHECKING:
    from jaxspec.decode import BeamSearch

STOPS = {"no": False, "yes": True, "never": "never"}


class Search(NamedTuple):
    """Options of a search, as those of the command line: see `jaxspec.beam_search`."""

    beams: Annotated[int | None, number("Search for the N best texts.")] = None
    length_penalty: Annotated[float, text("P", "Of --beams: score / length ** P.")] = 1.0
    early_stopping: Annotated[str, text("WHEN", "Of --beams: no, yes or never.")] = "no"


def check(search: Search, settings: Settings, sampling: dict[str, Any], refused: dict[str, Any]) -> None:
    """Refuses options that a search does not have.

    Raises:
        ValueError: there are such options, or no such `--early-stopping`.
    """
    refused = refused | {"--policy": settings.policy, "--rule": settings.rule, "--stop": settings.stop}
    refused |= {"--ban": settings.ban} | {f"--{name.replace('_', '-')}": True for name in sampling}
    if any(refused.values()):
        named = ", ".join(name for name, value in refused.items() if value)
        raise ValueError(f"--beams does not sample, and shows no rounds: drop {named}")
    if search.early_stopping not in STOPS:
        raise ValueError(f"--early-stopping is {search.early_stopping!r}: expected one of {', '.join(STOPS)}")


def run(session: Session, search: Search, as_json: bool, lines: bool, headline: Text, out: Console) -> None:
    """Searches a batch of prompts at a time, and prints hypotheses and counts; as JSON, if `lines`, a line a prompt."""
    from jaxspec.core import Model

    drafter = session.prepared.options["drafter"]
    if drafter is not None and not isinstance(drafter, Model):
        raise ValueError(f"--beams takes a model that drafts, not {session.settings.draft}: or --draft none")
    hypotheses: list[dict[str, Any]] = []
    steps, passes, seconds, rows = 0, 0, 0.0, session.settings.batch
    for start in session.sizes:
        _search(session, search, start, rows)  # compiles
    if not as_json:
        out.print(headline, "", sep="\n")
    for start in range(0, len(session.texts), rows):
        began = time.perf_counter()
        found = _search(session, search, start, rows)
        seconds += time.perf_counter() - began
        steps, passes = steps + int((found.steps - 1).sum()), passes + int(found.passes.sum())
        prompts, records = session.texts[start : start + rows], [r | {"row": r["row"] + start} for r in found.records()]
        hypotheses += records
        if lines:
            for row, prompt in enumerate(prompts, start):
                console.print_json({"prompt": prompt, "hypotheses": [r for r in records if r["row"] == row]})
        elif not as_json:
            _show(prompts, found, out)
    if as_json:
        totals = {"seconds": seconds, "settings": session.settings._asdict() | search._asdict()}
        console.print_json(totals if lines else {"prompts": session.texts, "hypotheses": hypotheses} | totals)
    else:
        per_pass = steps / max(passes, 1)
        out.print(f"{steps} steps after prefill's in {passes} passes ({per_pass:.2f} each), {seconds:.2f} s")


def _search(session: Session, search: Search, start: int, rows: int) -> BeamSearch:
    from jaxspec.decode import beam_search

    part = session.rows(start, rows)
    given = {name: part.options[name] for name in ("drafter", "gamma", "max_new_tokens", "eos_ids")}
    assert search.beams is not None
    stops: Any = STOPS[search.early_stopping]
    return beam_search(
        part.target,
        part.prompt,
        beams=search.beams,
        length_penalty=search.length_penalty,
        early_stopping=stops,
        **given,
    )


def _show(texts: list[str], found: BeamSearch, out: Console) -> None:
    for row, prompt in enumerate(texts):
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True, justify="right")
        grid.add_column(ratio=1)
        source, _, body = labels(prompt)
        grid.add_row(source, Text(body, "dim"))
        for record in found.records():
            if record["row"] == row:
                grid.add_row(f"{record['score']:.4f}", Text(record["text"]))
        out.print(grid, "")
