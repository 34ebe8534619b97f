"""A drafter's head over frequent tokens only (FR-Spec): for a large vocabulary the head is most of
a small drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxspec import nets
from jaxspec.core import Model, Params, token_ids
from jaxspec.core.checks import are_shapes, in_range, integer
from jaxspec.nets import quantised
from jaxspec.vocab.remap import MappedParams, check_ids, check_model, with_head


def trim_vocabulary(
    drafter_model: Model,
    *,
    size: int | None = None,
    counts: Sequence[float] | np.ndarray | None = None,
    ids: Sequence[int] | np.ndarray | None = None,
) -> Model:
    """Makes a drafter's head smaller, so that it computes and drafts only frequent tokens.

    The rows of the other tokens are not read at all: a drafter of 32,768 of 262,144 tokens reads an
    eighth of its head at each draft token. The text keeps the target's distribution exactly. Draft
    tokens are accepted less often, by at most the target's probability of the tokens that are left
    out. The drafter still reads all tokens, in prompts and in the text, and it always drafts the
    tokens that end a text.

    Args:
        drafter_model: a model with a network from jaxspec, as `jaxspec.load` returns it. If its
            head is already trimmed, the whole head is trimmed anew.
        size: how many tokens to draft: with `counts` the most frequent ones, otherwise the first
            ids. Vocabularies made by merging pairs, and most others, begin with their most frequent
            tokens.
        counts: how often each id occurs in texts like the target's; without `size`, all ids that
            occur.
        ids: the tokens to draft, in place of size and counts.

    Returns:
        A model for any drafter that takes one. Its vocabulary, tokenizer and input are the model's.

    Raises:
        TypeError: the argument is not a Model.
        ValueError: none or too many of the three, sizes or ids out of range, or a model whose head
            is not known.

    Example:
        >>> import jax, jaxspec
        >>> from jaxspec.nets import decoder
        >>> config = decoder.decoder_config(
        ...     32, dim=16, ff_dim=32, layers=1, heads=4, kv_heads=2, head_dim=4
        ... )
        >>> model = Model(
        ...     decoder.language_model(config),
        ...     decoder.init(config, jax.random.key(0)),
        ...     config=config,
        ... )
        >>> small = trim_vocabulary(model, size=8)
        >>> small.params.head["head"]["weight"].shape, small.lm.vocab_size
        ((8, 16), 32)
        >>> prompt = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2]))
        >>> out = jaxspec.generate(model, prompt, drafter=small, gamma=3, max_new_tokens=9)
        >>> bool((out.tokens == jaxspec.generate(model, prompt, max_new_tokens=9).tokens).all())
        True

    Reference: Zhao et al., FR-Spec, arXiv 2502.14856; Goel et al., VocabTrim, arXiv 2506.22694.
    """
    check_model(drafter_model, "trim_vocabulary")
    drafter_model = untrimmed(drafter_model)
    net = nets.find(drafter_model.config)
    name = drafter_model.name or "the model"
    if net is None or net.trimmed is None:
        raise ValueError(
            f"the head of {name} (a {type(drafter_model.config).__name__}) cannot be trimmed: "
            "expected a model of jaxspec's own networks, as jaxspec.load returns it"
        )
    if not isinstance(drafter_model.params, dict):
        raise ValueError(f"{name} has a vocabulary map already: trim the model first")
    chosen = frequent_ids(drafter_model, size, counts, ids)
    config, modules = net.trimmed(drafter_model.config, len(chosen))
    rows = jnp.asarray(chosen)

    def cut(layers: Params) -> Params:
        # Every parameter of the head's modules, a quantised matrix too, has a row for each token.
        return {
            name: {leaf: quantised.take_rows(x, rows) for leaf, x in layers[name].items()}
            for name in modules
        }

    layers = {name: drafter_model.params[name] for name in modules}
    head_params = jax.eval_shape(cut, layers) if are_shapes(layers) else cut(layers)
    inside = net.language_model(config).inside
    assert inside is not None
    trimmed = with_head(drafter_model, inside.head, head_params, chosen)
    return trimmed._replace(name=f"{drafter_model.name} ({len(chosen)} tokens)".strip())


def draft_tokens(model: Model) -> Int[np.ndarray, " W"] | None:
    """Returns the ids that a trimmed head drafts, ascending; None if the head is whole."""
    if isinstance(model.params, MappedParams) and model.params.head is not None:
        return np.asarray(model.params.to_target)
    return None


def untrimmed(model: Model) -> Model:
    """Restores the whole head of a model from `trim_vocabulary`, for training or writing."""
    if draft_tokens(model) is None:
        return model
    lm = nets.net_of(model.config).language_model(model.config)
    return model._replace(lm=lm, params=model.params.model)


def frequent_ids(
    model: Model, size: int | None, counts: Any, ids: Any = None
) -> Int[np.ndarray, " W"]:
    """Chooses the ids to draft, ascending; arguments and errors as `trim_vocabulary`'s."""
    vocab = model.lm.vocab_size
    if (ids is None) == (size is None and counts is None):
        raise ValueError("trim_vocabulary takes ids, or size and counts (one or both)")
    ends = [token for token in token_ids.ends(model) if token < vocab]
    if ids is not None:
        chosen = np.asarray(ids)
        if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer) or chosen.size == 0:
            raise ValueError(
                f"ids has shape {chosen.shape} and dtype {chosen.dtype}: expected a list of token "
                "ids"
            )
        check_ids(chosen, "ids", vocab)
        return np.union1d(chosen, ends).astype(np.int32)
    frequency = _counts(counts, vocab)
    count = int(np.count_nonzero(frequency)) if size is None else size
    in_range(1, vocab, size=integer(count, "size", f"a number of tokens from 1 to {vocab}"))
    frequency[ends] = np.inf  # end tokens are always drafted
    order = np.argsort(-frequency, kind="stable")  # the lower of equally frequent ids first
    return np.sort(order[:count]).astype(np.int32)


def _counts(counts: Any, vocab: int) -> Float[np.ndarray, " V"]:
    if counts is None:
        return np.zeros(vocab)
    frequency = np.array(counts, np.float64)
    if (
        frequency.shape != (vocab,)
        or not np.isfinite(frequency).all()
        or frequency.min() < 0
        or frequency.max() == 0
    ):
        raise ValueError(
            f"counts has shape {frequency.shape}: expected how often each of the {vocab} ids occurs"
        )
    return frequency
