"""Running a decoder with its draws scripted: `noise.categorical` and `noise.uniform` play a script.

Axis letters as in `jaxspec.base`; W is the width of what is compared between two paths, E the number of draws of a
call.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxspec import loops, noise
from jaxspec.base import Decoder, Keys, Request

ROUNDING = 1e-3  # of noise that is computed twice in one program


class Event(NamedTuple):
    """A draw of a call.

    Attributes:
        kind: "token" or "coin".
        index: its number among its kind.
        what: the draw in words, with the place in the code that asked for it.
    """

    kind: str
    index: int
    what: str


class Seen(NamedTuple):
    """What tells two paths apart after a call.

    Attributes:
        counts: the committed tokens, the lengths, and how many guesses were accepted.
        laws: what each token of the call was drawn from: log probabilities, not normalised.
        keys: the data of the key of each draw, of tokens and coins, in the order of `Program.plan`.
        used: which of them the row has drawn with: not where it said that it would not look at the outcome, nor in
            `Outcomes` where it did not.
    """

    counts: Int[Array, "B W"]
    laws: tuple[Float[Array, "B V"], ...]
    keys: UInt32[Array, "B E 2"]
    used: Bool[Array, "B E"]


class Program(NamedTuple):
    """A call of a decoder on rows of a batch.

    Attributes:
        run: (which, shared, rows, draws, coins) -> (rows after the call, Seen); compiled. `which` [B] says which of
            the `row_keys` each row has; `shared` is the weights and the end tokens, which rows have in common;
            column i of `draws` [B, draws] and `coins` [B, coins] is played in the i-th draw of its kind.
        plan: (which, shared, rows) -> the draws that the call makes, in order.
    """

    run: Callable[..., tuple[Any, Seen]]
    plan: Callable[..., list[Event]]


@functools.cache
def init_program(decoder: Decoder, room: int) -> Program:
    """`decoder.init`, on rows of (prompt, (controls, draft_controls, policy values), limit)."""

    def call(keys, shared, rows):
        (weights, eos), (prompt, (controls, own, values), limit) = shared, rows
        state = decoder.init(keys, weights, prompt, Request(controls, limit, eos, own, values), room)
        return state, jnp.zeros_like(state.length)

    return _program(call)


@functools.cache
def step_program(decoder: Decoder) -> Program:
    """`decoder.step`, on rows of DecodeState with the end tokens taken out."""

    def call(keys, shared, rows):
        weights, eos = shared
        state, info = decoder.step(keys, weights, rows._replace(request=rows.request._replace(eos=eos)))
        return state, info.num_accepted

    return _program(call)


def row_keys(which: Int[Array, " B"]) -> Keys:
    """Keys of rows by their numbers; what is drawn with the same one in different calls can be compared."""
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(0, impl="threefry2x32")))(which)


def _program(call: Callable) -> Program:
    def play(tape: _Tape, which: Int[Array, " B"], shared: Any, rows: Any) -> tuple[Any, Seen]:
        keys = row_keys(which)
        with tape.playing():
            state, accepted = call(keys, shared, rows)
        real = jnp.arange(state.tokens.shape[1])[None, :] < state.length[:, None]
        rest = jnp.stack([state.length, accepted, state.done.astype(jnp.int32)], axis=1)
        counts = jnp.concatenate([jnp.where(real, state.tokens, -1), rest], axis=1)
        data = jnp.stack(tape.keys, axis=1) if tape.keys else jnp.zeros((len(keys), 0, 2), jnp.uint32)
        used = jnp.stack(tape.used, axis=1) if tape.used else jnp.zeros((len(keys), 0), bool)
        seen = Seen(counts, tuple(tape.laws), data, used)
        state = state._replace(request=state.request._replace(eos=None))
        shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
        if any(shape[:1] != keys.shape for shape in shapes):
            raise ValueError(f"not every array of a state has the batch ({len(keys)}) first: got {sorted(shapes)}")
        return state, seen

    @jax.jit
    def run(which, shared, rows, draws, coins):
        return play(_Tape(draws, coins), which, shared, rows)

    plans: dict[Any, list[Event]] = {}  # by shapes, because tracing takes most of a small enumeration's time

    def plan(*args) -> list[Event]:
        leaves, treedef = jax.tree.flatten(args)
        shapes = treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in plans:
            tape = _Tape()
            jax.eval_shape(functools.partial(play, tape), *args)
            plans[shapes] = tape.events
        return plans[shapes]

    return Program(run, plan)


class _Tape:
    """Stands in for `jaxspec.noise` while a call is traced: plays a script and records what was asked for.

    Without a script every draw is 0.
    """

    def __init__(self, draws: Int[Array, "B draws"] | None = None, coins: Float[Array, "B coins"] | None = None):
        self.draws, self.coins = draws, coins
        self.events: list[Event] = []
        self.laws: list[Float[Array, "B V"]] = []
        self.keys: list[UInt32[Array, "B 2"]] = []
        self.used: list[Bool[Array, " B"]] = []

    def categorical(
        self,
        keys: Keys,
        log_probs: Float[Array, "B V"],
        wanted: Bool[Array, " B"] | None = None,
        drawn: Float[Array, "B V"] | None = None,
    ) -> Int[Array, " B"]:
        """As in a batch of one row: where the draw is not wanted it is token 0."""
        index = len(self.laws)
        used = jnp.ones(keys.shape, bool) if wanted is None else wanted
        token = jnp.zeros(keys.shape, jnp.int32) if self.draws is None else self.draws[:, index]
        if drawn is not None:
            own = jnp.all(jnp.abs(drawn - _gumbel_again(keys, drawn.shape[1])) < ROUNDING, axis=1)
            used, token = jnp.logical_and(used, own), jnp.where(own, token, noise.first_largest(log_probs + drawn))
        self.laws.append(jnp.where(used[:, None], log_probs, -jnp.inf))
        self._note("token", index, keys, used)
        return token

    def uniform(self, keys: Keys, count: int) -> Float[Array, "B count"]:
        first = len(self.events) - len(self.laws)
        for i in range(count):
            each = jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys)
            self._note("coin", first + i, each, jnp.ones(keys.shape, bool))
        return jnp.zeros((*keys.shape, count)) if self.coins is None else self.coins[:, first : first + count]

    def _note(self, kind: str, index: int, keys: Keys, used: Bool[Array, " B"]) -> None:
        above, caller, *_ = traceback.extract_stack(limit=4)  # of whoever called `noise`, and of the caller's caller
        where = (f"{Path(frame.filename).name}:{frame.lineno} ({frame.name})" for frame in (caller, above))
        self.events.append(Event(kind, index, f"a {kind} drawn in {' for '.join(where)}"))
        self.keys.append(jax.random.key_data(keys))
        self.used.append(used)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """Replaces the noise, and unrolls loops, so that each draw in a loop is a call of its own.

        Jits inside are disabled: their caches would keep the script.
        """
        with contextlib.ExitStack() as stack:
            for home, name, stand_in in [
                (noise, "categorical", self.categorical),
                (noise, "uniform", self.uniform),
                (jax.lax, "scan", _unrolled),
                (loops, "up_to", _up_to),
            ]:
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, stand_in)
            stack.enter_context(jax.disable_jit())
            yield


def _gumbel_again(keys: Keys, vocab: int) -> Float[Array, "B V"]:
    """As data, because to compute it a second time reads as using the keys twice."""
    data, impl = jax.random.key_data(keys), jax.random.key_impl(keys)
    return noise.gumbel(jax.random.wrap_key_data(data, impl=impl), vocab)


def _up_to(most: int, body: Callable, carry: Any, going: Callable | None = None) -> Any:
    """`loops.up_to` as a Python loop; what comes after the end is computed, and thrown away."""
    live = jnp.array(True)
    for i in range(most):
        at = jnp.asarray(i, jnp.int32)
        if going is None:
            carry = body(at, carry)
            continue
        live = jnp.logical_and(live, going(at, carry))
        carry = jax.tree.map(functools.partial(jax.lax.select, live), body(at, carry), carry)
    return carry


def _unrolled(
    f: Callable, init: Any, xs: Any = None, length: int | None = None, reverse: bool = False, **options: Any
) -> tuple[Any, Any]:
    """`lax.scan` as a Python loop; of length 0 too, which `jax.disable_jit` does not do."""
    del options
    count = jax.tree.leaves(xs)[0].shape[0] if length is None else length
    carry, ys = init, []
    for i in reversed(range(count)) if reverse else range(count):
        carry, y = f(carry, jax.tree.map(lambda x, i=i: x[i], xs))
        ys.append(y)
    if ys:
        return carry, jax.tree.map(lambda *y: jnp.stack(y), *(ys[::-1] if reverse else ys))
    with _Tape().playing():  # the body never runs, so its draws do not count
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        _, y = jax.eval_shape(f, init, one)
    return carry, jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), y)
