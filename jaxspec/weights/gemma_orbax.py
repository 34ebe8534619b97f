"""Gemma 1, 2 and 3 in Orbax folders: from Kaggle, from gemma's `gm.ckpts.save_params`, or from
Orbax v1's `save_pytree`.

Such a folder holds only arrays. Their names tell whether it is a Gemma 1, 2 or 3, and their sizes
tell which published model. Windows, rotations and caps come from that model, since no array shows
them: other sizes are refused. Names are nested in gemma, and flat in the published files:

    {"layer_0": {"attn": {"q_einsum": {"w": ...}}}}     {"transformer/layer_0/attn/q_einsum": {"w": ...}}

The tree lies in the folder itself or in one inside it: Orbax makes items ("default", "state"), and
Kaggle puts tokenizer.model beside the tree's folder. Parts for images are left out with a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.files.folders import some
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights import gguf_tokenizer, huggingface, tensors, tokenizers
from jaxspec.weights.hf_families import Family, gemma
from jaxspec.weights.orbax_layouts import CHECKPOINT
from jaxspec.weights.reader import ModelFormat, Reader
from jaxspec.weights.tensors import ArrayShape, CheckpointError, Shard, Stored
from jaxspec.weights.tensorstore_arrays import (
    METADATA,
    Index,
    most_common_dtype,
    open_arrays,
    read_index,
)

EMBEDDING = "embedder/input_embedding"
PARAMS = "params/"  # precedes the names in a training state, whose other parts are not read
TRANSFORMER = "transformer/"  # precedes the names in published files
_EMBEDDINGS = {EMBEDDING, TRANSFORMER + EMBEDDING}
OTHERS = ("vision_encoder/", "SigLiPFromPatches_0/", "embedder/mm_")  # parts that see
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of folders that Orbax has not finished
SENTENCEPIECE = "tokenizer.model"
ADVICE = (
    "jaxspec.from_arrays takes the arrays of any Gemma, under the names of a Hugging Face folder, "
    "with its config"
)

# Axes: N query heads, K key-value heads, H head dimension, D model dimension, F feed-forward
# dimension.
ArrayChange = Callable[[np.ndarray], np.ndarray]


class HeldTensor(NamedTuple):
    """A tensor of a Hugging Face folder that lies in an array of Gemma's."""

    name: str  # its name there
    take: ArrayChange  # takes it out of the array


class GemmaVersion(NamedTuple):
    """The facts of Gemma 1, 2 or 3 that its arrays do not show."""

    family: Family
    end_tokens: tuple[int, ...]  # <eos> and <end_of_turn>, where gemma's own sampler ends a text
    norms: Mapping[str, str]  # {name of a layer's norm: its name in a Hugging Face folder}


_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn/_query_norm": "self_attn.q_norm", "attn/_key_norm": "self_attn.k_norm"}
_LLAMA_NORMS = {
    "pre_attention_norm": "input_layernorm",
    "pre_ffw_norm": "post_attention_layernorm",
}
GEMMA1 = GemmaVersion(gemma.GEMMA, (1, 107), _LLAMA_NORMS)
"""The parameters and end tokens of Gemma 1."""
GEMMA2 = GemmaVersion(gemma.GEMMA2, (1, 107), _NORMS)
"""The parameters and end tokens of Gemma 2."""
GEMMA3 = GemmaVersion(gemma.GEMMA3, (1, 106), _NORMS | _HEAD_NORMS)
"""The parameters and end tokens of Gemma 3."""


class Dimensions(NamedTuple):
    """The sizes that tell a published model from others of its version."""

    layers: int
    dim: int
    ff_dim: int
    heads: int
    kv_heads: int
    head_dim: int


class Names(NamedTuple):
    """The arrays of a tree, sorted."""

    text: dict[str, tuple[str, ...]]  # {name, such as layer_0/attn/q_einsum: keys in the tree}
    beside: list[str]  # names of what sees


class StoredTree(NamedTuple):
    """A tree of arrays on disk that has a Gemma's embedding."""

    root: Path
    index: Index
    names: Names


def is_folder(folder: Path) -> bool:
    """Tells whether a folder is a Gemma's, or holds some, without Hugging Face's weights beside."""
    return folder.is_dir() and not tensors.are_in(folder) and bool(_trees(folder))


def _trees(folder: Path) -> list[StoredTree]:
    trees = []
    finished = [
        child
        for child in sorted(folder.iterdir())
        if child.is_dir() and TEMPORARY not in child.name
    ]
    for root in (folder, *finished):
        try:
            index = read_index(root / METADATA)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        names = _sorted_names(index.locations)
        if names is not None:
            trees.append(StoredTree(root, index, names))
    return trees


def _sorted_names(paths: Collection[tuple[str, ...]]) -> Names | None:
    """Removes what precedes Gemma's names, and the "w" that ends some; None for another tree.

    >>> _sorted_names([("transformer/embedder", "input_embedding"), ("transformer/x", "w")]).text
    {'embedder/input_embedding': ('transformer/embedder', 'input_embedding'), 'x': ('transformer/x', 'w')}
    """
    by_name = {"/".join(keys): keys for keys in paths}
    state = {
        name.removeprefix(PARAMS): keys for name, keys in by_name.items() if name.startswith(PARAMS)
    }
    tree = next((tree for tree in (by_name, state) if not _EMBEDDINGS.isdisjoint(tree)), None)
    if tree is None:
        return None
    names = {name.removeprefix(TRANSFORMER).removesuffix("/w"): keys for name, keys in tree.items()}
    beside = [name for name in names if name.startswith(OTHERS)]
    return Names({name: keys for name, keys in names.items() if name not in beside}, beside)


def _find(folder: Path) -> StoredTree:
    trees = _trees(folder)
    if len(trees) > 1 and trees[0].root != folder:
        names = ", ".join(tree.root.name for tree in trees)
        raise CheckpointError(f"{folder} holds several Gemmas: {names}. Give the path of one")
    return trees[0]


def open_model(folder: Path) -> Reader:
    """Opens a folder that `is_folder` recognises."""
    root, index, names = _find(folder)
    # Items of Orbax are called "default" or "state"; Kaggle's folder around a tree has a number.
    named = folder if (folder / CHECKPOINT).is_file() else root

    @functools.cache
    def arrays() -> dict[str, Stored]:
        chosen = {name: index.locations[keys] for name, keys in names.text.items()}
        return open_arrays(root, chosen, index.driver, index.leaves_zeros_out)

    @functools.cache
    def network() -> tuple[GemmaVersion, DecoderConfig]:
        return identify(folder, {name: x.shape for name, x in arrays().items()})

    def params(dtype: str, mesh: Any) -> Any:
        version, config = network()
        parts = sorted({name.partition("/")[0] for name in names.beside} - {"embedder"})
        huggingface.tell_of_parts(folder, parts or names.beside[:1], len(names.beside))
        files = [_shard(root, version, arrays())]
        return huggingface.assemble(
            folder, version.family, config, files, dtype, mesh, "names and shapes"
        )

    return Reader(
        folder,
        named.resolve().name,
        config=lambda: network()[1],
        tokenizer=lambda: _tokenizer(folder, network()[1].vocab_size),
        params=params,
        stored_dtype=lambda: most_common_dtype(arrays()),
        tokenizer_place="in it, or in the folder around it",
    )


def identify(folder: Path, shapes: Mapping[str, ArrayShape]) -> tuple[GemmaVersion, DecoderConfig]:
    """Finds the published model that arrays are of, by their names and shapes.

    The embedding says how large the vocabulary is: gemma pads it to other sizes than Hugging Face.

    Raises:
        CheckpointError: arrays are missing or unknown, or no published model has their sizes.
    """
    # Gemma 3 normalises queries and keys, Gemma 2 what a block returns.
    if "layer_0/attn/_query_norm/scale" in shapes:
        version = GEMMA3
    elif "layer_0/post_attention_norm/scale" in shapes:
        version = GEMMA2
    else:
        version = GEMMA1
    title = version.family.title.removesuffix(", text")
    dimensions = _dimensions(folder, title, shapes)
    unknown = [name for name in shapes if not _parts(version, name, dimensions.dim)]
    if unknown:
        raise CheckpointError(
            f"{folder} holds arrays that no {title} has: {some(unknown)}. Expected those of Gemma "
            f"1, 2 or 3, in full and without adapters. {ADVICE}"
        )
    sizes = {_published(config): config for config in version.family.sizes.values()}
    if dimensions not in sizes:
        published = "; ".join(
            f"{name}: {_words(_published(config))}" for name, config in version.family.sizes.items()
        )
        raise CheckpointError(
            f"{folder} holds a {title} of an unknown size: {_words(dimensions)}. Expected a "
            f"published one ({published}): windows, rotations and caps are not among the arrays. {ADVICE}"
        )
    rows = shapes[EMBEDDING][0]
    config = dataclasses.replace(sizes[dimensions], vocab_size=rows, end_tokens=version.end_tokens)
    return version, config


def _dimensions(folder: Path, title: str, shapes: Mapping[str, ArrayShape]) -> Dimensions:
    layers = {name.partition("/")[0] for name in shapes if re.match(r"layer_\d+/", name)}
    try:
        together = shapes.get("layer_0/attn/qkv_einsum")  # [3, N, D, H]
        if together is not None:
            heads = kv_heads = together[1]
        else:
            heads = shapes["layer_0/attn/q_einsum"][0]  # [N, D, H]
            kv_heads = shapes["layer_0/attn/kv_einsum"][1]  # [2, K, D, H]
        ff_dim, dim = shapes["layer_0/mlp/linear"]
        _, head_dim, _ = shapes["layer_0/attn/attn_vec_einsum"]  # [N, H, D]
    except KeyError as error:
        raise CheckpointError(
            f"{folder} has {EMBEDDING}, as a Gemma has, but not {error.args[0]}: it has "
            f"{some(list(shapes))}. Expected the arrays of Gemma 1, 2 or 3, layer by layer. "
            f"{ADVICE}"
        ) from None
    except (ValueError, IndexError):
        raise CheckpointError(
            f"{folder}: arrays of layer_0 do not have as many axes as those of a {title}. {ADVICE}"
        ) from None
    return Dimensions(len(layers), dim, ff_dim, heads, kv_heads, head_dim)


def _published(config: DecoderConfig) -> Dimensions:
    layer: Any = config.layers[0]
    heads = (layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim)
    return Dimensions(len(config.layers), config.dim, layer.ff.dim, *heads)


def _words(sizes: Dimensions) -> str:
    heads = f"{sizes.heads} heads of {sizes.head_dim}, {sizes.kv_heads} key-value heads"
    return f"{sizes.layers} layers of {sizes.dim}, {sizes.ff_dim} inside, {heads}"


def _shard(root: Path, version: GemmaVersion, arrays: Mapping[str, Stored]) -> Shard:
    """Presents arrays as a file of a Hugging Face folder."""
    dim = arrays[EMBEDDING].shape[1]
    parts = {name: _parts(version, name, dim) for name in arrays}

    def shape(name: str, tensor: HeldTensor) -> ArrayShape:
        # a view of one number: the change of an array's shape, without the array
        stored = arrays[name].shape
        try:
            return tensor.take(np.broadcast_to(np.float32(0), stored)).shape
        except (ValueError, IndexError):
            raise CheckpointError(
                f"{root}: {name} is {list(stored)}: it has other axes than in a Gemma. {ADVICE}"
            ) from None

    shapes = {
        tensor.name: shape(name, tensor) for name, members in parts.items() for tensor in members
    }

    def load(only: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name, members in parts.items():
            needed = [tensor for tensor in members if tensor.name in only]
            if needed:
                x = np.asarray(arrays[name])
                for tensor in needed:
                    yield tensor.name, tensor.take(x)
                del x

    return Shard(root, shapes, load)


def _parts(version: GemmaVersion, name: str, dim: int) -> list[HeldTensor]:
    """Lists the tensors that an array holds; none for an unknown name.

    >>> [tensor.name for tensor in _parts(GEMMA3, "layer_2/attn/kv_einsum", 640)]
    ['model.layers.2.self_attn.k_proj.weight', 'model.layers.2.self_attn.v_proj.weight']
    """
    if name == EMBEDDING:
        return [HeldTensor("model.embed_tokens.weight", _same)]
    if name == "final_norm/scale":
        return [HeldTensor("model.norm.weight", _same)]
    match = re.fullmatch(r"layer_(\d+)/(.+)", name)
    if match is None:
        return []
    layer, module = match.groups()
    norms = {f"{key}/scale": [HeldTensor(hf_name, _same)] for key, hf_name in version.norms.items()}
    gate_up = functools.partial(_of_stack, functools.partial(_towards, dim))
    modules = norms | {
        "attn/q_einsum": [HeldTensor("self_attn.q_proj", _heads)],
        "attn/kv_einsum": _of_stack(_heads, "self_attn.k_proj", "self_attn.v_proj"),
        "attn/qkv_einsum": _of_stack(
            _heads, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        ),
        "attn/attn_vec_einsum": [HeldTensor("self_attn.o_proj", _joined)],
        "mlp/gating_einsum": gate_up("mlp.gate_proj", "mlp.up_proj"),
        "mlp/linear": [HeldTensor("mlp.down_proj", np.transpose)],
    }
    return [
        HeldTensor(f"model.layers.{layer}.{tensor.name}.weight", tensor.take)
        for tensor in modules.get(module, [])
    ]


def _of_stack(change: ArrayChange, *names: str) -> list[HeldTensor]:
    """Lists the tensors that follow each other on the first axis of an array."""
    return [HeldTensor(name, lambda x, i=i: change(x[i])) for i, name in enumerate(names)]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _heads(x: np.ndarray) -> np.ndarray:
    """[N, D, H] -> [N * H, D]"""
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])


def _joined(x: np.ndarray) -> np.ndarray:
    """[N, H, D] -> [D, N * H]"""
    return x.reshape(-1, x.shape[-1]).T


def _towards(dim: int, x: np.ndarray) -> np.ndarray:
    """[F, D], or [D, F] in Gemma 1 and the 2B of Gemma 2, -> [F, D]"""
    return x if x.shape[1] == dim else x.T


def _tokenizer(folder: Path, size: int) -> Any:
    """Loads the tokenizer in a folder, or a model of sentencepiece's in the folder around it; None
    without either.
    """
    models = [candidate / SENTENCEPIECE for candidate in (folder, folder.resolve().parent)]
    model = next((path for path in models if path.is_file()), None)
    if (folder / "tokenizer.json").is_file():
        tokenizer = tokenizers.load(folder)
    elif model is not None:
        tokenizer = _sentencepiece(model)
    else:
        return None
    tokenizers.check_size(folder, tokenizer, size)
    return tokenizer


def _sentencepiece(path: Path) -> Any:
    """Makes a tokenizer from a model file of sentencepiece; a text begins with BOS."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model_type = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
        model = model_type.FromString(path.read_bytes())
    except DecodeError as error:
        raise CheckpointError(f"{path} is not a model of sentencepiece: {error}") from error
    trained = model.trainer_spec
    table = {
        "model": "llama",  # as a GGUF file calls it: pairs are merged by their scores
        "tokens": [piece.piece for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "bos_token_id": trained.bos_id,
        "eos_token_id": trained.eos_id,
        "unknown_token_id": trained.unk_id,
        "padding_token_id": trained.pad_id,
    }
    metadata = {f"{gguf_tokenizer.KEY}{key}": value for key, value in table.items()}
    return gguf_tokenizer.tokenizer(path, metadata)


FORMAT = ModelFormat("gemma", is_folder, open_model)
"""A Gemma's Orbax folder: how it is recognised and opened."""
