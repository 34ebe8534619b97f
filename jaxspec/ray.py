"""Decoding in Ray Data: a class for `map_batches`, whose actors load the models once each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.core import LogProbs, Model, token_rows
from jaxspec.jobs import generate_many

TargetAndDrafter = tuple[Model, Any]
# fields of a Completion
COLUMNS = ("text", "finish", "rounds", "drafted", "accepted", "truncated", "error")
# the fields of a core.LogProbs, in its order
LOG_PROBS = ("raw_log_probs", "sampled_log_probs", "top_tokens", "top_log_probs")
REFUSED = {  # options of `generate_many`, with advice
    "key": "give seed, an integer",
    "drafter": "load returns it, with the target",
    "prefix": "it lies in one process; put its text in front of each prompt",
    "in_order": "rows stay where they are",
}


class RayDecoder:
    """Decodes the prompts of a column, batch by batch, with `jaxspec.generate_many`.

    Each actor loads the models when it is made, and decodes short prompts. With `max_prompt_tokens`
    this compiles all programs before the first batch; without it, wider prompts compile further
    programs. The columns of a batch stay. `text`, `finish`, `new_tokens`, `rounds`, `drafted`,
    `accepted`, `truncated` and `error` are added, and `tokens` on request. Log probabilities add
    `raw_log_probs`, `sampled_log_probs`, `top_tokens` and `top_log_probs`: an array for each row,
    empty after an error.

    Args:
        load: makes target and drafter (or None) in the actor, since models are not sent between
            processes.
        column: the column with the prompts.
        number: the column with the prompts' numbers, from which their random keys are folded. With
            it a text does not depend on how Ray cuts the data. Required unless the temperature is
            0.
        seed: the seed of the random key.
        tokens: whether to add the ids of tokens; `log_probs` and `top_log_probs` always add them.
        on_error: "yield" puts a prompt's error into its row, "raise" raises it in the actor.
        **options: the options of `generate_many`, such as slots, max_new_tokens, temperature and
            stop.

    Raises:
        ValueError: a temperature above 0 without a column of numbers; `too_long="skip"`; an option
            that this class does not have (`key`, `drafter`, `prefix`, `in_order`).

    Example:
        >>> def load():
        ...     import jax
        ...     from jaxspec.testing import table_model, word_tokenizer
        ...
        ...     table = table_model(jax.random.key(1), vocab=5)
        ...     return table._replace(
        ...         tokenizer=word_tokenizer(["<unk>", "</s>", "the", "old", "cat"])
        ...     ), table
        >>> decoder = RayDecoder(
        ...     load, max_new_tokens=5, slots=2
        ... )  # or ray.data...map_batches(RayDecoder, ...)
        >>> decoder({"prompt": np.array(["the old", "cat"])})["new_tokens"].tolist()
        [2, 2]
    """

    def __init__(
        self,
        load: Callable[[], TargetAndDrafter],
        *,
        column: str = "prompt",
        number: str | None = None,
        seed: int = 0,
        tokens: bool = False,
        on_error: str = "yield",
        **options: Any,
    ):
        refused = sorted(REFUSED.keys() & options)
        if refused:
            raise ValueError(f"{refused[0]} is not an option of RayDecoder: {REFUSED[refused[0]]}")
        if np.any(np.asarray(options.get("temperature") or 0) > 0) and number is None:
            raise ValueError(
                "tokens are drawn (temperature), and number is None: name a column of prompts' "
                "numbers"
            )
        if options.get("too_long") == "skip":
            raise ValueError(
                "too_long is 'skip', and every row gets a text: expected 'error' or 'truncate'"
            )
        self._column = column
        self._number = number
        top = options.get("top_log_probs")
        self._no_log_probs = None
        if options.get("log_probs") or top is not None:
            self._no_log_probs = _no_log_probs(top or 0)
        self._with_tokens = tokens or self._no_log_probs is not None
        self._target, drafter = load()
        self._options = options | {
            "drafter": drafter,
            "key": jax.random.key(seed),
            "on_error": on_error,
        }
        # Compile the program of each width. "yield": a width that the models cannot read is not
        # needed.
        lengths = range(1, (options.get("max_prompt_tokens") or 1) + 1)
        longest_by_width = {token_rows.bucket(length): length for length in lengths}
        prompts = [{"prompt": [0] * n, "max_new_tokens": 1} for n in longest_by_width.values()]
        list(self._rows(prompts, on_error="yield"))

    def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Decodes a batch of columns."""
        missing = [
            name for name in (self._column, self._number) if name is not None and name not in batch
        ]
        if missing:
            raise ValueError(
                f"the data have no column {missing[0]!r}, but {sorted(batch)}: choose one of these"
            )
        prompts = [
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in batch[self._column].tolist()
        ]
        numbers = range(len(prompts))
        if self._number is not None:
            numbers = batch[self._number].tolist()
        requests = [
            {"prompt": prompt, "number": number}
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        rows = list(self._rows(requests))
        columns = {name: np.array([getattr(row, name) for row in rows]) for name in COLUMNS}
        columns["new_tokens"] = np.array([len(row.tokens) for row in rows])
        if self._with_tokens:
            columns["tokens"] = _ragged([np.array(row.tokens, np.int32) for row in rows])
        if self._no_log_probs is not None:
            log_probs = [row.log_probs or self._no_log_probs for row in rows]
            has_top = self._no_log_probs.top_raw.shape[1] > 0
            names = LOG_PROBS if has_top else LOG_PROBS[:2]
            columns |= {
                name: _ragged([values[i] for values in log_probs]) for i, name in enumerate(names)
            }
        return dict(batch) | columns

    def _rows(self, requests: Any, **options: Any) -> Any:
        return generate_many(self._target, requests, in_order=True, **self._options | options)


def _no_log_probs(top: int) -> LogProbs:
    """Makes the log probabilities of a prompt that was not decoded."""
    scores: Any = np.zeros(0, np.float32)
    top_tokens: Any = np.zeros((0, top), np.int32)
    top_scores: Any = np.zeros((0, top), np.float32)
    return LogProbs(scores, scores, top_tokens, top_scores)


def _ragged(arrays: Sequence[Any]) -> np.ndarray:
    """Makes a column of arrays, even of equal lengths, which NumPy would stack."""
    column = np.empty(len(arrays), object)
    for index, array in enumerate(arrays):
        column[index] = np.asarray(array)
    return column
