"""Figure 5: a generation as blocks on a line, one line for each decoder (Leviathan et al., arXiv
2211.17192).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks.figures.spans import KINDS, Span
from benchmarks.figures.style import BLUE, ORANGE, PURPLE, YELLOW, canvas

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the paper's
COLOURS: dict[str, str] = dict(zip(KINDS, (YELLOW, ORANGE, BLUE, PURPLE), strict=True))


def trace_diagram(rows: Mapping[str, Sequence[Span]]) -> Figure:
    """Blocks of time, from left to right: prefills, passes of the drafter, passes of the target.

    Example:
        >>> spans = [Span("target prefill", 0.0, 2.0), Span("target", 2.0, 1.0)]
        >>> [text.get_text() for text in trace_diagram({"plain": spans}).axes[0].get_yticklabels()]
        ['plain']
    """
    figure, axes = canvas(9.0, 0.75 * len(rows) + 1.3)
    from matplotlib.patches import Patch

    for index, spans in enumerate(rows.values()):
        bars, colours = (
            [(span.start, span.duration) for span in spans],
            [COLOURS[span.kind] for span in spans],
        )
        axes.broken_barh(
            bars, (index - 0.32, 0.64), facecolors=colours, edgecolor="white", linewidth=0.2
        )
        end = spans[-1].start + spans[-1].duration
        axes.annotate(
            f"{end:.0f} ms",
            (end, index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    longest = max(spans[-1].start + spans[-1].duration for spans in rows.values())
    axes.set(xlabel="milliseconds", xlim=(0, 1.07 * longest), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    used = {span.kind for spans in rows.values() for span in spans}
    key = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
    figure.legend(handles=key, loc="outside upper center", ncols=len(key), frameon=False)
    return figure
