"""`generate` and `stream`: what users call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np

from jaxspec import core, sharding
from jaxspec.core import programs, token_rows, tree
from jaxspec.decode import device_memory, loop, output, shared_prefix, stopping
from jaxspec.decode import state as states
from jaxspec.decode.chat_templates import chats_of, opening
from jaxspec.decode.options import OPTIONS, shown
from jaxspec.decode.output import WIDE, Generation, Piece
from jaxspec.decode.prompts import Prompts
from jaxspec.decode.request import Prepared, prepare
from jaxspec.decode.shared_prefix import SharedPrefix
from jaxspec.sampling import SamplingOptions


def generate(
    target: core.Model,
    prompts: Prompts,
    *,
    drafter: core.Model | core.Drafter | core.BoundDrafter | str | None = None,
    gamma: int = 5,
    rule: core.Rule | None = None,
    policy: core.BoundPolicy | core.Policy | None = None,
    max_new_tokens: Any = None,
    key: Any = None,
    eos_ids: Sequence[int | str] | int | str | None = None,
    stop: Sequence[str] = (),
    num_samples: int = 1,
    log_probs: bool = False,
    top_log_probs: int | None = None,
    trace_numbers: bool = False,
    prefix: SharedPrefix | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Generation:
    """Generates from `target`, faster with a `drafter`, with the same distribution of the output.

    The whole generation is one jitted program, from prefill to the last token of the longest row;
    rows accept different numbers of draft tokens per round. Calls whose prompts and limits fall
    into the same buckets (`token_rows.bucket`) share a program, whatever their temperature,
    penalties, key and text. With stop strings, which only the host can see, rounds are run one by
    one.

    Args:
        target: the model whose distribution the output has.
        prompts: text; token ids, a `jaxspec.Prompt` of right-padded rows [batch, prompt], a list of
            ids, or several; or a conversation, a list of messages {"role": ..., "content": ...}, or
            several, for the model's template.
        drafter: a smaller Model with the same tokenizer, any of `jaxspec.drafters`, or None for
            plain decoding. A string is the name of either, as on the command line, which each call
            makes again; `drafters.by_name` makes it once.
        gamma: draft tokens per round; with a policy, the most of them. A drafter of trees defines
            the size itself.
        rule: the acceptance rule; `jaxspec.rules.rejection()` by default.
        policy: chooses the number of draft tokens, round by round; see `jaxspec.policies`.
        max_new_tokens: most new tokens; a number, or one per row. By default 128, or as many as the
            models have positions for.
        key: a `jax.random.key`, or one per row; required unless temperature is 0.
        eos_ids: tokens that end a row (part of the output), by id or by name; by default the
            model's or the tokenizer's.
        stop: strings that end a row (cut from its text); names of special tokens among them mean
            these tokens.
        num_samples: texts of each prompt, which share its prefill: rows 0 to n - 1 are the first
            prompt's, the next n the second's. What is given "one per row" is then of so many. The
            texts equal those of a prompt given n times.
        log_probs: whether to report the log probability of every token, see `core.LogProbs`: the
            target's, raw and under the distribution that was sampled from. Such programs are
            compiled apart; others compute none.
        top_log_probs: the number of most probable tokens to report for each position, too; 0 is
            log_probs=True.
        trace_numbers: whether the trace has the numbers of every draft token (`core.TraceNumbers`):
            q, p, the uniform draw r, the mass that a rejection leaves, the drafter's entropy. Such
            programs are compiled apart; others compute none. `out.trace.table()` has them as
            columns.
        prefix: the beginning of all prompts, read before by `jaxspec.prefix`; the text is the same
            as for whole prompts.
        chat_template_kwargs: values for the template of conversations, such as {"enable_thinking":
            False}.
        **sampling: the options of `sampling.SamplingOptions`, such as temperature and top_p: a
            number for all rows or one per row. Greedy by default.

    Raises:
        ValueError, TypeError: unusable input; the message names the value and the expected one.
        FloatingPointError: the target's logits were not finite, or every token it allows is banned.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1], [2, 0]]), jax.numpy.array([2, 1]))
        >>> out = jaxspec.generate(target, prompt, drafter=draft, gamma=3, max_new_tokens=8)
        >>> plain = jaxspec.generate(target, prompt, max_new_tokens=8)
        >>> bool((out.tokens == plain.tokens).all()), out.lengths.tolist()
        (True, [8, 8])

    Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192.
    """
    prepared = prepare(
        target,
        prompts,
        drafter=drafter,
        gamma=gamma,
        rule=rule,
        policy=policy,
        max_new_tokens=max_new_tokens,
        key=key,
        eos_ids=eos_ids,
        num_samples=num_samples,
        log_probs=log_probs,
        top_log_probs=top_log_probs,
        trace_numbers=trace_numbers,
        prefix=prefix,
        chat_template_kwargs=chat_template_kwargs,
        **sampling,
    )
    return complete(prepared, stop)


@programs.outside_context_mesh
def complete(
    prepared: Prepared, stop: Sequence[str] = (), begin: loop.Begin | None = None
) -> Generation:
    """Runs a generation to its end; see `generate`, which is `prepare` and this, and for `begin`
    `loop.run`.
    """
    stopper = stopping.checked(stop, prepared.target)
    if stopper.strings:
        ran = stopping.run(prepared, stopper, begin)
    else:
        ran = loop.run(prepared, begin)
    outcome = sharding.fetch(ran)
    if outcome.failed.any():
        raise _failure(outcome.failed, prepared)
    # Buffers are as wide as the limit; results are as wide as the longest text.
    width = int(outcome.length.max())
    real = np.arange(width)[None, :] < outcome.length[:, None]
    tokens = np.where(real, outcome.tokens[:, :width], 0)
    rows = [row[:n].tolist() for row, n in zip(tokens, outcome.length, strict=True)]
    stops = stopping.of_rows(stopper, prepared.request)
    tokenizer = prepared.target.tokenizer
    texts = []
    if tokenizer is not None:
        texts = list(map(stopping.text_of, stops, rows))
    return Generation(
        texts,
        tokens,
        outcome.length,
        outcome.stats,
        output.ShownTrace.of(outcome.trace, tokens, outcome.length, tokenizer),
        prepared.decoder.exact,
        list(map(stopping.finish, stops, outcome.finish, rows)),
        None if outcome.log_probs is None else outcome.log_probs.window(0, width),
        tokenizer,
    )


@programs.outside_context_mesh
def prefix(
    target: core.Model,
    text: Prompts,
    *,
    drafter: core.Model | core.Drafter | core.BoundDrafter | str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> SharedPrefix:
    """Reads the beginning of prompts once: a system prompt, or examples of a task.

    `generate`, `stream`, `prepare` and `generate_many` take it as `prefix=`. Their prompts are then
    what follows it. A row has the ids of the prefix, followed directly by the prompt's ids without
    a begin-of-sequence token. (Both are tokenised apart: a tokenizer might have joined the end of
    one and the beginning of the other.) A conversation is given whole, and must begin with the
    prefix's ids. Any number of calls may share a prefix, with any options. Its caches take as much
    memory as one such row.

    Args:
        target: the model whose distribution the texts will have; decoder-only.
        text: one text, row of ids, or list of messages.
        drafter: the drafter of the later calls, which then need not read it either. Without one the
            prefix is for plain decoding.
        chat_template_kwargs: values for the template of a conversation.

    Raises:
        ValueError, TypeError: the reasons of `generate`; also an encoder-decoder, several rows, or
            a drafter that cannot go on from a prefix.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> shared = jaxspec.prefix(target, [3, 1, 4], drafter=draft)
        >>> out = jaxspec.generate(
        ...     target, [[2], [0, 1]], prefix=shared, drafter=draft, max_new_tokens=8
        ... )
        >>> whole = jaxspec.generate(target, [[3, 1, 4, 2], [3, 1, 4, 0, 1]], max_new_tokens=8)
        >>> bool((out.tokens == whole.tokens).all())
        True
    """
    chats = chats_of(text)
    if chats is not None:
        text = [opening(target, chat, chat_template_kwargs) for chat in chats]
    prepared = prepare(target, text, drafter=drafter, max_new_tokens=1)
    if target.lm.limits.start_token is not None:
        raise ValueError(
            f"{target.name or 'the target'} is an encoder-decoder, whose encoder reads each prompt "
            "as a whole: only prompts of a decoder-only model can share a prefix"
        )
    rows = len(prepared.prompt.length)
    if rows != 1:
        raise ValueError(f"got {rows} prefixes: expected one, which prompts are to share")
    bound = prepared.drafter
    if bound is not None:
        shared_prefix.check_drafter(bound)
    reader = prepared.target.lm
    weights = prepared.weights
    prompt = prepared.prompt
    # A prefix is read at once by both parties: a drafter without it would have to read it in every
    # prompt.
    functions = None if bound is None else bound.functions
    if device_memory.is_large(1, prompt.tokens.shape[1], 0):
        state, largest = device_memory.sizes_of(
            lambda *read: shared_prefix.read(reader, functions, *read), weights, prompt
        )
        parts = {
            "weights": device_memory.size_of(weights),
            "caches": state,
            "what reading makes": largest,
        }
        device_memory.check_memory(
            parts,
            f"a prefix of {int(prompt.length[0])} tokens",
            "its length",
            device_memory.devices(weights),
        )
    caches = shared_prefix.read(reader, functions, weights, prompt)
    (tokens,) = token_rows.to_lists(prompt.tokens, prompt.length)
    return SharedPrefix(tokens, target, bound, caches)


@shown(name for name in OPTIONS if name != "stop")
def stream(
    target: core.Model, prompt: Prompts, *, stop: Sequence[str] = (), **options: Any
) -> Iterator[Piece]:
    """Generates from one prompt and yields text as rounds finish; the arguments are `generate`'s.

    The pieces' texts joined are the text that `generate` returns. No character or word is cut in
    half: a word is yielded once no later token can extend it or change how it is decoded.

    Raises:
        ValueError, FloatingPointError: the reasons of `generate`; also more than one prompt. At the
            end, a tokenizer of an unknown kind that changed text which was yielded.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.testing import table_model
        >>> prompt = jaxspec.Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2]))
        >>> model = table_model(jax.random.key(1), vocab=5)
        >>> [
        ...     len(piece.tokens)
        ...     for piece in jaxspec.stream(model, prompt, drafter=model, gamma=3, max_new_tokens=9)
        ... ]
        [1, 4, 4]
    """
    prepared = prepare(target, prompt, **options)
    rows = len(prepared.request.max_new_tokens)
    if rows != 1:
        raise ValueError(
            f"stream takes one prompt and one sample of it, got {rows}: use generate for a batch"
        )
    return pieces(prepared, stop)


def pieces(
    prepared: Prepared,
    stop: Sequence[str] = (),
    keep: Callable[[core.State], None] | None = None,
    begin: loop.Begin = loop.prefill,
) -> Iterator[Piece]:
    """Streams a generation of one prompt; see `stream`, which is `prepare` and this.

    `keep` is called with the state after each round, before its piece is yielded. The next round
    consumes it.
    """
    (stop_of_row,) = stopping.of_rows(stopping.checked(stop, prepared.target), prepared.request)
    return _pieces(prepared, stop_of_row, keep, begin)


@programs.outside_context_mesh
def _pieces(
    prepared: Prepared,
    stop: stopping.Stop,
    keep: Callable[[core.State], None] | None,
    begin: loop.Begin,
) -> Iterator[Piece]:
    committed: list[int] = []
    shown = visible = ""
    for state, info in loop.iterate_rounds(
        prepared, stopping.edit([stop]) if stop.strings else None, begin
    ):
        row = (
            state.tokens,
            state.length,
            state.start,
            state.done,
            state.failed,
            state.stats,
            state.memory.log_probs,
            info,
        )
        tokens, length, start, done, failed, stats, log_probs, info = sharding.fetch(row)
        if failed[0]:
            raise _failure(failed, prepared)
        # A stop string may have cut the row, so what is new is counted from what was yielded.
        new = tokens[0, start[0] + len(committed) : length[0]].tolist()
        if log_probs is not None:
            log_probs = core.LogProbs(
                *(x[0] for x in log_probs.window(len(committed), len(committed) + len(new)))
            )
        committed += new
        if stop.tokenizer is not None:
            # Until the end only text is shown that no later token can change.
            visible = (stopping.text_of if done[0] else stopping.stable_text)(stop, committed)
        if done[0] and not visible.startswith(shown):
            raise ValueError(
                f"{shown[-WIDE:]!r} was yielded of a text that is {visible[-WIDE:]!r}: the "
                f"tokenizer, of type {type(stop.tokenizer).__name__}, changes text when more "
                "follows. Take the text from jaxspec.generate"
            )
        new_text = ""
        if visible.startswith(shown):
            new_text = visible[len(shown) :]
        shown += new_text
        if done[0]:
            finish = stopping.finish(stop, int(states.finish(state)[0]), committed)
        else:
            finish = None
        draft, accepted, parent, path, numbers = _round(info)
        if keep is not None:
            keep(state)
        yield Piece(
            new_text,
            new,
            draft,
            accepted,
            stats,
            bool(done[0]),
            parent,
            path,
            finish,
            log_probs,
            numbers,
        )


def _round(
    info: core.RoundInfo | None,
) -> tuple[list[int], int, list[int] | None, list[int] | None, core.TraceNumbers | None]:
    """The draft tokens of a stream's round and how many were accepted; of a tree its parents and
    the accepted path.

    The last are the numbers of the draft tokens, if they were asked for.
    """
    if info is None:
        return [], 0, None, None, None

    def numbers_of(tokens: Any) -> core.TraceNumbers | None:
        if info.numbers is None:
            return None
        return core.TraceNumbers(*(values[0][tokens] for values in info.numbers))

    accepted = int(info.num_accepted[0])
    if info.parent is None or info.path is None:
        real = slice(int(info.draft_length[0]))
        return info.draft[0, real].tolist(), accepted, None, None, numbers_of(real)
    # A static tree has nodes that this round did not use: they are taken out, and the rest
    # renumbered.
    real = np.asarray(tree.in_tree(jnp.asarray(info.parent)))[0]
    # The fed tokens' numbers among real nodes.
    number = np.concatenate([[0], np.cumsum(real)])
    parent = number[info.parent[0][real]].tolist()
    path = (number[info.path[0, :accepted] + 1] - 1).tolist()
    return info.draft[0][real].tolist(), accepted, parent, path, numbers_of(real)


def _failure(failed: np.ndarray, prepared: Prepared) -> Exception:
    # Samples of a prompt lie side by side: rows are named by their prompt.
    rows = (
        np.flatnonzero(failed == failed.max()) // (len(failed) // len(prepared.prompt.length))
    ).tolist()
    if failed.max() == core.Failure.RULE:
        return impossible_verdict(prepared, f"for prompts {rows}")
    return FloatingPointError(
        f"the target's logits were not finite for prompts {rows}, or all that they allow is "
        "banned: check its parameters (a bfloat16 overflow, a damaged checkpoint) with "
        "jaxspec.generate(target, prompts, max_new_tokens=1)"
    )


def impossible_verdict(prepared: Prepared, where: str) -> ValueError:
    """Returns the error for a rule that accepts tokens that were not drafted, or chooses an
    impossible token.
    """
    return ValueError(
        f"the rule {prepared.options.rule.name} accepted more "
        f"draft tokens than there were, or chose a token that the target lacks, {where}: expected "
        "num_accepted from 0 to draft.length, and next_token from 0 to "
        f"{prepared.target.lm.vocab_size - 1}"
    )
