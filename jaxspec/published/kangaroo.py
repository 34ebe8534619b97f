"""Kangaroo's adapters: attention and norms, named as Llama's.

Their authors' config.json does not say after which of the target's layers they come, nor whose; what is written here
does.
"""

from __future__ import annotations

import dataclasses

from jaxspec.families import describe
from jaxspec.nets.exit_adapter import ExitAdapterConfig
from jaxspec.published.common import (
    FamilyError,
    Format,
    Shapes,
    TargetShape,
    check_shape,
    check_vocabulary,
    layer_names,
    layer_of,
    plain,
    taps_of,
)

EXIT = "early_exit_layer"  # of ours: after how many of the target's layers
TARGET, LAYERS = "base_model_name_or_path", "num_target_layers"  # of ours, too: whose layers these are
QUERIES = "layers.0.self_attn.q_proj.weight"


def matches(table: dict, shapes: Shapes) -> bool:
    """Whether there are layers without feed-forward blocks, and nothing that joins hidden states with tokens."""
    alone = not any(".mlp." in name or name.startswith("fc.") for name in shapes)
    return {QUERIES, "layers.0.input_layernorm.weight", "norm.weight"} <= shapes.keys() and alone


def read(table: dict, shapes: Shapes, target: TargetShape) -> ExitAdapterConfig:
    """The network of a config.json."""
    layer = layer_of(table, shapes)
    check_vocabulary(layer.vocab_size, target)
    check_shape(shapes, QUERIES, 1, target.hidden_size, "a width of")
    if EXIT not in table and target.taps is None:
        raise FamilyError(
            f"its config.json has no {EXIT}: pass taps=[1] to load_drafter if it reads the output of the second layer, "
            "as Kangaroo's for 7B models do"
        )
    made_for = table.get(LAYERS)
    if made_for is not None and made_for != target.layers:
        raise FamilyError(f"it was made for a target of {made_for} layers, and the target has {target.layers}")
    tap, *more = taps_of([table.get(EXIT, 0)], -1, target)
    if more:
        raise FamilyError(f"taps is {[tap, *more]}: an adapter reads the output of one layer")
    return ExitAdapterConfig(dataclasses.replace(layer, tied_head=False), tap + 1)


def names(config: ExitAdapterConfig) -> dict[str, str]:
    """Where each parameter lies."""
    unread = (".mlp.", "post_attention_layernorm")
    found = {path: name for path, name in layer_names(config.layer).items() if not any(x in name for x in unread)}
    return found | {"norm/scale": "norm.weight"}


def write(config: ExitAdapterConfig, verifier: dict, tokens: int) -> dict:
    """The config.json, as its authors have it, with the layer that it reads."""
    _, table = describe(dataclasses.replace(config.layer, tied_head=False))
    return table | {EXIT: config.exit, TARGET: verifier["name_or_path"], LAYERS: verifier["layers"]}


KANGAROO = Format("Kangaroo", plain, matches, read, names, write)
