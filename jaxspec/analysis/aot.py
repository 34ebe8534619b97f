"""Compiles a generation for TPUs or GPUs that are not here, and reads from the program how long its parts should take.

libtpu, the compiler for TPUs, and jax's CUDA plugin, with the compiler for GPUs, run on any Linux machine. `estimate`
gives them the program that `jaxspec.generate` would run, made from shapes alone: it loads no weights and runs nothing.
Sizes (arguments, temporaries, code) and collectives are exact. Times are the TPU compiler's own estimates, which it
writes on every fused operation. For a GPU the only time is that of the bytes read; kernels are counted.

`program_text` assigns operations to parts. The estimates leave out two things: waiting for other chips, and prefetching
matrices into the chip's own memory, which v5e and v6e do with whole ones. So a part's time is the larger of its
estimate and the memory's time for the bytes it reads.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich import filesize

from jaxspec import sharding
from jaxspec.analysis import formulas, memory, roofline, table
from jaxspec.analysis.chips import GPUS, cores, devices_of, machine_of
from jaxspec.analysis.compiled import (
    Compiled,
    DoesNotFit,
    Program,
    compile_generation,
    fingerprint,
    lower,
    with_room,
)
from jaxspec.analysis.program_text import Part
from jaxspec.core import Model, Params, token_rows
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared
from jaxspec.nets import axes_of, decoder_layers, net_of
from jaxspec.weights import huggingface, loading, quantisation

ROUND = ("draft", "draft step", "target", "accept", "commit", "rest")
SUFFIX = ".executable"


class Expected(NamedTuple):
    """The promise of an acceptance rate.

    Attributes:
        tokens_per_round: tokens a round of each row.
        tokens_per_second, plain_tokens_per_second: tokens a second of all rows, with a drafter and without.
        speed_up: the former over the latter.
    """

    tokens_per_round: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float


class Estimate(NamedTuple):
    """The compiler's estimate of a generation, and of plain decoding with the same target.

    Attributes:
        topology, chips, mesh: for which devices, and how many of them are used.
        machine: one of them, as the compiler sees it (of a v4 one of its two cores).
        batch, gamma: rows, and draft tokens a round (of a tree its depth).
        trees: whether the draft is one.
        plain, speculative: the programs; the latter is None where nothing drafts.
        floors: bytes that the target's and the drafter's weights and caches have on a chip, as far as a pass must read
            them: "target" and "draft".
        compiled: both programs by the names "plain" and "speculative", to be saved.
    """

    topology: str
    chips: int
    mesh: str
    machine: roofline.Machine
    batch: int
    gamma: int
    trees: bool
    plain: Program
    speculative: Program | None
    floors: dict[str, float]
    compiled: dict[str, Compiled]

    def seconds(self, name: str, program: Program | None = None) -> float:
        """Returns the time of a part of the speculative program, or of another one."""
        program = program or self.speculative or self.plain
        return program.parts.get(name, Part()).seconds(self.machine)

    @property
    def plain_seconds(self) -> float:
        """The time of a token of plain decoding: the pass and what is around it."""
        return sum(self.seconds(name, self.plain) for name in ROUND)

    @property
    def on_gpus(self) -> bool:
        """Tells whether it is of GPUs."""
        return self.topology.partition(":")[0] in GPUS

    def in_a_round(self, count: str, program: Program) -> int:
        """Adds up "kernels" or "host_reads" of a round, or of a step of plain decoding."""
        repeated = {"draft step": 1 if self.trees else self.gamma - 1}
        return sum(repeated.get(name, 1) * getattr(program.parts.get(name, Part()), count) for name in ROUND)

    @property
    def draft_seconds(self) -> float:
        """The time of a round's draft: of a chain, its first token and one step for each other token."""
        steps = 1 if self.trees else self.gamma - 1  # a tree's levels are written out; its loops are small
        return self.seconds("draft") + steps * self.seconds("draft step")

    @property
    def rest_seconds(self) -> float:
        """The time of a round outside of both models' passes."""
        return sum(self.seconds(name) for name in ("accept", "commit", "rest"))

    @property
    def round_seconds(self) -> float:
        """The time of a round."""
        return self.draft_seconds + self.seconds("target") + self.rest_seconds

    @property
    def c(self) -> float:
        """The time of a draft token (of a tree, of a level) over that of the target's one-token pass."""
        return self.draft_seconds / max(self.gamma, 1) / self.seconds("target", self.plain)

    @property
    def v(self) -> float:
        """The time of the verify pass over that of the target's one-token pass."""
        return self.seconds("target") / self.seconds("target", self.plain)

    @property
    def fits(self) -> bool:
        """Tells whether the programs' bytes are fewer than the chip's memory."""
        programs = [self.plain, *([self.speculative] if self.speculative else [])]
        return self.machine.memory is None or all(program.memory <= self.machine.memory for program in programs)

    def expected(self, alpha: float) -> Expected:
        """Computes what an acceptance rate promises, if draft tokens are accepted independently.

        Raises:
            ValueError: the draft is a tree, whose tokens a round do not follow from one rate; or it is of GPUs.
        """
        if self.on_gpus:
            raise ValueError("for a GPU only bytes are estimated, not times: leave the acceptance rate out")
        if self.trees or self.speculative is None:
            raise ValueError(
                "an acceptance rate gives the tokens a round only for chains: estimate a chain, with a drafter"
            )
        tokens = float(formulas.expected_tokens(alpha, self.gamma))
        speed, plain = (self.batch * n / t for n, t in ((tokens, self.round_seconds), (1.0, self.plain_seconds)))
        return Expected(tokens, speed, plain, speed / plain)


def shape_model(shape: Any, dtype: str = "bfloat16") -> Model:
    """Makes a model without weights: its parameters are shapes, which is all that compiling needs.

    Args:
        shape: a published shape (`jaxspec models` lists them), a checkpoint's folder, a config.json of Hugging Face's,
            or the name of a shipped checkpoint; or a configuration of one of `jaxspec.nets`.
        dtype: the dtype of the matrices: "float32", "bfloat16", "int8" or "int4".

    Raises:
        ValueError: no such shape, file or dtype.

    >>> model = shape_model("t5-v1_1-xxl")
    >>> f"{quantisation.count(model.params):,}", model.params["decoder_0"]["ff"]["wi"]["weight"].shape
    ('11,135,332,352', (10240, 4096))
    """
    dtype = loading.dtype_name(dtype)
    config = dataclasses.replace(
        _config(shape) if isinstance(shape, str) else shape, dtype=quantisation.computation(dtype, "bfloat16")
    )

    def params() -> Params:
        random = net_of(config).init(config, jax.random.key(0))
        return jax.tree_util.tree_map_with_path(lambda path, x: quantisation.as_dtype(path, x, dtype), random)

    name = shape if isinstance(shape, str) else ""
    return Model(net_of(config).language_model(config), jax.eval_shape(params), config=config, name=name)


def _config(shape: str) -> Any:
    shapes, path = roofline.published_shapes(), Path(shape).expanduser()
    if shape in shapes:
        return shapes[shape]
    if path.is_file() and path.name == huggingface.CONFIG:
        return huggingface.read_config(path.parent)[1]
    if (local := loading.local(shape, loading.shipped())) is not None:
        return loading.format_of(local).open(local).config()
    raise ValueError(
        f"no shape, folder or config.json {shape!r}: expected one of {', '.join(shapes)}, or a path. A model of the "
        "hub is named by its shape, since its weights are not needed"
    )


def estimate(
    prepared: Prepared,
    topology: str,
    *,
    mesh: str | Mesh | None = None,
    plain: Compiled | None = None,
    advance: Callable[[str], object] = lambda doing: None,
) -> Estimate:
    """Compiles a generation, and plain decoding with the same target, for a TPU or a GPU, and estimates their times.

    A GPU's times are floors: the bytes read over the memory's bandwidth.

    Args:
        prepared: a generation, from `jaxspec.decode.request.prepare`; its models may be those of `shape_model`.
        topology: a kind of chip and how many of them, as "v5p:2x2x1"; "v5p" alone is the smallest host. Of GPUs "h100",
            or "h100:8" for a host of eight; jax must then be kept from looking for one (JAX_PLATFORMS=cpu).
        mesh: how to split the models over them, as `jaxspec.load` takes it; by default they lie on one chip, on both
            devices of one that is two.
        plain: plain decoding of an earlier estimate of the same target, rows and topology, not to be compiled again.
        advance: called with what is compiled next, before each of the two programs.

    Raises:
        ImportError: the compiler is not installed; with the command that does.
        ValueError: there is no such topology, or it has too few chips for the mesh.
        DoesNotFit: nor do the programs; with what would.

    Example, some minutes for large models:
        >>> import jax.numpy as jnp
        >>> from jaxspec.core import Prompt
        >>> from jaxspec.decode.request import prepare
        >>> target, draft = shape_model("llama-3.1-8b"), shape_model("llama-3.2-1b")
        >>> prompt = Prompt(jnp.zeros((1, 64), jnp.int32), jnp.array([64]))
        >>> prepared = prepare(target, prompt, drafter=draft, gamma=5)
        >>> print(round(estimate(prepared, "v5p:2x2x1").v, 2))  # doctest: +SKIP
        1.0
    """
    name, devices = devices_of(topology)
    machine, sizes = machine_of(name, devices), {"data": 1, "model": 1}
    if mesh is None and cores(devices) > 1:
        mesh = f"model={cores(devices)}"
    compiled = {} if plain is None else {"plain": plain}
    for which, request in (("plain", prepared.plain()), ("speculative", prepared)):
        if which not in compiled and (which == "plain" or prepared.drafter is not None):
            advance(which)
            try:
                compiled[which] = compile_generation(request, devices, mesh)
            except DoesNotFit as error:
                chips = 1 if mesh is None else sharding.mesh(mesh, devices).size
                raise DoesNotFit(f"{error}. {what_fits(request, machine, chips)}") from error
    programs = {which: kept.program for which, kept in compiled.items()}
    if mesh is not None:
        sizes = dict(sharding.mesh(mesh, devices).shape)
    return Estimate(
        topology=name,
        chips=math.prod(sizes.values()),
        mesh=",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1),
        machine=machine,
        batch=len(prepared.request.max_new_tokens),
        gamma=prepared.decoder.gamma,
        trees=prepared.decoder.trees,
        plain=programs["plain"],
        speculative=programs.get("speculative"),
        floors=floors(prepared, sizes.get("data", 1), sizes.get("model", 1)),
        compiled=compiled,
    )


def what_fits(prepared: Prepared, machine: roofline.Machine, chips: int) -> str:
    """Says in words how long prompts may be, by the sum of what cannot be done without."""
    if machine.memory is None:
        return ""
    room, prompts = chips * machine.memory, len(prepared.prompt.length)
    longest, *sizes = memory.longest_prompt(prepared, room)
    room_size, weights, token = map(filesize.decimal, (int(room), *sizes))
    return (
        f"Of {room_size} weights take {weights}, and caches and rows {token} for each token of {prompts} prompts, so "
        f"that prompts of up to {longest:,} tokens fit, less what passes make"
    )


def floors(prepared: Prepared, data: int, model: int) -> dict[str, float]:
    """Computes the bytes that a pass of each model must read on a chip: weights and the caches of its rows."""
    drafting = prepared.drafter.models[0] if prepared.drafter and prepared.drafter.models else None
    least = {}
    for which, part in (("target", prepared.target), ("draft", drafting)):
        if part is None or decoder_layers(part.config) == 0:
            continue
        width = prepared.prompt.tokens.shape[1]
        headroom = token_rows.headroom(prepared.max_new_tokens, prepared.decoder.nodes)
        row = headroom + token_rows.prefill_length(part.lm, prepared.prompt)
        load = roofline.load_of(part.config, row=row, prompt=width)
        params = part.params
        if "head" in params:  # else the embedding is it
            params = {name: layer for name, layer in params.items() if name != "embedding"}
        leaves = jax.tree.leaves(params, is_leaf=quantisation.is_quantised)
        matrices = [x for x in leaves if quantisation.is_quantised(x) or len(x.shape) == 2]
        weight_bytes = quantisation.nbytes(matrices) / quantisation.count(matrices)
        heads = axes_of(part.config).parts["kv_heads"]
        caches = len(prepared.request.max_new_tokens) * load.cache_bytes / data / (model if heads % model == 0 else 1)
        least[which] = load.parameters * weight_bytes / model + caches
    return least


def to_dict(estimated: Estimate) -> dict[str, Any]:
    """Returns an estimate as plain values, for JSON; without the executables."""
    report = {
        name: value for name, value in estimated._asdict().items() if name not in ("compiled", "plain", "speculative")
    }
    report |= {
        "fits": estimated.fits,
        "c": estimated.c if estimated.speculative else None,
        "v": estimated.v if estimated.speculative else None,
    }
    report["programs"] = {name: kept.program for name, kept in estimated.compiled.items()}
    report["fingerprints"] = {name: kept.fingerprint for name, kept in estimated.compiled.items()}
    return report | {"rows": [row._asdict() | {"over_floor": row.over_floor} for row in table.estimate_rows(estimated)]}


# Programs that are kept.


def save(compiled: Mapping[str, Compiled], folder: str | Path) -> Path:
    """Stores compiled programs, to be run where their devices are; `load` reads one back.

    Args:
        compiled: by name, as `Estimate.compiled` has them; a name is a file's.
        folder: made if it is not there; programs of other names in it stay.

    Returns:
        The folder.
    """
    from jax.experimental import serialize_executable

    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for name, kept in compiled.items():
        stored = {"fingerprint": kept.fingerprint, "program": serialize_executable.serialize(kept.executable)}
        (folder / f"{name}{SUFFIX}").write_bytes(pickle.dumps(stored))
        (folder / f"{name}.json").write_text(json.dumps(kept.fingerprint, indent=1) + "\n", encoding="utf-8")
    return folder


def load(
    folder: str | Path, prepared: Prepared, name: str = "speculative", *, devices: Sequence[Any] | None = None
) -> Callable[[Prepared], loop.Outcome]:
    """Loads a stored program for a generation, in place of compiling it: lowering it again takes seconds.

    Args:
        folder: a folder written by `save`. It is unpickled, which may run any code: load only folders that you trust.
        prepared: the generation, with its weights on their devices; another prompt or key of the same shape will do.
        name: the program's name.
        devices: by default all there are.

    Returns:
        A function that runs a generation of the same shape, as `jaxspec.decode.loop.run` does.

    Raises:
        FileNotFoundError: no such program.
        ValueError: it was compiled by another version, with other options, for other devices or shapes, or for another
            generation.
    """
    from jax.experimental import serialize_executable

    path = Path(folder).expanduser() / f"{name}{SUFFIX}"
    if not path.is_file():
        raise FileNotFoundError(f"no program at {path}: `jaxspec compile --save` and `aot.save` write them")
    devices, place = jax.devices() if devices is None else devices, sharding.mesh_of(prepared.weights)
    stored = pickle.loads(path.read_bytes())
    expected = fingerprint(lower(prepared, place, devices[0]), devices[0], place)
    for entry, value in stored["fingerprint"].items():
        if value != expected.get(entry):
            raise ValueError(
                f"{path} is of another {entry}: {value}, and here it is {expected.get(entry)}. Compile it "
                "again, with the options and the versions of this run"
            )
    used = list(devices[:1]) if place is None else list(place.devices.flat)
    program = serialize_executable.deserialize_and_load(*stored["program"], execution_devices=used)
    return lambda again: program(
        weights=again.weights, prompt=again.prompt, request=with_room(again.request), before=None
    )
