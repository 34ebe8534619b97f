"""Long sound in windows of 30 seconds: where each begins, and the segments of its text.

A window's text has timestamps. The next window begins at its last complete segment, as in Radford
et al., arXiv 2212.04356, section 4.5, and in transformers' long-form `generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.audio.features import HOP, RATE

STEP = 0.02  # seconds from one timestamp to the next
STRIDE = round(STEP * RATE) // HOP  # frames


class Segment(NamedTuple):
    """A part of a transcript."""

    # these two: seconds from the beginning of the sound
    start: float
    end: float
    text: str  # its words; empty if the model has no tokenizer
    tokens: list[int]  # ids, timestamps included


def window(
    features: Float[np.ndarray, "C F"], first: int, frames: int
) -> Float[np.ndarray, "C frames"]:
    """Takes the window of features that begins at a frame, padded with zeros.

    >>> window(np.ones((2, 400)), 390, 300).sum(axis=1).tolist()
    [10.0, 10.0]
    """
    piece = features[:, first : first + frames]
    return np.pad(piece, ((0, 0), (0, frames - piece.shape[1])))


def split(
    tokens: Sequence[int], first: int | None, begin: int, frames: int
) -> tuple[list[Segment], int]:
    """Splits a window's new tokens into segments; also returns the frames to the next window.

    A pair of timestamps ends a segment and begins the next. Text after the last pair is left to the
    next window, unless a single timestamp ends the text: then nothing was spoken after it. A text
    without pairs is one segment.

    Args:
        tokens: the new tokens, without the end token.
        first: the timestamp of 0 s; None: the tokens have no timestamps.
        begin: the first frame of the window.
        frames: frames of the window before the sound ends.

    >>> segments, moved = split(
    ...     [100, 7, 8, 150, 150, 9, 160, 160, 5], first=100, begin=3000, frames=2000
    ... )
    >>> [(round(s.start, 2), round(s.end, 2), s.tokens) for s in segments], moved
    ([(30.0, 31.0, [100, 7, 8, 150]), (31.0, 31.2, [150, 9, 160, 160])], 120)
    """
    offset = begin * HOP / RATE
    if first is None:
        first = max(tokens, default=0) + 1
    stamps = [token >= first for token in tokens]
    ends_alone = stamps[-2:] == [False, True]
    cuts = [i + 1 for i in range(len(stamps) - 1) if stamps[i] and stamps[i + 1]]  # inside a pair

    def segment(ids: Sequence[int], start: int, end: int) -> Segment:
        return Segment(offset + STEP * start, offset + STEP * end, "", list(ids))

    if not cuts:  # one segment, up to its last timestamp, or to the end of the window
        times = [token - first for token, is_stamp in zip(tokens, stamps, strict=True) if is_stamp]
        last = times[-1] if times else 0
        return [segment(tokens, 0, last or frames // STRIDE)], frames
    if ends_alone:
        cuts.append(len(tokens))
    else:
        cuts[-1] += 1  # the last segment keeps both timestamps of its end, as in transformers
    segments = list[Segment]()
    start = 0
    for cut in cuts:
        piece = tokens[start:cut]
        ends_twice = cut == cuts[-1] and not ends_alone
        last = piece[-2 if ends_twice else -1]
        segments.append(segment(piece, piece[0] - first, last - first))
        start = cut
    if ends_alone:  # nothing was spoken after the last segment
        return segments, frames
    # By the rules of timestamps the first pair is later than 0 s. If a text breaks them, skip the
    # window instead of reading it for ever.
    return segments, STRIDE * (tokens[start - 2] - first) or frames
