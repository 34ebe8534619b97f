"""The names and shapes of a T5's parameters in T5X, and the T5 that such arrays are of.

T5X has two networks of a T5. In examples/t5 the biases are shared by the layers of a side; in examples/scalable_t5
each layer has its own, layers may be stacked along axis 1, and projections are [dim, heads, head_dim].

Reference: Roberts et al., arXiv 2203.17189; t5x/examples/t5/network.py and t5x/examples/scalable_t5/network.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from jaxspec.files.folders import some
from jaxspec.nets.t5 import T5Config
from jaxspec.weights.parameters import Shape
from jaxspec.weights.t5x_arrays import Stored
from jaxspec.weights.tensors import CheckpointError

EMBEDDING, HEAD = "token_embedder/embedding", "decoder/logits_dense/kernel"
BIAS = "relpos_bias/rel_embedding"
BLOCKS = {  # a layer's blocks on either side: T5X's name, its norm's, and ours
    "encoder": [("attention", "pre_attention_layer_norm", "attention")],
    "decoder": [
        ("self_attention", "pre_self_attention_layer_norm", "attention"),
        ("encoder_decoder_attention", "pre_cross_attention_layer_norm", "cross"),
    ],
}
SIDES = tuple(BLOCKS)


class Layout(NamedTuple):
    """The differences between T5X's networks.

    Attributes:
        stacked: whether the layers of a side are one array, along axis 1.
        split: whether projections are [dim, heads, head_dim] rather than [dim, heads * head_dim].
        own_biases: whether each layer has relative biases of its own.
    """

    stacked: bool = False
    split: bool = False
    own_biases: bool = False


class Entry(NamedTuple):
    """The content of an array of T5X's.

    Attributes:
        shape: of the array.
        paths: of our parameters in it; one for each layer if it is stacked.
        stacked: whether the layers lie along axis 1.
    """

    shape: Shape
    paths: list[str]
    stacked: bool = False


def entries(config: T5Config, layout: Layout) -> dict[str, Entry]:
    """Says what each of T5X's arrays is, by its name.

    >>> config = T5Config(32, dim=16, ff_dim=24, heads=2, head_dim=4, encoder_layers=3, decoder_layers=1)
    >>> entries(config, Layout())["encoder/layers_2/mlp/wo/kernel"]
    Entry(shape=(24, 16), paths=['encoder_2/ff/out/weight'], stacked=False)
    >>> entries(config, Layout(stacked=True, split=True))["decoder/decoder/self_attention/out/kernel"]
    Entry(shape=(2, 1, 4, 16), paths=['decoder_0/attention/out/weight'], stacked=True)
    """
    by_name = {EMBEDDING: Entry((config.vocab_size, config.dim), ["embedding/embedding"])}
    if not config.tied_head:
        by_name[HEAD] = Entry((config.dim, config.vocab_size), ["head/weight"])
    depth = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    for side in SIDES:
        by_name[f"{side}/{side}_norm/scale"] = Entry((config.dim,), [f"{side}_norm/scale"])
        inside = {name: (shape, f"{side}_{{}}/{path}") for name, (shape, path) in _layer(config, layout, side).items()}
        bias = (config.heads, config.buckets), f"{side}_bias/table"
        if layout.own_biases:
            inside[BIAS] = bias
        else:
            by_name[f"{side}/{BIAS}"] = Entry(bias[0], [bias[1]])
        for name, (shape, path) in inside.items():
            paths = [path.format(i) for i in range(depth[side])]
            if layout.stacked:
                by_name[f"{side}/{side}/{name}"] = Entry((shape[0], depth[side], *shape[1:]), paths, stacked=True)
                continue
            by_name |= {f"{side}/layers_{i}/{name}": Entry(shape, [path]) for i, path in enumerate(paths)}
    return by_name


def _layer(config: T5Config, layout: Layout, side: str) -> dict[str, tuple[Shape, str]]:
    """Lists a layer's arrays: shape, and path in the layer of ours."""
    heads = (config.heads, config.head_dim) if layout.split else (config.heads * config.head_dim,)
    by_name: dict[str, tuple[Shape, str]] = {}
    for name, norm, ours in BLOCKS[side]:
        by_name[f"{norm}/scale"] = (config.dim,), f"{ours}_norm/scale"
        for matrix in ("query", "key", "value"):
            by_name[f"{name}/{matrix}/kernel"] = (config.dim, *heads), f"{ours}/{matrix}/weight"
        by_name[f"{name}/out/kernel"] = (*heads, config.dim), f"{ours}/out/weight"
    by_name["pre_mlp_layer_norm/scale"] = (config.dim,), "ff_norm/scale"
    for name, ours in ({"wi_0": "gate", "wi_1": "wi"} if config.gated else {"wi": "wi"}).items():
        by_name[f"mlp/{name}/kernel"] = (config.dim, config.ff_dim), f"ff/{ours}/weight"
    by_name["mlp/wo/kernel"] = (config.ff_dim, config.dim), "ff/out/weight"
    return by_name


def infer(checkpoint: Path, arrays: dict[str, Stored]) -> tuple[T5Config, Layout]:
    """Infers the network whose arrays these are, as far as names and shapes say, and how it is laid out.

    Raises:
        CheckpointError: some that tell are absent, or contradict each other.
    """

    def shape(name: str, rank: int) -> Shape:
        held = arrays[name].shape if name in arrays else None
        if held is None or len(held) != rank or 0 in held:
            what = "is absent" if held is None else f"is {list(held)}"
            raise CheckpointError(
                f"{checkpoint} holds no T5 of T5X's examples: {name} {what}. There is {some(list(arrays))}"
            )
        return held

    stacked = any(name.startswith("encoder/encoder/") for name in arrays)
    own_biases = not any(f"{side}/{BIAS}" in arrays for side in SIDES)
    first = {side: f"{side}/{side}" if stacked else f"{side}/layers_0" for side in SIDES}
    query = f"{first['encoder']}/attention/query/kernel"
    split = query in arrays and len(arrays[query].shape) == 3 + stacked
    layout = Layout(stacked, split, own_biases)
    vocab, dim = shape(EMBEDDING, 2)
    heads, *_, buckets = shape(f"{first['encoder'] if own_biases else 'encoder'}/{BIAS}", 2 + (own_biases and stacked))
    widths = shape(query, 2 + stacked + split)[1 + stacked :]
    if math.prod(widths) % heads or (split and widths[0] != heads):
        raise CheckpointError(
            f"{checkpoint}: {query} is {list(arrays[query].shape)}, which is not made for the {heads} heads of {BIAS}"
        )
    depth = {}
    for side in SIDES:
        ff_dim, *layers, _ = shape(f"{first[side]}/mlp/wo/kernel", 2 + stacked)
        depth[side] = layers[0] if stacked else _layers(arrays, side)
    gated = f"{first['encoder']}/mlp/wi_0/kernel" in arrays
    config = T5Config(
        vocab,
        dim,
        ff_dim,
        heads,
        math.prod(widths) // heads,
        depth["encoder"],
        depth["decoder"],
        "gelu" if gated else "relu",
        gated,
        tied_head=HEAD not in arrays,
        buckets=buckets,
    )
    return config, layout


def _layers(arrays: dict[str, Stored], side: str) -> int:
    """Counts the layers of a side."""
    start = f"{side}/layers_"
    return len({name.removeprefix(start).partition("/")[0] for name in arrays if name.startswith(start)})
