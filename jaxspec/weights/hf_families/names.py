"""The names of published sizes: hub ids of the models that have them."""

from __future__ import annotations

import re
from collections.abc import Collection

SAME = {  # names of models, as `plain` has them, whose sizes have other names
    "command-r7b-12": "command-r7b",
    "glm-4-32b": "glm-4-32b-0414",
    "layerskip-llama2-7b": "llama-2-7b",
    "layerskip-llama3-8b": "llama-3-8b",
    "layerskip-llama3.2-1b": "llama-3.2-1b",
    "m2m100_1.2b": "m2m100-1.2b",
    "m2m100_418m": "m2m100-418m",
    "mbart-large-50-many-to-many-mmt": "mbart-large-50",
    "nllb-200-1.3b": "nllb-200-distilled-1.3b",
    "olmo-3.1-32b": "olmo-3-32b",
    "pard-qwen3-0.6b": "qwen3-0.6b",
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.8-27b": "qwen3.5-27b",
    "stablelm-2-1_6b": "stablelm-2-1.6b",
    "vicuna-7b": "llama-2-7b",
    "vicuna-13b": "llama-2-13b",
}
_WORDS = re.compile(
    r"^(meta|c4ai)-|-(instruct|it|pt|chat|base|hf|coder|think|thinking|ul2|\d{4})(?=-|$)"
)
_VERSION = re.compile(r"-v\d+(\.\d+)?$")


def plain(name: str, sizes: Collection[str]) -> str:
    """Leaves out of a hub id what says nothing of a model's size: the owner, and words such as
    "instruct".

    >>> plain("meta-llama/Llama-3.1-8B-Instruct", ()), plain("google-t5/t5-base", ["t5-base"])
    ('llama-3.1-8b', 't5-base')
    """
    last = name.rpartition("/")[2].lower()
    shorter = _WORDS.sub("", last)
    shortest = _VERSION.sub("", shorter)
    return next((x for x in (last, shorter, shortest) if x in sizes), shortest)


def size_of(name: str, sizes: Collection[str]) -> str | None:
    """Returns the name of the published size that a model has, by its hub id; None if none is
    known.

    >>> sizes = ["gemma-4-e4b", "mistral-7b-v0.2", "command-r7b"]
    >>> [
    ...     size_of(name, sizes)
    ...     for name in ("google/gemma-4-E4B-it", "CohereLabs/c4ai-command-r7b-12-2024", "a/b")
    ... ]
    ['gemma-4-e4b', 'command-r7b', None]
    """
    short = plain(name, sizes)
    size = short if short in sizes else SAME.get(short)
    if size in sizes:
        return size
    return None
