"""Wraps a language model with another vocabulary, so that it reads and writes the target's ids.

The text has the target's distribution with any map. The model's logits go to the target's ids, and
every other id gets -inf. Draft tokens are drawn from the resulting distribution. A map costs
acceptance: the target's probability of the tokens that the model can draft bounds it.

Shapes: B batch, P prompt, T step, S capacity, M feature dimension. V is the target's vocabulary, W
the drafting model's, R the most drafting tokens per target token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec import core
from jaxspec.core import chunks, token_rows
from jaxspec.core.kv_cache import MappedCache
from jaxspec.sampling import match_vocab

NONE = -1  # in `to_target`: the target has no such token


def check_model(model: Any, function: str) -> None:
    """Raises TypeError if an argument is not a Model; the message has advice for draft heads."""
    if not isinstance(model, core.Model):
        head = (
            "If a drafter uses its target's head: load_drafter(..., "
            "head=jaxspec.trim_vocabulary(target, size=...))"
        )
        raise TypeError(f"{function} takes a jaxspec.Model, got {type(model).__name__}. {head}")


def check_ids(ids: Any, name: str, vocab: int, least: int = 0) -> None:
    """Raises ValueError if ids are outside of a vocabulary."""
    if np.size(ids) and (np.min(ids) < least or np.max(ids) >= vocab):
        raise ValueError(
            f"{name} has {np.min(ids)} to {np.max(ids)}: expected ids from {least} to {vocab - 1}"
        )


class MappedParams(NamedTuple):
    """The parameters of a mapped model."""

    model: core.Params  # the model's parameters
    # parameters of a separate head (`trim_vocabulary`); None for the model's own logits
    head: core.Params | None
    # the target's id of each of W ids; V, past the end, for ids that it lacks
    to_target: Int[Array, " W"]
    # the model's tokens for each of the target's ids, and their number (1..R); None: it reads the
    # target's ids
    to_draft: Int[Array, "V R"] | None = None
    count: Int[Array, " V"] | None = None
    first: Int[Array, " F"] | None = None  # read before every prompt; None: nothing


def map_vocabulary(
    model: core.Model,
    to_target: Sequence[int] | np.ndarray,
    vocab_size: int,
    to_draft: Sequence[Sequence[int]] | None = None,
    *,
    first: Sequence[int] = (),
) -> core.Model:
    """Makes a model draft for a target with other token ids, given a table of corresponding ids.

    The model reads a token that it lacks as several other tokens, so its rows are longer than the
    target's, by different amounts. A pass has T of the model's tokens if every target token is a
    single one, as all draft tokens are; otherwise it has R T.

    Args:
        model: the one that is to draft.
        to_target: the target's id for each of the model's tokens; -1 for tokens that the target
            lacks, which are never drafted. The `d2t` of EAGLE-3 checkpoints is this minus 0, 1, 2,
            ...
        vocab_size: how many ids the target has.
        to_draft: the model's tokens for each of the target's, at least one. By default the
            corresponding token, which every id must then have.
        first: tokens that the model reads before every prompt, such as a beginning of sequence.

    Returns:
        A model with `vocab_size` ids, without a tokenizer (give it the target's), for any drafter
        that takes a model. It takes token trees if every token is read as one.

    Raises:
        TypeError: the argument is not a Model.
        ValueError: ids out of range, one that two tokens stand for, or a target's id that nothing
            is read for.

    Example:
        >>> from jaxspec.testing import table_model
        >>> draft = map_vocabulary(
        ...     table_model(jax.random.key(0), vocab=2), [2, 0], 3, [[1], [1, 1], [0]]
        ... )
        >>> prompt = core.Prompt(jnp.array([[0, 1, 2]]), jnp.array([3]))
        >>> forward, cache = draft.lm.prefill(draft.params, prompt, core.Room(5))
        >>> cache.ends[0, :4].tolist(), forward.logits[0, 0, 1].item()
        ([0, 1, 3, 4], -inf)
    """
    check_model(model, "map_vocabulary")
    draft_vocab = model.lm.vocab_size
    target_ids = np.asarray(to_target)
    if target_ids.shape != (draft_vocab,) or not np.issubdtype(target_ids.dtype, np.integer):
        raise ValueError(
            f"to_target has shape {target_ids.shape}: expected an id for each of the model's "
            f"{draft_vocab} tokens"
        )
    check_ids(target_ids, "to_target", vocab_size, least=NONE)
    real = target_ids[target_ids != NONE]
    if len(np.unique(real)) < len(real):
        twice = np.flatnonzero(np.bincount(real) > 1)[0]
        raise ValueError(
            f"to_target has id {twice} more than once: expected each of the target's ids at most "
            "once"
        )
    if to_draft is None:  # the inverse of to_target
        draft_ids = np.full(vocab_size, NONE, np.int32)
        draft_ids[real] = np.flatnonzero(target_ids != NONE)
        unmatched = np.flatnonzero(draft_ids == NONE)
        if unmatched.size:
            raise ValueError(
                f"the target's id {unmatched[0]} matches no token of the model: give to_draft, the "
                "model's tokens for each of the target's ids"
            )
        to_draft = [[token] for token in draft_ids.tolist()]
    table, count = _table(to_draft, vocab_size, draft_vocab)
    check_ids(first, "first", draft_vocab)
    params = MappedParams(
        model=model.params,
        head=None,
        to_target=_past_the_end(target_ids, vocab_size),
        to_draft=jnp.asarray(table),
        count=jnp.asarray(count),
        first=jnp.asarray(first, jnp.int32) if len(first) else None,
    )
    longest = table.shape[1]
    if longest == 1 and not len(first):  # rows are as long as the target's
        lm = _mapped(model.lm, None, vocab_size)
    else:
        lm = _ragged(model.lm, vocab_size, longest, len(first))
    return model._replace(lm=lm, params=params, tokenizer=None)


def with_head(
    model: core.Model,
    head: core.Head,
    head_params: core.Params,
    to_target: Sequence[int] | np.ndarray,
) -> core.Model:
    """Replaces a model's head by one over W of its ids, `to_target`; it reads the same tokens."""
    ids = _past_the_end(np.asarray(to_target), model.lm.vocab_size)
    lm = _mapped(model.lm, head, model.lm.vocab_size)
    return model._replace(lm=lm, params=MappedParams(model.params, head_params, ids))


def _past_the_end(ids: np.ndarray, vocab_size: int) -> Int[Array, " W"]:
    return jnp.asarray(np.where(ids == NONE, vocab_size, ids), jnp.int32)


def _table(
    rows: Sequence[Sequence[int]], vocab_size: int, draft_vocab: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads rows of ids to a table; also returns their lengths."""
    if len(rows) != vocab_size:
        raise ValueError(
            f"to_draft has {len(rows)} entries: expected one for each of the target's {vocab_size} "
            "ids"
        )
    count = np.array([len(row) for row in rows], np.int32)
    if count.min() < 1:
        raise ValueError(
            f"to_draft has nothing for id {int(np.argmin(count))}: expected at least one token"
        )
    table = np.zeros((vocab_size, count.max()), np.int32)
    table[np.arange(table.shape[1])[None, :] < count[:, None]] = np.fromiter(
        (x for row in rows for x in row), np.int32
    )
    check_ids(table, "to_draft", draft_vocab)
    return table, count


@functools.lru_cache
def _mapped(lm: core.LanguageModel, head: core.Head | None, vocab: int) -> core.LanguageModel:
    """Makes the pure functions of a model whose tokens match one target token each."""

    def known(params: MappedParams, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        if params.to_draft is None:
            return tokens
        return params.to_draft[tokens, 0]

    def mapped(
        params: MappedParams, forward: core.Forward, position: Int[Array, "B T"] | None = None
    ) -> core.Forward:
        """Puts logits (a separate head's: at `position`) into the target's vocabulary."""
        if head is None or own_inside is None:
            return forward._replace(logits=match_vocab(forward.logits, vocab, params.to_target))
        features = forward.features
        if position is not None:
            features = _at(features, position)
        return forward._replace(logits=own_inside.head(params, features))

    def prefill(
        params: MappedParams,
        prompt: core.Prompt,
        room: core.Room,
        encoded: Float[Array, "B P M"] | None = None,
    ) -> tuple[core.Forward, core.Cache]:
        prompt = prompt._replace(tokens=known(params, prompt.tokens))
        if isinstance(prompt.encoder, core.Prompt):
            prompt = prompt._replace(
                encoder=prompt.encoder._replace(tokens=known(params, prompt.encoder.tokens))
            )
        if encoded is None or lm.encoder is None:
            forward, cache = lm.prefill(params.model, prompt, room)
        else:
            forward, cache = lm.encoder.prefill(params.model, prompt, room, encoded)
        last = token_rows.decoder_prompt(lm, prompt).length - 1
        return mapped(params, forward, last[:, None]), cache

    def extend(
        params: MappedParams,
        cache: core.Cache,
        tokens: Int[Array, "B T"],
        parent: Int[Array, "B N"] | None = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[core.Forward, core.Cache]:
        forward, cache = lm.extend(params.model, cache, known(params, tokens), parent, real)
        return mapped(params, forward), cache

    def inside(inner: core.Inside) -> core.Inside:
        def own_head(
            params: MappedParams, features: Float[Array, "B T M"], raw: bool = False
        ) -> Float[Array, "B T V"]:
            if head is None:
                logits = inner.head(params.model, features, raw)
            else:
                logits = head(params.head, features, raw)
            return match_vocab(logits, vocab, params.to_target)

        def own_embed(params: MappedParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
            return inner.embed(params.model, known(params, tokens))

        encoder = None
        # With a token map the encoder would read other tokens, so it cannot be shared.
        if inner.encoder is not None and head is not None:
            encoder = own_encoder(inner.encoder)
        return inner._replace(head=own_head, embed=own_embed, layers=None, encoder=encoder)

    def own_encoder(inner: core.Encoder) -> core.Encoder:
        def encoder_params(params: MappedParams) -> core.Params:
            return inner.params(params.model)

        def with_params(params: MappedParams, shared: core.Params) -> MappedParams:
            return params._replace(model=inner.with_params(params.model, shared))

        return core.Encoder(encoder_params, with_params, prefill, inner.is_shared)

    own_inside = None
    if lm.inside is not None:
        own_inside = inside(lm.inside)
    return lm._replace(prefill=prefill, extend=extend, vocab_size=vocab, inside=own_inside)


@functools.lru_cache
def _ragged(lm: core.LanguageModel, vocab: int, longest: int, lead: int) -> core.LanguageModel:
    """Makes the pure functions of a model that reads some target tokens as several own tokens."""
    model = _Ragged(lm, vocab, longest, lead)

    def shortened(limit: int | None, lead: int) -> int | None:
        """Returns how many target tokens surely fit into `limit` own tokens."""
        if limit is None:
            return None
        return (limit - lead) // longest

    def inside(inner: core.Inside) -> core.Inside:
        def embed(params: MappedParams, tokens: Int[Array, "B T"]) -> Float[Array, "B T M"]:
            """Embeds the last own token of each target token, where features are taken, too."""
            assert params.to_draft is not None and params.count is not None
            return inner.embed(params.model, params.to_draft[tokens, params.count[tokens] - 1])

        def head(
            params: MappedParams, features: Float[Array, "B T M"], raw: bool = False
        ) -> Float[Array, "B T V"]:
            return match_vocab(inner.head(params.model, features, raw), vocab, params.to_target)

        return core.Inside(inner.width, head, embed, inner.taps)

    own_inside = None
    if lm.inside is not None:
        own_inside = inside(lm.inside)
    is_decoder = lm.limits.start_token is None  # its positions hold the prompt and `first`, too
    limits = lm.limits._replace(
        max_positions=shortened(lm.limits.max_positions, lead if is_decoder else 0),
        max_prompt=shortened(lm.limits.max_prompt, lead),
    )
    return core.LanguageModel(
        prefill=model.prefill,
        extend=model.extend,
        rewind=model.rewind,
        vocab_size=vocab,
        select=None,  # no token trees
        limits=limits,
        inside=own_inside,
        is_causal=lm.is_causal,
    )


class _Ragged(NamedTuple):
    """A model whose rows are longer than the target's, each by another number. "Own": of `lm`."""

    lm: core.LanguageModel
    vocab: int  # V
    longest: int  # R
    lead: int  # F

    def spell(
        self, params: MappedParams, tokens: Int[Array, "B T"], real: Bool[Array, "B T"]
    ) -> tuple[Int[Array, "B T*R"], Int[Array, "B T"]]:
        """Spells the target's tokens as own tokens, and returns where each target token ends.

        With a = x, b = y z: before [a b a], after [x y z x . .] and [1 3 4].
        """
        assert params.to_draft is not None and params.count is not None
        batch, step = tokens.shape
        count = jnp.where(real, params.count[tokens], 0)  # [B, T], of own tokens
        ends = jnp.cumsum(count, axis=1)
        # Part r of token t goes to slot ends[t - 1] + r; missing parts go past the end, and are
        # dropped.
        r = jnp.arange(self.longest, dtype=ends.dtype)[None, None, :]
        has_part = r < count[:, :, None]  # [B, T, R]
        past_the_end = step * self.longest
        slot = jnp.where(has_part, (ends - count)[:, :, None] + r, past_the_end)
        empty = jnp.zeros((batch, step * self.longest), jnp.int32)
        row = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        return empty.at[row, slot].set(params.to_draft[tokens], mode="drop"), ends

    def narrowest(
        self, width: int, needed: Int[Array, ""], read: Callable[..., Any], *arguments: Any
    ) -> Any:
        """Reads `width` own tokens if no row has more, else `longest` times as many.

        A conditional copies the cache, but unlike a loop it can be differentiated, which training
        needs.
        """
        passes = [functools.partial(read, wide) for wide in (width, width * self.longest)]
        return jax.lax.cond(needed <= width, *passes, *arguments)

    def prefill(
        self, params: MappedParams, prompt: core.Prompt, room: core.Room
    ) -> tuple[core.Forward, MappedCache]:
        if prompt.encoder is not None or self.lm.limits.begin:
            raise ValueError(
                "the row begins with more than a start token, such as a language: expected a "
                "drafter with the target's tokenizer, and this one has another"
            )
        width = prompt.tokens.shape[1]
        lead = self.lead
        has_encoder = self.lm.limits.start_token is not None
        # tokens: [B, P R], ends: [B, P], where each target token ends among them
        tokens, ends = self.spell(params, prompt.tokens, _is_real(prompt.tokens, prompt.length))
        if params.first is not None:
            first = jnp.broadcast_to(params.first[None], (tokens.shape[0], lead))
            tokens = jnp.concatenate([first, tokens], axis=1)
            ends = ends + lead
        # A row of `room.tokens` target tokens, each spelled with R own tokens at most.
        capacity = lead + room.tokens * self.longest
        capacity += -(-capacity // chunks.LONGEST)  # equal chunks are rounded up
        own_room = core.Room(capacity, None if room.rewind is None else room.rewind * self.longest)

        def read(wide: int) -> tuple[core.Forward, core.Cache]:
            row = core.Prompt(tokens[:, : wide + lead], ends[:, -1])
            forward, cache = self.lm.prefill(params.model, row, own_room)
            if has_encoder:
                return forward, cache
            return _at_ends(forward, ends), cache

        # An encoder's output and cache are as wide as its input, which a conditional cannot choose.
        if has_encoder:
            forward, cache = read(width * self.longest)
        else:
            forward, cache = self.narrowest(width, jnp.max(ends[:, -1]) - lead, read)
        forward = forward._replace(logits=match_vocab(forward.logits, self.vocab, params.to_target))
        # From here on `ends` counts the decoder's row; with an encoder, the prompt is not a part of
        # it.
        if has_encoder:  # the row is its start token
            length = jnp.ones_like(prompt.length)
            ends = jnp.broadcast_to(jnp.arange(2, dtype=ends.dtype)[None], (tokens.shape[0], 2))
        else:
            length = prompt.length
            ends = jnp.pad(ends, ((0, 0), (1, 0)), constant_values=lead)
        ends = jnp.pad(ends, ((0, 0), (0, room.tokens + 1 - ends.shape[1])))
        return forward, MappedCache(cache, length, ends)

    def extend(
        self,
        params: MappedParams,
        cache: MappedCache,
        tokens: Int[Array, "B T"],
        parent: Any = None,
        real: Int[Array, " B"] | None = None,
    ) -> tuple[core.Forward, MappedCache]:
        if parent is not None:
            raise ValueError(
                "a model that reads one token as several takes chains only, no token trees"
            )
        lm = self.lm
        width = tokens.shape[1]
        start = _at_length(cache.ends, cache.length)  # [B], in own tokens
        is_real = tokens != token_rows.NO_TOKEN  # [B, T]
        if real is not None:
            is_real = is_real & _is_real(tokens, real)
        spelled, ends = self.spell(params, tokens, is_real)  # [B, T R], [B, T]

        def feed(
            inner: core.Cache, chunk: Int[Array, "B C"], count: Int[Array, " B"]
        ) -> tuple[core.Forward, core.Cache]:
            forward, inner = lm.extend(params.model, inner, chunk, real=count)
            if lm.inside:
                # The head is applied outside, so that a program that reads no logits computes none.
                forward = forward._replace(logits=forward.logits[..., :0])
            return forward, inner

        def read(wide: int, inner: core.Cache) -> tuple[core.Forward, core.Cache]:
            # Rows end at different own tokens: read them like a prompt, after the cache.
            before = core.Before(inner, start, wide)
            end = start + ends[:, -1]
            read_chunks = functools.partial(
                chunks.read, feed, lm.rewind, lambda batch, room: before.state
            )
            forward, _, inner = read_chunks(spelled[:, :wide], end, core.Room(0), before=before)
            return _at_ends(forward, ends)._replace(logits=_at(forward.logits, ends - 1)), inner

        forward, inner = self.narrowest(width, jnp.max(ends[:, -1]), read, cache.inner)
        if lm.inside is None:
            logits = forward.logits
        else:
            logits = lm.inside.head(params.model, forward.features)
        num_ends = cache.length + 1  # the first is the end of what precedes the row
        new_ends = (start[:, None] + ends).astype(cache.ends.dtype)
        all_ends = token_rows.append(cache.ends, num_ends, new_ends)
        length = cache.length + jnp.asarray(width, cache.length.dtype)
        logits = match_vocab(logits, self.vocab, params.to_target)
        return forward._replace(logits=logits), MappedCache(inner, length, all_ends)

    def rewind(self, cache: MappedCache, length: Int[Array, " B"]) -> MappedCache:
        own_length = _at_length(cache.ends, length)
        return cache._replace(inner=self.lm.rewind(cache.inner, own_length), length=length)


def _is_real(tokens: Int[Array, "B T"], length: Int[Array, " B"]) -> Bool[Array, "B T"]:
    return jnp.arange(tokens.shape[1], dtype=length.dtype)[None, :] < length[:, None]


def _at_ends(forward: core.Forward, ends: Int[Array, "B T"]) -> core.Forward:
    """Takes features and taps at the last own token of each target token."""
    hidden = forward.features, forward.taps  # each may be None
    features, taps = jax.tree.map(lambda x: _at(x, jnp.maximum(ends - 1, 0)), hidden)
    return forward._replace(features=features, taps=taps)


def _at_length(ends: Int[Array, "B S"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    return jnp.take_along_axis(ends, length[:, None], axis=1)[:, 0]


def _at(x: Float[Array, "B T M"], position: Int[Array, "B N"]) -> Float[Array, "B N M"]:
    return jnp.take_along_axis(x, position[:, :, None], axis=1)
