"""Another library's sampler beside jaxspec, on one Llama 3 that both run: greedy, on the CPU,
interleaved.

    python -m benchmarks.other_libraries tunix          # pip install google-tunix==0.1.7
    python -m benchmarks.other_libraries keras-hub      # pip install keras-hub==0.32.0

Training comes first, in the library's own network: a target on the bytes of a JSON file of this
repository, and a drafter of one layer, which learns the target's distributions. Random weights
draft nothing. The prompts are bytes that were held out. Then each repeat runs the library's sampler
and jaxspec four times: through the adapter and in jaxspec's own network (`from_arrays`), plain and
drafted. Ratios are taken within a repeat, so other work on the machine slows all alike. On a busy
machine, `taskset -c 0` with `--clock processor` counts what one core spends on each. On two cores
training takes a minute or two, and the whole some five minutes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import jaxspec
from jaxspec.nets import adapters

TEXT = Path(jaxspec.__file__).parent / "data" / "sizes.json"
VOCAB = 128  # ASCII
HEADS, KV_HEADS = 4, 2
ROPE_THETA = 1_000_000  # Tunix's Llama 3 rotates with no other
PROMPT, NEW, GAMMA = 32, 96, 4  # tokens of a prompt, of a text, of a draft
WINDOW, ROWS = 128, 4  # bytes of a training text, texts of a training step

Rows = list[list[int]]


class Network(NamedTuple):
    """A Llama 3 of a library.

    Attributes:
        params: its parameters, a tree.
        forward: (params, tokens [batch, step]) -> logits [batch, step, VOCAB], of whole rows.
        put: stores parameters in the library's model.
        sample: NEW greedy tokens for each prompt, by the library's own sampler.
        adapt: the library's model through jaxspec's adapter.
        convert: its arrays in jaxspec's own network.
    """

    params: Any
    forward: Callable[[Any, Int[Array, "B T"]], Float[Array, "B T V"]]
    put: Callable[[Any], None]
    sample: Callable[[Rows], Rows]
    adapt: Callable[[], jaxspec.Model]
    convert: Callable[[], jaxspec.Model]


class Ids:
    """A tokenizer of numbers, for Tunix's sampler."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return VOCAB  # no text ends early

    def pad_id(self) -> int:
        return 0


def tunix(layers: int, width: int) -> Network:
    """Tunix's Llama 3."""
    from flax import nnx

    library = importlib.import_module("tunix.models.llama3.model")
    samplers = importlib.import_module("tunix.generate.sampler")
    head_dim = width // HEADS
    config = library.ModelConfig(
        num_layers=layers,
        vocab_size=VOCAB,
        embed_dim=width,
        hidden_dim=2 * width,
        num_heads=HEADS,
        head_dim=head_dim,
        num_kv_heads=KV_HEADS,
        rope_theta=ROPE_THETA,
        norm_eps=1e-6,
    )
    module = library.Llama3(config, rngs=nnx.Rngs(layers))
    graph, params = nnx.split(module)

    def forward(params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        batch, step = tokens.shape
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((step, step), bool)), (batch, step, step))
        positions = jnp.broadcast_to(jnp.arange(step), tokens.shape)
        return nnx.merge(graph, params)(tokens, positions, None, seen)[0]

    def convert() -> jaxspec.Model:
        table = {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": head_dim,
            "rms_norm_eps": 1e-6,
            "rope_theta": ROPE_THETA,
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
        }
        return jaxspec.from_arrays(table, tunix_arrays(nnx.state(module, nnx.Param)))

    @functools.cache
    def sampler() -> Callable[..., Any]:
        size = samplers.CacheConfig(PROMPT + NEW, layers, KV_HEADS, head_dim)
        return samplers.Sampler(module, Ids(), size)

    def sample(prompts: Rows) -> Rows:
        texts = [" ".join(map(str, prompt)) for prompt in prompts]
        out = sampler()(texts, max_generation_steps=NEW, max_prompt_length=PROMPT)
        return [np.asarray(text).tolist() for text in out.tokens]

    return Network(
        params,
        forward,
        functools.partial(nnx.update, module),
        sample,
        lambda: adapters.from_tunix(module),
        convert,
    )


def tunix_arrays(state: Any) -> dict[str, np.ndarray]:
    """Names the arrays of Tunix's Llama 3 as a Hugging Face folder does."""
    from flax import nnx

    arrays = {}
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path[:-1])).replace("attn", "self_attn")
        x = np.asarray(variable[...])
        if "o_proj" in name:  # [N, H, D] -> [N * H, D]
            x = x.reshape(-1, x.shape[-1])
        elif x.ndim == 3:  # [D, N, H] -> [D, N * H]
            x = x.reshape(len(x), -1)
        if name == "embedder":
            arrays["model.embed_tokens.weight"] = x
        elif name == "final_norm":
            arrays["model.norm.weight"] = x
        elif name == "lm_head":
            arrays["lm_head.weight"] = x.T
        else:
            arrays[f"model.{name}.weight"] = x.T  # of a norm, too: one axis
    return arrays


def keras_hub(layers: int, width: int) -> Network:
    """keras-hub's Llama 3."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    library: Any = importlib.import_module("keras_hub")
    export = importlib.import_module("keras_hub.src.utils.transformers.export.llama3")
    backbone = library.models.Llama3Backbone(
        vocabulary_size=VOCAB,
        num_layers=layers,
        num_query_heads=HEADS,
        hidden_dim=width,
        intermediate_dim=2 * width,
        num_key_value_heads=KV_HEADS,
        rope_max_wavelength=ROPE_THETA,
    )
    model = library.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    model.compile(sampler="greedy")
    fixed = [variable.value for variable in model.non_trainable_variables]

    def forward(params: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        inputs = {"token_ids": tokens, "padding_mask": jnp.ones_like(tokens, dtype=bool)}
        return model.stateless_call(params, fixed, inputs)[0]

    def put(params: Any) -> None:
        for variable, value in zip(model.trainable_variables, params, strict=True):
            variable.assign(value)

    def sample(prompts: Rows) -> Rows:
        token_ids = np.zeros((len(prompts), PROMPT + NEW), np.int32)
        token_ids[:, :PROMPT] = prompts
        mask = np.broadcast_to(np.arange(PROMPT + NEW) < PROMPT, token_ids.shape)
        inputs = {"token_ids": token_ids, "padding_mask": mask}
        out = model.generate(inputs, stop_token_ids=None)
        return np.asarray(out["token_ids"])[:, PROMPT:].tolist()

    def convert() -> jaxspec.Model:
        arrays = export.get_llama3_weights_map(backbone, include_lm_head=True)
        return jaxspec.from_arrays(export.get_llama3_config(backbone), arrays)

    params = [variable.value for variable in model.trainable_variables]
    adapt = functools.partial(adapters.from_keras_hub, model)
    return Network(params, forward, put, sample, adapt, convert)


class Library(NamedTuple):
    """A library: what makes its network of so many layers and such a width, and what installs it."""

    make: Callable[[int, int], Network]
    module: str
    package: str


LIBRARIES = {
    "tunix": Library(tunix, "tunix", "google-tunix==0.1.7"),
    "keras-hub": Library(keras_hub, "keras_hub", "keras-hub==0.32.0"),
}


def train(networks: Sequence[Network], text: np.ndarray, steps: int) -> str:
    """Trains a target and its drafter, which learns the target's distributions; returns a line."""
    target, draft = networks
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)),
    )

    def losses(params: Any, rows: Int[Array, "B T"]) -> tuple[Array, tuple[Array, Array]]:
        logits = target.forward(params[0], rows[:, :-1])
        labels = jax.nn.softmax(jax.lax.stop_gradient(logits))
        of_target = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()
        drafted = draft.forward(params[1], rows[:, :-1])
        of_draft = optax.softmax_cross_entropy(drafted, labels).mean()
        same = jnp.mean(drafted.argmax(-1) == logits.argmax(-1))
        return of_target + of_draft, (of_target, same)

    @jax.jit
    def step(params: Any, state: Any, rows: Int[Array, "B T"]) -> tuple[Any, Any, Any]:
        gradients, shown = jax.grad(losses, has_aux=True)(params, rows)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, shown

    params = [redrawn(network.params) for network in networks]
    state = optimizer.init(params)
    random = np.random.default_rng(0)
    shown = []
    began = time.perf_counter()
    for _ in range(steps):
        starts = random.integers(0, len(text) - WINDOW, ROWS)
        rows = text[starts[:, None] + np.arange(WINDOW + 1)]
        params, state, of_step = step(params, state, rows)
        shown.append(jax.device_get(of_step))
    for network, trained in zip(networks, params, strict=True):
        network.put(trained)
    loss, same = np.mean(shown[-20:], axis=0)
    return (
        f"{steps} steps of {ROWS * WINDOW} bytes in {time.perf_counter() - began:.0f} s: "
        f"{loss / np.log(2):.2f} bits a byte, and the drafter agrees with the target on the "
        f"likeliest next byte at {same:.0%} of places"
    )


def redrawn(params: Any) -> Any:
    """Draws matrices at one scale in both libraries; Tunix's layers begin with matrices of zeros."""
    leaves, tree = jax.tree.flatten(params)
    random = np.random.default_rng(0)

    def draw(x: jax.Array) -> jax.Array:
        if x.ndim < 2:  # a norm's scale
            return x
        return jnp.asarray(random.normal(0.0, 0.03, x.shape), jnp.float32)

    return tree.unflatten([draw(x) for x in leaves])


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def race(
    ways: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> dict[str, np.ndarray]:
    """Returns the seconds of each way in each repeat, after a run that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            began = clock()
            run()
            if repeat > 0:
                seconds[name].append(clock() - began)
    return {name: np.asarray(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--layers", type=int, default=8, help="of the target; the drafter has 1")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=250, help="of training")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    given = parser.parse_args()
    library = LIBRARIES[given.library]
    if importlib.util.find_spec(library.module) is None:
        parser.error(f"{given.library} is not installed: pip install {library.package}")
    text = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int32)
    heldout = 9 * len(text) // 10
    target = library.make(given.layers, given.width)
    draft = library.make(1, given.width // 2)
    print(train((target, draft), text[:heldout], given.steps), flush=True)
    adapted, own = target.adapt(), target.convert()
    ways: dict[str, tuple[jaxspec.Model, Any]] = {
        "adapter": (adapted, None),
        "adapter, drafted": (adapted, draft.adapt()),
        "own network": (own, None),
        "own network, drafted": (own, draft.convert()),
    }
    print("| batch | jaxspec | speed, its sampler = 1 | range | tokens a round | same text |")
    print("|---|---|---|---|---|---|")
    for batch in given.batches:
        starts = heldout + np.arange(batch) * ((len(text) - heldout - PROMPT) // batch)
        prompts = text[starts[:, None] + np.arange(PROMPT)].tolist()
        texts = target.sample(prompts)
        runs: dict[str, Callable[[], Any]] = {"sampler": lambda p=prompts: target.sample(p)}
        facts = {}
        for name, (model, drafter) in ways.items():
            options = {"drafter": drafter, "gamma": GAMMA if drafter else None}
            options = {key: value for key, value in options.items() if value is not None}
            run = functools.partial(
                jaxspec.generate, model, prompts, max_new_tokens=NEW, eos_ids=(), **options
            )
            out = run()
            same = sum(row.tolist() == want for row, want in zip(out.tokens, texts, strict=True))
            tokens = (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
            facts[name] = f"{tokens:.1f} | {same} of {batch}"
            runs[name] = run
        seconds = race(runs, given.repeats, CLOCKS[given.clock])
        for name in ways:
            ratios = np.sort(seconds["sampler"] / seconds[name])
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"| {batch} | {name} | {np.median(ratios):.2f} | {spread} | {facts[name]} |")
        rate = batch * NEW / np.median(seconds["sampler"])
        print(f"| {batch} | (its sampler: {rate:.0f} tokens/s) | | | | |", flush=True)
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"jax {jax.__version__}, {os.cpu_count()} CPUs, load {load}, {given.repeats} repeats")


if __name__ == "__main__":
    main()
