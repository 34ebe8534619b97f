"""A profile shows kernels, gaps and weights; and a refused one is no failure."""

import jax
import pytest

from benchmarks import profile
from jaxspec.core import Prompt
from jaxspec.decode.request import prepare
from jaxspec.testing import table_model

# Of a GPU's profile: two streams, three passes of two kernels, a copy and a line that is no stream.
GPU = """
planes { name: "/host:CPU" }
planes {
  name: "/device:GPU:0"
  lines { name: "Stream #13(Compute)" timestamp_ns: 100
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000 }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 2000000 } }
  lines { name: "Stream #14(MemcpyD2D)" timestamp_ns: 100
    events { metadata_id: 3 offset_ps: 6000000 duration_ps: 4000000 } }
  lines { name: "XLA Modules" events { metadata_id: 1 offset_ps: 0 duration_ps: 99000000 } }
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_dot_12" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_dot_3" } }
  event_metadata { key: 3 value { id: 3 name: "MemcpyD2D" } }
}
"""


def test_kernels_of_a_gpu():
    data = jax.profiler.ProfileData
    ran = profile.kernels(data.from_serialized_xspace(data.text_proto_to_serialized_xspace(GPU)))
    assert [kernel.name for kernel in ran] == [
        "gemm_fusion_dot_12",
        "gemm_fusion_dot_3",
        "MemcpyD2D",
    ]
    summary = profile.summary(ran, count=1)
    assert (summary.kernels_per_pass, summary.pass_us, summary.busy_us) == (3, 10.0, 9.0)
    assert summary.largest[0] == profile.KernelGroup(
        "gemm_fusion_dot", 2.0, us_per_pass=6.0, us_each=3.0, share=0.6
    )


@pytest.mark.parametrize(
    ("busy", "floor_us", "said"),
    [
        (0.4, 40.0, "waiting for launches"),
        (0.9, 40.0, "small kernels"),
        (0.9, 80.0, "That is what its weights take"),
    ],
)
def test_advice_tells_gaps_from_kernels_from_weights(busy, floor_us, said):
    summary = profile.Profile(kernels_per_pass=50.0, pass_us=100.0, busy_us=100 * busy, busy=busy)
    assert said in profile.advice(summary, floor_us, target_us=1000.0, c=0.1)


def prepared():
    model = table_model(jax.random.key(0), vocab=5)
    return prepare(
        model, Prompt(jax.numpy.array([[3, 1]]), jax.numpy.array([2])), max_new_tokens=16
    )


@pytest.mark.slow
def test_a_profile_is_taken_and_read():
    parts = profile.passes(prepared())
    if not isinstance(parts, str):
        assert parts.kernels_per_pass > 0 and 0 < parts.busy <= 1
        assert sum(kernel.share for kernel in parts.largest) <= 1 + 1e-9


def test_a_refused_profile_is_no_failure(monkeypatch):
    def refuse(folder):
        raise RuntimeError("CUPTI is not to be had")

    monkeypatch.setattr(jax.profiler, "trace", refuse)
    parts = profile.passes(prepared())
    assert parts == "RuntimeError: CUPTI is not to be had"
    assert "No profile could be had" in profile.advice(parts, 1.0, 10.0, 0.1)
