"""Splitting paths: the choice of the draw that decides most, and of the value to split it at.

Each open draw is changed by itself, in three completions of the path: a draw matters if the call
then does something else. Uniforms come first, if all completions agree on the value at which the
call changes; then tokens, if their distribution does not depend on an open draw. A draw may also
decide only what another one is drawn from, as where a rule takes a token from from one of two
distributions: the path is split where these change. So the earliest decision splits a path first:
the first draft token, then whether it is accepted, then the tokens after it. Most draws of a tree
never split one.

N is a number of paths, C of completions (contexts), E of draws that a row makes, R of runs with one
draw changed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxspec.testing.paths import (
    NONE,
    SAME,
    Look,
    Paths,
    Runs,
    differ,
    distributions,
    is_uniform,
    matches,
    take,
)
from jaxspec.testing.tape import UNIFORMS

WIDTH = 3  # C


class Contexts(NamedTuple):
    """Completions with changed draws, C for each path."""

    # these two: the completions' `tape.Script.turn` and `every`
    turn: Int[np.ndarray, " NC"]
    every: Bool[np.ndarray, " NC"]
    look: Look  # the state after the call in each


class Changes(NamedTuple):
    """Runs with one changed draw of one completion each."""

    path: Int[np.ndarray, " R"]  # the path with that draw, 0 .. N - 1.
    context: Int[np.ndarray, " R"]  # its completion, 0 .. N C - 1.
    draw: Int[np.ndarray, " R"]  # its number among the completion's draws
    # its number among the draws of the path's first completion; -1: it is not there
    in_first: Int[np.ndarray, " R"]
    # these two: its values
    old: Int[np.ndarray, " R"]
    new: Int[np.ndarray, " R"]
    look: Look  # the state after the call
    changed: Bool[np.ndarray, " R"]  # whether that is another one


def split(runs: Runs, paths: Paths, contexts: Contexts) -> Paths:
    """Splits each path into two or more; one stays where no draw was found that matters in these
    contexts.
    """
    if not len(paths.source):
        return paths
    changes = _changes(runs, paths, contexts)
    first = take(contexts.look.drawn, slice(None, None, WIDTH))
    matters, ready, effect = _roles(changes, contexts.look, first.key, first.number)
    uniform = is_uniform(first.number)
    token, has_token = _best(np.where(ready & ~uniform, matters, 0))
    hidden, has_hidden = _best(np.where(ready & ~uniform, effect, 0))
    chosen, has_uniform = _best(np.where(uniform & (first.number != NONE), matters, 0))
    point, agreed = _turning_points(
        runs, paths, contexts, changes, np.where(has_uniform, chosen, NONE)
    )
    by_uniform = has_uniform & (agreed | ~has_token)
    by_token = ~by_uniform & (has_token | has_hidden)
    token = np.where(has_token, token, hidden)
    parts = [take(paths, ~(by_uniform | by_token))]
    parts += _halves(
        take(paths, by_uniform), *_picked(first, chosen, by_uniform), point[by_uniform]
    )
    log_probs = np.take_along_axis(first.log_probs, token[:, None, None], axis=1)[:, 0]
    parts.append(
        _each_token(take(paths, by_token), *_picked(first, token, by_token), log_probs[by_token])
    )
    unsplit = ~(by_uniform | by_token)
    rows = (np.flatnonzero(unsplit)[:, None] * WIDTH + np.arange(WIDTH)).reshape(-1)
    parts += _by_distributions(runs, parts.pop(0), take(contexts, rows))
    return Paths.joined(parts)


def _by_distributions(runs: Runs, paths: Paths, contexts: Contexts) -> list[Paths]:
    """Splits paths by a uniform that changes what other draws are drawn from, where it changes
    nothing else.
    """
    if not len(paths.source):
        return [paths]
    drawn = contexts.look.drawn
    first = take(drawn, slice(None, None, WIDTH))
    # the distributions of all
    compared = Paths(paths.source, first.key, first.number, first.value, first.value + 1)
    all_paths = np.arange(len(drawn.number))
    draw = np.zeros(len(drawn.number), int)
    unchanged = _completion(paths, contexts, all_paths, draw, drawn.value[:, 0])
    contexts = contexts._replace(look=runs.look(*unchanged, take(compared, all_paths // WIDTH)))
    changes = _changes(runs, paths, contexts, compared)
    matters, _, _ = _roles(changes, contexts.look, first.key, first.number)
    chosen, is_split = _best(
        np.where(is_uniform(first.number) & (first.number != NONE), matters, 0)
    )
    point, _ = _turning_points(runs, compared, contexts, changes, np.where(is_split, chosen, NONE))
    halves = _halves(take(paths, is_split), *_picked(first, chosen, is_split), point[is_split])
    return [take(paths, ~is_split), *halves]


def _changes(
    runs: Runs, paths: Paths, contexts: Contexts, compared: Paths | None = None
) -> Changes:
    """Changes each open draw of each context, and runs the call; `compared` as `fixed` of
    `Runs.look`.
    """
    drawn = contexts.look.drawn
    owner = np.arange(len(drawn.number)) // WIDTH
    entry = matches(take(paths, owner), drawn.key, drawn.number)
    fixed = entry.any(axis=2)
    if entry.shape[2]:
        index = entry.argmax(axis=2)
    else:
        index = np.zeros(drawn.number.shape, int)
    uniform = is_uniform(drawn.number)
    if entry.shape[2]:
        low, high = (np.take_along_axis(x[owner], index, axis=1) for x in (paths.low, paths.high))
    else:
        low = high = np.zeros(drawn.number.shape, np.int32)
    low = np.where(fixed, low, 0)
    high = np.where(fixed, high, UNIFORMS)
    # Another value of each draw: a uniform's farther end, a token's next one that has a
    # probability.
    far_end = np.where(2 * drawn.value >= low + high, low, high - 1)
    vocab = drawn.log_probs.shape[2]
    following = (drawn.value[:, :, None] + np.arange(1, vocab + 1)) % vocab
    possible = np.take_along_axis(drawn.log_probs != -np.inf, following, axis=2)
    next_token = np.take_along_axis(following, possible.argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    next_token = np.where(possible.any(axis=2) & ~fixed, next_token, drawn.value)
    new_value = np.where(uniform, far_end, next_token)
    context, draw = np.nonzero((new_value != drawn.value) & (drawn.number != NONE))
    path = owner[context]
    old = drawn.value[context, draw]
    new = new_value[context, draw]
    if compared is None:
        compared = paths
    look = runs.look(*_completion(paths, contexts, context, draw, new), take(compared, path))
    key = drawn.key[context, draw][:, None]
    number = drawn.number[context, draw][:, None]
    # among the draws of the path's first context
    same_draw = matches(take(drawn, path * WIDTH), key, number)[:, 0]
    in_first = np.where(same_draw.any(axis=1), same_draw.argmax(axis=1), NONE)
    changed = differ(look, np.arange(len(path)), contexts.look, context)
    return Changes(path, context, draw, in_first, old, new, look, changed)


def _completion(
    paths: Paths, contexts: Contexts, context: np.ndarray, draw: np.ndarray, value: np.ndarray
) -> tuple[Paths, np.ndarray, np.ndarray]:
    """Fixes all draws of a context, with another value for one; returns the arguments of
    `Runs.look`.
    """
    drawn, low = contexts.look.drawn, contexts.look.drawn.value[context].copy()
    low[np.arange(len(draw)), draw] = value
    script = Paths(
        paths.source[context // WIDTH], drawn.key[context], drawn.number[context], low, low + 1
    )
    return script, contexts.turn[context], contexts.every[context]


def _roles(
    changes: Changes, base: Look, key: np.ndarray, number: np.ndarray
) -> tuple[Float[np.ndarray, "N E"], Bool[np.ndarray, "N E"], Float[np.ndarray, "N E"]]:
    """Summarises the changes of each draw of the first contexts.

    Returns:
        How often it changes the state; whether its distribution is the same for all open draws; and
        how often it changes the distributions of other draws.
    """
    owner = np.arange(len(base.drawn.number)) // WIDTH
    before = distributions(base.drawn, key[owner], number[owner])
    ready = np.all(~_apart(before, before[owner * WIDTH]).reshape(len(key), WIDTH, -1), axis=1)
    after = distributions(changes.look.drawn, key[changes.path], number[changes.path])
    moved = _apart(after, before[changes.context])
    moved &= np.arange(moved.shape[1])[None, :] != changes.in_first[:, None]
    np.logical_and.at(ready, changes.path, ~moved)
    matters = np.zeros(key.shape)
    effect = np.zeros(key.shape)
    has_draw = changes.in_first != NONE
    np.add.at(
        matters, (changes.path[has_draw], changes.in_first[has_draw]), changes.changed[has_draw]
    )
    np.add.at(
        effect, (changes.path[has_draw], changes.in_first[has_draw]), moved[has_draw].sum(axis=1)
    )
    return matters, ready & (number != NONE), effect


def _apart(
    first: Float[np.ndarray, "R E V"], second: Float[np.ndarray, "R E V"]
) -> Bool[np.ndarray, "R E"]:
    return np.asarray(np.any(~(np.abs(first - second) < SAME), axis=2))


def _best(score: Float[np.ndarray, "N E"]) -> tuple[Int[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Finds the first of the largest scores, and whether it is more than 0."""
    return score.argmax(axis=1), score.max(axis=1, initial=0) > 0


def _turning_points(
    runs: Runs, paths: Paths, contexts: Contexts, changes: Changes, chosen: Int[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Finds the smallest value of a uniform at which each path has another state, in one context,
    and whether the others agree.

    chosen: the uniform, a draw of the path's first context; -1: none.
    """
    point = np.zeros(len(chosen), np.int64)
    agreed = np.zeros(len(chosen), bool)
    candidates = np.flatnonzero(
        changes.changed & (changes.in_first == chosen[changes.path]) & (changes.in_first != NONE)
    )
    if not len(candidates):
        return point, agreed
    path, index = np.unique(changes.path[candidates], return_index=True)
    run = candidates[index]
    point[path] = _first_change(runs, paths, contexts, take(changes, run))
    others = np.setdiff1d(candidates, run)
    if len(others):
        both = others.repeat(2)
        value = point[changes.path[both]] - np.tile([1, 0], len(others))
        context = changes.context[both]
        draw = changes.draw[both]
        look = runs.look(
            *_completion(paths, contexts, context, draw, value), take(paths, changes.path[both])
        )
        turns = differ(look, np.arange(0, len(both), 2), look, np.arange(1, len(both), 2))
        agreed[changes.path[others]] = True
        np.logical_and.at(agreed, changes.path[others], turns)
    return point, agreed


def _first_change(
    runs: Runs, paths: Paths, contexts: Contexts, changes: Changes
) -> Int[np.ndarray, " K"]:
    """Finds the smallest value of a uniform, between its old and its new one, at which the state
    changes.

    By bisection, but into as many parts as fill a chunk, because a short one takes as long.
    """
    both = np.sort(np.stack([changes.old, changes.new]).astype(np.int64), axis=0)
    (low, high), count, owner = both, both.shape[1], take(paths, changes.path)
    old_is_low = (changes.old == low)[:, None]
    old = take(contexts.look, changes.context)
    exact = np.where(old_is_low, old.exact, changes.look.exact)
    at_low = Look(exact, np.where(old_is_low, old.real, changes.look.real), old.drawn)
    inner = np.arange(1, max(1, runs.chunk // count) + 1)[None, :]
    rows = np.arange(count).repeat(inner.size)
    while (high - low).max() > 1:
        points = low[:, None] + (high - low)[:, None] * inner // (inner.size + 1)
        script = _completion(
            paths, contexts, changes.context[rows], changes.draw[rows], points.reshape(-1)
        )
        look = runs.look(*script, take(owner, rows))
        same = ~differ(look, np.arange(len(rows)), at_low, rows).reshape(points.shape)
        before = np.cumprod(same, axis=1).sum(axis=1)  # points before the first change
        edges = np.concatenate([low[:, None], points, high[:, None]], axis=1)
        low, high = (edges[np.arange(count), before + offset] for offset in range(2))
    return high


def _picked(
    drawn, draw: Int[np.ndarray, " N"], which: Bool[np.ndarray, " N"]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the key and the number of one draw of each path."""
    row = np.flatnonzero(which)
    return drawn.key[row, draw[row]], drawn.number[row, draw[row]]


def _halves(paths: Paths, key: np.ndarray, number: np.ndarray, point: np.ndarray) -> list[Paths]:
    entry = matches(paths, key[:, None], number[:, None])[:, 0]
    low = np.where(entry, paths.low, 0).sum(axis=1)
    high = np.where(entry.any(axis=1), np.where(entry, paths.high, 0).sum(axis=1), UNIFORMS)
    return [paths.fixing(key, number, low, point), paths.fixing(key, number, point, high)]


def _each_token(
    paths: Paths, key: np.ndarray, number: np.ndarray, log_probs: Float[np.ndarray, "N V"]
) -> Paths:
    """Makes a path for each token, whatever its probability: it may be another one with other open
    draws.
    """
    if np.isnan(log_probs).any():
        raise FloatingPointError(
            "a draw from a distribution with NaN in it, on a path of nonzero probability"
        )
    path, token = np.indices(log_probs.shape).reshape(2, -1)
    return take(paths, path).fixing(key[path], number[path], token, token + 1)
