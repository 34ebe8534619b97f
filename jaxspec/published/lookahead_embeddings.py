"""Look-ahead vectors (PaSS). Their authors publish none, nor a format: this one is ours, a matrix and its sizes."""

from __future__ import annotations

from jaxspec.nets.lookahead_embeddings import LookAheadConfig
from jaxspec.published.common import Format, Shapes, TargetShape, check_shape, check_vocabulary

VECTORS = "lookahead_embeddings.weight"


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether there are vectors."""
    return VECTORS in shapes


def read(table: dict, shapes: Shapes, target: TargetShape) -> LookAheadConfig:
    """As many vectors as the matrix has rows."""
    check_vocabulary(table.get("vocab_size", target.vocab_size), target)
    check_shape(shapes, VECTORS, 1, target.hidden_size, "a width of")
    dtype = getattr(target.config, "dtype", "float32")
    return LookAheadConfig(target.vocab_size, target.hidden_size, shapes[VECTORS][0], dtype)


def names(config: LookAheadConfig) -> dict[str, str]:
    """Where the parameter lies."""
    return {"vectors": VECTORS}


def write(config: LookAheadConfig, verifier: dict, tokens: int) -> dict:
    """The config.json."""
    return {
        "model_type": "lookahead_embeddings",
        "base_model_name_or_path": verifier["name_or_path"],
        "hidden_size": config.dim,
        "vocab_size": config.vocab_size,
        "num_lookahead_embeddings": config.vectors,
    }


LOOKAHEAD_EMBEDDINGS = Format("PaSS", lambda name: name, matches, read, names, write)
