"""Writes the tables of docs/pairs.md: published pairs, whether they load, and on which machines
they fit.

    python -m benchmarks.pairs          seconds; no weights are read, and nothing is downloaded

Pairs and what is refused are in tests/pairs/pairs.toml, published tokens a round in
jaxspec/data/acceptance.toml, each config.json in tests/pairs/configs, written down from many
sources (`SOURCES`). Names and shapes of a drafter's tensors are written here, by its format, and
compared by `draft_heads.load.describe`, as before any weights are read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxspec.analysis import memory, published, roofline
from jaxspec.core import BoundDrafter, Model, Params
from jaxspec.draft_heads import KINDS, check, kind_of, load
from jaxspec.draft_heads.kind import shape_of
from jaxspec.nets import decoder_layers, net_of
from jaxspec.weights import huggingface, quantisation, tensors
from jaxspec.weights.loading import DTYPES

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "tests" / "pairs", ROOT / "docs" / "pairs.md"
# by memory, the smallest first
CHIPS = {"v5e-1": "tpu-v5e", "v6e-1": "tpu-v6e", "H100": "h100", "v5p": "tpu-v5p"}
ROW, PROMPT = 2048, 512  # tokens in the caches of one row, and of a T5's prompt
TEMPORARIES = 1e9  # bytes that a program takes beside weights and caches
GB = 1e9
MODELS = ("model", "PARD")  # formats of drafters that are whole models
CONFIGS = tuple(kind.config for kind in KINDS)  # of draft heads

Shapes = dict[str, tuple[int, ...]]


class Pair(NamedTuple):
    """A row of the page; attributes as tests/pairs/pairs.toml describes them."""

    family: str
    target: str
    drafter: str
    format: str
    gamma: int
    chat: bool = True
    tensors: int = 0
    options: str = ""

    @property
    def tokens(self) -> str:
        """The tokens a round that others published, with their sources as links."""
        return ", ".join(
            short(row)
            for row in published.table()
            if (row.target, row.drafter) == (self.target, self.drafter)
        )


class Sizes(NamedTuple):
    """Bytes of a pair's weights, and of the caches of one row.

    Attributes:
        target, drafter: weights.
        caches: bytes of both caches.
    """

    target: float
    drafter: float
    caches: float

    def fits(self, machine: roofline.Machine) -> bool:
        """Tells whether a machine has room for them and for temporaries."""
        assert machine.memory is not None
        return memory.PairMemory(
            self.target, self.drafter + self.caches, machine.memory - TEMPORARIES
        ).fits


def short(row: published.Published) -> str:
    """Writes the first clause of a published figure and its conditions, linked to its source."""
    figure = row.figure
    words = [re.split("[,;:]", figure, maxsplit=1)[0]]
    if "tree" in figure and "tree" not in words[0]:
        words.append("with trees")
    if of_all := re.fullmatch(r"[^;]*, [^;]*(at T = [\d.]+)", figure):
        words.append(of_all[1])
    if "temperature not said" in figure:
        words.append("(temperature not said)")
    return f"[{' '.join(words)}]({row.url})"


@functools.cache
def index() -> dict[str, Any]:
    """Reads tests/pairs/pairs.toml."""
    return tomllib.loads((FOLDER / "pairs.toml").read_text("utf-8"))


def pairs() -> list[Pair]:
    """Reads the rows of the page."""
    return [Pair(**row) for row in index()["pair"]]


# where a configuration is from, as the page has it -> words of its source in pairs.toml
SOURCES = {
    "another repository's recipes or defaults, in part not confirmed: †": "not confirmed",
    "sizes of this library's families": "sizes of jaxspec.weights.hf_families",
    "the architecture's documentation": "documentation",
    "another drafter's, with the target's sizes": "with the target's sizes",
    "seen, or quoted by others": "",
}
UNCONFIRMED = next(iter(SOURCES))


def origin(source: str) -> str:
    """Returns the key of `SOURCES` for the source of a configuration."""
    return next(name for name, words in SOURCES.items() if words in source)


def code(name: str, form: str = "{}") -> str:
    """Writes the hub id of a configuration for a table, with a dagger if the configuration is not
    confirmed; the id stands in a `form`.
    """
    unconfirmed = origin(index()["configs"].get(name, "")) == UNCONFIRMED
    written = f"`{form.format(name)}`"
    return f"{written} †" if unconfirmed else written


def folder_of(name: str) -> Path:
    """Returns the folder of a hub id, which holds its config.json."""
    return FOLDER / "configs" / name.replace("/", "__", 1)


def table_of(name: str) -> dict[str, Any]:
    """Reads the config.json of a hub id."""
    return json.loads((folder_of(name) / "config.json").read_text("utf-8"))


@functools.cache
def model(name: str) -> Model:
    """Makes a model of a hub id's config.json, in bfloat16 and without parameters."""
    _, config = huggingface.read_config(folder_of(name))
    config = dataclasses.replace(config, dtype="bfloat16")
    return Model(net_of(config).language_model(config), {}, None, config, name)


# --- the tensors of published drafters


def layer_shapes(
    table: dict, prefix: str, *, fused: bool = False, norms: bool = False, bias: bool = False
) -> Shapes:
    """Lists the tensors of a layer as Llama's.

    Args:
        table: config.json.
        prefix: the beginning of the names.
        fused: whether attention reads two vectors, as in EAGLE-3.
        norms, bias: whether queries and keys have norms, and biases.
    """
    dim, ff_dim, heads = (
        table["hidden_size"],
        table["intermediate_size"],
        table["num_attention_heads"],
    )
    size = table.get("head_dim") or dim // heads
    query, shared, read = (
        heads * size,
        table.get("num_key_value_heads", heads) * size,
        (1 + fused) * dim,
    )
    shapes: Shapes = {
        "self_attn.q_proj.weight": (query, read),
        "self_attn.k_proj.weight": (shared, read),
        "self_attn.v_proj.weight": (shared, read),
        "self_attn.o_proj.weight": (dim, query),
        "mlp.gate_proj.weight": (ff_dim, dim),
        "mlp.up_proj.weight": (ff_dim, dim),
        "mlp.down_proj.weight": (dim, ff_dim),
        "post_attention_layernorm.weight": (dim,),
        "input_layernorm.weight": (dim,),
    }
    if fused:
        shapes["hidden_norm.weight"] = (dim,)
    if norms:
        shapes |= {f"self_attn.{part}_norm.weight": (size,) for part in "qk"}
    if bias:
        shapes |= {
            f"self_attn.{part}_proj.bias": (rows,)
            for part, rows in zip("qkv", (query, shared, shared), strict=True)
        }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def eagle(table: dict, pair: Pair) -> Shapes:
    """Lists EAGLE's tensors: a copy of the target's embedding, a projection, a layer without its
    first norm.
    """
    dim = table["hidden_size"]
    shapes = layer_shapes(table, "layers.0.")
    del shapes["layers.0.input_layernorm.weight"]
    return shapes | {
        "embed_tokens.weight": (table["vocab_size"], dim),
        "fc.weight": (dim, 2 * dim),
        "fc.bias": (dim,),
    }


def eagle3(table: dict, pair: Pair, layer: str = "midlayer.", taps: int = 3) -> Shapes:
    """Lists EAGLE-3's tensors, as its authors publish them: a head for a vocabulary of its own, no
    embedding.
    """
    dim, vocab, drafts = table["hidden_size"], table["vocab_size"], table["draft_vocab_size"]
    shapes = layer_shapes(table, layer, fused=True)
    shapes |= {
        "fc.weight": (dim, taps * dim),
        "norm.weight": (dim,),
        "lm_head.weight": (drafts, dim),
    }
    return shapes | {"d2t": (drafts,), "t2d": (vocab,)}


def eagle31(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of EAGLE-3.1: EAGLE-3's, and a norm for each layer that is read."""
    return eagle3(table, pair) | {f"fc_norm.{i}.weight": (table["hidden_size"],) for i in range(3)}


def peagle(table: dict, pair: Pair) -> Shapes:
    """Lists P-EAGLE's tensors: EAGLE-3's, an embedding, more layers, a vector in place of hidden
    states.
    """
    dim, shapes = table["hidden_size"], eagle3(table, pair)
    for i in range(1, table["num_hidden_layers"]):
        shapes |= layer_shapes(table, f"layers.{i}.")
    return shapes | {
        "embed_tokens.weight": (table["vocab_size"], dim),
        "mask_hidden": (1, 1, 3 * dim),
    }


def speculators(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of EAGLE-3 and P-EAGLE in the format of `speculators`: an embedding,
    too.
    """
    layer = {**table["transformer_layer_config"], "draft_vocab_size": table["draft_vocab_size"]}
    dim, taps = layer["hidden_size"], len(table.get("eagle_aux_hidden_state_layer_ids") or range(3))
    shapes = {
        "embed_tokens.weight": (layer["vocab_size"], dim),
        **eagle3(layer, pair, "layers.0.", taps),
    }
    for i in range(1, layer["num_hidden_layers"]):
        shapes |= layer_shapes(layer, f"layers.{i}.")
    shapes |= {"input_norm.weight": (taps * dim,)} if table.get("norm_before_fc") else {}
    return shapes | ({"mask_hidden": (1, 1, taps * dim)} if "mask_token_id" in table else {})


def deepspec(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of DeepSpec's EAGLE-3: Qwen 3's layer, five taps, the target's
    vocabulary.
    """
    dim, vocab, taps = table["hidden_size"], table["vocab_size"], len(table["target_layer_ids"])
    shapes = layer_shapes(table, "layers.0.", fused=True, norms=True)
    shapes |= {"fc.weight": (dim, taps * dim), "norm.weight": (dim,)}
    return shapes | {"embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim)}


def dflash(table: dict, pair: Pair) -> Shapes:
    """Lists DFlash's tensors: layers as Qwen 3's, with neither an embedding nor a head."""
    dim, taps = table["hidden_size"], (table.get("dflash_config") or table)["target_layer_ids"]
    shapes: Shapes = {
        "fc.weight": (dim, len(taps) * dim),
        "hidden_norm.weight": (dim,),
        "norm.weight": (dim,),
    }
    bias = table.get("attention_bias", False)
    for i in range(table["num_hidden_layers"]):
        shapes |= layer_shapes(table, f"layers.{i}.", norms=True, bias=bias)
        shapes |= {f"layers.{i}.self_attn.o_proj.bias": (dim,)} if bias else {}
    return shapes


def flat(table: dict) -> dict:
    """Brings a config.json of `speculators` into the form of z-lab's."""
    options = table | {"target_layer_ids": table["aux_hidden_state_layer_ids"]}
    return table["transformer_layer_config"] | {"dflash_config": options}


def speculators_dflash(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of DFlash in the format of `speculators`: a head for a vocabulary of its
    own.
    """
    plain, drafts = flat(table), table["draft_vocab_size"]
    head = {
        "lm_head.weight": (drafts, plain["hidden_size"]),
        "d2t": (drafts,),
        "t2d": (plain["vocab_size"],),
    }
    return dflash(plain, pair) | head


def speculators_dflash2(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of DFlash 2 in the format of `speculators`, which are z-lab's."""
    return dflash2(flat(table), pair)


def dflash2(table: dict, pair: Pair) -> Shapes:
    """Lists DFlash 2's tensors: DFlash's, two convolutions a layer, and the selector's two tables
    and projection.
    """
    options, dim, shapes = table["dflash_config"], table["hidden_size"], dflash(table, pair)
    reach, rank = options["conv_kernel_size"], options["selector_rank"]
    for i, part in itertools.product(range(table["num_hidden_layers"]), ("attention", "mlp")):
        shapes[f"layers.{i}.{part}_conv.base_kernel"] = (2, reach, dim)
        rows = 2 * reach * dim // options["conv_group_size"]
        shapes[f"layers.{i}.{part}_conv.kernel_projection.weight"] = (rows, dim)
    shapes |= {
        f"candidate_selector.{x}_codebook": (table["vocab_size"], rank)
        for x in ("predecessor", "successor")
    }
    return shapes | {"candidate_selector.hidden_projection.weight": (rank, dim)}


def dspark(table: dict, pair: Pair) -> Shapes:
    """Lists DSpark's tensors: DFlash's, an embedding and a head, and the two heads behind it."""
    dim, vocab, rank = table["hidden_size"], table["vocab_size"], table["markov_rank"]
    shapes = dflash(table, pair) | {
        "embed_tokens.weight": (vocab, dim),
        "lm_head.weight": (vocab, dim),
    }
    shapes |= {f"markov_head.markov_w{i}.weight": (vocab, rank) for i in (1, 2)}
    return shapes | {
        "confidence_head.proj.weight": (1, dim + rank),
        "confidence_head.proj.bias": (1,),
    }


def medusa(table: dict, pair: Pair) -> Shapes:
    """Lists Medusa's tensors: of each head a block and a projection to the vocabulary."""
    config = model(pair.target).config
    dim, shapes = config.dim, {}
    for i in range(pair.tensors):
        shapes |= {f"{i}.0.linear.weight": (dim, dim), f"{i}.0.linear.bias": (dim,)}
        shapes[f"{i}.1.weight"] = (config.vocab_size, dim)
    return shapes


def mimo(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of MiMo's module, which lie beside the model's."""
    dim, prefix = table["hidden_size"], "model.mtp_layers.0."
    shapes = layer_shapes(table, prefix, bias=True) | {f"{prefix}input_proj.weight": (dim, 2 * dim)}
    return shapes | {
        f"{prefix}{norm}_layernorm.weight": (dim,) for norm in ("token", "hidden", "final")
    }


def qwen(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of a Qwen 3.5's module, whose queries have gates; they lie beside the
    model's.
    """
    text = table["text_config"]
    dim, prefix = text["hidden_size"], "mtp.layers.0."
    shapes = layer_shapes(text, prefix, norms=True)
    rows, columns = shapes[f"{prefix}self_attn.q_proj.weight"]
    shapes |= {
        f"{prefix}self_attn.q_proj.weight": (2 * rows, columns),
        "mtp.fc.weight": (dim, 2 * dim),
    }
    return shapes | {
        f"mtp.{norm}.weight": (dim,)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }


def assistant(table: dict, pair: Pair) -> Shapes:
    """Lists the tensors of a Gemma 4's assistant: layers with queries only, and centroids of its
    tokens.
    """
    text, width, shapes = (
        table["text_config"],
        table["backbone_hidden_size"],
        dict[str, tuple[int, ...]](),
    )
    dim, vocab = text["hidden_size"], text["vocab_size"]
    for i, kind in enumerate(text["layer_types"]):
        size = text["global_head_dim" if kind == "full_attention" else "head_dim"]
        layer = layer_shapes({**text, "head_dim": size}, f"model.layers.{i}.", norms=True)
        shapes |= {
            name: shape
            for name, shape in layer.items()
            if not re.search(r"(k_proj|v_proj|k_norm)\.", name)
        }
        shapes |= {
            f"model.layers.{i}.{part}_feedforward_layernorm.weight": (dim,)
            for part in ("pre", "post")
        }
        shapes[f"model.layers.{i}.layer_scalar"] = (1,)
    shapes |= {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    shapes |= {"pre_projection.weight": (dim, 2 * width), "post_projection.weight": (width, dim)}
    if not table["use_ordered_embeddings"]:
        return shapes
    centroids = {"masked_embedding.centroids.weight": (table["num_centroids"], dim)}
    return shapes | centroids | {"masked_embedding.token_ordering": (vocab,)}


FORMATS: dict[str, Callable[[dict, Pair], Shapes]] = {
    "EAGLE": eagle,
    "EAGLE-3": eagle3,
    "EAGLE-3, DeepSpec's": deepspec,
    "EAGLE-3.1": eagle31,
    "P-EAGLE": peagle,
    "speculators, EAGLE-3": speculators,
    "speculators, P-EAGLE": speculators,
    "speculators, DFlash": speculators_dflash,
    "speculators, DFlash 2": speculators_dflash2,
    "DFlash": dflash,
    "DFlash 2": dflash2,
    "JetSpec": dflash,
    "DSpark": dspark,
    "Medusa": medusa,
    "MTP, MiMo's": mimo,
    "MTP, Qwen 3.5's": qwen,
    "assistant": assistant,
}


def published_tensors(pair: Pair) -> Shapes:
    """Lists names and shapes of a draft head's tensors."""
    return FORMATS[pair.format](table_of(pair.drafter), pair)


def describe(pair: Pair, target: Model | None = None) -> load.Description:
    """Reads a draft head's config.json, and compares it with its tensors and its target, as
    `load_drafter` does.

    Args:
        pair: a pair in a format of `FORMATS`.
        target: another one than the pair's, to be refused.
    """

    def unread(only=None):
        raise AssertionError("there are no weights")

    files = [
        tensors.Shard(
            folder_of(pair.drafter) / "model.safetensors", published_tensors(pair), unread
        )
    ]
    return load.describe(folder_of(pair.drafter), files, target or model(pair.target))


def heads() -> dict[str, Pair]:
    """Returns the pairs whose drafter is a draft head, by the drafter's hub id."""
    return {pair.drafter: pair for pair in pairs() if pair.format in FORMATS}


def head(pair: Pair, target: Model, params: Callable[[Any], Params]) -> BoundDrafter:
    """Makes the drafter of a pair without its weights.

    Args:
        target: the pair's target, with weights or with shapes.
        params: configuration of the head -> its parameters, or their shapes.
    """
    config = describe(pair, target).config
    return check.bound(config, params(config), target)


# --- memory


def abstract_params(config: Any) -> Any:
    """Returns the shapes of the parameters of a model or a draft head."""
    init = kind_of(config).init if isinstance(config, CONFIGS) else net_of(config).init
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def in_dtype(params: Any, dtype: str) -> Any:
    """Returns the shapes of parameters whose matrices are in a dtype."""

    def leaf(path, shape):
        return jax.ShapeDtypeStruct(
            shape.shape, dtype if quantisation.is_matrix(path, shape) else shape.dtype
        )

    return jax.tree_util.tree_map_with_path(leaf, params)


def sizes(pair: Pair, dtypes: Sequence[str] = ("bfloat16", "int8")) -> list[Sizes]:
    """Computes what a pair takes in several dtypes; draft heads compute in that of their target."""
    target = model(pair.target).config
    weights, drafts, shape = _weight_bytes(pair.target), dict.fromkeys(dtypes, 0), None
    if pair.format in MODELS:
        drafts, shape = _weight_bytes(pair.drafter), model(pair.drafter).config
    elif pair.format in FORMATS:
        config = describe(pair).config
        params, shape = abstract_params(config), shape_of(config)
        drafts = {
            dtype: _bytes(params, quantisation.computation(dtype, "bfloat16")) for dtype in dtypes
        }
    # Medusa's heads have none, either
    has_cache = decoder_layers(shape) > 0 and pair.format != "assistant"
    return [
        Sizes(
            weights[dtype],
            drafts[dtype],
            _cache_bytes(target, dtype) + (_cache_bytes(shape, dtype) if has_cache else 0),
        )
        for dtype in dtypes
    ]


@functools.cache
def _weight_bytes(name: str) -> dict[str, int]:
    return {dtype: memory.weight_bytes(model(name).config, dtype) for dtype in DTYPES}


def _bytes(params: Any, dtype: str) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(in_dtype(params, dtype)))


def _cache_bytes(config: Any, dtype: str) -> float:
    config = dataclasses.replace(config, dtype=quantisation.computation(dtype, "bfloat16"))
    return roofline.load_of(
        config, row=min(ROW, config.max_positions or ROW), prompt=PROMPT
    ).cache_bytes


# --- the page

HEADS = (
    "target",
    "GB",
    "bfloat16",
    "int8",
    "`--draft`, γ, tokens a round as published",
)
NO_TEMPLATE = " ‡"  # after a target that takes no --chat


def sections() -> Iterator[str]:
    """Writes the part of the page that is computed: one line per target, and where the
    configurations are from.
    """
    by_target: dict[str, list[Pair]] = {}
    for pair in pairs():
        by_target.setdefault(pair.target, []).append(pair)
    lines = [list(HEADS), ["---"] * len(HEADS), *map(cells, by_target.values())]
    yield "".join(f"| {' | '.join(line)} |\n" for line in lines)
    yield origins()


def cells(rows: Sequence[Pair]) -> list[str]:
    """Computes a line of the page.

    Args:
        rows: all pairs of one target.
    """
    name = code(rows[0].target) + ("" if rows[0].chat else NO_TEMPLATE)
    wide, narrow = (
        max(both, key=lambda size: size.drafter + size.caches)
        for both in zip(*map(sizes, rows), strict=True)
    )
    total = f"{(wide.target + wide.drafter) / GB:.1f}"
    drafts = "<br>".join(draft(pair) for pair in rows)
    return [name, total, smallest(wide), smallest(narrow), drafts]


def smallest(size: Sizes) -> str:
    """Names the smallest machine that has room for a pair."""
    machines = [(chip, roofline.MACHINES[name]) for chip, name in CHIPS.items()]
    return next((chip for chip, machine in machines if size.fits(machine)), "–")


def draft(pair: Pair) -> str:
    """Writes the options of a pair's command beside `--chat`, and what was published of it."""
    # A module lies beside its model, and the name alone is the model's.
    form = "load_drafter('{}')" if pair.drafter == pair.target else "{}"
    options = f"`{pair.options}`" if pair.options else ""
    parts = (code(pair.drafter, form), f"{pair.gamma}", options, pair.tokens)
    return ", ".join(part for part in parts if part)


def origins() -> str:
    """Writes how many configurations are from where."""
    counts = collections.Counter(map(origin, index()["configs"].values()))
    rows = "".join(
        f"| {name} | {counts[name]} |\n" for name in sorted(SOURCES, key=lambda name: -counts[name])
    )
    return f"| source of the {counts.total()} configurations | |\n| --- | --- |\n{rows}"


BEGIN, END = (
    "<!-- python -m benchmarks.pairs writes what follows -->\n",
    "<!-- and up to here -->\n",
)


def updated(page: str, begin: str = BEGIN, tables: Iterable[str] | None = None) -> str:
    """Puts newly computed tables in a page, by default those of pairs.

    Raises:
        ValueError: the page lacks the two comments between which they are.
    """
    pattern = re.compile(f"{re.escape(begin)}.*{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"the page has no {begin.strip()} and {END.strip()}")
    computed = "\n".join(sections() if tables is None else tables)
    return pattern.sub(lambda match: f"{begin}\n{computed}\n{END}", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text("utf-8")), "utf-8")
