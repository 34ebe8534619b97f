"""Marks for the cases of a parametrised test: those that are slow, and those that others stand
for. Modules that may be absent.
"""

import importlib

import pytest


def optional(name):
    """Imports a module that only tests with the mark `needs_torch` use; returns None where it is
    not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def other_library(name, module):
    """Imports a module of another library; skips the test where the library is not installed."""
    reason = f"{name} is not installed: bash tests/scripts/other_libraries.sh {name}"
    return pytest.importorskip(module, reason=reason)


def marked(cases, *, quick=(), slow=(), exhaustive=()):
    """Return the cases as pytest's parameters, with the marks that they are named for.

    A case is a value, or a tuple of values for a test of several parameters. `quick` takes a case
    out of `core`.
    """
    parameters = []
    for case in cases:
        named = {"quick": case in quick, "slow": case in slow, "exhaustive": case in exhaustive}
        marks = [getattr(pytest.mark, mark) for mark, is_named in named.items() if is_named]
        parameters.append(
            pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
        )
    return parameters
