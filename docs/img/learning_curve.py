"""Draws docs/img/learning-curve.png: the held-out loss of `debian-t5-large` over the tokens of its training.

    python docs/img/learning_curve.py

The numbers are what the runs of models/debian-t5-deeper.toml and models/debian-t5-large.toml printed; a step has 2,048
tokens.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

STEP = 2048 / 1e6  # million tokens
DEEPER = [(250, 3.02), (500, 2.93), (750, 2.83), (1000, 2.79)]
LARGE = [
    *[(500, 2.858), (1000, 2.760), (1500, 2.669), (2000, 2.613), (2500, 2.565), (2800, 2.540)],
    *[(3000, 2.511), (3500, 2.481), (4000, 2.460), (4500, 2.437), (5000, 2.413), (5500, 2.382)],
    *[(6000, 2.347), (6500, 2.314), (7000, 2.287), (7500, 2.269), (8000, 2.254), (8300, 2.250)],
]
LOST = [(5500, 2.343), (7000, 2.287), (8500, 2.220), (11500, 2.165), (12000, 2.133)]
CURVES = (  # label, colour, million tokens before the first step, (step, loss)
    ("debian-t5-deeper", "#888888", 6.55, DEEPER),
    ("debian-t5-large, as it ships (sacreBLEU 15.3 to 22.9)", "#0059b3", 8.6, LARGE),
    ("an earlier run at the constant rate, not kept", "#c77700", 8.6, LOST),
)


def draw(path: Path) -> None:
    """Draws the curves into a file."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=130)
    for label, color, before, losses in CURVES:
        tokens = [before + STEP * step for step, _ in losses]
        axes.plot(tokens, [loss for _, loss in losses], marker="o", ms=4, color=color, label=label)
    axes.set(xlabel="tokens of training, millions", ylabel="held-out loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    draw(Path(__file__).with_name("learning-curve.png"))
