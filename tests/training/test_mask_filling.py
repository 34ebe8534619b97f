"""A pass over a text with masks learns what the same masks would be asked in decoding."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.nets import decoder
from jaxspec.training import data, losses, mask_filling
from jaxspec.training.divergences import kl
from jaxspec.training.recipes import Masks

CONFIG = decoder.gpt_config(12, dim=8, ff_dim=16, layers=1, heads=2, max_positions=24)
OPTIONS = Masks(token=1, draft=3, decay=0.5, stride=2)


def test_a_mask_learns_the_token_that_it_stands_before():
    """The loss is the sum over rows that hold one branch of masks each, read without a tree."""
    params = decoder.init(CONFIG, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), params)
    texts = np.random.default_rng(0).integers(2, 12, (2, 8)).astype(np.int32)
    length = np.array([8, 6], np.int32)
    batch = data.TrainingBatch(texts[:, :0], np.zeros(2, np.int32), texts, length)
    total, count = jax.jit(mask_filling.loss(CONFIG, OPTIONS, None, 0.0, kl))(params, batch)

    rows, weights = [], []
    size = 6  # places with a next token, after the first token of a text
    first = int(texts[:, 1:-1].sum()) % 2
    for text, real in zip(texts, length, strict=True):
        for index in range(1, real - 1):  # of the text itself
            rows.append((text[: index + 1], text[index + 1]))
            weights.append(1.0)
        for place in range(first, size, 2):
            for masks in (1, 2):
                predicted = place + 2 + masks
                if predicted < real:
                    rows.append((np.append(text[: place + 2], [1] * masks), text[predicted]))
                    weights.append(0.5**masks)
    padded = np.zeros((len(rows), 10), np.int32)
    for number, (read, _) in enumerate(rows):
        padded[number, : len(read)] = read
    logits = jax.jit(decoder.DecoderNet(CONFIG).apply)({"params": params}, padded)
    last = logits[np.arange(len(rows)), [len(read) - 1 for read, _ in rows]][:, None]
    labels = jnp.array([[label] for _, label in rows], jnp.int32)
    expected = losses.negative_log_likelihood(last, labels)[:, 0] @ jnp.array(weights)
    np.testing.assert_allclose(count, sum(weights), rtol=1e-6)
    np.testing.assert_allclose(total, expected, rtol=1e-4)
