"""Checks a user's model against the contract of a `LanguageModel`.

It reads a sequence of tokens in all ways that a decoder does, and compares the logits after each
token with a plainer way's. For a decoder-only model the plainest way is prompts, which use no
cache.

Shapes: B batch, T step, L tokens of the sequence, l of them compared, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.core import Cache, LanguageModel, Model, Params, Prompt, Room, programs
from jaxspec.core.checks import at_least
from jaxspec.core.checks import check_model as check_is_model
from jaxspec.decode import causality

SPLIT = 3  # tokens of the sequence that prompts have, before others are fed
ROOM = 3  # tokens that are fed and taken back
LONGEST = 2048  # tokens of the longest row, unless another number is given
GROWTH = 4  # how many times longer each further row is
ACROSS = 4  # tokens of the pass at a long row's end
MOST_LOGITS = 2**31  # bytes of the logits of two such rows
LIMIT = "Give max_positions, if the network has a limit"
WAYS = {  # what is tried, what is most often the cause first
    "own token": "logits do not change with the token that they follow, and do with those before "
    "it: " + causality.SHIFTED,
    "batch": "the logits of a row change with the other rows of its batch. Take no norm, mean or "
    "maximum over rows",
    "causality": f"later tokens change the logits of earlier ones. {causality.CAUSAL}",
    "padding": "what stands after a prompt's end changes its logits. Entries at or past a row's "
    "own length must never be read",
    "cache": "tokens that are fed through the cache have other logits than in a prompt. Look at "
    "their positions, at what is written to the cache, and for dropout or other noise",
    "one pass": "several tokens in one pass have other logits than the same tokens one by one. "
    "Give each token its own position, its own entry of the cache, and a mask that "
    "ends there",
    "ragged rows": "rows of different lengths in one batch have other logits than rows of one "
    "length. Each row needs an index of its own (adapters.by_row gives it one)",
    "rewinds": "tokens that were fed and taken back change the logits of those that follow. "
    "Entries at or past a row's length must be masked when they are read, and "
    "overwritten when others are written. A running sum cannot be taken back",
    "windows": "at the end of a long row, several tokens in one pass have other logits than the "
    "same tokens one by one, or these have others than in a prompt. A window counts "
    "positions of the row (jaxspec.core.kv_cache.key_positions), not places in the "
    "pass. A network that is right one token at a time can be read so: "
    "adapters.by_row(step, one_by_one=True)",
    "trees": "the nodes of a token tree have other logits than their paths fed as chains. A node "
    "attends to the tokens before the tree, to its ancestors and to itself "
    "(jaxspec.core.kv_cache.mask), and its position counts its depth",
}


class LogitsToCompare(NamedTuple):
    """The logits after some tokens, read in one way, and the expected ones: [l, V] both."""

    logits: Float[Array, "l V"]
    expected: Float[Array, "l V"]


class Differences(dict[str, float]):
    """The result of `check_model`: the largest difference of each reading, by name.

    Attributes:
        not_tried: sentences on what could not be tried, or was not; empty if everything was.
    """

    not_tried: list[str]

    def __init__(self, differences: Mapping[str, float], not_tried: list[str]) -> None:
        super().__init__(differences)
        self.not_tried = not_tried


@programs.outside_context_mesh
def check_model(
    model: Model,
    *,
    length: int = 8,
    longest: int = LONGEST,
    seed: int = 0,
    tolerance: float | None = None,
) -> Differences:
    """Tries whether a model of your own is what decoding expects: call it once, before you trust
    its text.

    It reads a random sequence in all ways that decoding does, and compares the logits. Later
    tokens, padding and other rows of a batch must not change them. A cache, one pass over several
    tokens, rows of different lengths, tokens that were taken back and token trees (if the model
    takes them) must give the same logits as plain reading. Logits must depend on the token that
    they follow. At the ends of longer and longer rows a pass over several tokens is compared again,
    until a row's first token no longer matters: then every window of the network was crossed.

    Args:
        model: to be tried, with the parameters that it will have; random ones show more than zeros.
        length: tokens of the sequence.
        longest: tokens of the longest row that is read to cross windows, at most the model's
            positions. `length` leaves long rows out.
        seed: the seed of the tokens.
        tolerance: the difference that rounding may make, relative to the largest logit. By default
            1e-4, and 2e-2 for parameters of fewer than 32 bits. Products of float32 on a TPU need
            2e-2, too.

    Returns:
        The largest difference of each reading, relative to the largest logit. `WAYS` has their
        names. Its attribute `not_tried` names the checks that were left out, such as rows longer
        than `longest`.

    Raises:
        ValueError: with everything that is wrong, and what usually causes it; also of shapes.
        TypeError: not a model, or its functions return other types.

    Example:
        >>> import jaxspec
        >>> from jaxspec.nets import adapters
        >>> def looks_ahead(params, tokens):  # a mean over the whole row
        ...     return params[tokens] + jnp.mean(params[tokens], axis=1, keepdims=True)
        >>> params = jax.random.normal(jax.random.key(0), (7, 7))
        >>> model = jaxspec.Model(adapters.from_function(looks_ahead, vocab_size=7), params)
        >>> jaxspec.testing.check_model(model)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the model is not what decoding expects:
        - causality (logits differ by ...): later tokens change the logits of earlier ones. A position may read ...
    """
    check_is_model(model, "model")
    at_least(SPLIT + 2, length=length)
    if tolerance is None:
        if causality.is_narrow(model.params):
            tolerance = 2e-2
        else:
            tolerance = 1e-4
    lm = model.lm
    if lm.limits.max_positions is not None and lm.limits.max_positions < length + ROOM:
        raise ValueError(
            f"length is {length}, and the model has {lm.limits.max_positions} positions: lower it"
        )
    causality.check_shapes(model)
    tokens = np.random.default_rng(seed).integers(0, lm.vocab_size, (2, length)).astype(np.int32)
    # another one at every place
    tokens[1] = (tokens[0] + 1 + tokens[1] % (lm.vocab_size - 1)) % lm.vocab_size
    readings = jax.device_get(_readings(lm, model.params, jnp.asarray(tokens)))
    measured = {way: causality.difference(*reading) for way, reading in readings.items()}
    if math.isnan(max(measured.values())):
        raise ValueError(
            f"{causality.called(model)} gives logits that are NaN or +inf: check its parameters"
        )
    if any(difference > tolerance for difference in measured.values()):
        not_tried = []  # a model that is wrong in short rows is not read in long ones
    else:
        measured["windows"], not_tried = _windows(model, length, longest, tolerance, seed)
    apart = {way: measured[way] for way in WAYS if way in measured}
    wrong = [way for way, difference in apart.items() if difference > tolerance]
    shown = {way: f"logits differ by {apart[way]:.1g} of the largest" for way in wrong}
    looked_ahead = None
    if lm.vocab_size > 1:
        looked_ahead = jax.device_get(causality.look_ahead(lm, model.params))
    if looked_ahead is not None and causality.shifts_input(
        looked_ahead.own_token, looked_ahead.before
    ):
        wrong, shown["own token"] = ["own token", *wrong], "logits differ by 0"
    if wrong:
        lines = [f"- {way} ({shown[way]}): {WAYS[way]}." for way in wrong]
        more = ""
        if wrong[1:]:
            more = "\nMend the first of these, which may have caused the others, and try again."
        raise ValueError(
            f"{causality.called(model)} is not what decoding expects:\n" + "\n".join(lines) + more
        )
    if lm.select is None:
        not_tried.append("token trees: the model takes none")
    return Differences(apart, not_tried)


def _windows(
    model: Model, length: int, longest: int, tolerance: float, seed: int
) -> tuple[float, list[str]]:
    """Reads longer and longer rows; returns the largest difference at their ends, and the checks
    left out.
    """
    lm = model.lm
    largest = 0.0
    fitting = None
    if lm.limits.max_positions is not None:
        fitting = lm.limits.max_positions - ROOM
    if fitting is None:
        limit = longest
    else:
        limit = min(longest, fitting)
    reached = length
    while reached < limit:
        size = min(GROWTH * reached, limit)
        if lm.inside is None and 8 * size * lm.vocab_size > MOST_LOGITS:
            return largest, [
                f"rows of more than {reached} tokens: the logits of {size} would take too much "
                "memory"
            ]
        tokens = np.random.default_rng(seed).integers(0, lm.vocab_size, size).astype(np.int32)
        try:
            ends = jax.device_get(_ends(lm, model.params, jnp.asarray(tokens)))
        except Exception as error:
            # The caller's network may have a limit that is not declared.
            reason = (
                f"reading {size} raised {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]:.100}"
            )
            return largest, [f"rows of more than {reached} tokens: {reason}. {LIMIT}"]
        if np.isnan(ends.one_by_one).any():
            return largest, [
                f"rows of more than {reached} tokens: in rows of {size} logits are NaN. {LIMIT}"
            ]
        pairs = (ends.at_once, ends.one_by_one), (ends.whole, ends.one_by_one[-1])
        largest = max(largest, *(causality.difference(*pair) for pair in pairs))
        reached = size
        first_token = causality.difference(ends.one_by_one, ends.other_beginning)
        if largest > tolerance or first_token <= causality.SAME:
            return largest, []  # every window ends within such a row
    if reached == fitting:
        return largest, []
    further = f"longest={GROWTH * reached} reads further"
    return largest, [
        f"windows of {reached} tokens and more: the first token of such a row still counts "
        f"({further})"
    ]


class RowEnds(NamedTuple):
    """The logits after the last tokens of a long row."""

    at_once: Float[Array, "ACROSS V"]  # read in one pass
    one_by_one: Float[Array, "ACROSS V"]
    other_beginning: Float[Array, "ACROSS V"]  # one by one, in a row with another first token
    whole: Float[Array, " V"]  # the last token's, read with all others as one prompt


@programs.jit(static_argnames=("lm",))
def _ends(lm: LanguageModel, params: Params, row: Int[Array, " L"]) -> RowEnds:
    """Reads a long row in several ways, beside one that differs from it in its first token."""
    changed = row.at[0].set((row[0] + 1) % lm.vocab_size)
    rows = jnp.stack([row, changed])
    last = len(row) - ACROSS
    is_decoder = lm.limits.start_token is None
    room = Room(len(row) + len(lm.limits.first_tokens) + ROOM)

    def one_more(cache: Cache, fed: Int[Array, " 2"]) -> tuple[Cache, Float[Array, "2 V"]]:
        forward, cache = lm.extend(params, cache, fed[:, None])
        return cache, forward.logits[:, 0]

    def read(count: int) -> tuple[Float[Array, "2 V"], Cache]:
        """Reads the first tokens of both rows."""
        if is_decoder:
            forward, cache = lm.prefill(
                params, Prompt(rows[:, :count], jnp.full(2, count, jnp.int32)), room
            )
            return forward.logits[:, 0], cache
        _, cache = lm.prefill(params, Prompt(rows[:, :SPLIT], jnp.full(2, SPLIT, jnp.int32)), room)
        forward, cache = lm.extend(params, cache, rows[:, :count])
        return forward.logits[:, -1], cache

    _, cache = read(last)
    _, singly = jax.lax.scan(one_more, cache, rows[:, last:].T)
    at_once, _ = lm.extend(params, cache, rows[:, last:])
    return RowEnds(at_once.logits[0], singly[:, 0], singly[:, 1], read(len(row))[0][0])


class Sequences(NamedTuple):
    """A model, the sequence that it reads, and another one that differs at every place."""

    lm: LanguageModel
    params: Params
    row: Int[Array, " L"]
    other: Int[Array, " L"]

    # An encoder-decoder's row begins with its start token, and its encoder reads the same text
    # throughout.
    is_decoder = property(
        lambda self: self.lm.limits.start_token is None, doc="True for a decoder-only model."
    )
    begin = property(
        lambda self: SPLIT if self.is_decoder else 0,
        doc="Tokens of the sequence before the fed ones.",
    )
    before = property(
        lambda self: 0 if self.is_decoder else 1, doc="Tokens of a row before the sequence."
    )
    rest = property(
        lambda self: self.row[self.begin :], doc="The tokens that are fed, of which l are compared."
    )

    def started(
        self, ends: Int[Array, " B"], padding: Int[Array, " L"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Prefills a row for each end, with the sequence up to there and `padding` after it."""
        length = len(self.row)
        rows = jnp.where(jnp.arange(length)[None] < ends[:, None], self.row[None], padding[None])
        if not self.is_decoder:
            rows = jnp.broadcast_to(self.row[None], rows.shape)
            ends = jnp.full_like(ends, SPLIT)
        forward, cache = self.lm.prefill(
            self.params, Prompt(rows, ends), Room(length + self.before + ROOM)
        )
        return forward.logits[:, 0], cache

    def begun(self, rows: int) -> Cache:
        """Prefills some rows, all alike, up to where tokens are fed."""
        return self.started(jnp.full(rows, self.begin, jnp.int32), self.other)[1]

    def fed(
        self, cache: Cache, new: Int[Array, "B T"], *parent: Any
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Feeds tokens to all rows."""
        forward, cache = self.lm.extend(self.params, cache, new, *parent)
        return forward.logits, cache

    def next_token(self, cache: Cache, token: Int[Array, ""]) -> tuple[Cache, Float[Array, " V"]]:
        """Feeds one token to both rows."""
        logits, cache = self.fed(cache, jnp.broadcast_to(token, (2, 1)))
        return cache, logits[0, 0]

    def rewound(self, cache: Cache, position: Int[Array, ""] | int) -> Cache:
        """Takes both rows back to a position of the sequence."""
        return self.lm.rewind(cache, jnp.full(2, self.before, jnp.int32) + position)


@programs.jit(static_argnames=("lm",))
def _readings(
    lm: LanguageModel, params: Params, tokens: Int[Array, "2 L"]
) -> dict[str, LogitsToCompare]:
    """Reads a sequence in every way."""
    s = Sequences(lm, params, *tokens)
    # Through the cache, a token at a time: what each further reading is compared with.
    cache, cached = jax.lax.scan(s.next_token, s.begun(2), s.rest)  # [l, V]
    return _prompts(s, cached) | _passes(s, cached) | _rewinds(s, cache, cached)


def _prompts(s: Sequences, cached: Float[Array, "l V"]) -> dict[str, LogitsToCompare]:
    """Reads prompts, with and without padding; and feeds rows of different lengths their next
    tokens.
    """
    readings = dict[str, LogitsToCompare]()
    count = len(s.rest)
    if s.is_decoder:
        lengths = jnp.arange(1, len(s.row) + 1, dtype=jnp.int32)
        plain, _ = s.started(lengths, jnp.zeros_like(s.other))
        readings["padding"] = LogitsToCompare(s.started(lengths, s.other)[0], plain)
        readings["cache"] = LogitsToCompare(cached, plain[s.begin :])
        _, ragged = s.started(lengths[s.begin - 1 : -1], s.other)
    else:
        _, ragged = s.fed(s.begun(count), jnp.broadcast_to(s.rest[None], (count, count)))
        ragged = s.lm.rewind(ragged, s.before + jnp.arange(count, dtype=jnp.int32))
    readings["ragged rows"] = LogitsToCompare(s.fed(ragged, s.rest[:, None])[0][:, 0], cached)
    return readings


def _passes(s: Sequences, cached: Float[Array, "l V"]) -> dict[str, LogitsToCompare]:
    """Reads the rest in one pass: by itself, with other tokens from each place on, and beside
    another row.
    """
    other_tokens = s.other[s.begin :]
    count = len(s.rest)
    at_once, _ = s.fed(s.begun(2), jnp.stack([s.rest, s.rest]))
    # row i from its place i + 1 on
    changed = jnp.where(jnp.tri(count, dtype=bool), s.rest[None], other_tokens[None])
    of_changed, _ = s.fed(s.begun(count), changed)
    mixed, _ = s.fed(s.begun(2), jnp.stack([s.rest, other_tokens]))
    return {
        "one pass": LogitsToCompare(at_once[0], cached),
        "causality": LogitsToCompare(jnp.diagonal(of_changed, axis1=0, axis2=1).T, at_once[0]),
        "batch": LogitsToCompare(mixed[0], at_once[0]),
    }


def _rewinds(s: Sequences, cache: Cache, cached: Float[Array, "l V"]) -> dict[str, LogitsToCompare]:
    """Takes tokens back, from each place on; and feeds a tree before the last two tokens."""
    length = len(s.row)

    def taken_back(position: Int[Array, ""]) -> Float[Array, " V"]:
        """Feeds other tokens from a place of the sequence on, takes them back, and feeds the
        sequence's own.
        """
        _, after = s.fed(s.rewound(cache, position), jnp.broadcast_to(s.other[:ROOM], (2, ROOM)))
        return s.next_token(s.rewound(after, position), s.row[position])[1]

    places = jnp.arange(s.begin, length, dtype=jnp.int32)
    readings = {"rewinds": LogitsToCompare(jax.lax.map(taken_back, places), cached)}
    if s.lm.select is None:
        return readings
    # A tree of two branches before the last two tokens: others, and the sequence's own.
    last = length - 2
    nodes = jnp.stack([s.other[last], s.row[last], s.other[last + 1], s.row[last + 1]])
    parent = jnp.broadcast_to(jnp.array([-1, -1, 0, 1], jnp.int32), (2, 4))
    tree, _ = s.fed(s.rewound(cache, last), jnp.stack([nodes, nodes]), parent)
    return readings | {"trees": LogitsToCompare(tree[0, jnp.array([1, 3])], cached[-2:])}
