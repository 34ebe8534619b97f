"""Names of options that users give, checked: what is none is named, with what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


def check_names(
    names: Iterable[str],
    options: Sequence[str],
    other_names: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Refuses keywords that are no options, with the one that was probably meant.

    Args:
        names: the keywords given.
        options: the options there are.
        other_names: other libraries' names of some options, and the names here.
        elsewhere: names of other libraries' options that are none here, and what to do in their place.

    Raises:
        TypeError: one is not known.

    >>> check_names(["temprature"], ["temperature", "top_k"])
    Traceback (most recent call last):
    TypeError: there is no option 'temprature': did you mean temperature?
    """
    for name in names:
        if name in options:
            continue
        closest = difflib.get_close_matches(name, options, n=1)
        advice = (elsewhere or {}).get(name) or (f"did you mean {closest[0]}?" if closest else "")
        if other_names is not None and name in other_names:
            advice = f"it is called {other_names[name]}"
        raise TypeError(f"there is no option {name!r}: {advice or 'expected one of ' + ', '.join(options)}")
