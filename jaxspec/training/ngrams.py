"""Counts the n-gram tables of a recipe; `drafters.ngram` has the counting, `lookups.ngram_model` the tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxspec import progress as bars
from jaxspec.drafters.lookups.ngram import count
from jaxspec.drafters.lookups.ngram_model import NGramConfig, Tables, first_draft_tokens
from jaxspec.files.corpus import read_texts, token_rows
from jaxspec.training.recipes import TableRecipe
from jaxspec.weights import vocabulary
from jaxspec.weights.vocabulary import Vocabulary

ROWS, WIDTH = 16, 128  # held-out tokens that are predicted at once
HELDOUT_TEXTS = 512  # enough for two digits


class Counted(NamedTuple):
    """Tables, and what a checkpoint of them records.

    Attributes:
        tables, config: the arguments of `lookups.ngram_model`.
        vocabulary: the target's, whose tokenizer the texts were read with.
        provenance: for the manifest, with the share of held-out tokens that the first draft token gets right.
    """

    tables: Tables
    config: NGramConfig
    vocabulary: Vocabulary
    provenance: dict[str, Any]


def train(recipe: TableRecipe, folder: Path, progress: bool = True) -> Counted:
    """Counts the tables of a recipe in the data of `folder`.

    Raises:
        FileNotFoundError, ValueError: the target or the data is not there, or not as the recipe says.
    """
    data, options = recipe.data, recipe.tables
    target = vocabulary.load(options.target)
    texts, held = (read_texts(folder / file, data.field, data.tasks) for file in (data.train, data.heldout))
    few = held[:: -(-len(held) // HELDOUT_TEXTS)]
    with bars.bar(progress) as bar:
        reading = bar.add_task("texts", total=len(texts) + len(few))
        counting = bar.add_task("orders", total=options.order)
        rows, heldout = (token_rows(part, target.tokenizer, lambda n: bar.advance(reading, n)) for part in (texts, few))
        config, tables = count(
            rows,
            vocab_size=target.size,
            order=options.order,
            followers=options.followers,
            least=options.least,
            start_token=target.start_token,
            advance=lambda: bar.advance(counting),
        )
    provenance = {
        "target": options.target,
        "texts": len(rows),
        "tokens": sum(map(len, rows)),
        "order": options.order,
        "least": options.least,
        "file": data.train,
        "field": data.field,
        "tasks": list(data.tasks),
        "heldout_hits": round(hits(config, tables, heldout), 3),
    }
    return Counted(tables, config, target, provenance)


def hits(config: NGramConfig, tables: Tables, rows: Sequence[np.ndarray]) -> float:
    """Returns the share of tokens that are the tables' first draft token, over the first 128 tokens of each row.

    >>> config, tables = count([[1, 2, 1, 2, 1, 0]], vocab_size=3, order=2)
    >>> hits(config, tables, [np.array([1, 2, 1]), np.array([2, 2])])  # right: the first 1, and 2 and 1 after 1 and 2
    0.6
    """
    right, total = 0, 0
    for first in range(0, len(rows), ROWS):
        tokens = np.full((ROWS, WIDTH), -1, np.int32)
        for i, row in enumerate(rows[first : first + ROWS]):
            tokens[i, : len(row)] = row[:WIDTH]
        right += int(_right(config, tables, jnp.asarray(tokens)))
        total += int((tokens >= 0).sum())
    return right / total


@functools.partial(jax.jit, static_argnames=("config",))
def _right(config: NGramConfig, tables: Tables, tokens: Int[Array, "B T"]) -> Int[Array, ""]:
    """Counts the tokens that are the tables' first draft token after the tokens before them; -1 is padding."""
    start = -1 if config.start_token is None else config.start_token  # -1 is in no table
    fed = jnp.concatenate([jnp.full_like(tokens[:, :1], start), tokens[:, :-1]], axis=1)
    draft_tokens = first_draft_tokens(config, tables, fed)  # not by logits, which would take gigabytes
    return jnp.sum(jnp.logical_and(tokens >= 0, draft_tokens == tokens))
