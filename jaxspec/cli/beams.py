"""`jaxspec generate --beams`: the best texts of each prompt, with their scores."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.cli.session import Session
from jaxspec.cli.show import labels

if TYPE_CHECKING:
    from jaxspec.decode import BeamSearch

STOPS = {"no": False, "yes": True, "never": "never"}


class Search(NamedTuple):
    """Options of a search: see `jaxspec.beam_search`."""

    beams: int
    length_penalty: float
    early_stopping: str


def run(session: Session, search: Search, rows: int, as_json: bool, headline: Text, out: Console) -> None:
    """Searches `rows` prompts at a time, and prints hypotheses and counts."""
    from jaxspec.base import Model

    drafter = session.job.options["drafter"]
    if drafter is not None and not isinstance(drafter, Model):
        raise ValueError(f"--beams takes a model that drafts, not {session.settings.draft}: or --draft none")
    if search.early_stopping not in STOPS:
        raise ValueError(f"--early-stopping is {search.early_stopping!r}: expected one of {', '.join(STOPS)}")
    found, seconds = [], 0.0
    _search(session, search, 0, rows)  # compiles
    if not as_json:
        out.print(headline, "", sep="\n")
    for start in range(0, len(session.texts), rows):
        began = time.perf_counter()
        found.append(_search(session, search, start, rows))
        seconds += time.perf_counter() - began
        if not as_json:
            _show(session.texts[start : start + rows], found[-1], out)
    steps, passes = sum(int((x.steps - 1).sum()) for x in found), sum(int(x.passes.sum()) for x in found)
    if as_json:
        print(json.dumps(_report(session, search, found, rows, seconds), ensure_ascii=False))
    else:
        per_pass = steps / max(passes, 1)
        out.print(f"{steps} steps after prefill's in {passes} passes ({per_pass:.2f} each), {seconds:.2f} s")


def _search(session: Session, search: Search, start: int, rows: int) -> BeamSearch:
    from jaxspec.decode import beam_search

    part = session.rows(start, rows)
    given = {name: part.options[name] for name in ("drafter", "gamma", "max_new_tokens", "eos_ids")}
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
    for row, text in enumerate(texts):
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True, justify="right")
        grid.add_column(ratio=1)
        source, _, body = labels(text)
        grid.add_row(source, Text(body, "dim"))
        for record in found.records():
            if record["row"] == row:
                grid.add_row(f"{record['score']:.4f}", Text(record["text"]))
        out.print(grid, "")


def _report(session: Session, search: Search, found: list[BeamSearch], rows: int, seconds: float) -> dict[str, Any]:
    records = [r | {"row": r["row"] + index * rows} for index, batch in enumerate(found) for r in batch.records()]
    settings = session.settings.to_dict() | search._asdict()
    return {"prompts": session.texts, "hypotheses": records, "seconds": seconds, "settings": settings}
