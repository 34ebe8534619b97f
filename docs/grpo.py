"""GRPO in plain JAX and optax, with rollouts by exact speculative decoding: for reading and copying.

A step samples several answers of each prompt, scores them with a program, and makes those above
their group's mean more probable (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300). The samples
have the policy's distribution, whatever drafts; so the drafter is a matter of speed alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.decode import teacher_forcing

# ---- 1. A reward that a program can verify

WORDS = 8


def reward(text: str) -> float:
    """Asks for a sentence of eight words: 1 for a full stop after the eighth, 0 for none at all."""
    sentence, stop, _ = text.partition(".")
    words = len(sentence.split())
    return max(0.0, 1 - abs(words - WORDS) / WORDS) if stop else 0.0


# ---- 2. Rollouts


def rollouts(policy, prompts, drafter, key, samples=8, new_tokens=32):
    """Samples answers; rows 0 to samples - 1 are the first prompt's, the next ones the second's."""
    return jaxspec.generate(
        policy,
        prompts,
        drafter=drafter,
        gamma=4,
        temperature=1.0,
        num_samples=samples,
        max_new_tokens=new_tokens,
        log_probs=True,
        key=key,
    )


# ---- 3. The loss


def advantages(rewards, samples):
    """How far each answer [answer] is above the mean of its prompt's answers, in standard
    deviations; the rewards are in the order of `rollouts`.
    """
    groups = np.reshape(rewards, (-1, samples))
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def loss(params, lm, prompt, tokens, lengths, old, gains):
    """Clipped policy gradient. tokens, old [answer, place]: the answers, and their log probabilities
    when they were drawn; gains [answer]: their advantages.
    """

    def read(_, logits, tokens):
        log_probs = jax.nn.log_softmax(logits)
        return None, jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]

    new = teacher_forcing.at_new_tokens(lm, params, prompt, tokens, read, beside=(tokens,))
    ratio = jnp.exp(new - old)
    gain = gains[:, None]
    objective = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    is_text = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    return -jnp.sum(jnp.where(is_text, objective, 0.0)) / jnp.sum(is_text)


# ---- 4. A step


@functools.partial(jax.jit, static_argnames=("lm", "optimizer"))
def update(lm, optimizer, params, state, *batch):
    """Follows the gradient of one batch of answers."""
    gradients = jax.grad(loss)(params, lm, *batch)
    changes, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, changes), state


def learn(policy, optimizer, state, prompts, out, samples):
    """Rewards answers and moves the policy; returns it, the optimizer's state and the mean reward."""
    rewards = np.array([reward(text) for text in out.texts])
    gains = jnp.asarray(advantages(rewards, samples), jnp.float32)
    batch = (prompts, out.tokens, out.lengths, out.log_probs.raw, gains)
    params, state = update(policy.lm, optimizer, policy.params, state, *map(on_device, batch))
    return policy._replace(params=params), state, rewards.mean()


def on_device(x):
    """Puts arrays of NumPy on the device; the program is the same for both."""
    return jax.tree.map(jnp.asarray, x)
