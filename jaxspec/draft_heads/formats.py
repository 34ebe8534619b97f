"""The parts that published formats of draft heads share: the target's shape, layers and tensors,
numbers of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jaxspec import nets
from jaxspec.core import Model
from jaxspec.drafters.hidden_states import inside_of
from jaxspec.nets import decoder_layers
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.weights.hf_families import decoders, describe
from jaxspec.weights.hf_families.common import FamilyError, Key, count, need, only, table_of

Shapes = Mapping[str, tuple[int, ...]]
# derived from others, or the target's
IGNORED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
HIDES_NOTHING = 2**30  # a window wider than any row
# for each id of the drafter's vocabulary, what is to be added to it to have the target's
D2T = "d2t"


class TargetShape(NamedTuple):
    """The facts that a drafter's files need not say, since its target does."""

    config: Any  # the configuration of the target's network
    # these three: the target's sizes
    vocab_size: int
    hidden_size: int
    layers: int
    # the layers to read, should the caller know better than the files
    taps: tuple[int, ...] | None = None

    @property
    def embedding_scale(self) -> float:
        """The factor between the rows of its embedding and its first layer's input: Gemma's root of
        the width.
        """
        return nets.embedding_scale(self.config)


def target_shape(target: Model, taps: tuple[int, ...] | None = None) -> TargetShape:
    """Returns the settings that a drafter's files may leave out."""
    sizes = target.lm.vocab_size, inside_of(target).width, decoder_layers(target.config)
    return TargetShape(target.config, *sizes, taps)


# Checks of the keys that files of most kinds have. Those of a module for multi-token prediction are
# its target's.
KEYS: dict[str, Key] = {
    **decoders.with_text(decoders.KEYS),
    "transformer_layer_config": table_of(decoders.KEYS),
    "max_window_layers": count(least=0),
    "target_hidden_size": count(),
    "num_target_layers": count(),
    "draft_vocab_size": count(),
}


class Format(NamedTuple):
    """The functions that recognise, read and write the files of a kind of drafter."""

    title: str  # for people
    # name of a tensor -> one spelling of it; None for one that is not read
    canonical: Callable[[str], str | None]
    # (config.json, shapes by names in that spelling) -> whether this is one of these
    matches: Callable[[dict, Shapes], bool]
    # (config.json, shapes by those names, target) -> configuration of the network. Raises
    # FamilyError.
    read: Callable[[dict, Shapes, TargetShape], Any]
    # configuration -> the names of its modules in that spelling, for
    # `weights.hf_families.common.named`
    modules: Callable[[Any], Mapping[str, str]]
    # (configuration, the target's name and architectures, draft tokens a round) -> config.json as
    # vLLM and SGLang read it, in the format of `speculators` where that has such a drafter. Raises
    # FamilyError.
    write: Callable[[Any, dict, int], dict]
    # `modules` as they have them; None: in that spelling
    written: Callable[[Any], Mapping[str, str]] | None = None
    # names -> what is in front of those that `modules` has; a model's other tensors lie beside a
    # drafter's
    root: Callable[[Shapes], str] = lambda shapes: ""
    # whether the tensor of a vocabulary of the drafter's own holds the target's ids, or (`D2T`)
    # what is to be added to the drafter's
    stores_ids: bool = False
    # checks of the keys of config.json that `read` reads, by their names
    keys: Mapping[str, Key] = KEYS


def plain(name: str) -> str | None:
    """Drops "model." in front; None for tensors that are computed or belong to the target.

    >>> plain("model.layers.0.mlp.up_proj.weight"), plain("t2d")
    ('layers.0.mlp.up_proj.weight', None)
    """
    name = name.removeprefix("model.")
    if name in IGNORED or name.endswith("rotary_emb.inv_freq"):
        return None
    return name


def layer_of(
    table: dict, shapes: Shapes, prefix: str = "layers.0.", *, windows: bool = False
) -> DecoderConfig:
    """Reads the shape of a drafter's layers: sizes from config.json, options from the tensors that
    exist.

    `windows`: whether its layers may attend to a window.
    """
    table = with_windows(table.get("transformer_layer_config") or table)
    if "sliding_attention" in (table.get("layer_types") or ()):
        if not windows:
            raise FamilyError(
                "layer_types has sliding_attention: only full_attention is supported in such a "
                "drafter"
            )
        if table.get("sliding_window") is None:
            raise FamilyError(
                "layer_types has sliding_attention, but sliding_window is missing: expected a "
                "number"
            )
    if not windows:
        only(table, is_causal=False)

    def has(name: str) -> bool:
        return f"{prefix}{name}" in shapes

    # Some files leave head_dim out, though it is not the width over the heads: the query projection
    # has it.
    heads, (rows, *_) = (
        need(table, "num_attention_heads"),
        shapes.get(f"{prefix}self_attn.q_proj.weight", (0,)),
    )
    sizes = {
        "head_dim": table.get("head_dim") or rows // heads or None,
        "tie_word_embeddings": False,
    }
    return decoders.read(
        {**table, **sizes},
        qkv_bias=has("self_attn.q_proj.bias"),
        out_bias=has("self_attn.o_proj.bias"),
        ff_bias=has("mlp.up_proj.bias"),
        head_norms=has("self_attn.q_norm.weight"),
        **decoders.windows(table, []),
    )


def with_windows(table: dict) -> dict:
    """Completes the keys of windows as transformers' Qwen3Config does, through which such files go
    elsewhere.

    Without `use_sliding_window` no window counts. The layers still are sliding ones, which may make
    them causal.

    >>> with_windows({"model_type": "qwen3", "sliding_window": 8})["sliding_window"]
    1073741824
    >>> table = {
    ...     "model_type": "qwen3",
    ...     "use_sliding_window": True,
    ...     "num_hidden_layers": 2,
    ...     "max_window_layers": 1,
    ... }
    >>> with_windows(table)["layer_types"]
    ['full_attention', 'sliding_attention']
    """
    if table.get("model_type") != "qwen3":
        return table
    width = None
    if table.get("use_sliding_window"):
        width = table.get("sliding_window", 4096)
    if width is None:
        return {**table, "sliding_window": HIDES_NOTHING}
    first = table.get("max_window_layers")
    count = need(table, "num_hidden_layers")
    # null is no value
    if first is None:
        first = 28
    usual = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return {**table, "sliding_window": width, "layer_types": table.get("layer_types") or usual}


def layer_modules(
    config: DecoderConfig, path: str = "layers_{}", name: str = "layers.{}"
) -> dict[str, str]:
    """Names the modules of the layers; `path` and `name` are in front of ours and theirs."""
    return decoders.layer_modules(config, {}, path, name)


PARTS = {"embedding": "embed_tokens", "head": "lm_head", "vocabulary": D2T}
"""The names of what a drafter may have of its own."""


def own_parts(shapes: Shapes, prefix: str = "") -> dict[str, bool]:
    """Tells which parts a drafter does not share with its target, by its tensors: options of its
    configuration.
    """
    names = {"own_embedding": "embed_tokens.weight", "own_head": "lm_head.weight"}
    return {option: f"{prefix}{name}" in shapes for option, name in names.items()}


def taps_of(ids: list[int], offset: int, target: TargetShape) -> tuple[int, ...]:
    """Numbers layers as `language_model(config, taps)` does: 0 is the output of the first.

    Files count in two ways. `offset` 0: the output of layer l, counted from 0 (DFlash, DeepSpec,
    SGLang). -1: the input of layer l, which is transformers' `hidden_states[l]` (EAGLE, vLLM,
    speculators). The output of the last layer is refused, too: transformers, with which drafters
    are trained, has it after the final norm only.

    >>> taps_of([2, 16, 29], -1, TargetShape(None, 1, 1, layers=32))
    (1, 15, 28)
    """
    if target.taps is not None:
        return target.taps
    taps = tuple(int(i) + offset for i in ids)
    missing = [i for i, tap in zip(ids, taps, strict=True) if not 0 <= tap < target.layers - 1]
    if missing:
        layers = f"it reads layers {list(ids)} of its target, which has {target.layers}"
        advice = "It was made for another target; or pass taps= to load_drafter"
        raise FamilyError(f"{layers}: the output of {missing[0]} cannot be read. {advice}")
    return taps


def check_same(*facts: tuple[str, int | None, int]) -> None:
    """Compares the target's sizes in a drafter's files with the target: name, their value (None:
    not given), its value.

    >>> check_same(("layers", None, 4), ("vocabulary size", 13, 16))
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: its vocabulary size is 13, ... 16: it was made for another target
    """
    for name, value, expected in facts:
        if value is not None and value != expected:
            raise FamilyError(
                f"its {name} is {value}, and the target's {expected}: it was made for another "
                "target"
            )


def axis_of(shapes: Shapes, name: str, axis: int) -> int | None:
    """Returns the length of an axis of a tensor; None without the tensor."""
    if name in shapes:
        return shapes[name][axis]
    return None


def check_own_parts(config: Any, dim: int, hidden_size: int) -> None:
    """Raises ValueError for layers of another width or vocabulary than the target's that use the
    target's embedding or head.
    """
    if dim != hidden_size and not (config.own_embedding and config.own_head):
        raise ValueError(
            f"width {dim} is not the target's, {hidden_size}: expected own_embedding and own_head"
        )
    if config.draft_vocab is not None and not config.own_head:
        raise ValueError(
            f"draft_vocab is {config.draft_vocab} for the target's head, which has all: expected "
            "own_head"
        )


def draft_vocab(shapes: Shapes, vocab: int) -> int | None:
    """Returns the size of a vocabulary of the drafter's own; None if it is the target's."""
    if D2T not in shapes:
        return None
    if "lm_head.weight" not in shapes:
        raise FamilyError("it has its own vocabulary (d2t), but no lm_head for it")
    size = shapes[D2T][0]
    if size == vocab:
        return None
    return size


def written_layer(layer: DecoderConfig, types: Collection[str] = ()) -> dict[str, Any]:
    """Writes the shape of the layers as transformers has it.

    `types`: the values of model_type that the format's readers know; empty: any.
    """
    windows = sorted(layer.windows)
    # The type is that of the layers without windows: drafters' readers know no Mistral, and go by
    # the list.
    changed = (lambda i, x: decoders.change(x, {"window": None})) if windows else None
    table = describe(decoders.with_layers(layer, changed, tied_head=False))[1]
    if types and table["model_type"] not in types:
        raise FamilyError(
            f"its layers are those of {table['model_type']}: the format has those of "
            f"{', '.join(types)}"
        )
    if not windows:
        return table
    if len(windows) > 1:
        raise FamilyError(
            f"its layers have windows of {windows}: the format stores one width for all"
        )
    kinds = [
        "full_attention" if x.attention.window is None else "sliding_attention"
        for x in layer.layers
    ]
    return table | {"sliding_window": windows[0], "layer_types": kinds, "use_sliding_window": True}


def check_stored(form: str, config: Any, **stored: Any) -> None:
    """Raises FamilyError for the fields of a configuration that a format has no place for: it
    stores these values alone.

    >>> import types
    >>> check_stored(
    ...     "the format",
    ...     types.SimpleNamespace(fc_bias=True, own_head=False),
    ...     fc_bias=False,
    ...     own_head=False,
    ... )
    Traceback (most recent call last):
    jaxspec.weights.hf_families.common.FamilyError: the format cannot store fc_bias True (expected False)
    """
    fields = vars(config)
    lacking = [
        f"{name} {fields[name]!r} (expected {x!r})"
        for name, x in stored.items()
        if fields[name] != x
    ]
    if lacking:
        raise FamilyError(f"{form} cannot store {', '.join(lacking)}")


def check_head_norms(layer: DecoderConfig, drafters: str) -> None:
    """Raises FamilyError for layers without head norms: readers build Qwen 3's, and make norms that
    the files lack.
    """
    if not all(x.attention.head_norms for x in layer.layers):
        qwen = (
            f"the format has only {drafters} with Qwen 3's layer, which normalises queries and keys"
        )
        advice = "train it with head_norms = true (the default of a recipe's [head])"
        raise FamilyError(f"{qwen}. This one has head_norms=False: {advice}")


def speculators(
    kind: str, architecture: str, layer: dict, table: dict, verifier: dict, tokens: int
) -> dict:
    """Writes the config.json that `speculators`, and so vLLM and SGLang, read; `table` has this
    kind's own entries.

    `layer`: what `written_layer` returns. `verifier`: the target's name and architectures, and what
    else is known of it. `tokens`: draft tokens a round.
    """
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {name: verifier[name] for name in ("name_or_path", "architectures")},
        },
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        **table,
    }
