"""Decoding in Ray Data: a class for `map_batches`, whose actors load the models once each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec.core import Model
from jaxspec.jobs import generate_many

Pair = tuple[Model, Any]


class Decoder:
    """Decodes the prompts of a column, batch by batch; what is asked of it is what `jaxspec.generate_many` does.

    Each actor loads the models when it is made and decodes one short prompt, so that most programs are compiled before
    its first batch. The columns of a batch stay, and get `text`, `finish`, `new_tokens`, `rounds`, `drafted`,
    `accepted` and `error` beside them.

    Args:
        load: makes target and drafter (or None) in the actor: models do not travel between processes.
        column: of the prompts.
        number: column of the prompts' numbers, from which their random keys are folded: with it a text does not depend
            on how Ray cuts the data. Required unless the temperature is 0.
        seed: of the key.
        **options: those of `generate_many`, such as slots, max_new_tokens, temperature and stop.

    Raises:
        ValueError: tokens are to be drawn, and no column has numbers; prompts that are too long are to be skipped.

    Example:
        >>> def load():
        ...     import jax
        ...     from jaxspec.testing import table_model, word_tokenizer
        ...     table = table_model(jax.random.key(1), vocab=5)
        ...     return table._replace(tokenizer=word_tokenizer(["<unk>", "</s>", "the", "old", "cat"])), table
        >>> decoder = Decoder(load, max_new_tokens=5, slots=2)  # or ray.data...map_batches(Decoder, ...)
        >>> decoder({"prompt": np.array(["the old", "cat"])})["new_tokens"].tolist()
        [2, 2]
    """

    def __init__(
        self,
        load: Callable[[], Pair],
        *,
        column: str = "prompt",
        number: str | None = None,
        seed: int = 0,
        **options: Any,
    ):
        if np.any(np.asarray(options.get("temperature") or 0) > 0) and number is None:
            raise ValueError(
                "tokens are drawn (temperature), and number is None: name a column of the prompts' numbers"
            )
        if options.get("too_long") == "skip":
            raise ValueError(
                "too_long is 'skip', and every row of the data gets a text: expected 'error' or 'truncate'"
            )
        self._column, self._number = column, number
        self._target, drafter = load()
        self._options = options | {"drafter": drafter, "key": jax.random.key(seed), "on_error": "yield"}
        list(self._rows([{"prompt": [0]}]))

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Decodes a batch of columns."""
        if missing := [name for name in (self._column, self._number) if name is not None and name not in batch]:
            raise ValueError(f"the data have no column {missing[0]!r}, but {sorted(batch)}: choose one of these")
        prompts = [value.tolist() if isinstance(value, np.ndarray) else value for value in batch[self._column].tolist()]
        numbers = range(len(prompts)) if self._number is None else batch[self._number].tolist()
        rows = self._rows({"prompt": p, "number": n} for p, n in zip(prompts, numbers, strict=True))
        records = [row.to_dict() | {"new_tokens": len(row.tokens)} for row in rows]
        columns = ("text", "finish", "new_tokens", "rounds", "drafted", "accepted", "error")
        return dict(batch) | {name: np.array([record[name] for record in records]) for name in columns}

    def _rows(self, requests: Any) -> Any:
        return generate_many(self._target, requests, in_order=True, **self._options)
