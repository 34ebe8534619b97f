"""A selector is one file: this one. It picks each token of a block among the best that the block's
logits name.

A block drafter's `next_logits` is all that it replaces: of a position's logits the best stay,
scored anew by the token before, by the hidden state and by how many were picked before. What the
drafter never proposes the target still emits.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec.core import Model, Prompt
from jaxspec.draft_heads import block
from jaxspec.nets import decoder
from jaxspec.rules.catalogue import RULES
from jaxspec.testing import certify
from tests.marks import marked
from tests.small import random_params

MANY, BEST = 17, 16
EXACT = [name for name, entry in RULES.items() if entry.rule.exact]
PROMPTS = [[1, 0], [2]]


def selector(best, params, logits, previous, features, memory):
    """`BlockHead.next_logits`: the `best` of a position's logits [B, 1, V] with new scores, and
    -inf elsewhere.
    """
    own = params["selector"]
    top, ids = jax.lax.top_k(logits[:, 0], best)  # [B, best]
    pairs = jnp.take_along_axis(own["pairs"][previous[:, 0]], ids, axis=1)
    scores = top * (features[:, 0] @ own["features"])[:, None] + pairs
    scores = scores * (1 - 2 * memory)  # from the second token on the last are first
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return jnp.full_like(logits, -jnp.inf).at[rows, 0, ids].set(scores), jnp.ones_like(memory)


def values(vocab):
    """A selector's own parameters."""
    pairs = jax.random.normal(jax.random.key(5), (vocab, vocab))
    return {"selector": {"pairs": pairs, "features": jnp.linspace(-1.0, 1.0, 8)}}


@functools.cache
def pair(vocab, best):
    """A target, and a block drafter with a selector."""
    shape = functools.partial(
        decoder.decoder_config, vocab, dim=8, ff_dim=8, heads=2, kv_heads=1, head_dim=4
    )
    net = shape(layers=2)
    params = random_params(decoder.init, net, 1, 0.6)
    target = Model(decoder.language_model(net, (0, 1)), params, config=net)
    config = block.BlockConfig(shape(layers=1), 8, (0, 1), block=4, mask_token=vocab - 1)
    params = random_params(block.init, config, 4, 0.3)
    functions = block.head(config)._replace(memory=1, next_logits=functools.partial(selector, best))
    return target, block.block(jaxspec.DraftHead(functions, params | values(vocab)), target)


@pytest.mark.parametrize("name", marked(EXACT, slow={*EXACT} - {"rejection"}))
def test_every_exact_rule_stays_exact(name):
    """By enumeration: two of three tokens are ever proposed, and scored by the tokens before
    them.
    """
    target, drafter = pair(3, 2)
    prompt = Prompt(jnp.array([[1, 0]]), jnp.array([2]))
    assert (
        certify(target, drafter=drafter, rule=RULES[name].rule, gamma=2, steps=4, prompt=prompt)
        < 1e-5
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_so_it_is_with_sixteen_tokens():
    target, drafter = pair(MANY, BEST)
    assert certify(target, drafter=drafter, gamma=1, steps=3) < 1e-5


@pytest.mark.slow
def test_greedy_text_is_plain_text_and_drawn_tokens_are_accepted():
    target, drafter = pair(MANY, BEST)
    options = dict(max_new_tokens=12, eos_ids=())
    plain = jaxspec.generate(target, PROMPTS, **options)
    assert (
        jaxspec.generate(target, PROMPTS, drafter=drafter, gamma=3, **options).tokens.tolist()
        == plain.tokens.tolist()
    )
    sampled = dict(options, temperature=1.0, key=jax.random.key(0))
    stats = jaxspec.generate(target, PROMPTS, drafter=drafter, gamma=3, **sampled).stats
    assert 0 < stats.accepted.sum() < stats.drafted.sum()


def test_no_more_than_the_best_have_a_score():
    logits, features = jax.random.normal(jax.random.key(0), (2, MANY)), jnp.ones((2, 8))
    previous, zeros = jnp.array([[3], [5]]), jnp.zeros((2, 1))
    scores, memory = selector(
        BEST, values(MANY), logits[:, None], previous, features[:, None], zeros
    )
    assert (jnp.isneginf(scores[:, 0]) == (logits == logits.min(axis=1, keepdims=True))).all()
    assert memory.tolist() == [[1], [1]]
