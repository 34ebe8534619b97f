"""Figures of two distributions that make a third: the accepted part of a draft, its replacement,
and their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from benchmarks.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, canvas
from jaxspec.analysis import divergence
from jaxspec.core import Distribution, Draft, Rule, noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def decomposition(p: ArrayLike, q: ArrayLike, names: Sequence[str], most: int = 16) -> Figure:
    """Token by token: accepted mass min(p, q), and the residual's on top of it, which together are
    p (appendix A.1).

    Where the drafter proposes a token too often, what is rejected of q stands above, hatched; the
    same mass, in sum, comes back as residual elsewhere.

    Example:
        >>> figure = decomposition([0.5, 0.5, 0.0], [0.2, 0.5, 0.3], ["a", "b", "c"])
        >>> [
        ...     round(float(bar.get_height()), 2) for bar in figure.axes[0].containers[0]
        ... ]  # accepted, of a, b and c
        [0.2, 0.5, 0.0]
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    share = float(divergence.beta(p, q))
    shown = np.sort(np.argsort(-np.maximum(p, q), kind="stable")[:most])
    if len(shown) < len(p):
        shown = shown[np.argsort(-p[shown], kind="stable")]
    p, q, at = p[shown], q[shown], np.arange(len(shown))
    accepted = np.minimum(p, q)
    figure, axes = canvas(max(5.0, 0.5 * len(shown) + 1.5), 4.8)
    axes.bar(at, accepted, color=GREEN, label="accepted draft tokens: min(p, q)")
    axes.bar(at, p - accepted, bottom=accepted, color=BLUE, label="residual: p − min(p, q)")
    over = q > p
    hatched: dict[str, Any] = dict(facecolor="none", edgecolor=RED, hatch="////", linewidth=0.8)
    axes.bar(
        at[over],
        (q - p)[over],
        bottom=p[over],
        label="rejected draft tokens: q − min(p, q)",
        **hatched,
    )
    axes.hlines(
        p,
        at - 0.4,
        at + 0.4,
        color="black",
        linewidth=2,
        label="the target's distribution p: the sum of both",
    )
    axes.set_xticks(
        at, [names[int(i)] for i in shown], rotation=45, ha="right", rotation_mode="anchor"
    )
    axes.set(ylabel="probability", ylim=(0, 1.15 * max(p.max(), q.max())))
    axes.set_title(
        f"a draft token is accepted with probability β = Σ min(p, q) = {share:.2f}", fontsize=10
    )
    figure.legend(loc="outside lower center", frameon=False)  # any place inside may be full
    return figure


def distribution_distance(
    counts: Sequence[int] | np.ndarray,
    distances: Mapping[str, Float[np.ndarray, " counts"]],
    floor: Float[np.ndarray, " counts"],
) -> Figure:
    """The L1 distance between the empirical distribution of what was emitted and the target's, as
    rounds add up.

    Example:
        >>> figure = distribution_distance(
        ...     [10, 1000], {"rejection": np.array([0.3, 0.03])}, np.array([0.25, 0.025])
        ... )
        >>> figure.axes[0].get_xscale(), figure.axes[0].get_yscale()
        ('log', 'log')
    """
    figure, axes = canvas()
    axes.plot(counts, floor, color=GREY, linestyle=":", label="samples of p itself, on average")
    styles = zip((GREEN, RED, PURPLE, ORANGE, BLUE), "os^Dv", strict=True)
    for (name, distance), (colour, marker) in zip(distances.items(), styles, strict=False):
        axes.plot(
            counts, distance, color=colour, marker=marker, markersize=4, linewidth=1, label=name
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="rounds",
        ylabel="L1 distance to the target's distribution",
    )
    axes.legend(frameon=False)
    return figure


def first_tokens(
    rule: Rule, p: ArrayLike, q: ArrayLike, rounds: int, seed: int
) -> Int[np.ndarray, " N"]:
    """The first token of many independent rounds of one draft token: that token, if accepted, or
    what replaces it.

    Example, whose draft token is always wrong:
        >>> from jaxspec import rules
        >>> first_tokens(rules.rejection(), [0.0, 1.0], [1.0, 0.0], rounds=3, seed=0).tolist()
        [1, 1, 1]
    """
    log_p, log_q = (jnp.log(jnp.asarray(distribution, jnp.float32)) for distribution in (p, q))
    keys, position = noise.row_keys(jax.random.key(seed), rounds), jnp.zeros(rounds, jnp.int32)
    many = jnp.broadcast_to(log_q, (rounds, len(log_q)))
    draft_token = noise.categorical(noise.at(keys, position, noise.Purpose.DRAFT), many)
    draft = Draft(draft_token[:, None], jnp.ones(rounds, jnp.int32), log_probs=many[:, None])
    verdict = rule.verify(
        keys, position, draft, Distribution(jnp.broadcast_to(log_p, (rounds, 2, len(log_p))))
    )
    return np.asarray(jnp.where(verdict.num_accepted > 0, draft_token, verdict.next_token))


def l1_distance(
    tokens: Int[np.ndarray, " N"], p: ArrayLike, counts: ArrayLike
) -> Float[np.ndarray, " counts"]:
    """sum_x |share of x among the first n tokens - p(x)|, for each n of `counts`.

    >>> l1_distance(np.array([0, 1, 1, 1]), [0.5, 0.5], [1, 2, 4]).tolist()
    [1.0, 0.0, 0.5]
    """
    p, counts = np.asarray(p, np.float64), np.asarray(counts)
    if counts.min() < 1 or counts.max() > len(tokens):
        raise ValueError(
            f"counts go from {counts.min()} to {counts.max()}: expected 1 to {len(tokens)}, the "
            "tokens"
        )
    shares = (np.bincount(tokens[:n], minlength=len(p)) / n for n in counts)
    return np.array([np.abs(share - p).sum() for share in shares])


def noise_distance(p: ArrayLike, counts: ArrayLike) -> Float[np.ndarray, " counts"]:
    """Computes, nearly, the mean of `l1_distance` for n samples of p itself: sum_x sqrt(2 p (1 - p)
    / (pi n)).

    >>> noise_distance([0.5, 0.5], [100, 10_000]).round(4).tolist()
    [0.0798, 0.008]
    """
    p = np.asarray(p, np.float64)
    return np.sqrt(2 * p * (1 - p) / np.pi).sum() / np.sqrt(np.asarray(counts, np.float64))
