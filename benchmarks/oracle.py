"""The policy that knows how many draft tokens will be accepted: no draft-length policy can gain
more.

    python -m benchmarks.oracle --target debian-gpt-base --draft debian-gpt-small --c 0.15

A minute of two cores. The script counts rounds and draft tokens of a pair's greedy texts, with each
fixed gamma and with the oracle. Speeds follow from --c and v = 1. `jaxspec plan --alpha A --c C`
prints the bound of section 3.5 of the paper, which takes draft tokens for independent of each
other.

Reference: Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, section 3.5.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from benchmarks.options import parser_of
from jaxspec.analysis import acceptance
from jaxspec.cli import names
from jaxspec.cli.options import TARGET
from jaxspec.cli.prompts import prepared_pair
from jaxspec.core import BoundPolicy, Draft, Policy, Prompt, Verdict
from jaxspec.decode.request import Prepared


class Params(NamedTuple):
    accepted: Any


def oracle(accepted: Int[np.ndarray, "B N"]) -> BoundPolicy:
    """Drafts as many tokens as will be accepted, so that none is rejected: the upper bound of
    section 3.5 of the paper.

    It needs the decoded text, so it is for measurements: the gain that any policy could have on
    that text.

    Args:
        accepted: entry [b, t] is how many draft tokens would be accepted in a round that begins
            after token t of row b's new text (t = 0: after the first token). For greedy text
            `accepted_after` returns it.

    Raises:
        ValueError: an array that is not of two dimensions, or holds a negative number.

    Example:
        >>> policy = oracle(np.array([[2, 1, 0, 3]]))
        >>> memory = policy.functions.init(
        ...     policy.params, Prompt(jnp.zeros((1, 1), jnp.int32), jnp.array([1]))
        ... )
        >>> draft, two = Draft(jnp.zeros((1, 8), jnp.int32), jnp.array([2])), jnp.array([2])
        >>> later = policy.functions.update(
        ...     policy.params, memory, draft, Verdict(two, two, two), jnp.array([3])
        ... )
        >>> [
        ...     policy.functions.max_draft(policy.params, at, 8, two).tolist()
        ...     for at in (memory, later)
        ... ]
        [[2], [3]]
    """
    array = np.asarray(accepted)
    if array.ndim != 2 or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError(
            f"accepted has shape {array.shape} and dtype {array.dtype}: expected counts, [prompts, "
            "positions]"
        )
    return BoundPolicy(_oracle(), Params(array.astype(np.int32)), name="oracle")


@functools.lru_cache
def _oracle() -> Policy:
    def init(params: Params, prompt: Prompt) -> Int[Array, " B"]:
        return jnp.zeros_like(prompt.length)

    def max_draft(
        params: Params, state: Int[Array, " B"], gamma: int, remaining: Int[Array, " B"]
    ) -> Int[Array, " B"]:
        at = jnp.minimum(state, params.accepted.shape[1] - 1)
        return jnp.take_along_axis(params.accepted, at[:, None], axis=1)[:, 0]

    def update(
        params: Params,
        state: Int[Array, " B"],
        draft: Draft,
        verdict: Verdict,
        num_committed: Int[Array, " B"],
    ) -> Int[Array, " B"]:
        return state + num_committed

    return Policy(init, max_draft, update)


def accepted_after(prepared: Prepared) -> Int[np.ndarray, "B N"]:
    """Counts the draft tokens in a row that a greedy round accepts which begins after each token of
    the text.

    Args:
        prepared: a generation with a target and a draft model, at temperature 0.

    Example:
        >>> from jaxspec.testing import prepared_table
        >>> prepared = prepared_table(max_new_tokens=5)
        >>> accepted_after(prepared.replace(drafter=prepared.target)).tolist()
        [[4, 3, 2, 1, 0], [4, 3, 2, 1, 0]]
    """
    is_right = acceptance.measure(prepared).overlaps > 0
    counts = np.zeros(is_right.shape, np.int32)
    for t in range(is_right.shape[1] - 2, -1, -1):
        counts[:, t] = np.where(is_right[:, t + 1], counts[:, t + 1] + 1, 0)
    return counts


class Rounds(NamedTuple):
    """The rounds of texts.

    Attributes:
        tokens: new tokens after each text's first, which takes no round.
        rounds: passes of the target.
        drafted: draft tokens, each a pass of the drafter.
    """

    tokens: int
    rounds: int
    drafted: int

    def speed(self, c: float) -> float:
        """Computes the speed over plain decoding where a draft token costs c and a verify pass 1.

        >>> Rounds(tokens=8, rounds=4, drafted=10).speed(c=0.1)
        1.6
        """
        return self.tokens / (self.rounds + c * self.drafted)


def rounds_of(
    accepted: Int[np.ndarray, "B N"], counts: Int[np.ndarray, " B"], gamma: int | None
) -> Rounds:
    """Counts the rounds of texts whose acceptance is known, with `gamma` draft tokens a round.

    A round never drafts beyond its text's last token but one, since the target adds a token itself.

    Args:
        accepted: as `accepted_after` returns it.
        counts: tokens of each text.
        gamma: None lets the oracle choose: as many as will be accepted.

    Example, a text of 5 tokens in which one of four draft tokens is wrong:
        >>> accepted, counts = np.array([[1, 0, 2, 1, 0]]), np.array([5])
        >>> rounds_of(accepted, counts, gamma=2), rounds_of(accepted, counts, gamma=None)
        (Rounds(tokens=4, rounds=2, drafted=3), Rounds(tokens=4, rounds=2, drafted=2))
    """
    rounds = drafted = 0
    for row, count in zip(accepted.tolist(), counts.tolist(), strict=True):
        at = 0
        while at < count - 1:
            room = count - 2 - at
            right = min(row[at], room)
            draft = right if gamma is None else min(gamma, room)
            drafted += draft
            rounds += 1
            at += min(right, draft) + 1
    return Rounds(int(np.maximum(counts - 1, 0).sum()), rounds, drafted)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and prints the best fixed gamma beside the oracle."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", "-d", default="")
    parser.add_argument(
        "--c", type=float, default=0.1, help="a pass of the drafter, in passes of the target"
    )
    parser.add_argument("--gamma", type=int, default=16, help="the largest fixed gamma to try")
    parser.add_argument("--count", type=int, default=16, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    draft = options.draft or names.default_draft_model(options.target)
    generation = {"temperature": 0.0, "gamma": 1, "max_new_tokens": options.max_new_tokens}
    prepared = prepared_pair(options.target, draft, "float32", None, options.count, **generation)
    accepted, counts = accepted_after(prepared), acceptance.measure(prepared).counts
    fixed = {gamma: rounds_of(accepted, counts, gamma) for gamma in range(1, options.gamma + 1)}
    best = max(fixed, key=lambda gamma: fixed[gamma].speed(options.c))
    oracle_rounds = rounds_of(accepted, counts, None)
    print(f"{options.target} with {draft}, greedily, {len(counts)} texts, c = {options.c:g}, v = 1")
    for name, result in {f"gamma = {best}": fixed[best], "oracle": oracle_rounds}.items():
        print(
            f"{name:>10}: {result.rounds} rounds, {result.drafted} draft tokens, "
            f"{result.tokens / result.rounds:.2f} tokens a round, {result.speed(options.c):.2f} "
            "times plain decoding"
        )
    gain = oracle_rounds.speed(options.c) / fixed[best].speed(options.c) - 1
    print(f"No policy gains more than {gain:.0%} over the best fixed gamma on these texts.")


if __name__ == "__main__":
    main()
