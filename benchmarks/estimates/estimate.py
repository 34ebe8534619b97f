"""Estimates of a generation, from programs that `absent` compiled for TPUs or GPUs
that are not here.

Times of a TPU are its compiler's own estimates, which it writes on every fused operation. Times of
a GPU are those of its kernels: each takes as long as its bytes, and at least as long as a small
kernel, both as measured on an H100 (`roofline.Machine.kernel_seconds`, docs/gpu.md).

`program_text` assigns operations to parts. The estimates leave out two things: waiting for other
chips, and prefetching matrices into the chip's own memory, which v5e and v6e do with whole ones. So
a part's time is the larger of its estimate and the memory's time for the bytes it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.estimates import absent
from benchmarks.estimates.absent import Programs
from benchmarks.estimates.chips import GPUS
from benchmarks.estimates.program_text import Contents, Part, read
from jaxspec.analysis import acceptance, cost, formulas
from jaxspec.analysis import plan as planning
from jaxspec.decode.request import Prepared

ROUND = ("draft", "draft step", "target", "accept", "commit", "rest")
# the share of a GPU's memory that jax reserves, unless XLA_PYTHON_CLIENT_MEM_FRACTION says
# otherwise
RESERVED = 0.75
COMPILED = (5,)  # gammas whose rounds are compiled for a plan, beside the largest in question


class Expected(NamedTuple):
    """The promise of an acceptance rate.

    Attributes:
        tokens_per_round: tokens a round of each row.
        tokens_per_second, plain_tokens_per_second: tokens a second of all rows, with a drafter and
            without.
        speed_up: the former over the latter.
    """

    tokens_per_round: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speed_up: float


class Estimate(NamedTuple):
    """The compiler's estimate of a generation, and of plain decoding with the same target.

    Attributes:
        programs: the compiled programs, with their sizes and devices.
        plain, speculative: the contents of both programs; the latter is None where nothing drafts.
    """

    programs: Programs
    plain: Contents
    speculative: Contents | None

    gamma = property(lambda self: self.programs.gamma, doc="Draft tokens a round.")

    def seconds(self, name: str, contents: Contents | None = None) -> float:
        """Returns the time of a part of the speculative program, or of another one."""
        contents = contents or self.speculative or self.plain
        return contents.parts.get(name, Part()).seconds(self.programs.machine)

    @property
    def plain_seconds(self) -> float:
        """The time of a token of plain decoding: the pass and what is around it."""
        return sum(self.seconds(name, self.plain) for name in ROUND)

    @property
    def on_gpus(self) -> bool:
        """Tells whether it is of GPUs."""
        return self.programs.topology.partition(":")[0] in GPUS

    @property
    def steps(self) -> int:
        """The number of the drafter's loop's steps in a round: a tree's levels are written out, its
        loops are small.
        """
        return 1 if self.programs.trees else self.gamma - 1

    def in_a_round(self, count: str, contents: Contents) -> int:
        """Adds up "kernels" or "host_reads" of a round, or of a step of plain decoding."""
        repeated = {"draft step": self.steps}
        return sum(
            repeated.get(name, 1) * getattr(contents.parts.get(name, Part()), count)
            for name in ROUND
        )

    @property
    def draft_seconds(self) -> float:
        """The time of a round's draft: of a chain, its first token and one step for each other
        token.
        """
        return self.seconds("draft") + self.steps * self.seconds("draft step")

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
        """The time of a draft token (of a tree, of a level) over that of the target's one-token
        pass.
        """
        return self.draft_seconds / max(self.gamma, 1) / self.seconds("target", self.plain)

    @property
    def v(self) -> float:
        """The time of the verify pass over that of the target's one-token pass."""
        return self.seconds("target") / self.seconds("target", self.plain)

    def expected(self, alpha: float) -> Expected:
        """Computes what an acceptance rate promises, if draft tokens are accepted independently.

        Raises:
            ValueError: the draft is a tree, whose tokens a round do not follow from one rate.
        """
        if self.programs.trees or self.speculative is None:
            raise ValueError(
                "an acceptance rate gives the tokens a round only for chains: estimate a chain, "
                "with a drafter"
            )
        tokens, rows = float(formulas.expected_tokens(alpha, self.gamma)), self.programs.batch
        speed, plain = (
            rows * n / t for n, t in ((tokens, self.round_seconds), (1.0, self.plain_seconds))
        )
        return Expected(tokens, speed, plain, speed / plain)


def estimate(prepared: Prepared, topology: str, **options: Any) -> Estimate:
    """Compiles a generation as `absent.compile_for` does, with its arguments and errors, and estimates
    its times.
    """
    programs = absent.compile_for(prepared, topology, **options)
    texts = {name: kept.executable.as_text() or "" for name, kept in programs.compiled.items()}
    contents = {name: read(text, programs.machine) for name, text in texts.items()}
    return Estimate(programs, contents["plain"], contents.get("speculative"))


def plan(
    alpha: float,
    prepared: Prepared,
    topology: str,
    *,
    most: int = 16,
    advance: Callable[[str], object] = lambda doing: None,
) -> planning.Plan:
    """Plans for a TPU that is not here, by what its compiler estimates of the very programs: some
    minutes.

    Plain decoding and rounds with two gammas are compiled; v is taken to be linear between them.

    Args:
        alpha: acceptance rate.
        prepared: a generation with a target and a draft model; shapes will do (`absent.shape_model`).
        topology: the argument of `absent.compile_for`, for one chip.
        most: the largest gamma to consider.
        advance: called before each of the programs: plain decoding, and a round with each of the
            gammas.
    """
    estimates = list[Estimate]()
    for gamma in cost.gammas_up_to(most, COMPILED):
        plain = estimates[0].programs.compiled["plain"] if estimates else None
        estimates.append(
            estimate(prepared.replace(gamma=gamma), topology, plain=plain, advance=advance)
        )
    v = cost.interpolated_v(estimates, most)
    c_hat = cost.operations_ratio(prepared.target, acceptance.drafting_model(prepared))
    return planning.plan(alpha, estimates[0].c, v, c_hat=c_hat, batch=estimates[0].programs.batch)


class Row(NamedTuple):
    """A part of a generation that a compiler estimated.

    Attributes:
        name: the part's name.
        cycles: the compiler's estimate.
        seconds: the larger of that and of the memory's time for what is read.
        reads: bytes.
        floor: seconds that reading weights and caches once takes; None where a part has no such
            bytes.
        kernels, host_reads: `program_text.Part.kernels` and `host_reads`, for a GPU's program.
    """

    name: str
    cycles: int
    seconds: float
    reads: int
    floor: float | None
    kernels: int = 0
    host_reads: int = 0

    over_floor = property(
        lambda self: self.seconds / self.floor if self.floor else None, doc="How far it is above."
    )


def rows(estimated: Estimate) -> list[Row]:
    """Lists the parts of an estimate: prefill, the steps, the passes, and the rest of a round."""
    machine, floors = estimated.programs.machine, estimated.programs.floors

    def row(name: str, contents: Contents, parts: Sequence[str], floor: float | None) -> Row:
        chosen = [contents.parts.get(part, Part()) for part in parts]
        seconds = sum(part.seconds(machine) for part in chosen)
        counts = Part(*map(sum, zip(*chosen, strict=True)))
        floor = floor and floor / machine.bandwidth
        return Row(
            name,
            counts.cycles,
            seconds,
            counts.bytes_read,
            floor,
            counts.kernels,
            counts.host_reads,
        )

    plain, contents = estimated.plain, estimated.speculative
    target, draft = floors.get("target"), floors.get("draft")
    listed = [
        row("plain: prefill", plain, ["prefill"], None),
        row("plain: pass over a token", plain, ["target"], target),
    ]
    listed += [row("plain: rest of a step", plain, ["accept", "commit", "rest"], None)]
    if contents is not None:
        step = "draft step" if "draft step" in contents.parts else "draft"
        called = "draft of a round" if estimated.programs.trees or step == "draft" else "draft step"
        listed += [row("prefill", contents, ["prefill"], None)]
        listed += (
            [row("draft, first token", contents, ["draft"], draft)]
            if called != "draft of a round"
            else []
        )
        chosen = [step] if called == "draft step" else ["draft", "draft step"]
        listed += [row(called, contents, chosen, draft if called == "draft step" else None)]
        listed += [row("verify pass", contents, ["target"], target)]
        listed += [row("rest of a round", contents, ["accept", "commit", "rest"], None)]
    return listed


def notes(estimated: Estimate, alpha: float | None = None) -> list[str]:
    """Says in words what c and v are, what an acceptance rate promises, and what the times leave
    out.
    """
    said, programs = [], estimated.programs
    if estimated.speculative is not None and estimated.on_gpus:
        said += [
            "Times are those of kernels as measured on an H100, or of the bytes they read if these "
            "take longer."
        ]
    if estimated.speculative is not None:
        said += [
            f"c = {estimated.c:.3f}, v = {estimated.v:.2f}; a round is "
            f"{1e3 * estimated.round_seconds:.3f} ms, of "
            f"which {estimated.rest_seconds / estimated.round_seconds:.1%} are outside of both "
            "models."
        ]
    if alpha is not None:
        expected = estimated.expected(alpha)
        said += [
            f"With α = {alpha:g}: {expected.tokens_per_round:.2f} tokens a round, "
            f"{expected.tokens_per_second:.0f} "
            f"tokens/s for {expected.plain_tokens_per_second:.0f} of plain decoding: "
            f"{expected.speed_up:.2f} times."
        ]
    if programs.topology.startswith(("v5e", "v6e")):
        said += [
            "Cycles leave out the memory where matrices are prefetched: ms are the larger of "
            "cycles and reads."
        ]
    if programs.collectives.get("plain") and not estimated.on_gpus:
        said += ["Cycles leave out what chips wait for each other."]
    for name, contents in (("plain", estimated.plain), ("speculative", estimated.speculative)):
        if contents is None:
            continue
        if contents.copies:
            total = sum(contents.copies.values())
            said += [
                f"The {name} loop copies {total / 1e6:.1f} MB into another layout in every round."
            ]
        if contents.widened:
            total = sum(contents.widened.values())
            said += [
                f"The {name} loop writes {total / 1e6:.1f} MB of weights or caches in a wider "
                "dtype in every round."
            ]
        if estimated.on_gpus:
            kernels, reads = (
                estimated.in_a_round(count, contents) for count in ("kernels", "host_reads")
            )
            said += [
                f"A {'step' if name == 'plain' else 'round'} of the {name} program runs {kernels} "
                f"kernels, and the host waits for {reads} condition{'s' * (reads != 1)}: "
                "milliseconds leave out the waiting."
            ]
            size, memory = programs.compiled[name].program.memory, programs.machine.memory
            if memory is not None and RESERVED * memory < size <= memory:
                said += [
                    f"The {name} program takes more than {RESERVED:.0%} of a GPU's memory, which "
                    "is what jax reserves: set XLA_PYTHON_CLIENT_MEM_FRACTION to more."
                ]
    return said


def to_dict(estimated: Estimate) -> dict[str, Any]:
    """Returns an estimate as plain values, for JSON; without the executables."""
    both = {"plain": estimated.plain, "speculative": estimated.speculative}
    report = absent.to_dict(estimated.programs)
    report |= {
        "contents": {name: contents for name, contents in both.items() if contents is not None}
    }
    report |= {
        name: getattr(estimated, name) if estimated.speculative else None for name in ("c", "v")
    }
    return report | {
        "rows": [row._asdict() | {"over_floor": row.over_floor} for row in rows(estimated)]
    }
