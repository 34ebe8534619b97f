"""Why a pass or a round takes as long as it does: jax's profiler, read in the process, and what
follows from it.

    python -m benchmarks.profile --target debian-t5-large --draft debian-t5-draft --gamma 3

Any device, a minute. Prints milliseconds of a round by stage (draft, target, accept, commit), and
what a one-token pass of the target is made of. A pass of a small model over one token is a few
hundred kernels of some microseconds. Its time is that of its weights, read once, plus what the
kernels take beyond that, plus the gaps between them in which the device waits for the host. Each
calls for another remedy, so the three are separated.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.options import parser_of
from jaxspec.analysis import cost
from jaxspec.cli import names
from jaxspec.cli.options import TARGET
from jaxspec.cli.prompts import prepared_pair
from jaxspec.decode import loop
from jaxspec.decode.request import Prepared

INNER = 20  # passes of a profile
STAGES = ("draft", "target", "accept", "commit")  # of a round: the decoder's named scopes
LARGEST = 8  # kernels that are listed
# busy for less than this share of the time, a device waits for kernels rather than runs them
WAITING = 0.7
# busy for less than so many times what reading the weights takes, a pass is what its weights make
# it
TOLERANCE = 2.0


class Kernel(NamedTuple):
    """One kernel, or one copy, as it ran; in nanoseconds."""

    name: str
    start: float
    duration: float


class KernelGroup(NamedTuple):
    """Kernels that are alike, of all layers together.

    Attributes:
        name: without the number that tells one from another.
        per_pass: how many.
        us_per_pass, us_each: microseconds.
        share: the share of the time of all kernels.
    """

    name: str
    per_pass: float
    us_per_pass: float
    us_each: float
    share: float


class Profile(NamedTuple):
    """The parts of passes.

    Attributes:
        kernels_per_pass: how many.
        pass_us, busy_us: microseconds of a pass, and in how many of them a kernel ran.
        busy: their ratio.
        largest: kernels by the time that they take.
    """

    kernels_per_pass: float
    pass_us: float
    busy_us: float
    busy: float
    largest: tuple[KernelGroup, ...] = ()


def passes(prepared: Prepared, folder: Path | None = None) -> Profile | str:
    """Profiles one-token passes of a generation's target."""
    try:
        timed = cost.pass_loops(prepared.target, prepared, 1, INNER)(1)
        return summary(profiled(timed.call, folder), INNER)
    except Exception as error:
        # a profiler fails in its own ways, and is no reason to end a benchmark
        return f"{type(error).__name__}: {error}"


def stages(prepared: Prepared, rounds: int = INNER) -> dict[str, float]:
    """Milliseconds that a round of a generation takes on the device, by stage."""
    state = loop.start(
        prepared.decoder,
        prepared.weights,
        prepared.prompt,
        prepared.request,
        prepared.max_new_tokens,
    )
    program = (
        loop.advance.lower(prepared.decoder, prepared.weights, state).compile().as_text() or ""
    )
    of_kernel = stage_of_each(program)
    state, _ = loop.advance(prepared.decoder, prepared.weights, state)

    def run() -> None:
        nonlocal state
        # `loop.iterate_rounds` waits for each round, which would be seen in the profile
        for _ in range(rounds):
            state, _ = loop.advance(prepared.decoder, prepared.weights, state)
        if bool(jax.block_until_ready(state).done.any()):
            raise ValueError(
                f"a row has ended within {rounds} rounds: expected a longer max_new_tokens, "
                "without eos_ids"
            )

    times: dict[str, float] = {name: 0.0 for name in (*STAGES, "other")}
    for kernel in profiled(run):
        times[of_kernel.get(kernel.name, "other")] += kernel.duration / rounds / 1e6
    return times


def stage_of_each(program: str) -> dict[str, str]:
    """The stage of a round that each instruction of a compiled program belongs to, where it has
    one.

    >>> stage_of_each(
    ...     '%dot.1 = f32[2]{0} dot(%a, %b), metadata={op_name="jit(advance)/target/layer/dot_general"}'
    ... )
    {'dot.1': 'target'}
    """
    named = re.findall(
        r'^\s*(?:ROOT )?%?([\w.-]+) = .*metadata=\{[^}]*op_name="([^"]*)"', program, re.MULTILINE
    )
    scopes = {
        name: next((part for part in scope.split("/") if part in STAGES), None)
        for name, scope in named
    }
    return {name: stage for name, stage in scopes.items() if stage is not None}


def profiled(call: Callable[[], object], folder: Path | None = None) -> list[Kernel]:
    """Lists the kernels that ran on the device during a call."""
    with tempfile.TemporaryDirectory() as scratch:
        where = Path(scratch) if folder is None else folder
        with jax.profiler.trace(str(where)):
            call()
        (file,) = sorted(where.rglob("*.xplane.pb"))[-1:]
        return kernels(jax.profiler.ProfileData.from_file(str(file)))


def kernels(profile: Any) -> list[Kernel]:
    """Lists the kernels that ran on the device: the streams of an accelerator; on a CPU, the
    operations of all threads.

    On a CPU a small loop that XLA makes one function of is not among them.
    """
    with warnings.catch_warnings():
        # of types without a module, in jax 0.12
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = {plane.name: list(plane.lines) for plane in profile.planes}
        devices = [lines for name, lines in planes.items() if name.startswith("/device:")]
        if any(devices):
            streams = [
                line for lines in devices for line in lines if line.name.startswith("Stream")
            ]
            lines = streams or [
                line for lines in devices for line in lines if line.name == "XLA Ops"
            ]
            return [
                Kernel(e.name, e.start_ns, e.duration_ns) for line in lines for e in line.events
            ]
        events = [
            e
            for line in planes.get("/host:CPU", [])
            for e in line.events
            if "hlo_op" in dict(e.stats)
        ]
        containers = ("while", "call", "conditional")  # what these contain is listed, too
        return [
            Kernel(e.name, e.start_ns, e.duration_ns)
            for e in events
            if not e.name.startswith(containers)
        ]


def summary(ran: Iterable[Kernel], count: int) -> Profile:
    """Kernels by pass, the share of the time in which one ran, and the largest, alike ones of all
    layers together.

    >>> ran = [
    ...     Kernel("fusion_1", 0, 2000),
    ...     Kernel("fusion_2", 1000, 2000),
    ...     Kernel("gemm", 6000, 4000),
    ... ]
    >>> found = summary(ran, count=2)
    >>> found.kernels_per_pass, found.pass_us, found.busy_us, found.busy
    (1.5, 5.0, 3.5, 0.7)
    >>> found.largest[0]
    KernelGroup(name='fusion', per_pass=1.0, us_per_pass=2.0, us_each=2.0, share=0.5)
    """
    ran = sorted(ran, key=lambda kernel: kernel.start)
    if not ran:
        raise ValueError("the profile holds no kernel")
    busy, until = 0.0, ran[0].start
    groups: dict[str, list[float]] = defaultdict(list)
    for kernel in ran:
        end = kernel.start + kernel.duration
        busy += max(0.0, end - max(until, kernel.start))
        until = max(until, end)
        groups[re.sub(r"([._]\d+)+$", "", kernel.name)].append(kernel.duration)
    total = sum(kernel.duration for kernel in ran) or 1.0
    span = until - ran[0].start or 1.0
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:LARGEST]
    by_kind = (
        KernelGroup(
            name, len(x) / count, sum(x) / count / 1e3, sum(x) / len(x) / 1e3, sum(x) / total
        )
        for name, x in largest
    )
    return Profile(
        len(ran) / count, span / count / 1e3, busy / count / 1e3, busy / span, tuple(by_kind)
    )


def advice(profile: Profile | str, floor_us: float, target_us: float, c: float) -> str:
    """Says what a drafter's profile shows, and what would help.

    >>> found = Profile(kernels_per_pass=200.0, pass_us=800.0, busy_us=320.0, busy=0.4)
    >>> text = advice(found, floor_us=40.0, target_us=3200.0, c=0.25)
    >>> "busy for 40%" in text, "0.10 of the target's" in text, "XLA_FLAGS" in text
    (True, True, True)
    """
    if isinstance(profile, str):
        return (
            f"No profile could be had ({profile}). A drafter's pass takes {c * target_us:.0f} µs; "
            f"reading its weights would take {floor_us:.0f} µs."
        )
    made_of = (
        f"A drafter's pass is {profile.kernels_per_pass:.0f} kernels in {profile.pass_us:.0f} µs, "
        f"and the device is busy for {100 * profile.busy:.0f}% of them; reading its weights takes "
        f"{floor_us:.0f} µs."
    )
    if profile.busy < WAITING:
        return (
            f"{made_of} Most of c is waiting for launches: without the gaps a pass would take "
            f"{profile.busy_us:.0f} µs, {profile.busy_us / target_us:.2f} of the target's. Plan: "
            "launch a round's draft as one CUDA graph (try "
            "XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE), then fewer kernels a layer: one "
            "product for queries, keys and values, one for gate and input; or a drafter of fewer, "
            "wider layers."
        )
    if profile.busy_us > TOLERANCE * floor_us:
        return (
            f"{made_of} The device is busy with small kernels, most of which move little: "
            f"{_largest(profile)}. Plan: fewer of them (one product for queries, keys and values, "
            "one for gate and input; norms and attention fused), or a drafter of fewer, wider "
            f"layers; at the memory's speed c would be {floor_us / target_us:.3f}."
        )
    return (
        f"{made_of} That is what its weights take: only a smaller drafter, or one in int8, has a "
        "smaller c."
    )


def _largest(profile: Profile) -> str:
    return ", ".join(f"{kernel.name} {100 * kernel.share:.0f}%" for kernel in profile.largest[:3])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and profiles a pair."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default="")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=INNER)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args(arguments)
    draft = options.draft or names.default_draft_model(options.target)
    limits = {"gamma": options.gamma, "max_new_tokens": options.max_new_tokens, "eos_ids": ()}
    prepared = prepared_pair(options.target, draft, options.dtype, None, 1, **limits)
    for stage, milliseconds in stages(prepared, options.rounds).items():
        print(f"{stage:8} {milliseconds:8.3f} ms a round")
    print(passes(prepared.plain()))


if __name__ == "__main__":
    main()
