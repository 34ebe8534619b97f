"""GRPO in one file (docs/grpo.py): its gradient is the policy gradient, and the reward rises."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.testing import table_model
from jaxspec.weights.loading import shipped
from tests.small import module_at

SOURCE = Path(__file__).resolve().parents[1] / "docs" / "grpo.py"

pytestmark = pytest.mark.skipif(not SOURCE.is_file(), reason="not in a checkout")


@pytest.fixture(scope="module")
def grpo():
    return module_at(SOURCE)


@pytest.fixture(autouse=True)
def plain_jax():
    """A reader's settings: ranks are promoted."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_the_reward_counts_words(grpo):
    assert grpo.reward("one two three four five six seven eight. And more.") == 1.0
    assert grpo.reward("one two three four.") == 0.5
    assert grpo.reward("no full stop") == 0.0


def test_advantages_are_of_each_prompts_answers(grpo):
    gains = grpo.advantages([0.0, 1.0, 5.0, 5.0], samples=2)
    np.testing.assert_allclose(gains, [-1, 1, 0, 0], atol=1e-3)


def test_the_first_gradient_is_the_policy_gradient(grpo):
    """Where answers were drawn from the policy itself, nothing is clipped."""
    policy = table_model(jax.random.key(0), vocab=5, order=1)
    prompt = jaxspec.Prompt(jnp.array([[1], [3]]), jnp.array([1, 1]))
    out = jaxspec.generate(
        policy,
        prompt,
        temperature=1.0,
        num_samples=3,
        max_new_tokens=4,
        eos_ids=[0],
        log_probs=True,
        key=jax.random.key(1),
    )
    gains = jnp.array([0.3, -1.0, 0.7, 0.5, 0.5, -1.0])
    tokens, lengths = jnp.asarray(out.tokens), jnp.asarray(out.lengths)
    old = jnp.asarray(out.log_probs.raw)
    ours = jax.grad(grpo.loss)(policy.params, policy.lm, prompt, tokens, lengths, old, gains)

    def plainly(params):
        """Answer by answer and token by token: a table of order 1 has a row of logits a token."""
        table = jax.nn.log_softmax(jax.tree.leaves(params)[0], axis=-1)
        total = jnp.zeros(())
        for answer, (row, length) in enumerate(zip(out.tokens, out.lengths, strict=True)):
            before = int(prompt.tokens[answer // 3, 0])
            for token in row[:length].tolist():
                total += gains[answer] * table.reshape(5, 5)[before, token]
                before = token
        return -total / int(lengths.sum())

    theirs = jax.grad(plainly)(policy.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


@pytest.mark.slow
def test_the_reward_rises_with_speculative_rollouts(grpo):
    if "debian-gpt-small" not in shipped():
        pytest.skip("the checkpoints are not here")
    policy = jaxspec.load("debian-gpt-small")
    optimizer = optax.adam(3e-3)
    state = optimizer.init(policy.params)
    ids = policy.tokenizer(["This package contains", "A tool that reads"])["input_ids"]
    prompts = jaxspec.Prompt(jnp.array([row[:3] for row in ids]), jnp.array([3, 3]))
    rewards = []
    for step in range(12):
        out = grpo.rollouts(
            policy, prompts, drafters.suffix(), jax.random.key(step), samples=8, new_tokens=16
        )
        policy, state, reward = grpo.learn(policy, optimizer, state, prompts, out, samples=8)
        rewards.append(reward)
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1, rewards
