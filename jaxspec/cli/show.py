"""What `generate` prints: text that grows round by round, or a trace with a line for each round."""

from __future__ import annotations

import itertools
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from jaxspec.cli import console
from jaxspec.cli.counts import Decoded, note
from jaxspec.cli.decoding import decode_all, stream
from jaxspec.cli.exchange import exchange
from jaxspec.cli.session import Session
from jaxspec.trace import Round, terminal


def headline(session: Session) -> Text:
    """Models, draft and device; and what a mesh cannot split as it should."""
    import jax

    from jaxspec import sharding
    from jaxspec.core import BoundDrafter, Model
    from jaxspec.vocab import trim
    from jaxspec.weights import int8

    def name(model: Model) -> str:
        return f"{model.name} ({console.count(int8.count(trim.untrimmed(model).params))})"

    s, target, drafter, drafted = (
        session.settings,
        session.prepared.target,
        session.prepared.options["drafter"],
        "plain decoding",
    )
    if drafter is not None:
        tree = drafter.functions.tree if isinstance(drafter, BoundDrafter) else None
        most = tree.nodes if tree else s.gamma
        drafted = f"{'up to ' if s.policy else ''}{most} draft tokens a round from "
        drafted += name(drafter) if isinstance(drafter, Model) else str(s.draft)
        drafted += f", {s.policy}" if s.policy else ""
        drafted += f", in {s.draft_dtype}" if s.draft_dtype not in ("", s.dtype) else ""
    heat = session.prepared.options.get("temperature") or 0
    distribution = "greedy" if heat == 0 else f"temperature {heat:g}, seed {s.seed}"
    device = jax.devices()[0].device_kind + (f" ({s.mesh})" if s.mesh else "")
    lines = [Text(f"{name(target)} · {drafted} · {distribution} · {s.dtype} on {device}", "bold")]
    mesh = sharding.mesh_of(target.params)
    for model in (target, drafter):
        if mesh is None or not isinstance(model, Model) or model.config is None:
            continue
        if axes := sharding.kept_whole(model.config, mesh):
            lines.append(Text(f"{model.name}: whole on every device: {', '.join(axes)}"))
    if not session.prepared.decoder.exact:
        lines.append(Text(f"The rule {s.rule} is inexact: the text need not have the target's distribution.", "yellow"))
    return Text("\n").join([*lines, Text()])


def show(session: Session, out: Console, trace: bool) -> list[Decoded]:
    """Decodes and prints, text as it appears unless prompts are decoded in batches."""
    if trace:
        out.print(terminal.legend(_colour(out)), "\n")
    if session.settings.batch == 1:
        one = _stream_trace if trace else _stream_text
        return [one(session, index, out) for index in range(len(session.texts))]
    decoded = []
    for text, row in zip(session.texts, decode_all(session), strict=True):
        decoded.append(row)
        if trace:
            out.print(Text(text, "dim"))
            for number, step in enumerate(row.rounds):
                out.print(_trace_line(session, number, step, out))
            out.print()
        else:
            out.print(_exchange(session, text, row.text, "", note(row.counts)), "")
    return decoded


def _stream_text(session: Session, index: int, out: Console) -> Decoded:
    """Decodes one prompt, its text growing round by round."""
    text, shown = session.texts[index], ""
    with Live(console=out, auto_refresh=False, transient=True, vertical_overflow="visible") as live:

        def grow(piece: Any, _: Round) -> None:
            nonlocal shown
            live.update(_exchange(session, text, shown, piece.text), refresh=out.is_terminal)
            shown += piece.text

        decoded = stream(session, index, grow)
    out.print(_exchange(session, text, decoded.text, "", note(decoded.counts)), "")
    return decoded


def _stream_trace(session: Session, index: int, out: Console) -> Decoded:
    """Decodes one prompt, printing each round as it ends."""
    out.print(Text(session.texts[index], "dim"))
    numbers = itertools.count()
    decoded = stream(session, index, lambda _, step: out.print(_trace_line(session, next(numbers), step, out)))
    out.print()
    return decoded


def _colour(out: Console) -> bool:
    return out.is_terminal and not out.no_color


def _trace_line(session: Session, number: int, step: Round, out: Console) -> Text:
    return terminal.trace(session.prepared.target.tokenizer, number, step, width=out.width, colour=_colour(out))


def _exchange(session: Session, prompt: str, settled: str, fresh: str, last: Text | None = None) -> RenderableType:
    """A prompt and the text that answers it so far, the newest part of it lit up."""
    return exchange(prompt, settled, fresh, session.prepared.target.lm.start_token is None, last)
