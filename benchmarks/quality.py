"""The quality of texts: BLEU for translations, ROUGE-L for summaries. Both need the `train`
extra.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from jaxspec import optional_imports


def check() -> None:
    """Checks that the packages of this file are there, or raises an ImportError that names them."""
    for name in ("sacrebleu", "rouge_score"):
        _imported(name)


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU by sacreBLEU with its defaults (13a tokenisation, mixed case), from 0 to 100.

    >>> round(bleu(["Das ist ein kleiner Test."], ["Das ist ein kleiner Test."]), 1)
    100.0

    Reference: Post, WMT 2018, arXiv 1804.08771.
    """
    _check_pairs(hypotheses, references)
    return float(_imported("sacrebleu").corpus_bleu(list(hypotheses), [list(references)]).score)


def rouge_l(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Mean F-measure of the longest common subsequence of words (rouge-score's rougeL, unstemmed),
    0 to 100.

    Example, "fast editor" being 2 of 3 words of the one and 2 of 4 of the other:
        >>> round(rouge_l(["fast text editor"], ["a fast small editor"]), 1)
        57.1

    Reference: Lin, ACL workshop 2004, "ROUGE: a package for automatic evaluation of summaries".
    """
    _check_pairs(hypotheses, references)
    scorer = _imported("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = zip(references, hypotheses, strict=True)
    return (
        100
        * sum(scorer.score(want, got)["rougeL"].fmeasure for want, got in pairs)
        / len(references)
    )


def _check_pairs(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise ValueError("got one text: expected a list of hypotheses and a list of references")
    if len(hypotheses) != len(references) or not references:
        got = f"{len(hypotheses)} hypotheses and {len(references)} references"
        raise ValueError(f"got {got}: expected one of each per example")


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0].replace("_", "-")
        raise ImportError(optional_imports.missing(package, "train"), name=error.name) from error
