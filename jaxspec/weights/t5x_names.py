"""The names of a T5's parameters in T5X, and the T5 that arrays with such names are of.

T5X has two networks of a T5. In examples/t5 the biases are shared by the layers of a side. In
examples/scalable_t5 each layer has one, layers may be stacked along axis 1, and projections are
[dim, heads, head_dim]. Here all of them have the names and shapes of the first: `unstacked`
translates.

Reference: Roberts et al., arXiv 2203.17189; t5x/examples/t5/network.py and
t5x/examples/scalable_t5/network.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jaxspec.files.folders import some
from jaxspec.nets import net_of
from jaxspec.nets.t5 import T5Config
from jaxspec.weights.hf_families import common, t5
from jaxspec.weights.hf_families.common import Family, Tensor
from jaxspec.weights.tensors import ArrayShape, CheckpointError

EMBEDDING = "token_embedder/embedding"
HEAD = "decoder/logits_dense/kernel"
BIAS = "relpos_bias/rel_embedding"
SIDES = ("encoder", "decoder")
STACKS = ("encoder/encoder/", "decoder/decoder/")  # of layers, along axis 1
BLOCKS = {  # of a side's layers, by our names: T5X's and its norm's
    "encoder": {
        "attention": ("attention", "pre_attention_layer_norm"),
        "ff": ("mlp", "pre_mlp_layer_norm"),
    },
    "decoder": {
        "attention": ("self_attention", "pre_self_attention_layer_norm"),
        "cross": ("encoder_decoder_attention", "pre_cross_attention_layer_norm"),
        "ff": ("mlp", "pre_mlp_layer_norm"),
    },
}


def unstacked(name: str, shape: ArrayShape) -> tuple[list[str], ArrayShape]:
    """Returns the arrays of examples/t5 that an array stands for: a name for each of its layers,
    and their shape.

    >>> unstacked("decoder/decoder/self_attention/out/kernel", (2, 3, 4, 16))
    (['decoder/layers_0/self_attention/out/kernel', 'decoder/layers_1/self_attention/out/kernel', \
'decoder/layers_2/self_attention/out/kernel'], (8, 16))
    """
    names = [name]
    if name.startswith(STACKS) and len(shape) > 1:
        side, _, inner = name.split("/", 2)
        names = [f"{side}/layers_{i}/{inner}" for i in range(shape[1])]
        shape = (shape[0], *shape[2:])
    projection = re.search(r"attention/(query|key|value|out)/kernel$", name)
    if projection and len(shape) == 3:  # heads are apart from their width
        if projection[1] == "out":
            shape = (shape[0] * shape[1], shape[2])
        else:
            shape = (shape[0], shape[1] * shape[2])
    return names, shape


def family(config: T5Config) -> Family:
    """Makes the family of such arrays. Biases of further layers must repeat the first layer's, or
    it is another network.
    """
    layers = {"encoder": config.encoder_layers, "decoder": config.decoder_layers}
    copies = {
        f"{side}/layers_{i}/{BIAS}": f"{side}/{BIAS}"
        for side in SIDES
        for i in range(1, layers[side])
    }
    return t5.T5._replace(title="T5", names=names, canonical=_canonical, copies=copies)


def _canonical(name: str) -> str:
    return re.sub(rf"/layers_0/{BIAS}$", f"/{BIAS}", name)


def names(config: T5Config) -> dict[str, Tensor]:
    """Says where each parameter lies; kernels are stored [in, out], biases [heads, buckets].

    >>> config = T5Config(
    ...     32, dim=16, ff_dim=24, heads=2, head_dim=4, encoder_layers=3, decoder_layers=1
    ... )
    >>> names(config)["encoder_2/ff/out/weight"].name
    'encoder/layers_2/mlp/wo/kernel'
    """
    tensors = common.named(net_of(config).paths(config), _modules(config.gated))
    return {
        path: x._replace(transposed=path.endswith(("weight", "table")))
        for path, x in tensors.items()
    }


def _modules(gated: bool) -> dict[str, str]:
    modules = {"embedding/embedding": EMBEDDING, "head/weight": HEAD}
    for side, blocks in BLOCKS.items():
        modules |= {
            f"{side}_norm/scale": f"{side}/{side}_norm/scale",
            f"{side}_bias/table": f"{side}/{BIAS}",
        }
        for path, (block, norm) in blocks.items():
            if path == "ff":
                parts = t5.FF[gated]
            else:
                parts = {x: x for x in t5.PROJECTIONS}
            modules |= {
                f"{side}_{{}}/{path}/{x}/weight": f"{side}/layers_{{}}/{block}/{projection}/kernel"
                for x, projection in parts.items()
            }
            modules[f"{side}_{{}}/{path}_norm/scale"] = f"{side}/layers_{{}}/{norm}/scale"
    return modules


def infer(checkpoint: Path, arrays: Mapping[str, ArrayShape]) -> T5Config:
    """Infers the network whose arrays these are, as far as names and shapes say.

    Args:
        arrays: the shapes of its arrays, by T5X's names.
    """
    shapes = {
        name: shape
        for path, x in arrays.items()
        for names, shape in [unstacked(path, x)]
        for name in names
    }

    def sizes(name: str) -> ArrayShape:
        shape = shapes.get(name)
        if shape is None or len(shape) != 2 or 0 in shape:
            if shape is None:
                got = "is absent"
            else:
                got = f"is {list(shape)}"
            names = some(list(arrays))
            raise CheckpointError(
                f"{checkpoint} holds no T5 of T5X's examples: {name} {got}. There is {names}"
            )
        return shape

    first = "encoder/layers_0"
    vocab, dim = sizes(EMBEDDING)
    heads, buckets = sizes(f"encoder/{BIAS}" if f"encoder/{BIAS}" in shapes else f"{first}/{BIAS}")
    inner, (ff_dim, _) = (
        sizes(f"{first}/attention/query/kernel")[1],
        sizes(f"{first}/mlp/wo/kernel"),
    )
    # Heads may be apart from their width, [dim, heads, head_dim], or [dim, layers, heads, head_dim]
    # in a stack.
    query = next((path for path in arrays if path.endswith("attention/query/kernel")), "")
    if inner % heads or (
        len(arrays[query]) == 3 + query.startswith(STACKS) and arrays[query][-2] != heads
    ):
        shape = f"{query} is {list(arrays[query])}"
        raise CheckpointError(
            f"{checkpoint}: {shape}, which is not made for the {heads} heads of {BIAS}"
        )
    encoder, decoder = (
        len({name.split("/")[1] for name in shapes if name.startswith(f"{x}/layers_")})
        for x in SIDES
    )
    gated = f"{first}/mlp/wi_0/kernel" in shapes
    tied = HEAD not in arrays
    activation = "gelu" if gated else "relu"
    return T5Config(
        vocab,
        dim,
        ff_dim,
        heads,
        inner // heads,
        encoder,
        decoder,
        activation,
        gated,
        tied_head=tied,
        buckets=buckets,
    )
