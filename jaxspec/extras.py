"""How to get the packages that only a part of jaxspec needs: the extras of pyproject.toml."""


def missing(package: str, extra: str) -> str:
    """Says that a package is not installed, and which command brings it.

    >>> missing("matplotlib", "figures")
    'matplotlib is not installed: pip install ".[figures]" in a checkout of jaxspec brings it'
    """
    return f'{package} is not installed: pip install ".[{extra}]" in a checkout of jaxspec brings it'
