"""Decoding the prompts of a session: in batches, or one of them round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from jaxspec import trace
from jaxspec.cli.counts import Counts, Decoded
from jaxspec.cli.session import Session
from jaxspec.trace import Prefix, Round

if TYPE_CHECKING:
    from jaxspec.core import Stats
    from jaxspec.decode import Generation


def decode_all(session: Session) -> Iterator[Decoded]:
    """Decodes a batch of prompts at a time and yields its rows, among whose tokens its seconds are divided."""
    from jaxspec.decode.generate import complete

    for start in range(0, len(session.texts), session.settings.batch):
        prepared = session.rows(start, session.settings.batch)
        began = time.perf_counter()
        out = complete(prepared, session.settings.stop or ())
        share = (time.perf_counter() - began) / max(1, int(out.lengths.sum()))
        yield from (_decoded(out, row, share * int(out.lengths[row])) for row in range(len(out.texts)))


def _decoded(out: Generation, row: int, seconds: float) -> Decoded:
    tokens = out.tokens[row, : out.lengths[row]].tolist()
    rounds = trace.of_row(tokens, out.trace, row)
    return Decoded(out.texts[row], tokens, rounds, _counts(out.stats, row, seconds))


def stream(session: Session, index: int, show: Callable[[Any, Round], None]) -> Decoded:
    """Decodes one prompt round by round; the time that `show` takes is not counted."""
    from jaxspec.decode.generate import pieces

    running = pieces(session.rows(index, 1), session.settings.stop or ())
    text, tokens, rounds, seconds = "", [], [], 0.0
    while True:
        began = time.perf_counter()
        piece = next(running, None)
        seconds += time.perf_counter() - began
        if piece is None:
            break
        before = Prefix(tokens, len(tokens))
        rounds.append(Round(before, piece.tokens, piece.draft, piece.num_accepted, piece.parent, piece.path))
        text, stats = text + piece.text, piece.stats
        tokens += piece.tokens
        show(piece, rounds[-1])
    return Decoded(text, tokens, rounds, _counts(stats, 0, seconds))


def _counts(stats: Stats, row: int, seconds: float) -> Counts:
    return Counts(prompts=1, seconds=seconds, **{name: int(x[row]) for name, x in stats._asdict().items()})
