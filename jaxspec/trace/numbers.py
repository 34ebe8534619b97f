"""The numbers of a round's draft tokens, to print under its line: `core.TraceNumbers` as text."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxspec.trace.history import CONTEXT, TracedRound, fates, spell

HEADINGS = ("q", "p", "p/q", "r", "r below", "entropy")
LEGEND = (
    "under it each draft token: q and p, its probability under drafter and target; r, the uniform "
    "draw, which accepts it where it is below the next number; the entropy of the drafter's "
    "distribution, 1 at most. γ: draft tokens; Z: the mass of the residual after the rejection"
)
NOTHING = "–"  # stands for a missing number


class NumberedToken(NamedTuple):
    """A draft token with its numbers, spelt."""

    token: str
    numbers: list[str]  # in the order of `HEADINGS`
    fate: str  # "accepted", "rejected", or "untried" (not tested)


def numbered(tokenizer: Any, step: TracedRound) -> list[NumberedToken]:
    """Spells the draft tokens of a round with their numbers; [] if numbers were not traced.

    >>> numbers = {
    ...     "q": [0.5, 0.25],
    ...     "p": [0.25, None],
    ...     "r": [0.125, None],
    ...     "acceptance": [0.5, None],
    ...     "residual_mass": [0.25, None],
    ...     "entropy": [1.0, None],
    ... }
    >>> step = TracedRound([5], [6, 2], [6, 7], 1, numbers=numbers)
    >>> for token, cells, fate in numbered(None, step):
    ...     print(token, *cells, fate)
     6 0.500 0.250 0.500 0.125 0.500 1.000 accepted
     7 0.250 – – – – – rejected
    """
    if step.numbers is None:
        return []
    columns = step.numbers
    lines = []
    for index, (fate, before) in enumerate(zip(fates(step), _before(step), strict=True)):
        if fate == "none":
            continue
        q = columns["q"][index]
        p = columns["p"][index]
        cells = [  # in the order of `HEADINGS`
            q,
            p,
            p / q if p is not None and q else None,
            columns["r"][index],
            columns["acceptance"][index],
            columns["entropy"][index],
        ]
        token = step.draft[index]
        piece = f" {token}"
        if tokenizer is not None:
            piece = spell(tokenizer, before, [token])[0]
        lines.append(NumberedToken(piece, [_cell(number) for number in cells], fate))
    return lines


def of_whole_round(step: TracedRound) -> str:
    """Returns the numbers of a round: draft tokens, the drafter's entropy, the residual's mass.

    The entropy is taken at the first draft token, as in `policies.entropy`. The mass is the
    residual's after the last rejection, if any.

    >>> numbers = {"residual_mass": [0.25, 0.5], "entropy": [1.0, None]}
    >>> of_whole_round(TracedRound([5], [6, 2], [6, 7], 1, numbers=numbers))
    'γ 2 · entropy 1.000 · Z 0.500'
    """
    if step.numbers is None:
        return ""
    round_fates = fates(step)
    real = [index for index, fate in enumerate(round_fates) if fate != "none"]
    rejected = [index for index in real if round_fates[index] == "rejected"]
    entropy = step.numbers["entropy"][real[0]] if real else None
    mass = step.numbers["residual_mass"][rejected[-1]] if rejected else None
    parts = [f"γ {len(real)}"]
    if entropy is not None:
        parts.append(f"entropy {_cell(entropy)}")
    if mass is not None:
        parts.append(f"Z {_cell(mass)}")
    return " · ".join(parts)


def _before(step: TracedRound) -> list[list[int]]:
    """Lists the tokens that precede each draft token, at most the last `CONTEXT` committed ones."""
    # the committed text, then the text up to each draft token, itself included
    texts = [list(step.before[-CONTEXT:])]
    for index, token in enumerate(step.draft):
        parent = index  # a chain
        if step.parent is not None:
            parent = max(step.parent[index], 0)
        texts.append([*texts[parent], token])
    return [text[:-1] for text in texts[1:]]


def _cell(number: float | None) -> str:
    """Formats a number with three decimals, very small and large ones with an exponent.

    >>> _cell(0.5), _cell(1234.5), _cell(0.00001), _cell(None)
    ('0.500', '1.2e+03', '1.0e-05', '–')
    """
    if number is None:
        return NOTHING
    if number == 0 or 0.001 <= number < 1000:
        return f"{number:.3f}"
    return f"{number:.1e}"
