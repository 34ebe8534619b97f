"""Both sides of the roofline, and what it says of speculation at large batches."""

import numpy as np
import pytest

from jaxspec.analysis import formulas
from jaxspec.analysis.roofline import (
    MACHINES,
    Load,
    Machine,
    draft_cost,
    load_of,
    load_of_size,
    machine,
    pass_time,
    spare_tokens,
    verify_cost,
)
from jaxspec.nets.decoder import decoder_config

TOY = Machine(bandwidth=100.0, bfloat16=1000.0, float32=500.0)
# 100 bytes of weights: a second; 100 operations a token: a tenth
MODEL = Load(parameters=50, cache_bytes=10)


def test_memory_then_arithmetic():
    assert pass_time(TOY, MODEL._replace(cache_bytes=0), 1, [1, 10, 20, 30]).tolist() == [
        1.0,
        1.0,
        2.0,
        3.0,
    ]
    assert pass_time(TOY, MODEL, [1, 2]).tolist() == [1.1, 1.2]  # each row brings its cache
    assert spare_tokens(TOY, MODEL) == 10


def test_float32_reads_twice_the_bytes_at_its_own_peak():
    load = Load(50, dtype="float32")
    assert pass_time(TOY, load, 1, [1, 20]).tolist() == [2.0, 4.0]
    assert spare_tokens(TOY, load) == 10


def test_c_is_the_ratio_of_bytes_where_memory_rules():
    assert draft_cost(TOY, Load(5), Load(50)) == pytest.approx(0.1)
    # and of operations where they do
    assert draft_cost(TOY, Load(5), Load(50), batch=1000) == pytest.approx(0.1)


def test_caches_keep_the_verify_pass_cheap_at_large_batches():
    """Rows bring bytes as well as operations: with long rows, memory rules on."""
    long = MODEL._replace(cache_bytes=1000)
    assert verify_cost(TOY, long, 3, batch=100) == pytest.approx(1.0)
    assert verify_cost(TOY, MODEL._replace(cache_bytes=0), 3, batch=100) == pytest.approx(4.0)


def test_layers_with_a_window_read_no_more_than_their_rings():
    shape = dict(dim=4, ff_dim=4, layers=3, heads=1, kv_heads=1, head_dim=2)
    config = decoder_config(8, **shape, window=5, local=(True, False))
    entry = 2 * 2 * 4  # a key and a value of two float32
    read = [load_of(config, row=row).cache_bytes for row in (600, 1000)]
    assert read == [(row + 2 * 5) * entry for row in (600, 1000)]


@pytest.mark.parametrize("name", MACHINES)
def test_batch_ends_what_speculation_gains(name):
    """At batch 1 the verify pass is free, as the paper assumes; beyond the ridge it costs gamma + 1
    and loses.
    """
    target, chip = Load(11e9), machine(name)

    def best(batch: int) -> int:
        v = verify_cost(chip, target, np.arange(17), batch)
        return int(formulas.optimal_gamma(0.75, 0.02, v))

    assert verify_cost(chip, target, 7) == 1.0
    assert best(1) == formulas.optimal_gamma(0.75, 0.02, most=16)
    assert best(round(spare_tokens(chip, target)) * 2) == 0


def test_all_machines_are_memory_bound_at_one_token():
    assert all(spare_tokens(chip, Load(1e9)) > 8 for chip in MACHINES.values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: machine("h20"),
            "no machine 'h20': did you mean 'h200'.*expected one of b200, h200, h100",
        ),
        (lambda: machine("abacus"), "no machine 'abacus': expected"),
        (lambda: machine("tpu-v4").peak("float32"), "no peak is published in 'float32'"),
        (lambda: machine("h200").peak("bandwidth"), "no peak is published in 'bandwidth'"),
        (lambda: pass_time(TOY, MODEL, 0), "batch is 0.* expected at least 1"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("size", "measured"),
    [
        ("llama-3.1-8b", 6.05),
        ("llama-3.2-1b", 1.18),
        ("t5-v1_1-xxl", 4.68),
        ("t5-v1_1-small", 0.26),
    ],
)
def test_estimates_of_an_h100_are_within_a_tenth_of_what_was_measured(size, measured):
    """Milliseconds of a pass over one token, from the kernel traces behind docs/gpu.md."""
    assert 1e3 * float(
        pass_time(machine("h100"), load_of_size(size, "bfloat16", 128))
    ) == pytest.approx(measured, rel=0.1)


def test_small_products_take_as_long_as_any_kernel():
    """A network's matrices, by hand: 100 of 50 numbers, which would stream in half a second
    each.
    """
    toy = TOY._replace(kernel=1.0)
    load = Load(5000, matrices=((50, 100),), small_kernels=7)
    assert float(pass_time(toy, load)) == 100 + 7
    assert float(pass_time(toy, load._replace(matrices=((500, 10),)))) == 5000 * 2 / 100 + 7
