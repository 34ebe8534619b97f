"""Published acceptance: tokens a round that others measured of a drafter, from
jaxspec/data/acceptance.toml.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.analysis import formulas, roofline
from jaxspec.weights.hf_families import names

TABLE = Path(__file__).parents[1] / "data" / "acceptance.toml"  # which describes the fields


class Published(NamedTuple):
    """A measurement of a drafter by others; its source and the sentence of it."""

    target: str
    drafter: str
    tokens: str
    source: str
    url: str
    more: str = ""
    draft: int = 0
    reads: str = ""
    at_once: bool = False

    figure = property(
        lambda self: self.tokens + self.more, doc="The tokens a round, and of what text."
    )

    @property
    def alpha(self) -> float:
        """The acceptance rate with which Equation 1 gives as many tokens.

        >>> round(of("RedHatAI/gpt-oss-20b-speculator.eagle3").alpha, 3)
        0.707
        """
        rates = np.linspace(0, 1, 10_001)
        return float(
            np.interp(float(self.tokens), formulas.expected_tokens(rates, self.draft), rates)
        )


def table() -> list[Published]:
    """Reads the table."""
    return [Published(**row) for row in tomllib.loads(TABLE.read_text("utf-8"))["published"]]


def of(drafter: str, target: str = "") -> Published:
    """Returns the evidence for a plan.

    Args:
        drafter: its hub id.
        target: a name of `jaxspec models` or a hub id, to be compared; any if empty.

    Raises:
        ValueError: nothing is published of chains of it, or only with another target.
    """
    planned = _planned()
    if drafter not in planned:
        raise ValueError(
            f"no acceptance rate is published of {drafter}: give its size or shape and add an "
            "--alpha (the paper has 0.5 to 0.9), or give one of these as --draft: "
            f"{', '.join(sorted(planned))}"
        )
    row = planned[drafter]
    if target and not _same(row.target, target):
        raise ValueError(
            f"--target is {target}, but the acceptance of {drafter} is published with "
            f"{row.target}: give that as --target, or a size as --draft and an --alpha"
        )
    return row


def needed(target: str) -> str:
    """Explains which drafters can be planned for a target on an absent machine, with the published
    ones.
    """
    rows = {name: row for name, row in _planned().items() if _same(row.target, target)}
    choices = ", ".join(
        f"{name} ({row.tokens} tokens a round)" for name, row in sorted(rows.items())
    )
    alternative = "the size or shape of another with an --alpha (the paper has 0.5 to 0.9)"
    if not choices:
        return (
            f"a plan for a --device needs a --draft, and no acceptance is published with {target}: "
            f"give {alternative}"
        )
    return f"a plan for a --device needs a --draft: for {target} one of {choices}, or {alternative}"


def is_of(drafter: str, target: str) -> bool:
    """Tells whether a plan for a target can rest on what is published of a drafter."""
    row = _planned().get(drafter)
    return row is not None and _same(row.target, target)


def _planned() -> dict[str, Published]:
    """Returns the first row of each drafter whose chains were measured, where target and drafter
    have known sizes.
    """
    shapes = roofline.published_shapes()
    rows = [row for row in table() if row.draft and row.reads and names.size_of(row.target, shapes)]
    return {row.drafter: row for row in reversed(rows)}


def _same(published: str, target: str) -> bool:
    """Tells whether two names are one model's, but for its tuning."""
    sizes = roofline.published_shapes()
    return names.plain(published, sizes) == names.plain(target, sizes)
