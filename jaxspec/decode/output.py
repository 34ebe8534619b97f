"""The results of a generation, as they are, in a notebook, and as plain values for tables and
JSON.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from jaxspec import trace
from jaxspec.core import LogProbs, Stats, TraceNumbers
from jaxspec.decode import loop
from jaxspec.trace.html import SIGNS

ROWS = 4  # what a page shows of a generation, of a row's rounds, and of a text
ROUNDS = 48
CHARACTERS = 4000
BOX = "border-left:3px solid #0059b3;padding:0.2em 0.8em;margin:0.6em 0"
TEXT = "white-space:pre-wrap;overflow-wrap:anywhere"
# A text may have line ends and tabs.
SIGNED = {code: sign for code, sign in SIGNS.items() if chr(code) not in "\n\t"}
# rows, and characters of each, that the repr of a Generation has
SHOWN = 4
WIDE = 90


class ShownTrace(loop.Trace):
    """The arrays of a `loop.Trace`, with the text and the tokenizer that a notebook needs to show
    them.

    A trace that was made from one (`jax.tree.map`, `_replace`) has its arrays alone, and is shown
    as those.
    """

    _tokens: np.ndarray | None = None
    _lengths: np.ndarray | None = None
    _tokenizer: Any = None

    @classmethod
    def of(
        cls, arrays: loop.Trace, tokens: np.ndarray, lengths: np.ndarray, tokenizer: Any
    ) -> Self:
        """A trace that shows itself: new tokens as in a `Generation`, spelt if the model has a
        tokenizer.
        """
        rounds = cls(*arrays)
        rounds._tokens = tokens
        rounds._lengths = lengths
        rounds._tokenizer = tokenizer
        return rounds

    def table(self) -> dict[str, np.ndarray]:
        """Returns a column for each fact of the draft tokens, with an entry for every one; see
        `trace.table`.

        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> options = {"gamma": 2, "max_new_tokens": 4, "trace_numbers": True}
        >>> columns = jaxspec.generate(model, [[3]], drafter=model, **options).trace.table()
        >>> {name: columns[name].tolist() for name in ("position", "accepted", "p")}
        {'position': [1, 2], 'accepted': [True, True], 'p': [1.0, 1.0]}
        """
        return trace.table(self)

    def _repr_html_(self) -> str | None:
        if self._tokens is None or self._lengths is None:
            return None
        parts = []
        for row, length in enumerate(self._lengths[:ROWS]):
            figure = _figure(self._tokens[row, :length].tolist(), self, row, self._tokenizer)
            parts.append(f'<div style="{BOX}"><div>row {row}</div>{figure}</div>')
        return _first_rows(parts, len(self._lengths), "jaxspec.trace.of_row")


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `generate`; a notebook shows its texts, counts and rounds.

    Attributes:
        texts: one per row, without the prompt, cut before a stop string; empty if the target has no
            tokenizer.
        tokens: the new tokens [batch, longest], padded with 0.
        lengths: how many of them are real [batch].
        stats: counts per row; see `core.Stats`.
        trace: each round's drafts and commits; see `loop.Trace`. A notebook shows its rounds.
        exact: whether the text has the target's distribution: it was decoded plainly, or by an
            exact rule.
        finish: why each row ended: "eos" (an end token), "stop" (a stop string) or "length"
            (max_new_tokens).
        log_probs: the new tokens' log probabilities, [batch, longest], if asked for; see
            `core.LogProbs`.

    Example:
        >>> import jax, json, jaxspec
        >>> from jaxspec.testing import table_model
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> out = jaxspec.generate(model, prompt, drafter=model, gamma=3, max_new_tokens=9)
        >>> out
        Generation of 9 tokens, rows: 1, rounds: 2 (4.00 tokens a round after each row's first)
          0: ids [3, 2, 3, 0, 1, 1, 3, 2, 3]
        >>> {name: out.records()[0][name] for name in ("emitted", "rounds", "tokens_per_round")}
        {'emitted': 9, 'rounds': 2, 'tokens_per_round': 4.0}
        >>> json.loads(json.dumps(out.to_dict())) == out.to_dict()
        True
    """

    texts: list[str]
    tokens: np.ndarray
    lengths: np.ndarray
    stats: Stats
    trace: loop.Trace
    exact: bool
    finish: list[str]
    log_probs: LogProbs | None = None
    # spells the draft tokens of the rounds
    _tokenizer: Any = dataclasses.field(default=None, repr=False, compare=False)

    def records(self) -> list[dict[str, Any]]:
        """Lists one flat dict of plain values per row: text, tokens, why it ended and counts, for
        `pandas.DataFrame`.

        Log probabilities are lists if they were reported; None stands for -inf.
        """
        rate = self.stats.acceptance_rate
        per_round = self.stats.tokens_per_round
        return [
            {
                "row": row,
                "text": self.texts[row] if self.texts else None,
                "tokens": _tokens(self, row),
            }
            | {"finish": self.finish[row]}
            | {name: int(counts[row]) for name, counts in self.stats._asdict().items()}
            | {"acceptance_rate": float(rate[row]), "tokens_per_round": float(per_round[row])}
            | (
                {}
                if self.log_probs is None
                else log_probs(LogProbs(*(x[row, :length] for x in self.log_probs)))
            )
            for row, length in enumerate(self.lengths)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON: `exact`, `metrics`, and `rows`, which are `records`
        with their rounds.

        `metrics` are counts of all rows together, under the names of vLLM; `decode.output.metrics`
        describes them.
        """
        rows = [record | {"trace": rounds(self, record["row"])} for record in self.records()]
        return {"exact": self.exact, "metrics": metrics(self), "rows": rows}

    def _repr_html_(self) -> str:
        return page(self)

    def __repr__(self) -> str:
        """A line for all rows, and one for each of the first; the fields have the rest."""
        # Each row's first token is prefill's and costs no round.
        rounds = int(np.sum(self.stats.rounds))
        later = int(np.sum(self.stats.emitted)) - len(self.lengths)
        texts = self.texts or [
            f"ids {row[:n].tolist()}" for row, n in zip(self.tokens, self.lengths, strict=True)
        ]
        rate = f"{later / max(rounds, 1):.2f} tokens a round after each row's first"
        lines = [
            f"Generation of {int(np.sum(self.lengths))} tokens, rows: {len(texts)}, rounds: "
            f"{rounds} ({rate})"
        ]
        lines += [
            f"  {i}: {text[:WIDE]}{' ...' * (len(text) > WIDE)}"
            for i, text in enumerate(texts[:SHOWN])
        ]
        return "\n".join([*lines, *[f"  and {len(texts) - SHOWN} more"] * (len(texts) > SHOWN)])


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece that `stream` yields: text that will not change any more, and the round it came from.

    Attributes:
        text: new text, whole words and characters only; may be empty.
        tokens: the tokens that the round committed.
        draft: the draft tokens of the round (empty for the first piece, which comes from prefill).
        num_accepted: how many of them were accepted.
        stats: counts so far.
        done: whether this was the last piece.
        parent, path: the parents and the accepted path of a tree, as in `core.Draft` and
            `core.Verdict`, the path cut to its length; None where the draft is a chain.
        finish: why the text ended, as `Generation.finish`, in the last piece; before it None.
        log_probs: the log probabilities of the piece's tokens, [tokens], if asked for; see
            `core.LogProbs`.
        numbers: the numbers of the draft tokens, [tokens], if asked for; see `core.TraceNumbers`.
    """

    text: str
    tokens: list[int]
    draft: list[int]
    num_accepted: int
    stats: Stats
    done: bool
    parent: list[int] | None = None
    path: list[int] | None = None
    finish: str | None = None
    log_probs: LogProbs | None = None
    numbers: TraceNumbers | None = None


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """The result of `beam_search`: the best hypotheses of each prompt, the best first.

    Attributes:
        texts: each prompt's hypotheses; empty if the target has no tokenizer.
        tokens: the new tokens [batch, beams, longest], padded with 0.
        lengths: how many of them are real [batch, beams]; 0 for padding.
        scores: sums of log probabilities over length ** length_penalty [batch, beams].
        steps: tokens that the running beams of each prompt had in the end [batch].
        passes: passes of the target after prefill, while a prompt was not done [batch]. Without a
            drafter one for each step but the first, which is prefill's.
        finish: why each prompt's hypotheses end: "eos" (an end token) or "length" (max_new_tokens).
        log_probs: the tokens' log probabilities [batch, beams, longest], if asked for: under the
            softmax of the model's logits. 0 where there is no token.
        top_tokens, top_log_probs: the k most probable tokens for each position, best first, and
            their log probabilities [batch, beams, longest, k]. None unless `top_log_probs` asked
            for them.
    """

    texts: list[list[str]]
    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    steps: np.ndarray
    passes: np.ndarray
    finish: list[list[str]]
    log_probs: np.ndarray | None = None
    top_tokens: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None

    @property
    def steps_per_pass(self) -> np.ndarray:
        """(steps - 1) / passes [batch], or 0 without passes; 1 without a drafter."""
        return (self.steps - 1) / np.maximum(self.passes, 1)

    def records(self) -> list[dict[str, Any]]:
        """Lists one flat dict of plain values per hypothesis."""
        return [
            {"row": row, "rank": rank, "text": self.texts[row][rank] if self.texts else None}
            | {"tokens": self.tokens[row, rank, : self.lengths[row, rank]].tolist()}
            | {"finish": self.finish[row][rank], "score": float(self.scores[row, rank])}
            | {"steps": int(self.steps[row]), "passes": int(self.passes[row])}
            | self._log_probs(row, rank)
            for row in range(len(self.steps))
            for rank in range(self.scores.shape[1])
            if self.lengths[row, rank]
        ]

    def _log_probs(self, row: int, rank: int) -> dict[str, Any]:
        named = dict(
            raw_log_probs=self.log_probs,
            top_tokens=self.top_tokens,
            top_log_probs=self.top_log_probs,
        )
        real = slice(int(self.lengths[row, rank]))
        return {name: plain(x[row, rank, real]) for name, x in named.items() if x is not None}


def page(out: Generation) -> str:
    """The first rows as HTML: text, counts, and with a drafter the rounds as in the paper's Figure
    1.

    What is left out is counted, so that a notebook of long batches stays small.
    """
    batch = len(out.lengths)
    inexact = "the acceptance rule lets text differ from the target's distribution"
    parts = []
    if not out.exact:
        parts = [f"<div><b>Inexact</b>: {inexact}.</div>"]
    return _first_rows(
        [*parts, *(_row(out, row) for row in range(min(batch, ROWS)))], batch, "out.records()"
    )


def _first_rows(parts: list[str], batch: int, others: str) -> str:
    """Joins the first rows of a page, and names the attribute with the rest."""
    if batch > ROWS:
        more = _count(batch - ROWS, "more row")
        parts = [*parts, f"<div>… and {more}: <code>{others}</code> has them all.</div>"]
    return "<div>" + "\n".join(parts) + "</div>"


def log_probs(row: LogProbs) -> dict[str, Any]:
    """Returns the log probabilities of one row's tokens as plain values, by names that say which;
    None for -inf.

    >>> log_probs(
    ...     LogProbs(np.array([-0.5]), np.array([-np.inf]), np.zeros((1, 0), int), np.zeros((1, 0)))
    ... )
    {'raw_log_probs': [-0.5], 'sampled_log_probs': [None]}
    """
    named = {"raw_log_probs": row.raw, "sampled_log_probs": row.sampled}
    if row.top_tokens.shape[-1]:
        named |= {"top_tokens": row.top_tokens, "top_log_probs": row.top_raw}
    return {name: plain(values) for name, values in named.items()}


def plain(values: Any) -> list[Any]:
    """Returns an array as lists for JSON, with None for -inf."""
    return np.where(np.isfinite(values), values, np.array(None)).tolist()


def metrics(out: Generation) -> dict[str, Any]:
    """Returns counts of all rows together, named and nested as in vLLM's responses; {} where
    nothing was drafted.
    """
    nodes = out.trace.draft.shape[2]
    committed = np.asarray(out.trace.num_committed)
    # A limit or an end token may cut accepted tokens off; rounds of finished rows commit nothing
    # and do not count.
    emitted = np.minimum(out.trace.num_accepted, committed)[committed > 0]
    histogram = ()
    if nodes:
        histogram = np.bincount(emitted, minlength=nodes + 1).tolist()
    return metrics_of(histogram, int(np.sum(out.stats.drafted)))


def metrics_of(acceptance_histogram: Sequence[int], drafted: int) -> dict[str, Any]:
    """Returns counts of rounds under the names of vLLM's responses.

    Args:
        acceptance_histogram: at n how many rounds there were of which n draft tokens were emitted;
            as long as the most that a round drafts, `num_spec_tokens`, and 1. Empty where nothing
            is drafted: there are then no metrics.
        drafted: tokens in these rounds.

    `mean_acceptance_length` is 1 + accepted tokens over rounds: a round emits the token after them,
    too, unless an end token or the limit is before it.

    >>> metrics_of([1, 0, 3], drafted=8)["speculative_decoding"]["mean_acceptance_length"]
    2.5
    """
    if not len(acceptance_histogram):
        return {}
    steps = sum(acceptance_histogram)
    accepted = sum(n * count for n, count in enumerate(acceptance_histogram))
    counts = {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": list(acceptance_histogram),
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(acceptance_histogram) - 1,
    }
    return {"speculative_decoding": counts}


def rounds(out: Generation, row: int) -> list[dict[str, Any]]:
    """Lists the draft and the committed tokens of each round of a row; for trees also parents and
    accepted paths.

    A parent of -1 is a node that was not verified.
    """
    steps = trace.of_row(_tokens(out, row), out.trace, row)
    return [
        {"draft": s.draft, "num_accepted": s.num_accepted, "new": s.new}
        | ({} if s.parent is None else {"parent": s.parent, "path": s.path})
        | ({} if s.numbers is None else {"numbers": s.numbers})
        for s in steps
    ]


def _row(out: Generation, row: int) -> str:
    tokens = _tokens(out, row)
    if out.texts:
        text = out.texts[row]
    else:
        text = " ".join(map(str, tokens))
    cut = len(text) - CHARACTERS
    # Control characters are shown as signs: a page must not be laid out by what a model writes.
    shown = html.escape(text[:CHARACTERS].translate(SIGNED)) + (
        f" … {_count(cut, 'more character')}" if cut > 0 else ""
    )
    lines = [
        f'<div dir="auto" style="{TEXT}">{shown}</div>',
        f'<div style="color:#666">{_counts(out, row)}</div>',
    ]
    if out.trace.draft.shape[2]:
        figure = _figure(tokens, out.trace, row, out._tokenizer)
        unfolded = " open" if len(out.lengths) == 1 else ""
        head = _count(int(out.stats.rounds[row]), "round")
        lines.append(f"<details{unfolded}><summary>{head}</summary>{figure}</details>")
    return f'<div style="{BOX}">' + "".join(lines) + "</div>"


def _figure(tokens: list[int], arrays: loop.Trace, row: int, tokenizer: Any) -> str:
    """The first rounds of a row, as in the paper's Figure 1."""
    steps = trace.of_row(tokens, arrays, row)
    if len(steps) > ROUNDS:
        more = f"<div>… and {_count(len(steps) - ROUNDS, 'more round')}</div>"
    else:
        more = ""
    return trace.html(steps[:ROUNDS], tokenizer) + more


def _counts(out: Generation, row: int) -> str:
    stats = {name: int(counts[row]) for name, counts in out.stats._asdict().items()}
    counts = (
        f"{_count(stats['emitted'], 'token')}, {_count(stats['rounds'], 'pass', 'passes')} after "
        "prefill"
    )
    if not stats["drafted"]:
        return counts
    per_round = float(out.stats.tokens_per_round[row])
    drafted = _count(stats["drafted"], "draft token")
    return f"{counts} ({per_round:.2f} tokens each), {stats['accepted']} of {drafted} accepted"


def _tokens(out: Generation, row: int) -> list[int]:
    return out.tokens[row, : out.lengths[row]].tolist()


def _count(number: int, noun: str, many: str = "") -> str:
    return f"{number} {noun if number == 1 else many or noun + 's'}"
