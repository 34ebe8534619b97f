"""Marks for the cases of a parametrised test that are slow, and for those that others stand for."""

import importlib

import pytest


def optional(name):
    """Imports a module that only tests with the mark `needs_torch` use; returns None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def marked(cases, *, slow=(), exhaustive=()):
    """Return the cases as pytest's parameters, with the marks `slow` and `exhaustive` on those that are named there.

    A case is a value, or a tuple of values for a test of several parameters.
    """
    parameters = []
    for case in cases:
        marks = [pytest.mark.slow] * (case in slow) + [pytest.mark.exhaustive] * (case in exhaustive)
        parameters.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return parameters
