"""Several independent drafts of one model (SpecTr, Sun et al., arXiv 2310.15141), or of several
models.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxspec.core import BoundDrafter, Model
from jaxspec.core.checks import integers
from jaxspec.drafters.common import name_of
from jaxspec.drafters.trees.several import as_drafters
from jaxspec.drafters.trees.shape import branching
from jaxspec.drafters.trees.tree import tree

LENGTH = 5


def sequences(
    draft: Model | BoundDrafter | Sequence[Model | BoundDrafter],
    k: int = 4,
    length: int | None = None,
) -> BoundDrafter:
    """Drafts k continuations of `length` tokens, drawn independently of each other: a tree of k
    chains.

    Continuations that begin alike are merged, so nothing is lost: x y and x z become x, then y or
    z. Each token costs one pass of the model, over k tokens. At temperature 0 the continuations are
    the k most probable first tokens, each continued greedily.

    Args:
        draft: the model; or a list of models, which take turns: the first draws the first
            continuation to its end, the next the second, and so on.
        k: the number of continuations, at least the number of models.
        length: tokens of each; gamma is not read. By default 5, or as many as the drafter drafts
            ahead, if these are fewer (heads).

    Raises:
        ValueError: k or length below 1, k below the number of models or above the vocabulary, a
            length that the drafter does not reach, or a model without trees.

    Example:
        >>> import jax, jax.numpy as jnp, jaxspec
        >>> from jaxspec.testing import table_model
        >>> target, draft = (
        ...     table_model(jax.random.key(1), vocab=5),
        ...     table_model(jax.random.key(2), vocab=5),
        ... )
        >>> prompt, key = jaxspec.Prompt(jnp.array([[3, 1]]), jnp.array([2])), jax.random.key(0)
        >>> options = dict(max_new_tokens=9, temperature=1.0, key=key)
        >>> jaxspec.generate(
        ...     target, prompt, drafter=sequences(draft, k=3, length=2), **options
        ... ).lengths.tolist()
        [9]
    """
    bound = as_drafters(draft)
    every_steps = [drafter.functions.steps for drafter in bound]
    longest = min(
        (steps.depth for steps in every_steps if steps is not None and steps.depth is not None),
        default=None,
    )
    k, length = integers(
        1, k=k, length=min(LENGTH, longest or LENGTH) if length is None else length
    )
    if longest is not None and length > longest:
        raise ValueError(
            f"length is {length}: expected at most {longest} tokens, as many as the drafter drafts "
            "ahead"
        )
    if k < len(bound):
        raise ValueError(
            f"k is {k} and there are {len(bound)} drafters: expected at least one sequence of each"
        )
    drafter = tree(bound, shape=branching((k,) + (1,) * (length - 1)), draw="replacement")
    return drafter._replace(
        name=f"sequences({k} of {length} tokens, {'+'.join(map(name_of, bound))})"
    )
