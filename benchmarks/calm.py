"""What leaving the layers early costs: the text, if nothing verifies (CALM), or draft tokens, if
the target does.

    python -m benchmarks.calm --target debian-gpt-base

The target writes texts. At each position the script compares the distribution after every layer
with the target's own, and leaves the layers by three rules: after a fixed layer, once two layers in
a row prefer the same token (saturation), or once the most probable token has the probability of a
threshold. For each it prints the mean number of layers and the mean total variation to the target.

Decoding that never verifies writes tokens that are off by that distance, and is at most (layers of
the target) / (mean layers) times as fast. Speculative decoding with the same exit accepts 1 -
distance of its draft tokens, and its text is the target's. Its speed is that of Theorem 3.8 with v
= 1 and the best gamma. Heads are not counted in either.

Both are bounds in favour of the exit. Here it reads the keys that all layers have made of the text
before. CALM copies states into the layers that were left out, which moves the text further away.

Reference: Schuster et al., CALM, NeurIPS 2022, arXiv 2207.07061.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

import jaxspec
from benchmarks.options import parser_of
from jaxspec import Model
from jaxspec.analysis import formulas
from jaxspec.cli import names
from jaxspec.cli.prompts import heldout_for
from jaxspec.core import Prompt, Room, token_rows

THRESHOLDS = (0.5, 0.7, 0.9)


class ExitResult(NamedTuple):
    """The mean layers of a token, and the mean total variation between what it was drawn from and
    the target's.
    """

    name: str
    layers: float
    distance: float


def exits(
    probs: Float[np.ndarray, "L N V"], thresholds: Sequence[float] = THRESHOLDS
) -> Iterator[ExitResult]:
    """Compares ways to leave the layers, by the distributions after each of L layers at N
    positions.

    Where a rule never holds, the token takes all layers.

    >>> first, second, last = [0.6, 0.4], [0.8, 0.2], [0.5, 0.5]
    >>> for way in exits(np.array([[first], [second], [last]]), [0.7]):
    ...     print(way.name, round(way.layers), round(way.distance, 2))
    layer 1 1 0.1
    layer 2 2 0.3
    saturation 2 0.3
    confidence 0.7 2 0.3
    """
    count, positions, _ = probs.shape
    distance = 0.5 * np.abs(probs - probs[-1]).sum(axis=-1)  # L N
    best = probs.argmax(axis=-1)
    agrees = np.concatenate([np.zeros((1, positions), bool), best[1:] == best[:-1]])
    leaves = {
        f"layer {layer + 1}": np.arange(count)[:, None] == layer for layer in range(count - 1)
    }
    leaves["saturation"] = agrees
    leaves |= {
        f"confidence {threshold:g}": probs.max(axis=-1) >= threshold for threshold in thresholds
    }
    for name, is_exit in leaves.items():
        is_exit = np.broadcast_to(is_exit, (count, positions)).copy()
        is_exit[-1] = True
        layer = is_exit.argmax(axis=0)
        yield ExitResult(
            name, float(layer.mean() + 1), float(distance[layer, np.arange(positions)].mean())
        )


def probabilities(target: Model, rows: Prompt, begin: np.ndarray) -> Float[np.ndarray, "L N V"]:
    """Computes the distributions after each layer, for all tokens of the rows from `begin` on."""
    inside = target.lm.inside
    if inside is None or inside.layers is None or target.lm.limits.start_token is not None:
        raise ValueError(
            f"{target.name} is no decoder of jaxspec's networks: expected a target such as "
            "debian-gpt-base"
        )
    layers = inside.layers
    count = layers.count
    tapped = jaxspec.with_taps(target, range(count))

    @jax.jit
    def after_layers(params: dict, rows: Prompt) -> jax.Array:
        taps = tapped.lm.prefill(params, rows, Room(rows.tokens.shape[1] + 1))[0].taps
        assert taps is not None
        features = [layers.features(params, stream) for stream in jnp.split(taps, count, axis=-1)]
        return jnp.stack(
            [jax.nn.softmax(inside.head(params, each).astype(jnp.float32)) for each in features]
        )

    position = np.arange(rows.tokens.shape[1])[None]
    # The distribution after a token is that of the next one: a prompt's last token counts, and a
    # text's does not.
    counts = (position >= begin[:, None] - 1) & (position < np.asarray(rows.length)[:, None] - 1)
    return np.asarray(after_layers(target.params, rows))[:, counts]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and prints a line for each way to leave the layers."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default="debian-gpt-base")
    parser.add_argument("--count", type=int, default=8, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args(arguments)
    target = names.model(options.target)
    texts = heldout_for(target, options.count)
    prompts = [target.tokenizer.encode(text) for text in texts]
    out = jaxspec.generate(
        target,
        token_rows.pad(prompts),
        max_new_tokens=options.max_new_tokens,
        temperature=1.0,
        key=jax.random.key(0),
    )
    written = [
        tokens[:length].tolist() for tokens, length in zip(out.tokens, out.lengths, strict=True)
    ]
    rows = token_rows.pad([[*prompt, *new] for prompt, new in zip(prompts, written, strict=True)])
    probs = probabilities(target, rows, np.array([len(prompt) for prompt in prompts]))
    print(f"{options.target}, {len(probs)} layers, {probs.shape[1]} positions at temperature 1")
    print(
        f"{'exit':>16} {'layers':>7} {'distance':>9} {'unverified':>11} {'verified':>9} "
        f"{'gamma':>6}"
    )
    for way in exits(probs):
        c, alpha = way.layers / len(probs), 1 - way.distance
        gamma = int(formulas.optimal_gamma(alpha, c, most=16))
        speed = float(formulas.improvement(alpha, gamma, c))
        print(
            f"{way.name:>16} {way.layers:7.2f} {way.distance:9.3f} {1 / c:10.2f}x {speed:8.2f}x "
            f"{gamma:6}"
        )


if __name__ == "__main__":
    main()
