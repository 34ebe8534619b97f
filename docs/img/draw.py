"""Draws the pictures of the pages: `python docs/img/draw.py`, with the extra "figures"."""

from pathlib import Path

import numpy as np

from benchmarks import figures

HERE = Path(__file__).parent
WORDS = ("the", "a", "cat")
P, Q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])  # target and draft of index.md

if __name__ == "__main__":
    figures.save(figures.decomposition(P, Q, WORDS), HERE, "accepted-and-residual", ("svg",))
    figures.save(figures.expected_tokens(), HERE, "tokens-per-round", ("svg",))
