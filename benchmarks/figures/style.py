"""The look of the pictures: canvas, colours, and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxspec import files, optional_imports

if TYPE_CHECKING:  # an extra, and a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which readers with any common colour blindness can tell apart.
BLUE, ORANGE, GREEN, PURPLE, RED, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#8F5AA5",
    "#D55E00",
    "#F0E442",
    "#777777",
)
FORMATS = ("png", "svg")


def canvas(width: float = 6.0, height: float = 4.0) -> tuple[Figure, Axes]:
    """An empty figure with one pair of axes; no global state, no window, whatever the backend."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            optional_imports.missing("matplotlib", "figures"), name=error.name
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def shades(count: int) -> list[tuple[float, float, float, float]]:
    """Colours for an ordered series, dark to light, light enough to be told apart and dark enough
    to be seen.
    """
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * i / max(1, count - 1)) for i in range(count)]


def check_formats(formats: Sequence[str]) -> None:
    """Refuses formats that `save` has not, or none at all."""
    if not formats or not set(formats) <= set(FORMATS):
        raise ValueError(f"formats are {list(formats)}: expected some of {', '.join(FORMATS)}")


def save(
    figure: Figure, folder: str | Path, name: str, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Writes a figure as folder/name.png and .svg, each whole or not at all."""
    check_formats(formats)
    import matplotlib

    folder, written = Path(folder), []
    for form in formats:
        written.append(folder / f"{name}.{form}")
        # Text as text, and neither date nor random ids: the same numbers give the same file.
        with (
            files.whole(written[-1]) as beside,
            matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}),
        ):
            metadata = {"Date": None} if form == "svg" else {"Software": None}
            figure.savefig(beside, format=form, dpi=150, metadata=metadata)
    return written
