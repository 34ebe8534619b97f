"""The paper's Figures 2, 3 and 4, and the speed-up over alpha and gamma (Leviathan et al., arXiv
2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.figures.style import RED, canvas, shades
from jaxspec.analysis import formulas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALPHA = "acceptance rate α"
LEVELS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12)  # speeds at which the landscape has a line
# of its colours: the same speed has the same one in every landscape, and 1 is in the middle
RANGE = (1 / 12, 12)


class Mark(NamedTuple):
    """A pair that was measured: its label, and where it is."""

    name: str
    alpha: float
    gamma: int


def expected_tokens(
    gammas: Sequence[float] = (1, 3, 5, 7, 10, np.inf), top: float = 12.0
) -> Figure:
    """Figure 2: expected tokens per round as a function of alpha, Equation 1.

    Example:
        >>> [line.get_label() for line in expected_tokens([1, np.inf]).axes[0].lines]
        ['γ = 1', 'γ = ∞']
    """
    figure, axes = canvas()
    alpha = np.linspace(0, 1, 501)
    for gamma, colour in zip(gammas, shades(len(gammas)), strict=True):
        with np.errstate(divide="ignore"):
            axes.plot(
                alpha, formulas.expected_tokens(alpha, gamma), color=colour, label=_gamma(gamma)
            )
    axes.set(xlim=(0, 1), ylim=(0, top), xlabel=ALPHA, ylabel="expected tokens per round")
    _legend(axes)
    return figure


def optimal_gamma(costs: Sequence[float] = (0.01, 0.02, 0.05, 0.1), top: int = 30) -> Figure:
    """Figure 3: the gamma that maximises Theorem 3.8 as a function of alpha, for several costs c of
    the drafter.

    Example:
        >>> line = optimal_gamma([0.1]).axes[0].lines[0]
        >>> int(np.interp(0.8, line.get_xdata(), line.get_ydata()))
        6
    """
    figure, axes = canvas()
    alpha = np.linspace(0, 0.995, 996)
    for c, colour in zip(costs, shades(len(costs)), strict=True):
        best = formulas.optimal_gamma(alpha, c, most=max(2 * top, formulas.MOST))
        axes.plot(alpha, best, color=colour, drawstyle="steps-post", label=f"c = {c:g}")
    axes.set(xlim=(0, 1), ylim=(0, top), xlabel=ALPHA, ylabel="optimal γ")
    _legend(axes)
    return figure


def trade_off(gammas: Sequence[int] = (2, 3, 5, 7, 10), top: float = 8.0) -> Figure:
    """Figure 4: speed-up and increase in operations as functions of alpha, where the drafter costs
    nothing.

    Example:
        >>> len(
        ...     trade_off([1, 3]).axes[0].lines
        ... )  # solid and dashed of each, and the line of plain decoding
        5
    """
    figure, axes = canvas(7.0)
    from matplotlib.lines import Line2D

    alpha = np.linspace(0, 1, 501)
    key = [
        Line2D([], [], color="black", label="speed"),
        Line2D([], [], color="black", ls="--", label="operations"),
    ]
    for gamma, colour in zip(gammas, shades(len(gammas)), strict=True):
        key += axes.plot(
            alpha, formulas.improvement(alpha, gamma, 0.0), color=colour, label=_gamma(gamma)
        )
        axes.plot(alpha, formulas.operations(alpha, gamma, 0.0), color=colour, linestyle="--")
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlim=(0, 1), ylim=(0, top), xlabel=ALPHA, ylabel="times plain decoding")
    figure.legend(handles=key, loc="outside right upper", frameon=False)
    return figure


def landscape(
    c: float,
    v: Callable[[int], float] | float = 1.0,
    marks: Sequence[Mark] = (),
    most: int = 16,
    title: str = "",
) -> Figure:
    """Speed-up over plain decoding for every alpha and gamma at one c: levels, the best gamma, and
    measured pairs.

    Example:
        >>> figure = landscape(0.05, marks=[Mark("ours", 0.75, 5)], most=8)
        >>> [text.get_text() for text in figure.axes[0].texts if "ours" in text.get_text()]
        ['ours']
    """
    figure, axes = canvas(6.6, 4.2)
    from matplotlib.colors import LogNorm
    from matplotlib.patheffects import withStroke

    alpha, gammas = np.linspace(0, 1, 401), np.arange(1, most + 1)
    costs = np.array([v(int(gamma)) if callable(v) else v for gamma in gammas])
    speed = formulas.improvement(alpha[None, :], gammas[:, None], c, costs[:, None])
    colours: dict[str, Any] = dict(
        cmap="cividis", norm=LogNorm(*RANGE), shading="nearest", rasterized=True
    )
    mesh = axes.pcolormesh(alpha, gammas, speed, **colours)
    bar = figure.colorbar(
        mesh, label="speed-up over plain decoding", pad=0.02, ticks=LEVELS, format="%g×"
    )
    bar.ax.minorticks_off()
    between = np.linspace(1, most, 16 * most)  # lines of equal speed, smooth between whole gammas
    smooth = formulas.improvement(
        alpha[None, :], between[:, None], c, np.interp(between, gammas, costs)[:, None]
    )
    levels = [level for level in LEVELS if speed.min() < level < speed.max()]
    widths = [2.0 if level == 1 else 0.8 for level in levels]
    if levels:  # a draft token may cost so much that all of the map is one colour
        lines = axes.contour(
            alpha, between, smooth, levels=levels, colors="white", linewidths=widths
        )
        # the last is in a corner, where a label is cut
        labelled = levels if len(levels) < 4 else levels[:-1]
        for label in axes.clabel(lines, labelled, fmt=lambda level: f"{level:g}×", fontsize=8):
            # steep ones all read upwards: a 6 is no 9
            label.set_rotation((label.get_rotation() + 80) % 180 - 80)
    best = formulas.optimal_gamma(alpha, c, np.concatenate([[1.0], costs]))
    line = np.where(best > 0, best, np.nan)
    edge = [withStroke(linewidth=3.5, foreground="white")]  # black on white is seen on any ground
    axes.plot(alpha, line, color="black", drawstyle="steps-post", label="best γ", path_effects=edge)
    for mark in marks:
        axes.plot(
            mark.alpha, mark.gamma, "o", color=RED, markeredgecolor="white", markersize=8, zorder=5
        )
        side, where = ("right", -9) if mark.alpha > 0.5 else ("left", 9)
        box = dict(boxstyle="round,pad=0.25", facecolor="white", edgecolor="none")
        options: dict[str, Any] = dict(
            xytext=(where, 0), textcoords="offset points", va="center", ha=side, bbox=box
        )
        axes.annotate(mark.name, (mark.alpha, mark.gamma), fontsize=8, zorder=6, **options)
    axes.set(xlim=(0, 1), ylim=(0.5, most + 0.5), xlabel=ALPHA, ylabel="draft tokens a round γ")
    axes.set_title(title or f"c = {c:.3g}", fontsize=10)
    axes.legend(loc="upper left", framealpha=1)
    return figure


def _gamma(gamma: float) -> str:
    return "γ = ∞" if gamma == np.inf else f"γ = {gamma:g}"


def _legend(axes: Axes) -> None:
    # in the order of the curves, from the top
    axes.legend(loc="upper left", frameon=False, reverse=True)
