"""keras-hub's models through the adapter: a stand-in always, Llama 3 where keras-hub is installed."""

import contextlib
import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters
from jaxspec.nets import adapters
from tests.marks import other_library

VOCAB, DIM, HEADS = 24, 8, 2
PROMPTS = [[2, 7, 1, 8, 5, 9, 11], [2, 3], [2, 7, 2, 7], [3]]
NEW = 12


class Variable:
    """As Keras has it: a value, which a `StatelessScope` may replace."""

    def __init__(self, value: Any):
        self.value = value


@contextlib.contextmanager
def scope(state_mapping: list) -> Any:
    before = [variable.value for variable, _ in state_mapping]
    for variable, value in state_mapping:
        variable.value = value
    yield
    for (variable, _), value in zip(state_mapping, before, strict=True):
        variable.value = value


@pytest.fixture
def keras(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the adapter uses of Keras."""
    module = ModuleType("keras")
    vars(module).update(StatelessScope=scope, backend=SimpleNamespace(backend=lambda: "jax"))
    monkeypatch.setitem(sys.modules, "keras", module)
    return module


class StandIn:
    """One attention layer, called as a `CausalLM` calls its own."""

    compute_dtype = "float32"

    def __init__(self, seed: int):
        keys = jax.random.split(jax.random.key(seed), 5)
        shapes = [(VOCAB, DIM), (DIM, DIM), (DIM, DIM), (DIM, DIM), (DIM, VOCAB)]
        drawn = [
            Variable(jax.random.normal(key, shape)) for key, shape in zip(keys, shapes, strict=True)
        ]
        self.trainable_variables = drawn[1:]
        self.non_trainable_variables = drawn[:1]
        self.backbone = SimpleNamespace(
            num_layers=1,
            num_key_value_heads=HEADS,
            num_query_heads=HEADS,
            hidden_dim=DIM,
            vocabulary_size=VOCAB,
        )

    def call_with_cache(self, tokens: Any, cache: Any, index: Any) -> tuple[Any, Any, Any]:
        """tokens [1, T], cache [1, layer, 2, S, HEADS, width], entries before: one number."""
        query, key, value, head = (variable.value for variable in self.trainable_variables)
        x = self.non_trainable_variables[0].value[tokens]
        shape = (1, tokens.shape[1], HEADS, DIM // HEADS)
        new = jnp.stack([(x @ key).reshape(shape), (x @ value).reshape(shape)], axis=1)
        cache = jax.lax.dynamic_update_slice(cache, new[:, None], (0, 0, 0, index, 0, 0))
        keys, values = cache[:, 0, 0], cache[:, 0, 1]
        scores = jnp.einsum("bthd,bshd->bhts", (x @ query).reshape(shape), keys)
        places = index + jnp.arange(tokens.shape[1])
        seen = jnp.arange(keys.shape[1])[None] <= places[:, None]
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e30))
        x = x + jnp.einsum("bhts,bshd->bthd", weights, values).reshape(x.shape)
        return x @ head, x, cache


def own_text(model: StandIn, prompt: list[int]) -> list[int]:
    """The model's own greedy text, a token at a time through its own cache."""
    cache = jnp.zeros((1, 1, 2, 64, HEADS, DIM // HEADS))
    row = list(prompt)
    for i in range(len(prompt) + NEW - 1):
        logits, _, cache = model.call_with_cache(jnp.array([row[i : i + 1]]), cache, i)
        if i >= len(prompt) - 1:
            row.append(int(logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.usefixtures("keras")
def test_speculative_text_is_that_of_its_own_greedy_decoding():
    model = StandIn(0)
    target, draft = adapters.from_keras_hub(model), adapters.from_keras_hub(StandIn(1))
    own = [own_text(model, prompt) for prompt in PROMPTS]
    options = {"gamma": 3, "max_new_tokens": NEW, "eos_ids": ()}
    for drafter in (None, draft, drafters.prompt_lookup()):
        out = jaxspec.generate(target, PROMPTS, drafter=drafter, **options)
        assert [row.tolist() for row in out.tokens] == own
    itself = jaxspec.generate(target, PROMPTS, drafter=target, **options)
    assert itself.stats.rounds.tolist() == [3] * len(PROMPTS)


@pytest.mark.usefixtures("keras")
def test_a_backbone_may_call_its_heads_otherwise():
    """As GPT-2's of keras-hub does."""
    model = StandIn(0)
    del model.backbone.num_key_value_heads, model.backbone.num_query_heads
    with pytest.raises(
        TypeError, match=r"no num_key_value_heads or num_heads.*jaxspec\.from_arrays"
    ):
        adapters.from_keras_hub(model)
    model.backbone.num_heads = HEADS
    out = jaxspec.generate(
        adapters.from_keras_hub(model), PROMPTS[:1], max_new_tokens=NEW, eos_ids=()
    )
    assert out.tokens.tolist() == [own_text(model, PROMPTS[0])]


def test_another_backend_is_refused(keras: ModuleType):
    keras.backend.backend = lambda: "torch"
    with pytest.raises(ValueError, match=r"backend 'torch': expected 'jax'\. Set KERAS_BACKEND"):
        adapters.from_keras_hub(StandIn(0))


@pytest.mark.usefixtures("keras")
def test_what_has_no_cache_is_refused():
    with pytest.raises(TypeError, match="of type SimpleNamespace: expected one with call_with"):
        adapters.from_keras_hub(SimpleNamespace())


def llama(seed: int, layers: int) -> Any:
    import keras_hub

    sizes = {"vocabulary_size": 96, "num_layers": layers, "num_query_heads": 4, "hidden_dim": 32}
    backbone = keras_hub.models.Llama3Backbone(
        intermediate_dim=48, num_key_value_heads=2, rope_max_wavelength=10_000, **sizes
    )
    model = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        fan_in = np.prod(variable.shape[:-1]) if len(variable.shape) > 1 else 4
        spread = 3.0 if "embed" in variable.path else 1.5
        variable.assign(spread * rng.normal(size=variable.shape) / fan_in**0.5)
    return model


def keras_text(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    size = max(map(len, prompts)) + NEW
    ids = np.zeros((len(prompts), size), np.int32)
    mask = np.zeros((len(prompts), size), bool)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = prompt
        mask[i, : len(prompt)] = True
    out = model.generate({"token_ids": ids, "padding_mask": mask}, stop_token_ids=None)["token_ids"]
    return [
        row[len(prompt) : len(prompt) + NEW].tolist()
        for row, prompt in zip(np.asarray(out), prompts, strict=True)
    ]


def converted(model: Any) -> jaxspec.Model:
    export = importlib.import_module("keras_hub.src.utils.transformers.export.llama3")
    return jaxspec.from_arrays(
        export.get_llama3_config(model.backbone),
        export.get_llama3_weights_map(model.backbone, include_lm_head=True),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # theirs
def test_llama_of_keras_hub():
    """Its own `generate`, the adapter, and its exporter with `from_arrays` give one text."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    other_library("keras-hub", "keras_hub")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        model, small = llama(0, 2), llama(1, 1)
        adapted = adapters.from_keras_hub(model)
        own_network, own_draft = converted(model), converted(small)
        choices = (None, adapters.from_keras_hub(small), own_draft, drafters.prompt_lookup())
        cases = [(target, drafter) for target in (adapted, own_network) for drafter in choices]
        cases.append((own_network, drafters.tree(own_draft, (3, 2))))
        for prompts in (PROMPTS, PROMPTS[:1]):
            own = keras_text(model, prompts)
            for target, drafter in cases:
                out = jaxspec.generate(
                    target, prompts, drafter=drafter, gamma=3, max_new_tokens=NEW, eos_ids=()
                )
                assert [row.tolist() for row in out.tokens] == own
