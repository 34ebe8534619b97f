"""Tiny random drafters and their logits, which `speculators_parity` and `zlab_parity` compare with
other packages'.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import Model, nets
from jaxspec.core import Forward
from jaxspec.draft_heads import kind_of
from jaxspec.draft_heads.block_config import BlockConfig
from jaxspec.draft_heads.target import shared_with
from jaxspec.draft_heads.training import DraftStarts, DraftStep
from jaxspec.nets import decoder
from jaxspec.weights import huggingface

TOLERANCE = 1e-5
# A text has so many positions; a block begins at the anchor.
VOCAB, WIDTH, POSITIONS, ANCHOR, WINDOW = 40, 16, 12, 5, 3
LLAMA = decoder.decoder_config(
    VOCAB,
    WIDTH,
    ff_dim=24,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_base=100.0,
    epsilon=1e-5,
    max_positions=64,
)
QWEN = nets.replace(LLAMA, head_norms=True)  # the layers of blocks and modules


def random_params(net, config, random):
    """Parameters away from norms of one; a vocabulary of its own is some of the target's ids."""
    shapes = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda x: jnp.asarray(0.3 * random.standard_normal(x.shape), jnp.float32), shapes
    )
    if "vocabulary" in params:
        ids = np.sort(random.choice(VOCAB, config.draft_vocab, replace=False))
        params["vocabulary"] = jnp.asarray(ids, jnp.int32)
    return params


def random_target(folder, random):
    """A Llama, and the same in a folder for transformers."""
    target = Model(
        decoder.language_model(LLAMA),
        random_params(decoder, LLAMA, random),
        None,
        LLAMA,
        str(folder),
    )
    huggingface.save(target, folder)
    return target


def random_text(taps, random):
    """Hidden states of some layers, and tokens: [1, positions, taps x width], [1, positions]."""
    states = random.standard_normal((1, POSITIONS, taps * WIDTH)).astype(np.float32)
    return states, random.integers(0, VOCAB, (1, POSITIONS)).astype(np.int32)


def with_window(layer):
    """The same layers, of which the first sees a window only."""
    first, *rest = layer.layers
    first = dataclasses.replace(
        first, attention=dataclasses.replace(first.attention, window=WINDOW)
    )
    return dataclasses.replace(layer, layers=(first, *rest))


def logits_of(target, config, params, states, tokens, depths=1):
    """Logits by jaxspec, in the drafter's vocabulary: [draft tokens, vocabulary].

    Those of a block after the anchor; of other drafters those at every position, draft token by
    draft token.
    """
    shared, block = shared_with(target.lm, target.params), isinstance(config, BlockConfig)
    after, place = jnp.asarray(tokens[:, 1:]), jnp.array([ANCHOR - 1])
    if block:
        depths, ahead = config.count, jnp.asarray(tokens[:, ANCHOR : ANCHOR + config.count])
    else:
        states, place, ahead = (
            states[:, : POSITIONS - 1],
            jnp.arange(POSITIONS - 1),
            after[0][:, None],
        )
        # what is drafted in one pass reads none of these
        after = jnp.pad(after, ((0, 0), (0, depths - 1)))
    forward = Forward(jnp.zeros(0), jnp.asarray(states), jnp.asarray(states))
    kind = kind_of(config).training
    assert kind is not None
    starts = DraftStarts(forward, after, place, depths, lambda *_: forward)
    hidden = kind.hidden_states(config, params, shared, starts)[0]
    by_depth, memory = [], None
    for depth in range(depths):
        logits, memory = kind.logits(
            config, params, shared, DraftStep(hidden, ahead, depth, memory)
        )
        by_depth.append(logits)
    logits = np.concatenate(by_depth)
    return logits[:, np.asarray(params["vocabulary"])] if "vocabulary" in params else logits


def report(numbers, rows):
    """Prints a line for each drafter: its name, the largest difference of `numbers`, and their
    range; exits with 1 if one is above `TOLERANCE`.
    """
    worst = 0.0
    print(f"| drafter | largest difference of {numbers} | their range |\n|---|---|---|")
    for name, most, spread in rows:
        worst = max(worst, float(most))
        print(f"| {name} | {most:.1e} | {spread:.1f} |", flush=True)
    if worst > TOLERANCE:
        sys.exit(f"{numbers} differ by {worst:.1e}: expected at most {TOLERANCE}")


def difference(actual, expected):
    """The largest difference, and the range of what was expected; infinite where different tokens
    are impossible.
    """
    possible = np.isfinite(expected)
    if (np.isfinite(actual) != possible).any():
        return np.inf, np.ptp(expected[possible])
    return np.abs(actual[possible] - expected[possible]).max(), np.ptp(expected[possible])
