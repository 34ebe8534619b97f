"""Whether a real pair samples from the target's law: a test of what a round's first token is, over many rows.

For models too large to enumerate (`jaxspec.testing.certify`) this is the next best: fixed keys, and a p-value.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from jaxspec import buffers, warp
from jaxspec.base import AcceptRule, Model, Prompt
from jaxspec.decode import generate

EXPECTED = 5  # draws that a cell must expect; rarer tokens share one


class ChiSquare(NamedTuple):
    """A test of fit.

    Attributes:
        statistic: sum over cells of (observed - expected)^2 / expected.
        cells: tokens, or groups of rare tokens.
        draws: how many second tokens were looked at.
        pvalue: how likely a statistic this large is if the law is right. One below 0.001 is news.
        acceptance_rate: of the guesses; near 0 or 1 only one way through the rule was tested.
    """

    statistic: float
    cells: int
    draws: int
    pvalue: float
    acceptance_rate: float


def second_token(
    target: Model,
    drafter: Model,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    rows: int = 4000,
    temperature: float = 1.0,
    gamma: int = 2,
    accept: AcceptRule | None = None,
) -> ChiSquare:
    """Samples the second token behind the commonest first one, and compares it with the target's own law there.

    The second token is the first that a round decides: a guess that was kept, or a draw from the residual.

    Args:
        target, drafter: a pair.
        prompt: one row.
        key: of all samples.
        rows: samples.
        temperature: of both; positive.
        gamma: guesses per round.
        accept: the rule, `accept.rejection()` by default.

    Raises:
        ValueError: more than one prompt, or too few samples for a test.

    Example:
        >>> from jaxspec.testing import table_model
        >>> target, draft = table_model(jax.random.key(1), vocab=5), table_model(jax.random.key(2), vocab=5)
        >>> prompt = Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> second_token(target, draft, prompt, jax.random.key(0), rows=2000).pvalue > 0.001
        True
    """
    if prompt.tokens.shape[0] != 1:
        raise ValueError(f"got {prompt.tokens.shape[0]} prompts: expected one")
    many = Prompt(jnp.repeat(prompt.tokens, rows, 0), jnp.repeat(prompt.length, rows))
    out = generate(
        target,
        many,
        drafter=drafter,
        gamma=gamma,
        accept=accept,
        temperature=temperature,
        max_new_tokens=3,
        key=key,
        eos_ids=(),
    )
    first, second = out.tokens[:, 0], out.tokens[:, 1]
    common = int(np.bincount(first).argmax())
    observed = np.bincount(second[first == common], minlength=target.lm.vocab_size).astype(np.float64)
    expected = _law_behind(target, prompt, common, temperature) * observed.sum()
    frequent = expected >= EXPECTED
    cells = [observed[frequent], observed[~frequent].sum(keepdims=True)]
    hoped = [expected[frequent], expected[~frequent].sum(keepdims=True)]
    seen, due = (np.concatenate(x) for x in (cells, hoped))
    seen, due = seen[due > 0], due[due > 0]
    if len(seen) < 2:
        raise ValueError(f"{int(observed.sum())} samples leave one cell to compare: give more rows")
    statistic = float(np.sum((seen - due) ** 2 / due))
    pvalue = float(jax.scipy.special.gammaincc((len(seen) - 1) / 2, statistic / 2))
    return ChiSquare(
        statistic, len(seen), int(observed.sum()), pvalue, float(np.mean(np.asarray(out.stats.acceptance_rate)))
    )


def _law_behind(target: Model, prompt: Prompt, token: int, temperature: float) -> np.ndarray:
    """The target's law of what follows the prompt and one token, by a pass over one token, as plain decoding's."""
    width = buffers.row_width(target.lm, prompt) + 2
    _, cache = jax.jit(target.lm.prefill, static_argnums=2)(target.params, prompt, width)
    forward, _ = jax.jit(target.lm.extend)(target.params, cache, jnp.full((1, 1), token, jnp.int32))
    controls = warp.Controls(jnp.full(1, temperature, jnp.float32), jnp.full(1, target.lm.vocab_size), jnp.ones(1))
    warping = warp.sampling()
    if target.tokenizer is not None and len(target.tokenizer) < target.lm.vocab_size:
        warping = warp.only(warping, len(target.tokenizer))
    law = warping(controls, forward.logits).log_probs
    assert law is not None
    probs = np.exp(np.asarray(law[0, 0], np.float64))
    return probs / probs.sum()
