"""Strict JAX for every test. At the root, not in tests/, because the doctests in jaxspec/ are tests, too."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the time that the tests take, and this halves it; what the compiler's optimisations make of a
# program is the compiler's business. XLA_FLAGS="" brings them back.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones refuse these flags
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network; huggingface_hub reads this when it is imported

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)

# A second run need not compile again. Tests that count compilations are not misled: jax reports one whether or not
# this cache then provides the result.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"jax{jax.__version__}-py{sys.version_info.major}{sys.version_info.minor}"
    jax.config.update("jax_compilation_cache_dir", str(home / "jaxspec-tests" / version))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")  # of the processes of tests, too
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# What jax traces are many small objects that live long; looking through all of them time and again is a good part of
# what tracing takes.
gc.set_threshold(100_000, 20, 50)

# The same examples on every run and every machine; no deadline, since the first example of a test compiles.
hypothesis.settings.register_profile("jaxspec", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxspec")


# What takes longest is begun first, so that of several workers none is left with it in the end. Tests of a file share
# programs, as those of the command line do; what is listed in SEPARATE is long, and shares little.
LONGEST = ("tests/test_shipped.py", "tests/test_sharding.py", "tests/rules/", "tests/cli/", "tests/test_notebooks.py")
TOGETHER = ("tests/cli/",)
SLOW = Path(__file__).parent / "tests" / "slow.txt"  # marked `slow`; written by `pytest --record-slow 2`
SEPARATE = {"tests/test_shipped.py": re.compile(r"t5|gpt"), "tests/test_notebooks.py": re.compile(r"\[.*")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the combinations, too, that others stand for")
    parser.addoption("--record-slow", type=float, metavar="S", help="write tests that take S seconds to tests/slow.txt")


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` is heeded
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first, the rest as it was; without `--exhaustive`, not what others stand for."""
    slow = set(SLOW.read_text().splitlines()) if SLOW.is_file() else set()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
    if not config.getoption("exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
    items.sort(
        key=lambda item: next((i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `pytest -n`, tests that share programs go to one worker, which compiles them once."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedPrograms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            part = SEPARATE[file].search(nodeid.partition("::")[2]) if file in SEPARATE else None
            return next((name for name in TOGETHER if file.startswith(name)), file) + (part[0] if part else "")

    config.option.loadscopereorder = False  # not those with the most tests first, but in the order above
    return BySharedPrograms(config, log)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_slow") is None or hasattr(config, "workerinput"):
        return
    if config.args_source is not config.ArgsSource.TESTPATHS:
        raise pytest.UsageError("--record-slow writes tests/slow.txt anew: run all tests, without names of files")
    SLOW.unlink(missing_ok=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    controller = not hasattr(session.config, "workerinput")
    if controller and session.config.getoption("record_slow") is not None and SLOW.is_file():
        SLOW.write_text("".join(sorted(SLOW.read_text().splitlines(keepends=True))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With `--record-slow`, notes what takes long: processor time, which a busy machine changes little."""
    before, least = sum(os.times()[:4]), item.config.getoption("record_slow")
    result = yield
    if least is not None and sum(os.times()[:4]) - before > least and not item.get_closest_marker("slow"):
        with SLOW.open("a") as file:
            file.write(item.nodeid + "\n")
    return result


def pytest_report_header() -> str:
    import jaxspec

    return f"jax {jax.__version__} on {jax.default_backend()}; jaxspec from {Path(jaxspec.__file__).parent}"


@pytest.fixture(scope="session")
def allowance() -> list[int]:
    """How many memory maps this process may have before its compiled programs are dropped."""
    return [20_000]


FINISHED = itertools.count()  # tests


@pytest.fixture(autouse=True)
def few_memory_maps(allowance):
    """Linux gives a process 65,530 memory maps; compiled programs take some each, and without one left jax crashes.

    Maps of dropped programs stay, and are used again by the next ones.
    """
    yield
    if next(FINISHED) % 8 == 0 and _memory_maps() > allowance[0]:  # counting them takes a while
        jax.clear_caches()
        allowance[0] = _memory_maps() + 10_000


def _memory_maps() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.is_file() else 0


@pytest.fixture
def standard_dtype_promotion():
    """For tests that run an optax optimizer: Adam's bias correction is a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield
