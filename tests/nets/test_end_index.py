"""Adapters for networks of other libraries give the text of the library's own greedy decoding.

A stand-in with the libraries' way of calling always runs. The libraries run where they are installed;
`tests/scripts/other_libraries.sh` installs each into an environment of its own.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec import drafters
from jaxspec.decode import loop
from jaxspec.nets import adapters
from tests.marks import other_library

VOCAB, LAYERS, HEADS, HEAD_DIM = 64, 2, 2, 8
WIDTH = HEADS * HEAD_DIM
PROMPTS = [[2, 7, 1, 8, 5, 9, 11], [2, 30], [2, 7, 2, 7], [3]]  # ragged
NEW = 12


class StandIn(nnx.Module):
    """Attention layers that are called as Tunix calls its own: (tokens, positions, cache, mask).

    A cache's layer has `k` and `v` [1, S, HEADS, HEAD_DIM], and the entries in it, `end_index` [1].
    With a window, a pass of several tokens counts it from the first of them, as Tunix's Gemma 3
    does.
    """

    def __init__(self, rngs: nnx.Rngs, layers: int = LAYERS, window: int | None = None):
        def matrix(*shape: int) -> nnx.Param:
            return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)

        self.config = SimpleNamespace(
            vocab_size=VOCAB,
            num_layers=layers,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            sliding_window_size=window,
        )
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.place = nnx.Param(jax.random.normal(rngs.params(), (64, WIDTH)))
        self.query, self.key = matrix(layers, WIDTH, WIDTH), matrix(layers, WIDTH, WIDTH)
        self.value, self.head = matrix(layers, WIDTH, WIDTH), matrix(WIDTH, VOCAB)

    def __call__(self, tokens: Any, positions: Any, cache: Any, mask: Any) -> tuple[Any, Any]:
        x = self.embedding[...][tokens] + self.place[...][positions]
        shape = (*tokens.shape, HEADS, HEAD_DIM)
        new_cache = {}
        if self.config.sliding_window_size is not None:
            places = positions[0] if tokens.shape[1] == 1 else jnp.arange(tokens.shape[1])
            distance = places[:, None] - jnp.arange(mask.shape[-1])[None]
            mask = mask & (distance < self.config.sliding_window_size)[None]
        for i in range(self.config.num_layers):
            name = f"layer_{i}"
            query = (x @ self.query[...][i]).reshape(shape)
            k, v = (x @ self.key[...][i]).reshape(shape), (x @ self.value[...][i]).reshape(shape)
            if cache is not None:
                end = cache[name]["end_index"][0]
                k = jax.lax.dynamic_update_slice(cache[name]["k"], k, (0, end, 0, 0))
                v = jax.lax.dynamic_update_slice(cache[name]["v"], v, (0, end, 0, 0))
                new_cache[name] = {"k": k, "v": v, "end_index": end[None] + tokens.shape[1]}
            scores = jnp.einsum("bthd,bshd->bhts", query, k)
            weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
            x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return x @ self.head[...], new_cache


def redrawn(module: nnx.Module, seed: int) -> nnx.Module:
    """The module with all parameters drawn: libraries begin some of them with zeros."""
    graph, params = nnx.split(module)
    return nnx.merge(graph, drawn(params, seed))


def drawn(params: Any, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)

    def draw(x: Any) -> jax.Array:
        spread = x.shape[-2] ** -0.5 if x.ndim > 1 else 0.5
        return jnp.asarray(spread * rng.normal(size=x.shape), jnp.float32)

    return tree.unflatten([draw(x) for x in leaves])


class Ids:
    """A tokenizer of numbers, for the libraries' own samplers; without a start token if `bos` is 0.

    Tunix takes every `pad` for padding, a generated one, too.
    """

    FORBIDDEN_TOKENS = ()

    def __init__(self, bos: int = 2, pad: int = 0):
        self.bos, self.pad = bos, pad

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    def bos_id(self) -> int:
        return self.bos

    def eos_id(self) -> int:
        return 1

    def pad_id(self) -> int:
        return self.pad


Sampler = Callable[[list[list[int]]], list[list[int]]]


class Made(NamedTuple):
    """A library's network.

    Attributes:
        model: the adapter's model.
        logits: maps a row [tokens] to its logits [1, tokens, vocab], without a cache.
        sampler: maps prompts to NEW tokens each by the library's own sampler; None without one.
    """

    model: jaxspec.Model
    logits: Callable[[list[int]], Any]
    sampler: Sampler | None = None


def tunix_module(family: str, name: str) -> Callable[[int, int], nnx.Module]:
    """Makes a small network of Tunix's with random weights, by its seed and layers."""

    def make(seed: int, layers: int) -> nnx.Module:
        lib = other_library("tunix", f"tunix.models.{family}.model")
        sizes = {"num_layers": layers, "embed_dim": 32, "hidden_dim": 48}
        sizes |= {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
        if family == "gemma3":
            config = lib.ModelConfig(
                num_embed=VOCAB,
                sliding_window_size=4,
                global_base_frequency=1_000_000,
                param_dtype=jnp.float32,
                **sizes,
            )
        else:
            config = lib.ModelConfig(vocab_size=VOCAB, rope_theta=1_000_000, norm_eps=1e-6, **sizes)
        return redrawn(getattr(lib, name)(config, rngs=nnx.Rngs(seed)), seed)

    return make


def tunix(family: str, name: str) -> Callable[[int, int], Made]:
    def make(seed: int, layers: int) -> Made:
        module = tunix_module(family, name)(seed, layers)

        def sample(prompts: list[list[int]]) -> list[list[int]]:
            library = importlib.import_module("tunix.generate.sampler")
            config = module.config
            size = library.CacheConfig(64, layers, config.num_kv_heads, config.head_dim)
            out = library.Sampler(module, Ids(bos=0, pad=VOCAB), size)(
                [" ".join(map(str, prompt)) for prompt in prompts],
                max_generation_steps=NEW,
                max_prompt_length=8,
                eos_tokens=[VOCAB],  # no text ends early
            )
            return [np.asarray(text).tolist() for text in out.tokens]

        return Made(adapters.from_tunix(module), lambda row: nnx_logits(module, row), sample)

    return make


def stand_in(window: int | None) -> Callable[[int, int], Made]:
    def make(seed: int, layers: int) -> Made:
        module = StandIn(nnx.Rngs(seed), layers, window)
        return Made(adapters.from_tunix(module), lambda row: nnx_logits(module, row))

    return make


def nnx_logits(module: Any, row: list[int]) -> Any:
    """The logits of a whole row, without a cache."""
    mask = jnp.tril(jnp.ones((len(row), len(row)), bool))[None]
    return module(jnp.array([row]), jnp.arange(len(row))[None], None, mask)[0]


def gemma(is_third: bool) -> Callable[[int, int], Made]:
    def make(seed: int, layers: int) -> Made:
        other_library("gemma", "gemma.gm.nn._config")
        parts = [f"gemma.gm.nn._{name}" for name in ("config", "modules", "transformer")]
        config, modules, transformer = map(importlib.import_module, parts)
        local, everywhere = (
            modules.AttentionType.LOCAL_SLIDING,
            modules.AttentionType.GLOBAL,
        )
        module = transformer.Transformer(
            config=config.TransformerConfig(
                num_embed=VOCAB,
                embed_dim=32,
                hidden_dim=48,
                num_heads=4,
                head_dim=16,
                num_kv_heads=2,
                final_logit_softcap=None if is_third else 30.0,
                use_post_attn_norm=True,
                use_post_ffw_norm=True,
                attention_types=((local, everywhere) * layers)[:layers],
                attn_logits_soft_cap=None if is_third else 50.0,
                sliding_window_size=4,
                use_qk_norm=is_third,
                transpose_gating_einsum=True,
                local_base_frequency=10_000,
                global_base_frequency=1_000_000 if is_third else 10_000,
            ),
            dtype=jnp.float32,
        )
        params = module.init(jax.random.key(seed), jnp.ones((1, 4), jnp.int32))["params"]
        params = drawn(params, seed)

        def logits(row: list[int]) -> Any:
            mask = jnp.tril(jnp.ones((len(row), len(row)), bool))[None]
            places = jnp.arange(len(row))[None]
            return module.apply(
                {"params": params}, jnp.array([row]), positions=places, attention_mask=mask
            ).logits

        def sample(prompts: list[list[int]]) -> list[list[int]]:
            text = importlib.import_module("gemma.gm.text")
            tokenizer = Ids()
            tokenizer.VERSION, tokenizer.FORMAT = None, text.Gemma3Tokenizer.FORMAT
            nothing = {"EOS": VOCAB, "END_OF_TURN": VOCAB, "BEGIN_OF_TOOL_RESPONSE": VOCAB}
            tokenizer.special_tokens = type("SpecialTokens", (), nothing)  # no text ends early
            sampler = text.Sampler(
                model=module,
                params=params,
                tokenizer=tokenizer,
                cache_length=64,
                max_out_length=NEW,
                pad_length=8,
            )
            out = sampler.sample(
                [" ".join(map(str, prompt)) for prompt in prompts],
                max_new_tokens=NEW,
                return_state=True,
            )
            return np.asarray(out.tokens).tolist()

        return Made(adapters.from_gemma(module, params), logits, sample)

    return make


class Library(NamedTuple):
    """A library's networks.

    Attributes:
        make: (seed, layers) -> a small one with random weights.
        trees: whether it takes token trees.
    """

    make: Callable[[int, int], Made]
    trees: bool = True


LIBRARIES = {
    "a stand-in": Library(stand_in(None)),
    "a stand-in with a window": Library(stand_in(4), trees=False),
    "Tunix, Llama 3": Library(tunix("llama3", "Llama3")),
    "Tunix, Qwen 3": Library(tunix("qwen3", "Qwen3")),
    "Tunix, Gemma 3": Library(tunix("gemma3", "Gemma3"), trees=False),
    "gemma, Gemma 2": Library(gemma(False)),
    "gemma, Gemma 3": Library(gemma(True)),
}


def greedy(logits: Callable[[list[int]], Any], prompt: list[int], new_tokens: int) -> list[int]:
    """The library's own greedy text: the whole row again for each token."""
    row = list(prompt)
    for _ in range(new_tokens):
        row.append(int(logits(row)[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", LIBRARIES)
def test_speculative_text_is_that_of_its_own_greedy_decoding(name: str):
    library = LIBRARIES[name]
    # Their code promotes ranks and dtypes.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        target, logits, sampler = library.make(0, 2)
        draft = library.make(1, 1).model
        choices: dict[str, Any] = {
            "none": None,
            "chain": draft,
            "itself": target,
            "look-up": drafters.prompt_lookup(),
        }
        if library.trees:
            choices["tree"] = drafters.tree(draft, (3, 2))
            choices["tree of itself"] = drafters.tree(target, (2, 1, 1))
        options = {"gamma": 3, "max_new_tokens": NEW, "temperature": 0.0, "eos_ids": ()}
        for prompts in (PROMPTS, PROMPTS[:1]):
            own = [greedy(logits, prompt, NEW) for prompt in prompts]
            if sampler is not None:
                assert sampler(prompts) == own
            for kind, drafter in choices.items():
                out = jaxspec.generate(target, prompts, drafter=drafter, **options)
                assert [row.tolist() for row in out.tokens] == own, kind
                if kind.endswith("itself"):  # prefill's token, then 4 + 4 + 3
                    assert out.stats.rounds.tolist() == [3] * len(prompts), kind


def test_a_tunix_network_with_a_window_takes_a_token_at_a_time():
    model = adapters.from_tunix(StandIn(nnx.Rngs(0), window=4))
    with pytest.raises(ValueError, match="takes chains only"):
        jaxspec.generate(model, [[3, 1]], drafter=drafters.tree(model, (2, 1)), max_new_tokens=4)


def test_check_model_finds_a_window_that_is_counted_within_a_pass():
    model = adapters.from_tunix(StandIn(nnx.Rngs(0), window=4), one_by_one=False)
    with pytest.raises(ValueError, match="one pass"):
        jaxspec.testing.check_model(model, longest=24)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"k": (1, 0, 2)}, "the cache has k in its layers: expected end_index"),
        ({"k": (1, -8, 2), "end_index": (1,)}, r"\['k'\] has the shape .*A ring of fewer entries"),
    ],
)
def test_caches_that_cannot_be_rewound_are_refused(layer: dict, message: str):
    def init_cache(batch: int, capacity: int) -> Any:
        sizes = {
            name: (shape[0], capacity + shape[1], *shape[2:]) if len(shape) > 1 else shape
            for name, shape in layer.items()
        }
        return {"layer_0": {name: jnp.zeros(shape) for name, shape in sizes.items()}}

    lm = adapters.from_end_index(lambda *_: None, VOCAB, init_cache)
    with pytest.raises(ValueError, match=message):
        jaxspec.generate(jaxspec.Model(lm, {}), [[3, 1]], max_new_tokens=4)


def test_what_is_no_network_of_tunix_is_refused():
    with pytest.raises(TypeError, match="the module is of type Embed: expected a network of"):
        adapters.from_tunix(nnx.Embed(4, 4, rngs=nnx.Rngs(0)))


def test_new_parameters_compile_nothing():
    """What a trainer does after each step."""
    module, other = StandIn(nnx.Rngs(0)), StandIn(nnx.Rngs(1))
    target = adapters.from_tunix(module)
    options = {"max_new_tokens": NEW, "eos_ids": ()}
    jaxspec.generate(target, PROMPTS, **options)
    moved = target._replace(params=nnx.split(other)[1])
    programs = loop.generation.num_programs()
    out = jaxspec.generate(moved, PROMPTS, **options)
    assert loop.generation.num_programs() == programs
    own = greedy(lambda row: nnx_logits(other, row), PROMPTS[0], NEW)
    assert out.tokens[0].tolist() == own
