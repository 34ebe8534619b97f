"""The results of a job: a text of a prompt, and counts of all texts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxspec.core import Finish, LogProbs
from jaxspec.decode import output


@dataclasses.dataclass(frozen=True)
class Completion:
    """One text of a prompt."""

    id: Any  # the prompt's id: the caller's, or its number
    number: int  # the prompt's number in the job; its random key is folded from it
    # the text without the prompt, cut before a stop string; None if the target has no tokenizer
    text: str | None
    tokens: list[int]  # the new tokens
    # "eos" (an end token, the last of `tokens`), "stop" (a stop string), "length" (the limit) or
    # "failure"
    finish: str
    prompt_tokens: int  # how many the prompt has; 0 if it was not decoded
    # these three: passes of the target after prefill, their draft tokens, and the emitted ones
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    # at n how many rounds emitted n draft tokens; empty: nothing is drafted
    acceptance_histogram: tuple[int, ...] = ()
    error: str | None = None  # the row's error, if it failed
    # the tokens' log probabilities, if they were asked for; see `core.LogProbs`
    log_probs: LogProbs | None = None
    # how many more the prompt had before it was cut, with too_long="truncate"; 0 if it was not
    truncated: int = 0
    sample: int = 0  # the number of this text among the prompt's, from 0
    samples: int = 1  # how many texts the prompt gets
    # the caller's own fields of the prompt
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON or `pandas.DataFrame(row.to_dict() for row in rows)`.

        Log probabilities are columns, named as in `Generation.records`, with a list for each row:
        `raw_log_probs`, `sampled_log_probs`, and with `top_log_probs` also `top_tokens` and
        `top_log_probs`. Values of NumPy become Python's.
        """
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        columns |= {
            "id": plain(self.id),
            "fields": plain(self.fields),
            "new_tokens": len(self.tokens),
        }
        # Leave out columns without information; the last two stand at the end.
        if self.samples == 1:
            del columns["sample"], columns["samples"]
        if not self.fields:
            del columns["fields"]
        del columns["acceptance_histogram"], columns["log_probs"]
        if self.acceptance_histogram:
            columns["acceptance_histogram"] = list(self.acceptance_histogram)
        if self.log_probs is not None:
            columns |= output.log_probs(self.log_probs)
        return columns


def plain(value: Any) -> Any:
    """Returns a value with Python's lists and numbers in place of NumPy's and JAX's.

    >>> import numpy as np
    >>> plain({"id": np.int64(3), "scores": (np.float32(0.5), np.ones(2))})
    {'id': 3, 'scores': [0.5, [1.0, 1.0]]}
    """
    if isinstance(value, Mapping):
        return {plain(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


class Progress(NamedTuple):
    """Counts of a job's results so far, also over several runs of a resumed job."""

    done: int = 0  # texts that are done
    failed: int = 0  # texts that are errors
    prompts: int = 0  # how many prompts the texts belong to
    truncated: int = 0  # texts of prompts that were cut
    # these two: tokens of the prompts, and of the texts
    prompt_tokens: int = 0
    new_tokens: int = 0
    # these three: rounds, their draft tokens, and the emitted ones
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    # texts by the reason of their end
    finish: Mapping[str, int] = MappingProxyType(
        dict.fromkeys((reason.name.lower() for reason in Finish), 0)
    )
    acceptance_histogram: tuple[int, ...] = ()  # at n how many of the rounds emitted n draft tokens
    live: int = 0  # rows that are being decoded
    idle: int = 0  # rounds of slots without a row to decode
    # the number of the first prompt with an error, and the error
    first_error: tuple[int, str] | None = None

    def plus(self, row: Mapping[str, Any]) -> Progress:
        """Returns the counts with one more result, given as a line of a job's files."""
        histograms = itertools.zip_longest(
            self.acceptance_histogram, row.get("acceptance_histogram", ()), fillvalue=0
        )
        first_error = self.first_error
        if row["error"] is not None:  # keep the error of the lowest number
            error = (row["number"], row["error"])
            first_error = error if first_error is None else min(first_error, error)
        return self._replace(
            done=self.done + 1,
            failed=self.failed + (row["error"] is not None),
            prompts=self.prompts + (row.get("sample", 0) == 0),
            first_error=first_error,
            truncated=self.truncated + bool(row.get("truncated")),
            finish={**self.finish, row["finish"]: self.finish[row["finish"]] + 1},
            acceptance_histogram=tuple(map(sum, histograms)),
            prompt_tokens=self.prompt_tokens + row["prompt_tokens"],
            new_tokens=self.new_tokens + row["new_tokens"],
            rounds=self.rounds + row["rounds"],
            drafted=self.drafted + row["drafted"],
            accepted=self.accepted + row["accepted"],
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; `metrics` as in `Generation.to_dict`, no histogram.

        >>> progress = Progress(
        ...     done=1, new_tokens=6, rounds=2, drafted=6, acceptance_histogram=(1, 0, 0, 1)
        ... )
        >>> progress.to_dict()["metrics"]["speculative_decoding"]["mean_acceptance_length"]
        2.5
        """
        counts = {
            name: value for name, value in self._asdict().items() if name != "acceptance_histogram"
        }
        metrics = output.metrics_of(self.acceptance_histogram, self.drafted)
        return counts | {"finish": dict(self.finish), "metrics": metrics}
