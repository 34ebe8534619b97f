"""Kangaroo (Liu et al., arXiv 2404.18911): attention and a norm between a target's layer and its
head.

The network reads the output of a layer of the target at each position, for draft tokens, too. The
target's head makes logits of its output. It drafts by `drafters.early_exit`.

Its files hold attention and norms, named as Llama's. The authors' config.json names neither the
layer nor the target; files written here do.

Shapes: B batch, T step, N nodes, M model dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.core import BoundDrafter, Model, Params, Room
from jaxspec.core import kv_cache as kv
from jaxspec.draft_heads import formats
from jaxspec.draft_heads.formats import Format, Shapes, TargetShape
from jaxspec.draft_heads.kind import Kind, sizes_of
from jaxspec.draft_heads.target import SharedWithTarget
from jaxspec.draft_heads.training import DraftStarts, DraftStep, Training
from jaxspec.drafters.hidden_states import DraftHead, TargetRequirements
from jaxspec.drafters.self_speculative import ExitAdapter, early_exit
from jaxspec.nets import stack
from jaxspec.nets.attention import LayerInputs, causal
from jaxspec.nets.decoder import DecoderConfig, empty_cache, layers_of


@dataclasses.dataclass(frozen=True)
class ExitAdapterConfig:
    """The shape of an adapter."""

    # the shape of its layers (Kangaroo has one). They have no feed-forward block, so `ff_dim` is
    # not read. Its vocabulary and width are the target's.
    layer: DecoderConfig
    exit: int  # after how many of the target's layers it reads

    def __post_init__(self):
        if self.layer.positions != "rotary" or self.layer.windows:
            raise ValueError(
                "an adapter's layers are as Llama's: expected rotary positions and no windows"
            )

    @property
    def taps(self) -> tuple[int, ...]:
        """The layer that it reads, counted as `language_model(config, taps)` does."""
        return (self.exit - 1,)


# --- the network


class Net(nn.Module):
    """The network; its output goes to the head."""

    config: ExitAdapterConfig

    def setup(self):
        c = self.config.layer
        self.layers = layers_of(c)
        self.norm = c.norm_module()

    def __call__(
        self, x: Float[Array, "B T M"], cache: kv.KVCache, parent: Int[Array, "B N"] | None = None
    ):
        """Reads T further positions of each row."""
        pass_ = kv.Pass(cache.length, x.shape[1], parent)
        mask = causal(pass_.length, pass_.step, cache.capacity, parent)
        turn = self.config.layer.layers[0].attention.rotation
        inputs = LayerInputs(mask, turn and turn[0].at(pass_.positions(), turn[1]), None)
        # The adapter's layers are attention alone: their feed-forward blocks have no parameters.
        layers = [functools.partial(layer, inputs=inputs, mlp=False) for layer in self.layers]
        x, _, cache = stack.with_cache(
            layers, x.astype(self.config.layer.dtype), cache, pass_=pass_
        )
        return self.norm(x), cache


@functools.lru_cache
def head(config: ExitAdapterConfig) -> ExitAdapter:
    """Makes an adapter's pure functions, for `drafters.early_exit`."""
    module = Net(config)
    c = config.layer

    def extend(params: Params, cache, hidden, parent=None):
        return module.apply({"params": params}, hidden, cache, parent)

    requirements = TargetRequirements(c.vocab_size, c.dim, config.taps, head=True)
    return ExitAdapter(functools.partial(empty_cache, c), extend, kv.rewind, requirements)


def init(config: ExitAdapterConfig, key: Key[Array, ""]) -> Params:
    """Draws random parameters."""
    return stack.init_params(
        Net(config),
        key,
        jnp.zeros((1, 2, config.layer.dim), jnp.float32),
        head(config).empty(1, Room(2)),
    )


# --- the drafter


def drafter(
    adapter: DraftHead[ExitAdapter], target: Model, trimmed: Model | None = None
) -> BoundDrafter:
    """Drafts with the target's layers up to the adapter's, the adapter, and the target's or a
    trimmed head.
    """
    (tap,) = adapter.network.requirements.taps
    return early_exit(target, tap + 1, head=trimmed, adapter=adapter)


# --- in training


def draft_states(
    config: ExitAdapterConfig, params: Params, shared: SharedWithTarget, starts: DraftStarts
):
    """Reads whole rows in one pass: the draft tokens stand in the text."""
    adapter = head(config)
    taps = starts.forward.taps
    position = starts.place
    assert taps is not None
    batch, size, _ = taps.shape
    hidden, _ = adapter.extend(params, adapter.empty(batch, Room(size)), taps)
    index = position[:, None] + 1 + jnp.arange(starts.depths, dtype=position.dtype)[None]
    return hidden[:, jnp.minimum(index, size - 1)]  # past the end nothing is compared


def draft_logits(
    config, params: Params, shared: SharedWithTarget, at: DraftStep
) -> tuple[Array, None]:
    """Makes logits with the target's head."""
    return shared.logits(at.hidden[:, at.depth : at.depth + 1]).astype(jnp.float32)[:, 0], None


# --- its files

EXIT = "early_exit_layer"  # of ours: after how many of the target's layers
# In our files, too: the target whose layers these are.
TARGET = "base_model_name_or_path"
LAYERS = "num_target_layers"
QUERIES = "layers.0.self_attn.q_proj.weight"


def matches(table: dict, shapes: Shapes) -> bool:
    """Tells whether the files have layers without feed-forward blocks, no projection that joins
    hidden states with tokens, and no embedding, which models have.
    """
    # Kangaroo publishes no other mark: what is missing tells its files apart.
    foreign = re.compile(r"\.mlp\.|^fc\.|^embed_tokens\.")
    alone = not any(foreign.search(name) for name in shapes)
    return {QUERIES, "layers.0.input_layernorm.weight", "norm.weight"} <= shapes.keys() and alone


def read(table: dict, shapes: Shapes, target: TargetShape) -> ExitAdapterConfig:
    """Reads the network of a config.json."""
    layer = formats.layer_of(table, shapes)
    formats.check_same(
        ("vocabulary size", layer.vocab_size, target.vocab_size),
        ("width of hidden states", formats.axis_of(shapes, QUERIES, 1), target.hidden_size),
        ("number of target layers", table.get(LAYERS), target.layers),
    )
    if EXIT not in table and target.taps is None:
        advice = "if it reads the output of the second layer, as Kangaroo's for 7B models do"
        raise formats.FamilyError(
            f"its config.json has no {EXIT}: pass taps=[1] to load_drafter {advice}"
        )
    tap, *more = formats.taps_of([table.get(EXIT, 0)], -1, target)
    if more:
        raise formats.FamilyError(
            f"taps is {[tap, *more]}: an adapter reads the output of one layer"
        )
    return ExitAdapterConfig(dataclasses.replace(layer, tied_head=False), tap + 1)


def modules(config: ExitAdapterConfig) -> dict[str, str]:
    """Names the modules of a network: the attention half of Llama's layers."""
    return {"norm": "norm"} | formats.layer_modules(config.layer)


def write(config: ExitAdapterConfig, verifier: dict, tokens: int) -> dict:
    """Writes the config.json, as its authors have it, with the layer that it reads."""
    facts = {EXIT: config.exit, TARGET: verifier["name_or_path"], LAYERS: verifier["layers"]}
    return formats.written_layer(config.layer) | facts


KIND = Kind(
    name="exit_adapter",
    config=ExitAdapterConfig,
    sizes=sizes_of(ExitAdapterConfig, ff_dim=1),  # there is no feed-forward block
    init=init,
    head=head,
    drafter=drafter,
    format=Format("Kangaroo", formats.plain, matches, read, modules, write),
    training=Training(draft_states, draft_logits),
)
