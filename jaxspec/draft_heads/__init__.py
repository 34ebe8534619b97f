"""Draft heads: networks that draft from the target's hidden states.

Each kind is one file: the configuration, the network, the drafter, the reading and writing of
published files, and the training. The file ends in an entry of this table. Kinds share:

    kind         Kind, an entry of the table; sizes of transformer layers in recipes
    target       what heads take of their target: its embedding, its head, its vocabulary; their drafters
    training     how heads are unrolled over whole texts
    recurrent    heads that are fed what they made (EAGLE, MTP)
    block_*      the shape, the network and the files of block drafters (DFlash, DSpark, DFlash 2)
    formats      what published files have in common
    load, save   a folder in and out, by the table
"""

from __future__ import annotations

from typing import Any

import jax

from jaxspec import optional_imports
from jaxspec.draft_heads import (
    assistant,
    block,
    dflash2,
    eagle,
    kangaroo,
    lookahead_embeddings,
    medusa,
    mtp,
)
from jaxspec.draft_heads.kind import Kind
from jaxspec.weights import parameters

# files are of the first whose format they match: a module for MTP lies beside a model
KINDS: tuple[Kind, ...] = (
    eagle.KIND,
    dflash2.KIND,  # which has DFlash's tensors, and more
    block.KIND,
    medusa.KIND,
    kangaroo.KIND,
    lookahead_embeddings.KIND,
    assistant.KIND,
    mtp.KIND,
)


def kind_of(config: Any) -> Kind:
    """Returns the kind of a network's configuration.

    >>> kind_of(lookahead_embeddings.LookAheadConfig(32, dim=16, vectors=2)).name
    'lookahead_embeddings'
    """
    return next(head_kind for head_kind in KINDS if type(config) is head_kind.config)


def shapes_of(config: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a network's parameters by path; nothing is drawn."""
    return parameters.flat(jax.eval_shape(lambda: kind_of(config).init(config, jax.random.key(0))))


__getattr__ = optional_imports.submodules(__name__)
