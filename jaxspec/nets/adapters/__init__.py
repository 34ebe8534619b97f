"""Users' models as a `LanguageModel`: a function, a Linen, NNX or Equinox module, a network of
another library.

| a network that | adapter |
|---|---|
| maps whole rows to logits | `from_function`, `from_linen`, `from_nnx`, `from_equinox` |
| takes its cache as an argument | `from_function(..., empty_cache=...)`, with `by_row` |
| the same, with an `end_index` in each layer | `from_end_index`, `from_tunix`, `from_gemma` |
| has `call_with_cache` (keras-hub) | `from_keras_hub` |
| keeps a "cache" collection (Linen) | `from_linen_cache` |

Two kinds of function will do, and the same two as a module's `__call__`:

    apply(params, tokens) -> logits a causal forward pass over whole rows: tokens [batch, step],
        logits [batch, step, vocab]. It has no cache; each pass recomputes the row. Exact, and
        enough to try an idea out.

    apply(params, cache, tokens, positions) -> (logits, cache) tokens and positions [batch, step]:
        writes entry `positions[b, t]` of row b, and attends to all entries up to it, itself
        included. What lies after is garbage, to be masked and overwritten, so rewinding is free.
        The cache is any pytree that `empty_cache(batch, capacity)` makes, whose every leaf has the
        batch first.

The latter can take token trees, too. It is then given with `select`, and called with two arguments
more, by name:

    apply(params, cache, tokens, positions, *, length, parent) -> (logits, cache) writes the nodes
        of a tree one after the other, at entry `length[b] + t`, though siblings share a position.
        `jaxspec.core.kv_cache.mask(length, step, capacity, parent)` says which entries each token
        attends to, for trees and for chains (parent None); windows count
        `jaxspec.core.kv_cache.key_positions`.

    select(cache, start, path) -> cache Moves entry `start[b] + path[b, i]` of row b to `start[b] +
        i`; `path` increases, and never points backwards.
"""

from jaxspec.nets.adapters.end_index import from_end_index, from_gemma, from_tunix
from jaxspec.nets.adapters.equinox_modules import from_equinox
from jaxspec.nets.adapters.functions import (
    by_row,
    from_function,
    from_linen,
    from_linen_cache,
    from_nnx,
)
from jaxspec.nets.adapters.keras_models import from_keras_hub

__all__ = [
    "by_row",
    "from_end_index",
    "from_equinox",
    "from_function",
    "from_gemma",
    "from_keras_hub",
    "from_linen",
    "from_linen_cache",
    "from_nnx",
    "from_tunix",
]
