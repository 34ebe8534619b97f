"""Draws docs/img/learning-curve.png: the losses of `debian-t5-large` over the tokens of its
training.

    python docs/img/learning_curve.py

The numbers are what the run printed (models/debian-t5-large.toml). A step has 65,536 tokens,
padding included.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STEP = 65536 / 1e6  # million tokens
TRAINING = [
    *[
        (329, 5.106),
        (676, 2.954),
        (1024, 2.099),
        (1375, 1.640),
        (1713, 1.271),
        (2079, 1.258),
        (2417, 1.045),
    ],
    *[
        (2766, 0.871),
        (3088, 0.849),
        (3426, 0.782),
        (3754, 0.730),
        (4090, 0.647),
        (4424, 0.637),
        (4758, 0.600),
    ],
    *[(5086, 0.511), (5422, 0.511), (5759, 0.489), (6095, 0.444)],
]
HELD_OUT = [(1713, 1.971), (2766, 1.792), (4424, 1.871), (6095, 2.067)]
CURVES = (
    ("training texts, with dropout", "#888888", TRAINING),
    ("held-out texts", "#0059b3", HELD_OUT),
)


def draw(path: Path) -> None:
    """Draws the curves into a file."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=130)
    for label, color, losses in CURVES:
        tokens = [STEP * step for step, _ in losses]
        axes.plot(tokens, [loss for _, loss in losses], marker="o", ms=4, color=color, label=label)
    axes.set(xlabel="tokens of training, millions", ylabel="loss, nats per token", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(__file__).with_name("learning-curve.png"))
