"""A process that makes models for ever keeps the last ones: no cache grows without an end."""

import ast
import functools
import gc
import importlib
import pkgutil
import types
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxspec
from jaxspec import drafters, rules, sampling
from jaxspec.core import programs
from jaxspec.decode import speculative
from jaxspec.testing import table_model

PLAIN = {  # static arguments of `jax.jit` that are values, so that there are few of them
    *("children", "config", "count", "draw", "dtype", "shape", "shares_noise", "sizes", "vocab"),
}


def fresh(base):
    """The same model, of functions of its own, as an adapter makes them; and a sign of whether it
    is alive.
    """

    def prefill(*arguments):
        return base.lm.prefill(*arguments)

    return base._replace(lm=base.lm._replace(prefill=prefill)), weakref.ref(prefill)


def modules():
    for info in pkgutil.walk_packages(jaxspec.__path__, "jaxspec."):
        if info.name != "jaxspec.__main__":
            yield importlib.import_module(info.name)


def test_every_cache_is_bounded():
    caches = {}
    for module in modules():
        for name, value in vars(module).items():
            if (
                isinstance(value, functools._lru_cache_wrapper)
                and value.__module__ == module.__name__
            ):
                caches[f"{module.__name__}.{name}"] = value
    assert len(caches) > 50
    assert not [
        name for name, cache in caches.items() if cache.cache_parameters()["maxsize"] is None
    ]


def test_no_program_is_kept_by_its_functions_for_ever():
    """`jax.jit` itself holds on to static arguments: those that may be functions go through
    `programs.jit`.
    """
    for path in Path(jaxspec.__file__).parent.rglob("*.py"):
        for call in [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]:
            if ast.unparse(call).startswith(("jax.jit(", "functools.partial(jax.jit,")):
                static = [
                    ast.literal_eval(k.value) for k in call.keywords if k.arg == "static_argnames"
                ]
                names = {
                    name
                    for value in static
                    for name in ([value] if isinstance(value, str) else value)
                }
                assert names <= PLAIN, f"{path}:{call.lineno}: {names - PLAIN}"


def test_models_that_are_gone_are_let_go_of():
    base, alive = table_model(jax.random.key(0), 5), []
    for _ in range(200):
        model, sign = fresh(base)
        alive.append(sign)
        tree = drafters.tree(model, (2, 1))
        speculative(model.lm, tree.functions, rules.rejection(), sampling.greedy(), 3)
        prepared = jaxspec.prepare(model, [[1, 2]], drafter=model, max_new_tokens=4)
    del model, tree, prepared
    gc.collect()
    assert 0 < sum(sign() is not None for sign in alive) <= programs.KEPT


def test_programs_go_with_the_functions_that_they_are_of():
    @programs.jit(static_argnames=("function",), kept=2)
    def apply(function, x, *, scale=2.0):
        return function(scale * x)

    def negative():
        return lambda x: -x

    functions = [negative() for _ in range(5)]
    alive = [weakref.ref(function) for function in functions]
    for function in functions:
        assert float(apply(function, jnp.array(1.0), scale=3.0)) == -3.0
    count = apply.num_programs()
    assert (
        float(apply(functions[-1], jnp.array(5.0))) == -10.0 and apply.num_programs() == count == 2
    )
    del function, functions
    gc.collect()
    assert [sign() is not None for sign in alive] == [False, False, False, True, True]
    assert "func" in apply.lower(alive[-1](), jnp.array(1.0)).as_text()


def test_a_device_s_options_are_given_to_the_compiler_of_the_outermost_program(monkeypatch):
    @programs.jit(static_argnames=("function",))
    def apply(function, x):
        return function(x)

    one = jnp.array(1.0)
    assert float(apply(jnp.negative, one)) == -1.0  # this device has none
    monkeypatch.setattr(
        programs, "COMPILER_OPTIONS", {jax.devices()[0].device_kind: {"no_such_option": "1"}}
    )
    monkeypatch.setattr(programs, "_is_known", lambda *_: True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        apply(jnp.abs, one)
    assert float(jax.jit(lambda x: apply(jnp.abs, x))(one)) == 1.0
    assert jax.vmap(lambda x: apply(jnp.abs, x))(one[None]).tolist() == [1.0]
    assert float(apply.lower(jnp.abs, one).compile()(x=one)) == 1.0


def test_options_that_a_compiler_lacks_are_left_out(monkeypatch):
    """Its release may be older or newer than ours; programs are then a little slower, and not
    refused.
    """
    device = jax.devices()[0]
    options = {"xla_cpu_enable_fast_min_max": "True", "no_such_option": "1"}
    monkeypatch.setattr(programs, "COMPILER_OPTIONS", {device.device_kind: options})
    with pytest.warns(UserWarning, match=r"without the option no_such_option: .*[Nn]o such"):
        assert programs.accepted_options(device) == {"xla_cpu_enable_fast_min_max": "True"}

    @programs.jit(static_argnames=("function",))
    def apply(function, x):
        return function(x)

    assert float(apply(jnp.abs, jnp.array(-1.0))) == 1.0


def test_a_generation_is_compiled_once_for_its_functions():
    model, _ = fresh(table_model(jax.random.key(0), 5))
    texts = [
        jaxspec.generate(model, [[1, 2]], max_new_tokens=4, repetition_penalty=p).tokens
        for p in (1.0, 1.5)
    ]
    program = jaxspec.decode.loop.generation
    count = program.num_programs()
    jaxspec.generate(model, [[3]], max_new_tokens=4, repetition_penalty=2.0)
    assert program.num_programs() == count and texts[0].shape == texts[1].shape


def test_programs_are_stored_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert programs.folder({}) == tmp_path / ".cache" / "jaxspec" / "programs"
    assert programs.folder({"XDG_CACHE_HOME": "/x"}).parent.as_posix() == "/x/jaxspec"


@pytest.mark.parametrize(
    ("chosen", "env", "ours"),
    [
        (None, {}, True),
        (None, {"JAX_COMPILATION_CACHE_DIR": "/there"}, False),
        ("/there", {}, False),
    ],
)
def test_the_users_choice_of_a_cache_is_kept(chosen, env, ours, tmp_path):
    updates = {}
    config = types.SimpleNamespace(jax_compilation_cache_dir=chosen, update=updates.__setitem__)
    assert programs.keep({"XDG_CACHE_HOME": str(tmp_path), **env}, config) == ""
    expected = str(tmp_path / "jaxspec" / "programs") if ours else None
    assert updates.get("jax_compilation_cache_dir") == expected


def test_programs_are_not_stored_where_nothing_can_be_written(monkeypatch, tmp_path):
    """jax would warn of each program, with its own source."""
    updates = {}
    config = types.SimpleNamespace(jax_compilation_cache_dir=None, update=updates.__setitem__)
    (tmp_path / "file").touch()
    for home in (tmp_path / "file", tmp_path / "file" / "inside"):
        why = programs.keep({"XDG_CACHE_HOME": str(home)}, config)
        assert why.startswith(f"compiled programs are not stored for the next call ({home}")
    monkeypatch.setattr(programs.os, "access", lambda *_: False)
    assert "Permission denied): set XDG_CACHE_HOME to a folder" in programs.keep(
        {"XDG_CACHE_HOME": str(tmp_path)}, config
    )
    monkeypatch.setattr(
        programs.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("there is no home"))
    )
    assert "(there is no home)" in programs.keep({}, config)
    assert updates == {}
