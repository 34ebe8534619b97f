"""Compiled programs, kept and loaded again."""

import json
import pickle

import jax
import numpy as np
import pytest

from jaxspec import Prompt
from jaxspec.analysis import aot
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.testing import prepared_table


@pytest.fixture(scope="module")
def prepared():
    made = prepared_table(max_new_tokens=8)
    return made.replace(drafter=made.target, gamma=3)


@pytest.fixture(scope="module")
def stored(prepared, tmp_path_factory):
    made = aot.compile_generation(prepared, jax.devices())
    return made, aot.save({"speculative": made}, tmp_path_factory.mktemp("programs"))


def test_a_loaded_program_gives_the_text_of_generate(prepared, stored):
    made, folder = stored
    run = aot.load(folder, prepared)
    assert np.array_equal(run(prepared).tokens, loop.run(prepared).tokens)
    assert made.program.arguments > 0 and made.program.memory > made.program.arguments


def test_a_program_of_shapes_serves_models_with_several_end_tokens(prepared, stored):
    """A shape names no end tokens; those that a checkpoint's files name are arguments of the
    program.
    """
    _, folder = stored
    text = np.asarray(loop.run(prepared).tokens)
    ends = text[0, 3:6].tolist()
    ending = prepared.replace(eos_ids=ends)
    assert ending.request.eos.shape == (2, 3) and prepared.request.eos.shape == (2, 1)
    out, expected = aot.load(folder, prepared)(ending), loop.run(ending)
    assert np.array_equal(out.tokens, expected.tokens) and not np.array_equal(out.tokens, text)
    with pytest.raises(ValueError, match="is of another shape: "):
        aot.load(folder, prepared.replace(eos_ids=range(aot.ENDS + 1)))


def test_a_program_is_refused_for_another_shape_or_decoder(prepared, stored):
    _, folder = stored
    longer = prepared.replace(max_new_tokens=40)  # the same arguments, but another output
    with pytest.raises(ValueError, match=r"is of another program: .* Compile it again"):
        aot.load(folder, longer)
    more = Prompt(np.tile(prepared.prompt.tokens, (2, 1)), np.tile(prepared.prompt.length, 2))
    with pytest.raises(ValueError, match="is of another shape: "):
        aot.load(
            folder,
            prepare(prepared.target, more, drafter=prepared.target, gamma=3, max_new_tokens=8),
        )
    with pytest.raises(FileNotFoundError, match=r"no program at .*plain"):
        aot.load(folder, prepared, "plain")


def test_a_program_is_refused_by_another_version(prepared, stored, tmp_path):
    _, folder = stored
    held = pickle.loads((folder / "speculative.executable").read_bytes())
    held["fingerprint"]["jax"] = "0.0.1"
    (tmp_path / "speculative.executable").write_bytes(pickle.dumps(held))
    with pytest.raises(ValueError, match=r"another jax: 0.0.1, and here it is \d"):
        aot.load(tmp_path, prepared)
    assert json.loads((folder / "speculative.json").read_text())["jax"] == jax.__version__
