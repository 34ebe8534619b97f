"""Medusa's heads: as their authors publish them, and as vLLM has them."""

from __future__ import annotations

import re

from jaxspec.nets.heads import HeadsConfig
from jaxspec.published.common import FamilyError, Format, Shapes, TargetShape, check_shape

MAP = "token_map"  # vLLM's: the target's ids of the heads' vocabulary


def canonical(name: str) -> str | None:
    """One spelling: "head.block" and "head.head".

    >>> canonical("2.0.linear.weight"), canonical("2.1.weight"), canonical("blocks.2.layers.0.weight")
    ('2.0.weight', '2.head.weight', '2.0.weight')
    """
    name = name.removeprefix("medusa_heads.").removeprefix("medusa_head.")
    if found := re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name):
        return f"{found[1]}.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", name):
        return f"{found[1]}.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"(?:lm_heads\.(\d+)|(\d+)\.\d+)\.weight", name):
        return f"{found[1] or found[2]}.head.weight"
    return name


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether there is a head number 0 with a block."""
    return {"0.0.weight", "0.head.weight"} <= shapes.keys()


def read(table: dict, shapes: Shapes, target: TargetShape) -> HeadsConfig:
    """As many heads and blocks as there are tensors of; config.json is often wrong about the former."""
    heads, blocks = (len({name.split(".")[i] for name in shapes if re.match(r"\d+\.\d+\.", name)}) for i in (0, 1))
    check_shape(shapes, "0.0.weight", 1, target.hidden_size, "a width of")
    draft_vocab = shapes[MAP][0] if MAP in shapes else None
    rows = shapes["0.head.weight"][0]
    if draft_vocab is None:
        check_shape(shapes, "0.head.weight", 0, target.vocab_size, "a vocabulary of")
    elif rows != draft_vocab:
        raise FamilyError(f"{MAP} has {draft_vocab} ids, and the heads {rows}")
    return HeadsConfig(
        vocab_size=target.vocab_size,
        dim=target.hidden_size,
        heads=heads,
        blocks=blocks,
        bias="0.0.bias" in shapes,
        draft_vocab=draft_vocab,
        dtype=getattr(target.config, "dtype", "float32"),
    )


def names(config: HeadsConfig) -> dict[str, str]:
    """Where each parameter lies."""
    found: dict[str, str] = {} if config.draft_vocab is None else {"vocabulary": MAP}
    for i in range(config.heads):
        found[f"heads_{i}/head/weight"] = f"{i}.head.weight"
        for j in range(config.blocks):
            for part in ("weight", "bias") if config.bias else ("weight",):
                found[f"heads_{i}/blocks_{j}/linear/{part}"] = f"{i}.{j}.{part}"
    return found


MEDUSA = Format("Medusa", canonical, matches, read, names)
