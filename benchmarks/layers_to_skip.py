"""The search for layers to skip when the target drafts for itself, by measured speed (arXiv
2309.08168).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import progress as bars
from jaxspec.analysis import cost
from jaxspec.core import Model
from jaxspec.core.checks import integers
from jaxspec.decode import loop
from jaxspec.decode.prompts import Prompts
from jaxspec.decode.request import Prepared, prepare
from jaxspec.drafters.self_speculative import layers_of, skip_layers

# attention and mlp, as `drafters.skip_layers` takes them
Skipped = tuple[tuple[int, ...], tuple[int, ...]]


class Trial(NamedTuple):
    """A set of layers to skip, and its speed."""

    # these two: for `drafters.skip_layers(target, attention, mlp)`
    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    # the speed of whole generations, all rows together: the median of the repeats
    tokens_per_second: float
    # over the fastest set before it, whose runs were interleaved with this one's; of the first
    # trial, over plain decoding
    speed_up: float
    tokens_per_round: float  # mean over the rows


class Search(NamedTuple):
    """The result of `search_layers`."""

    best: Trial  # the fastest set
    # its speed over plain decoding, from runs that were interleaved at the end: below 1, skipping
    # layers does not pay
    over_plain: float
    trials: tuple[Trial, ...]  # every set that was tried, in order


def search_layers(
    target: Model,
    prompts: Prompts,
    *,
    trials: int = 40,
    gamma: int = 4,
    repeats: int = 3,
    seed: int = 0,
    progress: bool = True,
    **options: Any,
) -> Search:
    """Searches for layers whose skipping makes `drafters.skip_layers` fastest on some prompts.

    It starts with every other attention of the later half, and changes one or two parts of the best
    set at a time, at random; a change that is faster stays. A set is a program of its own, so that
    most of a trial's time is compilation (the persistent compilation cache helps a search that is
    repeated). Every generation is exact, whatever the set.

    Args:
        target: the model whose text is drafted.
        prompts: such as it will be used for; as in `jaxspec.generate`.
        trials: sets to measure.
        gamma: draft tokens a round.
        repeats: timed runs of each set, interleaved with as many of the best one before it.
        seed: the seed of the changes.
        progress: whether a bar on standard error shows the trials, with the best speed so far.
        **options: options of `jaxspec.generate`: max_new_tokens, temperature, key, ...; not
            drafter.

    Raises:
        ValueError: trials, repeats or gamma < 1 or no integer, a drafter, a target whose layers
            cannot be run in part, or as `jaxspec.generate`.

    Example:
        >>> import jax.numpy as jnp, jaxspec
        >>> from jaxspec.nets import decoder
        >>> shape = decoder.gpt_config(32, dim=16, ff_dim=32, layers=3, heads=2, max_positions=48)
        >>> target = Model(decoder.language_model(shape), decoder.init(shape, jax.random.key(0)))
        >>> prompt = jaxspec.Prompt(jnp.array([[5, 6, 7]]), jnp.array([3]))
        >>> search = search_layers(
        ...     target, prompt, trials=1, repeats=1, max_new_tokens=5, progress=False
        ... )
        >>> search.best.attention, search.best.mlp
        ((1,), ())

    Reference: Zhang et al., Draft & Verify, ACL 2024, arXiv 2309.08168, who search by Bayesian
    optimisation.
    """
    if options.get("drafter") is not None:
        raise ValueError(
            "got a drafter: expected none, as the target's own layers draft here; leave it out"
        )
    trials, repeats, gamma = integers(1, trials=trials, repeats=repeats, gamma=gamma)
    plain = prepare(target, prompts, **options)
    count = layers_of(target).count
    if count < 2:
        raise ValueError(
            "the target has 1 layer: expected at least 2, of which some can be skipped"
        )
    best_prepared = plain
    best = None
    tried = []
    rng = np.random.default_rng(seed)
    current: Skipped | None = tuple(range(count // 2, count, 2)), ()
    seen: set[Skipped] = {current}
    with bars.bar(progress, remaining=True) as bar:
        task = bar.add_task("layers to skip", total=trials)
        for _ in range(trials):
            drafter = skip_layers(target, *current)
            prepared = plain.replace(drafter=drafter, gamma=gamma)
            trial = _measure(current, prepared, best_prepared, repeats)
            tried.append(trial)
            if best is None or trial.speed_up > 1:
                best_prepared = prepared
                best = trial
            bar.update(
                task,
                advance=1,
                description=f"layers to skip ({best.tokens_per_second:.1f} tokens/s)",
            )
            current = _changed((best.attention, best.mlp), seen, count, rng)
            if current is None:  # a small network has few sets
                break
            seen.add(current)
    assert best is not None
    seconds = _median_seconds(plain, best_prepared, repeats)
    return Search(best, float(seconds[0] / seconds[1]), tuple(tried))


def _measure(skipped: Skipped, prepared: Prepared, best: Prepared, repeats: int) -> Trial:
    """Runs a set beside the best one; both are compiled first."""
    outcome = jax.tree.map(np.asarray, loop.run(prepared))
    cost.run_all([best])
    seconds = _median_seconds(prepared, best, repeats)
    rounds = float(np.mean(np.asarray(outcome.stats.tokens_per_round)))
    return Trial(
        *skipped, float(outcome.length.sum() / seconds[0]), float(seconds[1] / seconds[0]), rounds
    )


def _median_seconds(first: Prepared, second: Prepared, repeats: int) -> np.ndarray:
    calls = [functools.partial(cost.run_all, [prepared]) for prepared in (first, second)]
    return np.median(cost.interleave(calls, repeats), axis=1)


def _changed(
    best: Skipped, seen: set[Skipped], count: int, rng: np.random.Generator
) -> Skipped | None:
    """Changes one or two parts of a set, at random, to one that was not seen yet; None where none
    is found.

    >>> start = (2,), ()
    >>> len(set(_changed(start, {start}, 4, np.random.default_rng(0))[0]) ^ {2}) <= 2
    True
    """
    for _ in range(1000):
        parts = {(0, layer) for layer in best[0]} | {(1, layer) for layer in best[1]}
        for _ in range(rng.integers(1, 3)):
            parts ^= {(int(rng.integers(2)), int(rng.integers(count)))}
        attention, mlp = (
            tuple(sorted(layer for sublayer, layer in parts if sublayer == which))
            for which in (0, 1)
        )
        changed: Skipped = attention, mlp
        skips_all = all(len(layers) == count for layers in changed)
        if any(changed) and not skips_all and changed not in seen:
            return changed
    return None
