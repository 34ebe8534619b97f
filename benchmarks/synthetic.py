"""Models nobody has trained, written as checkpoints: wider copies of a model, and what it may have
been before int8.

    python -m benchmarks.synthetic widen debian-t5-base --units 9216 --out wide/debian-t5-base
    python -m benchmarks.synthetic unrounded debian-t5-base --out unrounded/debian-t5-base

A widened model has zeros in its new feed-forward units: the same text, at the cost of a larger
model, for pairs that are too small to have anything to gain. `unrounded` draws weights that int8
rounds to exactly what is stored, to see what rounding does. Seconds on any machine; `jaxspec bench
--target FOLDER` measures what is written.

`random_verdicts_for_benchmarks` is a rule whose verdicts are drawn, for `benchmarks.paper`.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

import jaxspec
from jaxspec import nets
from jaxspec.cli.convert import write
from jaxspec.core import Distribution, Draft, Keys, Model, Params, Rule, Verdict
from jaxspec.nets import decoder, quantised, t5
from jaxspec.rules.common import (
    chain_verdict,
    count_accepted,
    sample_residual,
    take_position,
    uniforms,
)
from jaxspec.vocab import trim

# Which axes of the leaves of a feed-forward block run over its hidden units.
_HIDDEN: dict[tuple[str, ...], int] = {
    ("gate", "weight"): 0,
    ("gate", "bias"): 0,
    ("wi", "weight"): 0,
    ("wi", "bias"): 0,
    ("out", "weight"): 1,
}


@functools.lru_cache
def random_verdicts_for_benchmarks(alpha: float) -> Rule:
    r"""NOT a rule to decode with: accepts each draft token with probability alpha, whatever the two
    distributions are.

    The time of speculative decoding depends on how many draft tokens are accepted, not on which. So
    with this rule models of random weights, which agree on nothing, take the time of trained ones
    whose acceptance rate is alpha. A round accepts k < gamma draft tokens with probability alpha^k
    (1 - alpha), the distribution behind Equation 1 of the paper. The text is nonsense: draft tokens
    are accepted that the target would never generate. The token after them is the target's argmax,
    or drawn from its distribution. The rule is marked inexact, and no name in `jaxspec.rules` or on
    the command line leads to it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxspec.core import noise
        >>> draft, keys = (
        ...     Draft(jnp.array([[4, 9]]), jnp.array([2])),
        ...     noise.row_keys(jax.random.key(0), 1),
        ... )
        >>> for alpha in (0, 1):
        ...     rule = random_verdicts_for_benchmarks(alpha)
        ...     verdict = rule.verify(
        ...         keys, jnp.array([3]), draft, Distribution(tokens=jnp.array([[4, 9, 6]]))
        ...     )
        ...     verdict.num_accepted.tolist(), verdict.next_token.tolist(), rule.exact
        ([0], [4], False)
        ([2], [6], False)
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: expected a probability, 0 to 1")

    def verify(
        keys: Keys, position: Int[Array, " B"], draft: Draft, target: Distribution
    ) -> Verdict:
        count = count_accepted(uniforms(keys, position, draft) < alpha, draft.length)
        if target.tokens is not None:
            return chain_verdict(draft, count, take_position(target.tokens, count))
        assert target.log_probs is not None
        next_token = sample_residual(keys, position, take_position(target.log_probs, count))
        return chain_verdict(draft, count, next_token)

    return Rule(verify, f"random verdicts for benchmarks({alpha:g})", exact=False)


def widen(model: Model, ff_dim: int) -> Model:
    """The same function with feed-forward blocks of `ff_dim` hidden units, the new ones all zeros.

    Each new unit is act(0) = 0 and its weights out are 0 as well, so logits are the same up to the
    order in which a matrix product sums, and the cost of a pass is that of the larger model.

    Example:
        >>> config = decoder.gpt_config(32, dim=16, ff_dim=32, layers=1, heads=2, max_positions=16)
        >>> small = Model(
        ...     decoder.language_model(config),
        ...     decoder.init(config, jax.random.key(0)),
        ...     config=config,
        ... )
        >>> wide = widen(small, 64)
        >>> (
        ...     nets.short_form(wide.config).ff_dim,
        ...     wide.params["layers_0"]["ff"]["out"]["weight"].shape,
        ... )
        (64, (16, 64))
    """
    if (net := nets.find(model.config)) not in (t5.NETWORK, decoder.NETWORK):
        kind = type(model.config).__name__
        raise TypeError(f"widen takes a model with a T5 or a decoder, got one with a {kind}")
    narrow = nets.short_form(model.config).ff_dim
    more = ff_dim - narrow
    if more < 0:
        raise ValueError(f"ff_dim is {ff_dim}: expected at least the model's own, {narrow}")
    config = nets.replace(model.config, ff_dim=ff_dim)

    def leaf(path: tuple[Any, ...], x: Array) -> Array:
        names = tuple(str(entry.key) for entry in path)
        stored = names[-1] if names[-2] == "weight" else ""  # "int8" or "scale" of an int8 matrix
        axis = _HIDDEN.get(names[-3:-1] if stored else names[-2:]) if "ff" in names else None
        if axis is None or (stored == "scale" and axis == 1):  # a scale is of an output
            return x
        new = 1 if stored == "scale" else 0
        return jnp.pad(
            x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=new
        )

    params = jax.tree_util.tree_map_with_path(leaf, model.params)
    return model._replace(lm=net.language_model(config), params=params, config=config)


def unrounded(params: Params, key: Array) -> Params:
    """Draws float32 matrices w = s(q + u), u uniform in (-1/2, 1/2): `quantise` rounds them to q
    and s again.

    What a checkpoint stores as int8 was rounded before, and the lost matrices lie about as far from
    what is stored as these: they tell how far rounding moves a model, not which way, since the lost
    ones were trained.

    The largest entries of a channel, which its scale s was made of, stay as they are.

    >>> from jaxspec.weights import quantisation
    >>> stored = quantisation.quantise({"weight": jax.random.normal(jax.random.key(0), (8, 16))})
    >>> drawn = unrounded(stored, jax.random.key(1))
    >>> bool((drawn["weight"] == quantisation.dequantise(stored)["weight"]).all())
    False
    >>> jax.tree.map(lambda a, b: bool((a == b).all()), quantisation.quantise(drawn), stored)
    {'weight': {'int8': True, 'scale': True}}
    """
    leaves, tree = jax.tree.flatten(params, is_leaf=quantised.is_quantised)
    keys = jax.random.split(key, len(leaves))
    pairs = zip(leaves, keys, strict=True)
    return tree.unflatten(
        [_drawn(**x, key=key) if quantised.is_quantised(x) else x for x, key in pairs]
    )


@jax.jit
def _drawn(
    int8: Int8[Array, "rows columns"], scale: Array, key: Array
) -> Float[Array, "rows columns"]:
    q = int8.astype(jnp.float32)
    # As far inside as it takes: float32 rounds s(q + u) / s by less than 2**-16.
    u = jax.random.uniform(key, q.shape, minval=2.0**-15 - 0.5, maxval=0.5 - 2.0**-15)
    size = jnp.abs(q)
    return jnp.where(size == size.max(axis=1, keepdims=True), q, q + u) * scale


def widened(model: Model, units: int) -> Model:
    """Widens a model, and keeps its head over frequent tokens, if it has one."""
    few = trim.draft_tokens(model)
    wide = widen(trim.untrimmed(model), units)
    return wide if few is None else trim.trim_vocabulary(wide, ids=few)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and writes a model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("widen", "unrounded"))
    parser.add_argument("model", help="as jaxspec.load takes it")
    parser.add_argument("--units", type=int, help="hidden units of a widened feed-forward block")
    parser.add_argument("--seed", type=int, default=0, help="of unrounded weights")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    options = parser.parse_args(arguments)
    if (options.what == "widen") != (options.units is not None):
        parser.error("--units goes with widen, and widen needs it")
    if options.what == "widen":
        model = widened(jaxspec.load(options.model), options.units)
    else:
        stored = trim.untrimmed(jaxspec.load(options.model, dtype="int8"))
        model = trim.untrimmed(jaxspec.load(options.model))
        model = model._replace(params=unrounded(stored.params, jax.random.key(options.seed)))
    few = trim.draft_tokens(model)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write(trim.untrimmed(model), options.out, "float32", {}, False, few)
    print(options.out)


if __name__ == "__main__":
    main()
