"""Counts the n-gram tables of a recipe; `drafters.ngram` has the counting, `lookups.ngram_model`
the tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

import jaxspec
from jaxspec import progress as bars
from jaxspec.core import LanguageModel, Model
from jaxspec.drafters.lookups.ngram import count
from jaxspec.drafters.lookups.ngram_model import (
    NGramConfig,
    Tables,
    first_draft_tokens,
    language_model,
)
from jaxspec.files.corpus import read_texts, token_rows
from jaxspec.training import boosting
from jaxspec.training.loop import Destination
from jaxspec.training.recipes import NGramTables, TableRecipe
from jaxspec.weights import orbax, vocabulary
from jaxspec.weights.loading import load

# held-out tokens that are predicted at once
ROWS = 16
WIDTH = 128
HELDOUT_TEXTS = 512  # enough for two digits


def write(recipe: TableRecipe, folder: Path, to: Destination, progress: bool = True) -> str:
    """Counts the tables of a recipe in the data of `folder`, and writes them; returns a line that
    describes them.
    """
    data = recipe.data
    options = recipe.tables
    target = vocabulary.load(options.target)
    boosted = Boosted.of(options) if options.after else None
    texts, others = (
        read_texts(folder / file, data.field, data.tasks) for file in (data.train, data.heldout)
    )
    few = others[:: -(-len(others) // HELDOUT_TEXTS)]
    with bars.bar(progress) as bar:
        reading = bar.add_task("texts", total=len(texts) + len(few))
        counting = bar.add_task("orders", total=options.order)
        rows, heldout = (
            token_rows(
                split,
                target.tokenizer,
                lambda n: bar.advance(reading, n),
                encoder=target.has_encoder,
            )
            for split in (texts, few)
        )
        weights = None if boosted is None else boosting.weights(rows, *boosted)
        config, tables = count(
            rows,
            vocab_size=target.size,
            order=options.order,
            followers=options.followers,
            least=options.least,
            begin=target.begin,
            weights=weights,
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
        "heldout_hits": round(hits(config, tables, heldout, target.begin), 3),
        "jaxspec": jaxspec.__version__,
    }
    further = ""
    if boosted is not None:
        missed, remaining = boosted.shares(heldout, language_model(config), tables)
        provenance["after"] = list(options.after)
        provenance["heldout_missed"] = [round(missed, 3), round(remaining, 3)]
        names = " and ".join(options.after)
        further = (
            f"; {missed:.1%} of these are missed by {names} at temperature {options.temperature:g}"
        )
        further = f"{further}, {remaining:.1%} with the tables"
    with vocabulary.tokenizer_folder(target) as words:
        named = {
            "name": recipe.name,
            "dtype": to.dtype,
            "overwrite": to.overwrite,
        }
        manifest = orbax.save(to.out, tables, config, words, description=provenance, **named)
    contexts = ", ".join(f"{n:,} of {length} tokens" for length, n in enumerate(config.contexts, 1))
    size = sum(entry[0] for entry in manifest.files.values())
    share = (
        f"the first draft token is right for {provenance['heldout_hits']:.1%} of held-out tokens"
    )
    return f"{to.out}: {size:,} bytes; contexts: {contexts or 'none'}; {share}{further}"


class Boosted(NamedTuple):
    """The models that boosted tables are weighed with.

    These are the arguments of `boosting.weights` after the texts.
    """

    target: Model
    before: list[Model]  # the drafters that come first
    temperature: float

    @classmethod
    def of(cls, options: NGramTables) -> Boosted:
        """Loads the models of a recipe."""
        before = [load(name) for name in options.after]
        return cls(load(options.target), before, options.temperature)

    def shares(
        self, rows: Sequence[np.ndarray], lm: LanguageModel, tables: Tables
    ) -> tuple[float, float]:
        """Returns the share of texts that the first drafters miss, and the share that they miss
        together with the tables.
        """
        cut = [row[:WIDTH] for row in rows]
        together = [*self.before, Model(lm, tables)]
        without, beside = (
            np.concatenate(
                [row[1:] for row in boosting.missed(cut, self.target, drafters, self.temperature)]
            )
            for drafters in (self.before, together)
        )
        return float(without.mean()), float(beside.mean())


def hits(
    config: NGramConfig, tables: Tables, rows: Sequence[np.ndarray], begin: Sequence[int] = ()
) -> float:
    """Returns the share of tokens that are the tables' first draft token, over the first 128 tokens
    of each row.

    `begin`, the beginning of a decoder's row, comes before them.

    >>> config, tables = count([[1, 2, 1, 2, 1, 0]], vocab_size=3, order=2)
    >>> hits(
    ...     config, tables, [np.array([1, 2, 1]), np.array([2, 2])]
    ... )  # right: the first 1, and 2 and 1 after 1 and 2
    0.6
    """
    beginning = jnp.asarray(tuple(begin) or (-1,), jnp.int32)  # -1 is in no table
    right = 0
    total = 0
    for first in range(0, len(rows), ROWS):
        tokens = np.full((ROWS, WIDTH), -1, np.int32)
        for i, row in enumerate(rows[first : first + ROWS]):
            tokens[i, : len(row)] = row[:WIDTH]
        right += int(_right(config, tables, jnp.asarray(tokens), beginning))
        total += int((tokens >= 0).sum())
    return right / total


@functools.partial(jax.jit, static_argnames=("config",))
def _right(
    config: NGramConfig, tables: Tables, tokens: Int[Array, "B T"], beginning: Int[Array, " n"]
) -> Int[Array, ""]:
    """Counts the tokens that are the tables' first draft token after those before it; -1 is
    padding.
    """
    first = jnp.broadcast_to(beginning[None], (tokens.shape[0], beginning.shape[0]))
    fed = jnp.concatenate([first, tokens[:, :-1]], axis=1)
    # not by logits, which would take gigabytes
    draft_tokens = first_draft_tokens(config, tables, fed)
    draft_tokens = draft_tokens[:, first.shape[1] - 1 :]
    return jnp.sum((tokens >= 0) & (draft_tokens == tokens))
