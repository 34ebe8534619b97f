"""Checks that draft tokens are drawn from the distributions that their draft declares.

A rule judges a draft token by the distribution that its draft declares (`core.Draft.log_probs`). A
round cannot tell whether that is so. Here a drafter drafts many times, with different keys, and its
tokens are counted.
"""

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Bool, Float

from jaxspec import core
from jaxspec.core import Draw, noise, token_rows
from jaxspec.decode import state as states
from jaxspec.decode.request import Prepared

ROWS = 4096  # drafts that are counted
DEVIATIONS = 6.0  # standard errors that a count may differ by


def check_declared(prepared: Prepared) -> None:
    """Raises ValueError for a drafter whose tokens have other frequencies than the distributions
    that its drafts declare.

    Raises:
        ValueError: with the node of the draft, the token, and both frequencies.
    """
    if prepared.drafter is None:
        return
    drafter = prepared.drafter.functions
    decoder = prepared.decoder

    def drafted(keys: core.Keys) -> core.Draft:
        prompt, request = token_rows.repeat_rows(
            (prepared.prompt, prepared.request._replace(keys=None)), ROWS
        )
        headroom = token_rows.headroom(prepared.max_new_tokens, decoder.nodes)
        state = decoder.init(prepared.weights, prompt, request._replace(keys=keys), headroom)
        vocab = prepared.target.lm.vocab_size
        _, of_drafter = states.distributions(state, prepared.sampler, vocab)
        context = states.draft_context(None, state, decoder.gamma, of_drafter, prepared.sampler)
        return drafter.propose(prepared.weights, state.caches, context)[0]

    draft = jax.device_get(jax.jit(drafted)(noise.row_keys(jax.random.key(0), ROWS)))
    if draft.log_probs is None:
        return
    for node in range(draft.tokens.shape[1]):
        _check_node(draft, node)


def _check_node(draft: core.Draft, node: int) -> None:
    expected, counts = declared(draft, node)
    if not counts.any():
        return
    tokens = draft.tokens[counts, node]
    probs = expected[counts]
    frequency = np.bincount(tokens, minlength=probs.shape[1]) / len(tokens)
    # The count of a token is a sum of independent draws, whose probabilities differ from row to
    # row.
    error = np.sqrt(np.maximum((probs * (1 - probs)).mean(axis=0), 1e-6) / len(tokens))
    deviation = np.abs(frequency - probs.mean(axis=0)) / error
    if deviation.max() > DEVIATIONS:
        token = int(deviation.argmax())
        raise ValueError(
            "the drafter does not draw its tokens from the distributions that its draft declares: "
            f"draft token {node} is {token} in {frequency[token]:.3f} of {len(tokens)} drafts, and "
            f"by Draft.log_probs and Draft.draws in {probs[:, token].mean():.3f}. All children of "
            "a node must be drawn from the node's one entry of log_probs, with replacement or "
            "without, as draws says. Tokens of several drafters at one node have no common entry: "
            "declare each drafter's distribution (Draft.sources and other_log_probs, as "
            "drafters.tree of a list of drafters does), or propose them as point masses "
            "(log_probs=None)"
        )


def declared(
    draft: core.Draft, node: int
) -> tuple[Float[np.ndarray, "B V"], Bool[np.ndarray, " B"]]:
    """Returns the distribution that a draft token was drawn from, and the rows that drew it.

    >>> log_probs = np.log(np.array([[[0.5, 0.25, 0.25]]]))
    >>> draft = core.Draft(np.array([[0, 2]]), np.array([2]), np.array([[0, 0]]), log_probs)
    >>> declared(draft, 1)[0].tolist(), declared(draft, 1)[1].tolist()
    ([[0.0, 0.5, 0.5]], [True])
    """
    assert draft.log_probs is not None
    batch, nodes = draft.tokens.shape
    rows = np.arange(batch)
    if draft.parent is None:
        parent = np.broadcast_to(np.arange(nodes), (batch, nodes))
    else:
        parent = np.asarray(draft.parent)
    entry = np.clip(parent[:, node], 0, draft.log_probs.shape[1] - 1)
    log_probs = np.stack(
        [np.asarray(x, np.float64) for x in (draft.log_probs, *draft.other_log_probs)]
    )
    if draft.sources is None:
        source = np.zeros(batch, np.int32)
    else:
        source = np.asarray(draft.sources)[:, node]
    probs = np.exp(log_probs[source, rows, entry])
    if draft.draws is None:
        drawn = np.full((batch, nodes), int(Draw.WITHOUT_REPLACEMENT))
    else:
        drawn = np.asarray(draft.draws)
    for sibling in range(node):
        is_gone = (parent[:, sibling] == parent[:, node]) & (
            drawn[:, node] == Draw.WITHOUT_REPLACEMENT
        )
        probs[rows[is_gone], draft.tokens[is_gone, sibling]] = 0.0
    total = probs.sum(axis=1)
    probs = probs / np.maximum(total, 1e-30)[:, None]
    is_real = (
        (node < np.asarray(draft.length)) & (parent[:, node] >= 0) & (drawn[:, node] != Draw.FIXED)
    )
    return probs, is_real & (total > 1e-9)
