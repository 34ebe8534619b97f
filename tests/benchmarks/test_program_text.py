"""What is read of a program as XLA prints it: a small one, written by hand in the form of a
TPU's.
"""

import pytest

from benchmarks.estimates import program_text
from benchmarks.estimates.absent import collectives
from benchmarks.estimates.program_text import Part, read
from jaxspec.analysis import roofline

CYCLES = 'backend_config={"window_config":{"estimated_cycles":"%d"}}'
SCOPE = 'metadata={op_name="jit(generation)/%s"}'
WEIGHT = "bf16[1024,1024]{1,0:T(8,128)(2,1)}"  # 2 MiB
MIB = 1 << 20
BRANCHES = "{%cheap_branch, %dear_branch}"

PROGRAM = f"""HloModule jit_generation, is_scheduled=true

%fused_product (param_0.1: bf16[1,1024], param_1.1: bf16[1024,1024]) -> bf16[1,1024] {{
  %param_0.1 = bf16[1,1024]{{1,0}} parameter(0)
  %param_1.1 = {WEIGHT} parameter(1)
  ROOT %convolution.1 = bf16[1,1024]{{1,0}} convolution(%param_0.1, %param_1.1), dim_labels=bf_oi->bf
}}

%fused_lookup (param_0.2: bf16[1024,1024], param_1.2: s32[]) -> bf16[1,1024] {{
  %param_1.2 = s32[] parameter(1)
  %param_0.2 = {WEIGHT} parameter(0)
  %bitcast.2 = {WEIGHT} bitcast(%param_0.2)
  %fusion.30 = {WEIGHT} fusion(%bitcast.2), kind=kLoop, calls=%fused_relayout
  ROOT %dynamic-slice.1 = bf16[1,1024]{{1,0}} dynamic-slice(%fusion.30, %param_1.2), dynamic_slice_sizes={{1,1024}}
}}

%fused_relayout (param_0.3: bf16[1024,1024]) -> bf16[1024,1024] {{
  %param_0.3 = {WEIGHT} parameter(0)
  ROOT %copy.9 = bf16[1024,1024]{{0,1:T(8,128)(2,1)}} copy(%param_0.3)
}}

%fused_rotation (param_0.4: bf16[1,1024]) -> (bf16[1,1024]) {{
  %param_0.4 = bf16[1,1024]{{1,0}} parameter(0)
  %multiply.4 = bf16[1,1024]{{1,0}} multiply(%param_0.4, %param_0.4), {
    SCOPE % "while/body/target/mul"
}
  ROOT %tuple.4 = (bf16[1,1024]{{1,0}}) tuple(%multiply.4)
}}

%cheap_branch (arg.1: bf16[1,1024]) -> bf16[1,1024] {{
  ROOT %fusion.20 = bf16[1,1024]{{1,0:S(1)}} fusion(), kind=kLoop, calls=%none, {CYCLES % 1}
}}

%dear_branch (arg.2: bf16[1,1024]) -> bf16[1,1024] {{
  ROOT %fusion.21 = bf16[1,1024]{{1,0:S(1)}} fusion(), kind=kLoop, calls=%none, {CYCLES % 50}
}}

%draft_loop (carry.1: (bf16[1,1024], bf16[1024,1024])) -> (bf16[1,1024], bf16[1024,1024]) {{
  %carry.1 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) parameter(0)
  %held.1 = bf16[1,1024]{{1,0:S(1)}} get-tuple-element(%carry.1), index=0
  %weight.1 = {WEIGHT} get-tuple-element(%carry.1), index=1
  %fusion.1 = bf16[1,1024]{{1,0:S(1)}} fusion(%held.1, %weight.1), calls=%fused_product, {
    CYCLES % 300
}
  ROOT %tuple.1 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) tuple(%fusion.1, %weight.1)
}}

%round (carry.2: (bf16[1,1024], bf16[1024,1024])) -> (bf16[1,1024], bf16[1024,1024]) {{
  %carry.2 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) parameter(0)
  %held.2 = bf16[1,1024]{{1,0:S(1)}} get-tuple-element(%carry.2), index=0
  %weight.2 = {WEIGHT} get-tuple-element(%carry.2), index=1
  %while.1 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) while(%carry.2), condition=%c, body=%draft_loop, {
    SCOPE % "while/body/draft/while"
}
  %copy-start.1 = (bf16[1024,1024]{{1,0:S(1)}}, {WEIGHT}, u32[]) copy-start(%weight.2)
  %copy-done.1 = bf16[1024,1024]{{1,0:T(8,128)(2,1)S(1)}} copy-done(%copy-start.1)
  %fusion.2 = bf16[1,1024]{{1,0:S(1)}} fusion(%held.2, %copy-done.1), kind=kOutput, calls=%fused_product, {
    SCOPE % "while/body/target/dot_general"
}, {CYCLES % 400}
  %slice-start.1 = (({
    WEIGHT
}), bf16[256,1024]{{1,0:S(1)}}, s32[]) slice-start(%weight.2), slice={{[0:256], [0:1024]}}
  %slice-done.1 = bf16[256,1024]{{1,0:S(1)}} slice-done(%slice-start.1)
  %joined.1 = bf16[512,1024]{{1,0:S(1)}} custom-call(%slice-done.1, %slice-done.1), custom_call_target="ConcatBitcast"
  %fusion.7 = bf16[1,512]{{1,0:S(1)}} fusion(%held.2, %joined.1), kind=kOutput, calls=%fused_product, {
    SCOPE % "while/body/accept/dot_general"
}, {CYCLES % 6}
  %all-reduce.1 = bf16[1,1024]{{1,0:S(1)}} all-reduce(%fusion.2), to_apply=%add
  %fusion.3 = (bf16[1,1024]{{1,0:S(1)}}) fusion(%all-reduce.1), kind=kLoop, calls=%fused_rotation, {
    CYCLES % 7
}
  %fusion.4 = bf16[1024,1024]{{0,1:T(8,128)(2,1)S(1)}} fusion(%weight.2), kind=kLoop, calls=%fused_relayout, {
    SCOPE % "while/body/target/transpose"
}, {CYCLES % 90}
  %conditional.1 = bf16[1,1024]{{1,0:S(1)}} conditional(%p, %held.2), branch_computations={
    BRANCHES
}, {SCOPE % "while/body/commit/cond"}
  %fusion.5 = bf16[1,1024]{{1,0:S(1)}} fusion(%held.2), kind=kLoop, calls=%none, {CYCLES % 3}
  ROOT %tuple.2 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) tuple(%fusion.5, %weight.2)
}}

ENTRY %main.1 (weights.1: bf16[1024,1024], token.1: s32[]) -> bf16[1,1024] {{
  %weights.1 = {WEIGHT} parameter(0)
  %token.1 = s32[]{{:S(6)}} parameter(1)
  %fusion.6 = bf16[1,1024]{{1,0:S(1)}} fusion(%weights.1, %token.1), kind=kLoop, calls=%fused_lookup, {
    SCOPE % "prefill/gather"
}, {CYCLES % 20}
  %tuple.3 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) tuple(%fusion.6, %weights.1)
  %while.2 = (bf16[1,1024]{{1,0:S(1)}}, {WEIGHT}) while(%tuple.3), condition=%c, body=%round, {
    SCOPE % "while"
}
  ROOT %copy.1 = {WEIGHT} copy(%weights.1), {CYCLES % 5}
}}
"""


def test_parts_are_those_of_scopes_and_loops():
    parts = read(PROGRAM).parts
    cycles = {name: part.cycles for name, part in parts.items()}
    assert cycles["draft step"] == 300, "an operation without a scope is of its loop"
    assert cycles["target"] == 400 + 7 + 90, (
        "one of several results has the scope of what it consists of"
    )
    assert cycles["commit"] == 50, "of a conditional the most expensive branch counts"
    assert (cycles["rest"], cycles["prefill"]) == (3, 20 + 5)


def test_bytes_are_those_of_the_main_memory():
    parts = read(PROGRAM).parts
    assert parts["draft step"].bytes_read == 2 * MIB, "what the carry holds on the chip is not read"
    assert parts["target"].bytes_read == 2 * 2 * MIB, "prefetched, and once more for the copy"
    assert parts["accept"].bytes_read == MIB, (
        "prefetched in two slices of half a MiB, which are joined"
    )
    assert parts["rest"].bytes_read == 0, "prefetches are counted where they are used"
    assert parts["prefill"].bytes_read == 2048 + 2 * MIB, (
        "of a table one row is looked up; the copy reads all"
    )


def test_copies_in_the_loop_and_collectives_are_listed():
    found = read(PROGRAM)
    assert collectives(PROGRAM) == {"all-reduce": (1, 2048)}
    assert found.copies == {"fusion.4": 2 * MIB}, (
        "neither a prefetch in the same layout, nor a copy outside of the loop"
    )


@pytest.mark.parametrize(
    ("scope", "part"),
    [
        ("jit(generation)/while/body/target/DecoderNet.run/add", "target"),
        ("jit(generation)/while/body/draft/while/cond/lt", "draft"),
        ("jit(generation)/while/body/add", "rest"),
        ("", "rest"),
    ],
)
def test_a_scope_names_a_part(scope: str, part: str):
    assert program_text.part_of(scope, "rest") == part


def test_a_part_takes_the_larger_of_estimate_and_memory():
    from jaxspec.analysis.roofline import Machine

    machine = Machine(bandwidth=100.0, bfloat16=None, float32=None, clock=10.0)
    assert Part(cycles=50, bytes_read=100).seconds(machine) == 5.0
    assert Part(cycles=5, bytes_read=100).seconds(machine) == 1.0


def test_of_alternatives_the_most_expensive_counts_and_of_what_is_done_or_not_all():
    """`core.branches` makes loops of both: three widths of a pass, of which one is run, and two
    levels of a tree.
    """

    def loop(name, cycles):
        return f"""
%{name} (arg.{cycles}: f32[8]) -> f32[8] {{
  ROOT %fusion.{cycles} = f32[8]{{0}} fusion(), kind=kLoop, calls=%none, {CYCLES % cycles}
}}
"""

    loops = {"one": 10, "two": 30, "three": 20, "level": 5, "deeper": 6}
    scopes = dict.fromkeys(("one", "two", "three"), "while/body/target/one_of/branch/while")
    scopes |= dict.fromkeys(("level", "deeper"), "while/body/draft/branch/while")
    calls = "\n".join(
        f"  %while.{name} = f32[8]{{0}} while(%carry.9), condition=%c, body=%{name}, "
        f"{SCOPE % scope}"
        for name, scope in scopes.items()
    )
    text = f"""
{"".join(loop(*pair) for pair in loops.items())}
%round (carry.9: f32[8]) -> f32[8] {{
  %carry.9 = f32[8]{{0}} parameter(0)
{calls}
  ROOT %copy.9 = f32[8]{{0}} copy(%while.one)
}}

ENTRY %main.1 (start: f32[8]) -> f32[8] {{
  %start = f32[8]{{0}} parameter(0)
  ROOT %while.9 = f32[8]{{0}} while(%start), condition=%c, body=%round, {SCOPE % "while"}
}}
"""
    cycles = {name: part.cycles for name, part in read(text).parts.items() if part.cycles}
    assert cycles == {"target": 30, "draft": 11}


def test_a_gpus_program_has_kernels_and_what_the_host_reads():
    """In the form of a GPU's: a product that lost its scope, a loop of known length, and weights
    that are widened.
    """
    known, many = 'backend_config={"known_trip_count":{"n":"4"}}', "1024,2048"
    text = f"""
%fused_widening (p.1: s8[{many}], p.2: f32[1024]) -> bf16[{many}] {{
  ROOT %multiply.1 = bf16[{many}]{{1,0}} multiply(%p.1, %p.2)
}}

%gemm (p.3: bf16[{many}], p.4: bf16[8]) -> f32[8] {{
  ROOT %dot.1 = f32[8]{{0}} dot(%p.3, %p.4)
}}

%step (carry.1: (bf16[8])) -> (bf16[8]) {{
  %carry.1 = (bf16[8]{{0}}) parameter(0)
  ROOT %fusion.1 = bf16[8]{{0}} fusion(%carry.1), kind=kLoop, calls=%none
}}

%round (carry.2: (bf16[8], s8[{many}])) -> (bf16[8], s8[{many}]) {{
  %carry.2 = (bf16[8]{{0}}, s8[{many}]{{1,0}}) parameter(0)
  %weight.2 = s8[{many}]{{1,0}} get-tuple-element(%carry.2), index=1
  %held.2 = bf16[8]{{0}} get-tuple-element(%carry.2), index=0
  %while.1 = (bf16[8]{{0}}) while(%held.2), condition=%c, body=%step, {
        SCOPE % "while/body/draft/while"
    }, {known}
  %bitcast.2 = s8[{many}]{{1,0}} bitcast(%weight.2)
  %wide.2 = bf16[{many}]{{1,0}} fusion(%bitcast.2, %held.2), kind=kLoop, calls=%fused_widening, {
        SCOPE % "while/body/target/mul"
    }
  %moved.2 = bf16[{many}]{{0,1}} bitcast(%wide.2)
  %product.2 = f32[8]{{0}} fusion(%held.2, %moved.2), kind=kCustom, calls=%gemm
  %converted.2 = f32[{many}]{{1,0}} fusion(%wide.2), kind=kLoop, calls=%fused_widening, {
        SCOPE % "while/body/target/convert"
    }
  ROOT %tuple.2 = (bf16[8]{{0}}, s8[{many}]{{1,0}}) tuple(%held.2, %weight.2)
}}

ENTRY %main.1 (weights.1: s8[{many}]) -> bf16[8] {{
  %weights.1 = s8[{many}]{{1,0}} parameter(0)
  ROOT %while.2 = (bf16[8]{{0}}, s8[{many}]{{1,0}}) while(%weights.1), condition=%c, body=%round, {
        SCOPE % "while"
    }
}}
"""
    found = read(text)
    assert found.widened == {"wide.2": 2 * 1024 * 2048}, (
        "a weight; not what the round itself has computed"
    )
    assert found.parts["target"]._replace(bytes_read=0) == Part(kernels=3), (
        "a product without a scope, too"
    )
    assert found.parts["draft step"]._replace(bytes_read=0) == Part(kernels=1), (
        "of a length that is known"
    )
    assert found.parts["rest"] == Part(kernels=1, host_reads=1), (
        "the host reads whether there is another round"
    )
    machine = roofline.machine("h100")
    assert read(text, machine).parts["target"].kernel_seconds == pytest.approx(
        3 * machine.kernel
    ), "small ones"
    large = read(text, machine._replace(kernel=1e-12)).parts["target"]
    assert large.kernel_seconds == pytest.approx(
        large.bytes_read / (0.84 * machine.bandwidth), rel=1e-3
    )
