"""Medusa's heads: as their authors publish them, and as vLLM has them, in whose format they are written.

Blockwise decoding's feed-forward blocks, heads without a vocabulary projection, and Hydra's projection of tokens are
further tensors of the same format, which nobody else reads.
"""

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
    if found := re.fullmatch(r"blocks\.(\d+)\.layers\.(\d+)\.(.+)", name):
        return f"{found[1]}.{found[2]}.{found[3]}"
    if found := re.fullmatch(r"(?:lm_heads\.(\d+)|(\d+)\.\d+)\.weight", name):
        return f"{found[1] or found[2]}.head.weight"
    return name


def spelled(name: str) -> str:
    """As vLLM has it.

    >>> spelled("2.0.weight"), spelled("2.head.weight")
    ('blocks.2.layers.0.weight', 'lm_heads.2.weight')
    """
    if found := re.fullmatch(r"(\d+)\.head\.weight", name):
        return f"lm_heads.{found[1]}.weight"
    return re.sub(r"^(\d+)\.(\d+)\.", r"blocks.\1.layers.\2.", name)


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether there is a head number 0 with a block."""
    return "0.0.wi.weight" in shapes or "0.0.weight" in shapes


def read(table: dict, shapes: Shapes, target: TargetShape) -> HeadsConfig:
    """As many heads and blocks as there are tensors of; config.json is often wrong about the former."""
    heads, blocks = (len({name.split(".")[i] for name in shapes if re.match(r"\d+\.\d+\.", name)}) for i in (0, 1))
    ff_dim, *_ = shapes.get("0.0.wi.weight", (0,))
    # Hydra's first block takes tokens beside the features, and has a projection of both.
    first = next(name for name in ("0.0.shortcut.weight", "0.0.wi.weight", "0.0.weight") if name in shapes)
    hydra = first == "0.0.shortcut.weight"
    check_shape(shapes, first, int(not hydra), target.hidden_size, "a width of")
    draft_vocab = shapes[MAP][0] if MAP in shapes else None
    if draft_vocab is None:
        check_shape(shapes, "0.head.weight", 0, target.vocab_size, "a vocabulary of")
    elif shapes.get("0.head.weight", (draft_vocab,))[0] != draft_vocab:
        raise FamilyError(f"{MAP} has {draft_vocab} ids, and the heads {shapes['0.head.weight'][0]}")
    return HeadsConfig(
        vocab_size=target.vocab_size,
        dim=target.hidden_size,
        heads=heads,
        blocks=blocks,
        block="feed_forward" if ff_dim else "residual",
        ff_dim=ff_dim,
        bias="0.0.bias" in shapes or "0.0.wi.bias" in shapes,
        own_head="0.head.weight" in shapes,
        draft_vocab=draft_vocab,
        reads_tokens=hydra,
        dtype=getattr(target.config, "dtype", "float32"),
    )


def names(config: HeadsConfig) -> dict[str, str]:
    """Where each parameter lies."""
    found: dict[str, str] = {} if config.draft_vocab is None else {"vocabulary": MAP}
    layers = {"linear": ""} if config.block == "residual" else {"wi": "wi.", "out": "out."}
    for i in range(config.heads):
        if config.own_head:
            found[f"heads_{i}/head/weight"] = f"{i}.head.weight"
        if config.reads_tokens:
            found[f"heads_{i}/blocks_0/shortcut/weight"] = f"{i}.0.shortcut.weight"
        for j in range(config.blocks):
            for part in ("weight", "bias") if config.bias else ("weight",):
                found |= {f"heads_{i}/blocks_{j}/{ours}/{part}": f"{i}.{j}.{x}{part}" for ours, x in layers.items()}
    return found


def write(config: HeadsConfig, verifier: dict, tokens: int) -> dict:
    """The config.json, as vLLM has it."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": verifier["name_or_path"],
        "hidden_size": config.dim,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab or config.vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.blocks,
        "medusa_fc_bias": config.bias,
    }


MEDUSA = Format("Medusa", canonical, matches, read, names, write, spelled)
