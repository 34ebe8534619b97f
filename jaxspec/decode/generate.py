"""The front door: `generate` and `stream`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from jaxspec import sharding
from jaxspec.base import AcceptRule, Drafter, Model, Policy, Prompt, RoundInfo, Stats
from jaxspec.decode import display, loop, stopping, text
from jaxspec.decode.request import Job, prepare
from jaxspec.decode.warping import Warping


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns; a notebook shows its texts, counts and rounds.

    Attributes:
        texts: one per prompt, without the prompt, cut before a stop string; empty if the target has no tokenizer.
        tokens: the new tokens [batch, longest], padded with 0.
        lengths: how many of them are real [batch].
        stats: counts per row; see `base.Stats`.
        trace: what each round drafted and kept; see `loop.Trace`. A notebook shows its rounds.
        exact: whether the text has the target's law: it was decoded plainly, or by a rule that says it is exact.

    Example:
        >>> import jax, json, jaxspec
        >>> from jaxspec.testing import table_model
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> out = jaxspec.generate(model, prompt, drafter=model, gamma=3, max_new_tokens=9)
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
    _tokenizer: Any = dataclasses.field(default=None, repr=False, compare=False)  # spells the guesses of the rounds

    def records(self) -> list[dict[str, Any]]:
        """One flat dict of plain values per row: text, tokens and counts, as `pandas.DataFrame` takes them."""
        return display.records(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON: `exact`, and `rows`, which are `records` with their rounds."""
        rows = [record | {"trace": display.rounds(self, record["row"])} for record in self.records()]
        return {"exact": self.exact, "rows": rows}

    def _repr_html_(self) -> str:
        return display.page(self)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What `stream` yields: text that will not change any more, and the round it came from.

    Attributes:
        text: new text, whole words and characters only; may be empty.
        tokens: the tokens that the round committed.
        draft: the guesses of the round (empty for the first piece, which comes from prefill).
        num_accepted: how many of them were accepted.
        stats: counts so far.
        done: whether this was the last piece.
    """

    text: str
    tokens: list[int]
    draft: list[int]
    num_accepted: int
    stats: Stats
    done: bool


def generate(
    target: Model,
    prompts: Sequence[str] | str | Prompt,
    *,
    drafter: Model | Drafter | None = None,
    gamma: int = 5,
    accept: AcceptRule | None = None,
    policy: Policy | None = None,
    max_new_tokens: Any = 128,
    key: Any = None,
    eos_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    **warping: Unpack[Warping],
) -> Generation:
    """Generates from `target`, faster with a `drafter`, with the same law of the output.

    The whole generation is one jitted program, from prefill to the last token of the longest row; every row accepts
    its own number of guesses per round. Calls whose prompts and limits fall into the same buckets (`buffers.bucket`)
    share a program, whatever their temperature, penalties, key and text. With stop strings, which only the host
    can see, rounds are run one by one.

    Args:
        target: the model whose law the output has.
        prompts: text, or a `jaxspec.Prompt` of right-padded token ids [batch, prompt].
        drafter: a smaller Model with the same tokenizer, any Drafter, or None for plain decoding.
        gamma: guesses per round; with a policy, the most of them.
        accept: the acceptance rule; `jaxspec.accept.rejection()` by default.
        policy: of `jaxspec.policies`: chooses the number of guesses, round by round.
        max_new_tokens: most new tokens; a number, or one per row.
        key: a `jax.random.key`, or one per row; required unless temperature is 0.
        eos_ids: tokens that end a row (kept in the output); by default the model's or the tokenizer's.
        stop: strings that end a row (cut from its text).
        **warping: the law, in the order of `jaxspec.warp`; each a number for all rows or one per row, but as noted.
            An option that is None (the default) is no part of the program.

            logit_bias: added to the logits: {id: bias}, or an array [vocab] or [batch, vocab].
            banned: ids that no row says.
            repetition_penalty: divides positive logits of tokens in prompt or text, multiplies negative ones
                (encoder-decoder: in the text).
            presence_penalty, frequency_penalty: taken from the logit of a token in the text; once, or each time.
            temperature: 0, the default, is greedy.
            top_k, top_p, min_p: keep the k likeliest tokens; the likeliest with this mass; those at least this
                many times as likely as the likeliest.
            draft_temperature: the drafter's own temperature, by default the target's. Changes how many guesses are
                accepted, not the law of the text; without effect where the temperature is 0.

    Raises:
        ValueError: input that cannot be decoded from; the message says what was got and what was expected.
        FloatingPointError: the target's logits were not finite, or it allows nothing but what is banned.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1], [2, 0]]), jax.numpy.array([2, 1]))
        >>> out = jaxspec.generate(target, prompt, drafter=draft, gamma=3, max_new_tokens=8)
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=8)
        >>> bool((out.tokens == plain.tokens).all()), out.lengths.tolist()
        (True, [8, 8])

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192.
    """
    job = prepare(
        target,
        prompts,
        drafter=drafter,
        gamma=gamma,
        accept=accept,
        policy=policy,
        max_new_tokens=max_new_tokens,
        key=key,
        eos_ids=eos_ids,
        **warping,
    )
    strings = _stop_strings(stop, target)
    outcome = stopping.run(job, target.tokenizer, strings) if strings else loop.run(*job)
    outcome = sharding.fetch(outcome)
    if outcome.failed.any():
        raise FloatingPointError(_not_finite(np.flatnonzero(outcome.failed).tolist()))
    width = int(outcome.length.max())
    real = np.arange(width)[None, :] < outcome.length[:, None]
    tokens = np.where(real, outcome.tokens[:, :width], 0)
    texts = _texts(target, tokens, outcome.length, strings)
    exact = job.decoder.gamma == 0 or accept is None or getattr(accept, "exact", False)
    trace = display.ShownTrace.of(outcome.trace, tokens, outcome.length, target.tokenizer)
    return Generation(texts, tokens, outcome.length, outcome.stats, trace, exact, target.tokenizer)


def stream(target: Model, prompt: str | Prompt, *, stop: Sequence[str] = (), **options: Any) -> Iterator[Piece]:
    """Generates from one prompt and yields text as rounds finish; the arguments are `generate`'s.

    The pieces' texts joined are the text that `generate` returns. No character or word is ever cut in half: a word
    is yielded when what follows it shows that it is complete.

    Raises:
        ValueError, FloatingPointError: as `generate`; also for more than one prompt.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> [len(piece.tokens) for piece in jaxspec.stream(model, prompt, drafter=model, gamma=3, max_new_tokens=9)]
        [1, 4, 4]
    """
    job = prepare(target, prompt, **options)
    if job.prompt.tokens.shape[0] != 1:
        raise ValueError(f"stream takes one prompt, got {job.prompt.tokens.shape[0]}: use generate for a batch")
    stop = _stop_strings(stop, target)
    return _pieces(job, target, stop)


def _pieces(job: Job, target: Model, stop: Sequence[str]) -> Iterator[Piece]:
    state, info = loop.start(*job), None
    committed: list[int] = []
    shown = ""
    while True:
        if stop:
            state, info = stopping.cut(state, info, target.tokenizer, stop)
        row = (state.tokens, state.length, state.start, state.done, state.failed, state.stats, info)
        tokens, length, start, done, failed, stats, told = sharding.fetch(row)
        if failed[0]:
            raise FloatingPointError(_not_finite([0]))
        new = tokens[0, start[0] + len(committed) : length[0]].tolist()
        committed += new
        whole = "" if target.tokenizer is None else text.decode(target.tokenizer, committed)
        visible = whole[: text.find_stop(whole, stop)] if done[0] else text.settled(whole, stop)
        fresh = visible[len(shown) :] if visible.startswith(shown) else ""
        shown += fresh
        yield _piece(fresh, new, told, stats, bool(done[0]))
        if done[0]:
            return
        state, info = loop.advance(job.decoder, job.keys, job.weights, state)


def _piece(fresh: str, new: list[int], info: RoundInfo | None, stats: Stats, ended: bool) -> Piece:
    if info is None:
        return Piece(fresh, new, [], 0, stats, ended)
    drafted = info.draft[0, : info.draft_length[0]].tolist()
    return Piece(fresh, new, drafted, int(info.num_accepted[0]), stats, ended)


def _not_finite(rows: Sequence[int]) -> str:
    return (
        f"the target's logits were not finite for prompts {list(rows)}, or all that they allow is banned: check its "
        "parameters (a bfloat16 overflow, a damaged checkpoint) with jaxspec.generate(target, prompts, "
        "max_new_tokens=1)"
    )


def _stop_strings(stop: Sequence[str], target: Model) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if strings and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, which this model lacks: use eos_ids")
    if any(not string for string in strings):
        raise ValueError("stop has an empty string: it would end every row at once")
    return strings


def _texts(target: Model, tokens: np.ndarray, length: np.ndarray, stop: Sequence[str]) -> list[str]:
    if target.tokenizer is None:
        return []
    whole = [text.decode(target.tokenizer, row[:n].tolist()) for row, n in zip(tokens, length, strict=True)]
    return [t[: text.find_stop(t, stop)] for t in whole]
