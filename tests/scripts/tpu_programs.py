"""Whole generations compiled for a TPU that is not there: what the compiler makes of them, and what it refuses.

libtpu compiles on any Linux machine. Give it an environment (or a folder on PYTHONPATH) of its own, and

    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py            # the pairs of docs/results.md: some minutes
    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py T5 tree    # those whose names have these words
    JAX_PLATFORMS=cpu python tests/scripts/tpu_programs.py --small    # small shapes of the same: what CI compiles

Nothing runs, and no weights are needed. The sizes are the compiler's; so are cycles, which are estimates: of a part of
a round each, where one step of a chain's draft loop stands for all.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import drafters, rules, sampling, sharding
from jaxspec.core import BoundDrafter, Model, Prompt, Request, Weights, token_rows
from jaxspec.decode import loop, speculative
from jaxspec.nets import decoder, net_of, t5
from jaxspec.weights import int8
from jaxspec.weights.hf_families import FAMILIES

SCOPES = {  # of a round (decode.speculative), and how the names of its operations begin
    "draft step": "draft/while/body/",
    "draft": "draft/",
    "target": "target/",
    "accept": "accept/",
    "commit": "commit/",
}
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


class Case(NamedTuple):
    """A generation to compile: a pair, a drafter, a topology and how many of its chips, and the shapes."""

    name: str
    topology: str
    chips: int
    target: Any
    draft: Any
    drafter: Callable[[Model, Model], BoundDrafter]  # of the target and the draft model
    batch: int
    temperature: float
    prompt: int = 64
    new: int = 128


class Compiled(NamedTuple):
    """The result: seconds, bytes of each chip, collectives by kind, estimated cycles by part of a round, and the
    program's text.
    """

    seconds: float
    arguments: int
    temporaries: int
    collectives: dict[str, int]
    cycles: dict[str, int]
    text: str


def sizes(name: str) -> Any:
    """A published shape, in bfloat16."""
    published = {name: config for family in FAMILIES for name, config in family.sizes.items()}
    return dataclasses.replace(published[name], dtype="bfloat16")


def tiny_t5(dim: int, dtype: str = "bfloat16") -> Any:
    return t5.T5Config(512, dim, 2 * dim, 4, 32, 2, 2, dtype=dtype)


def tiny_llama(dim: int) -> Any:
    return decoder.DecoderConfig(512, dim, 2 * dim, 2, 8, 4, 32, dtype="bfloat16")


def chain(target: Model, draft: Model) -> BoundDrafter:
    return drafters.model(draft)


def tree_of(*branching: int) -> Callable[[Model, Model], BoundDrafter]:
    return lambda target, draft: drafters.tree(draft, branching)


def cases(small: bool) -> list[Case]:
    programs = []
    for kind, branching in (("chain", chain), ("tree", tree_of(4, 2, 1, 1) if small else tree_of(8, 1, 1, 1))):
        if small:
            programs.append(Case(f"T5, {kind}", "v5p:2x2x1", 1, tiny_t5(256), tiny_t5(128), branching, 1, 0.0))
            programs.append(Case(f"Llama, {kind}", "v6e:2x2", 4, tiny_llama(256), tiny_llama(128), branching, 4, 1.0))
        else:
            pair = sizes("t5-v1_1-xxl"), sizes("t5-v1_1-small")
            programs.append(Case(f"T5-XXL + T5-small, {kind}", "v5p:2x2x1", 1, *pair, branching, 1, 0.0))
            programs.append(Case(f"T5-XXL + T5-small, {kind}", "v6e:2x2", 4, *pair, branching, 4, 1.0))
            pair = sizes("llama-3.1-8b"), sizes("llama-3.2-1b")
            programs.append(Case(f"Llama 8B + 1B, {kind}", "v6e:2x2", 4, *pair, branching, 4, 1.0))
    if small:
        exact = tiny_t5(256, "float32"), tiny_t5(128, "float32")
        programs.append(Case("T5 in float32, chain", "v5p:2x2x1", 1, *exact, chain, 1, 0.0))
    else:
        pair = sizes("t5-v1_1-xxl"), sizes("t5-v1_1-small")  # the latter is not read
        for name, drafter in (
            ("early exit after 6 of 24 layers", lambda target, draft: drafters.early_exit(target, 6)),
            ("lookahead", lambda target, draft: drafters.lookahead()),
        ):
            programs.append(Case(f"T5-XXL, {name}", "v5p:2x2x1", 1, *pair, drafter, 1, 0.0))
    return programs


def compile_case(case: Case) -> Compiled:
    """Lowers and compiles `loop.generation` for the case's chips."""
    devices = np.array(topologies.get_topology_desc(topology_name=case.topology, platform="tpu").devices[: case.chips])
    mesh = Mesh(devices.reshape(1, case.chips), ("data", "model"))
    target, draft = (Model(net_of(config).language_model(config), None, config=config) for config in case[3:5])
    drafter = case.drafter(target, draft)
    sampler = sampling.greedy() if case.temperature == 0 else sampling.at_temperature()
    decoder = speculative(target.lm, drafter.functions, rules.rejection(), sampler, 5)

    def params(model: Model) -> Any:
        config = model.config
        shapes = jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))
        where = sharding.parameters(shapes, config, mesh)

        def leaf(path, x, sharding):
            dtype = jnp.dtype(config.dtype) if int8.is_matrix(path, x) else x.dtype
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(leaf, shapes, where)

    def rows() -> tuple[Prompt, Request]:
        ones = jnp.zeros(case.batch, jnp.int32)
        cold = jnp.zeros(case.batch, jnp.float32)
        sampled = sampling.SamplingParams(cold)
        keys = jax.random.split(jax.random.key(0), case.batch)
        return Prompt(jnp.zeros((case.batch, case.prompt), jnp.int32), ones), Request(
            keys, sampled, ones, ones[:, None]
        )

    replicated = NamedSharding(mesh, PartitionSpec())
    prompt, request = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), jax.eval_shape(rows)
    )
    started = time.monotonic()
    weights = Weights(params(target), params(draft) if drafter.models else drafter.params)
    compiled = loop.generation.lower(decoder, weights, prompt, request, token_rows.bucket(case.new)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    collectives = collections.Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
    sizes = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    return Compiled(time.monotonic() - started, *sizes, dict(collectives), cycles(text), text)


def cycles(text: str) -> dict[str, int]:
    """The compiler's estimate for each part of a round, in cycles; of prefill and the rest nothing."""
    cycles_by_part = collections.Counter()
    for line in text.splitlines():
        estimate, name = re.search(r'"estimated_cycles":"(\d+)"', line), re.search(r'op_name="([^"]*)"', line)
        if estimate and name and "/while/body/" in name[1]:
            inside = name[1].partition("/while/body/")[2]
            cycles_by_part[next((scope for scope, start in SCOPES.items() if inside.startswith(start)), "other")] += (
                int(estimate[1])
            )
    return dict(cycles_by_part)


def main() -> None:
    """Compiles the cases and prints a table."""
    words = [word for word in sys.argv[1:] if word != "--small"]
    print("| program | chips | compiled in | arguments, temporaries per chip | collectives | cycles of a round |")
    print("|---|---|---|---|---|---|")
    for case in cases("--small" in sys.argv):
        if not all(word in f"{case.name} {case.topology}" for word in words):
            continue
        compiled = compile_case(case)
        chips = f"{case.chips} x {case.topology.split(':')[0]}, batch {case.batch}, T = {case.temperature:g}"
        collectives = ", ".join(f"{count} {kind}" for kind, count in compiled.collectives.items()) or "none"
        memory = f"{compiled.arguments / 1e9:.2f} GB, {compiled.temporaries / 1e9:.3f} GB"
        estimated = ", ".join(f"{scope} {count / 1e6:.2f}M" for scope, count in compiled.cycles.items())
        print(
            f"| {case.name} | {chips} | {compiled.seconds:.0f} s | {memory} | {collectives} | {estimated} |", flush=True
        )


if __name__ == "__main__":
    main()
