"""Strict JAX for every test. At the root, not in tests/, because the doctests in jaxspec/ are
tests, too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of the time that the tests take, and this halves it; what the compiler's
# optimisations make of a program is the compiler's business. XLA_FLAGS="" brings them back.
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones refuse these flags
        os.environ["XLA_FLAGS"] += (
            " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        )
# PyTorch's threads only wait for each other, with models of these sizes
os.environ.setdefault("OMP_NUM_THREADS", "1")
# no test needs a network; huggingface_hub reads this when it is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import jax
import psutil
import pytest

# A shell starts what it runs in the background with Ctrl-C ignored, and children inherit that:
# tests of interruptions would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)

# A second run need not compile again. Tests that count compilations are not misled: jax reports one
# whether or not this cache then provides the result.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"jax{jax.__version__}-py{sys.version_info.major}{sys.version_info.minor}"
    jax.config.update("jax_compilation_cache_dir", str(home / "jaxspec-tests" / version))
    # of the processes of tests, too
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

# What jax traces are many small objects that live long; looking through all of them time and again
# is a good part of what tracing takes.
gc.set_threshold(100_000, 20, 50)

MOST_MEMORY = 2 * 2**30  # bytes that a process holds before its compiled programs are dropped

# The same examples on every run and every machine; no deadline, since the first example of a test
# compiles.
hypothesis.settings.register_profile("jaxspec", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("jaxspec")


# What `pytest` runs by itself: it proves that texts have the target's distribution, for every rule,
# drafter and head, and tries every command and README's Python once. The quick tests in these files
# are marked `core`; any other test is `quick` or `slow`.
CORE = (
    *(
        "tests/core/",
        "tests/rules/",
        "tests/drafters/",
        "tests/exactness/",
        "tests/testing/",
        "tests/sampling/",
    ),
    *(
        f"tests/decode/test_{name}.py"
        for name in ("speculative", "trees", "output", "rollout", "rows", "doors")
    ),
    *("tests/draft_heads/test_drafters.py", "tests/draft_heads/test_dflash2.py"),
    *(
        f"tests/nets/test_{name}.py"
        for name in ("t5", "gpt", "decoder", "layer_shapes", "adapters")
    ),
    *("tests/families/test_families.py", "tests/cli/test_smoke.py", "tests/test_pages.py"),
    *(
        f"jaxspec/{package}/"
        for package in ("core", "rules", "sampling", "drafters", "decode", "testing")
    ),
)


# What takes longest is begun first, so that of several workers none is left with it in the end.
# Tests of a file share programs, as those of the command line do; what is listed in SEPARATE is
# long, and shares little.
LONGEST = (
    "tests/test_shipped.py",
    "tests/test_sharding.py",
    "tests/rules/",
    "tests/cli/",
    "tests/test_notebooks.py",
)
TOGETHER = ("tests/cli/",)
SEPARATE = {
    "tests/test_shipped.py": re.compile(r"t5|gpt"),
    "tests/test_notebooks.py": re.compile(r"\[.*"),
}

# Docstrings cannot mark their examples. With a warm compilation cache these take over half a second
# of a processor.
SLOW_EXAMPLES = {
    "testing.exactness.certificate",
    "analysis.plan.of_pair",
    "decode.beam_search.beam_search",
    "draft_heads.block.block",
    "draft_heads.eagle.eagle",
    "draft_heads.mtp.mtp",
    "drafters.greedy.greedy",
    "drafters.lookups.ngram_model.first_draft_tokens",
    "drafters.lookups.ngram_model.language_model",
    "drafters.lookups.online_ngram.online_ngram",
    "drafters.lookups.retrieval.retrieval",
    "drafters.lookups.suffix.suffix",
    "drafters.lookups.vote.as_tree",
    "drafters.lookups.without_backoff.without_backoff",
    "drafters.saturated_exit.saturated_exit",
    "drafters.self_speculative.skip_layers",
    "drafters.share_encoder.share_encoder",
    "drafters.trees.sequences.sequences",
    "drafters.trees.tree.tree",
    "drafters.windowed.windowed",
    "nets.decoder.language_model",
    "nets.t5.language_model",
    "rules.block.block",
    "rules.rejection.rejection",
    "rules.traversal.traversal",
    "testing.certificate.certify",
    "training.online_distillation.online",
    "vocab.remap.map_vocabulary",
    "vocab.trim.trim_vocabulary",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="run the combinations, too, that others stand for"
    )
    parser.addoption(
        "--part",
        type=part_of,
        metavar="K/N",
        help="of a test with many slow cases run the K-th, the K+N-th and so on, from 0; at least "
        "one of them",
    )


def part_of(text: str) -> tuple[int, int]:
    """Reads K/N.

    >>> part_of("2/3"), part_of("5/3")
    ((2, 3), (2, 3))
    """
    part, _, parts = text.partition("/")
    return int(part) % int(parts), int(parts)


def outside_of_part(items: list[pytest.Item], part: int, parts: int) -> set[pytest.Item]:
    """Returns the slow cases that another part runs. Every test keeps one of its cases at least."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {
        item
        for slow in cases.values()
        for number, item in enumerate(slow)
        if (number - part) % min(parts, len(slow)) != 0
    }


def pytest_configure(config: pytest.Config) -> None:
    """Without arguments the tests marked `core` run. Whoever names a file or gives `-m` gets what
    that says.
    """
    if hasattr(config, "workerinput"):
        config.option.markexpr = config.workerinput["markexpr"]
    elif config.args_source is not pytest.Config.ArgsSource.ARGS and not config.option.markexpr:
        config.option.markexpr = "core"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker of `pytest -n` which tests run: it is given files, whether or not the user has
    named them.
    """
    node.workerinput["markexpr"] = node.config.option.markexpr


def is_in_core(path: Path) -> bool:
    """Says whether a file, or a folder, is one of `CORE` in this checkout."""
    checkout = Path(__file__).parent
    return path.is_relative_to(checkout) and path.relative_to(checkout).as_posix().startswith(CORE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Importing a test file takes longer than many of its tests: what has none in `core` is not
    imported for it.
    """
    if (
        config.option.markexpr == "core"
        and collection_path.suffix == ".py"
        and not is_in_core(collection_path)
    ):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before the expression of `-m` is heeded
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests, and takes the longest first; without `--exhaustive`, leaves out what others
    stand for.
    """
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name[8:] in SLOW_EXAMPLES:
            item.add_marker("slow")
        if item.get_closest_marker("slow") or item.get_closest_marker("exhaustive"):
            # of its other cases
            item.own_markers = [mark for mark in item.own_markers if mark.name != "quick"]
        elif not item.get_closest_marker("quick"):
            item.add_marker("core" if is_in_core(item.path) else "quick")
        if item.get_closest_marker("needs_torch") and importlib.util.find_spec("torch") is None:
            item.add_marker(
                pytest.mark.skip(reason="compares with PyTorch, which is not installed")
            )
    left_out = set[pytest.Item]()
    if not config.getoption("exhaustive"):
        left_out = {item for item in items if item.get_closest_marker("exhaustive")}
    if config.getoption("part"):
        kept = [item for item in items if item not in left_out]
        left_out |= outside_of_part(kept, *config.getoption("part"))
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
    items.sort(
        key=lambda item: next(
            (i for i, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST)
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `pytest -n`, tests that share programs go to one worker, which compiles them once."""
    from xdist.scheduler import LoadScopeScheduling

    class BySharedPrograms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            part = SEPARATE[file].search(nodeid.partition("::")[2]) if file in SEPARATE else None
            return next((name for name in TOGETHER if file.startswith(name)), file) + (
                part[0] if part else ""
            )

    # not those with the most tests first, but in the order above
    config.option.loadscopereorder = False
    return BySharedPrograms(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: nothing need look through them again


def pytest_report_header() -> str:
    import jaxspec

    return (
        f"jax {jax.__version__} on {jax.default_backend()}; jaxspec from "
        f"{Path(jaxspec.__file__).parent}"
    )


@pytest.fixture(scope="session")
def slow_examples() -> set[str]:
    """Return the functions, named from `jaxspec` on, whose docstrings' examples are slow."""
    return SLOW_EXAMPLES


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.fixture(scope="session")
def most_memory() -> list[int]:
    """Return, in a list, how many bytes this process may hold before its compiled programs are
    dropped.
    """
    return [MOST_MEMORY]


@pytest.fixture(autouse=True)
def bounded_memory(most_memory):
    """Compiled programs are dropped when a test leaves the process too large: together they take
    several gigabytes.

    That also keeps it below the 65,530 memory maps that Linux gives a process, without which jax
    crashes.
    """
    yield
    if resident() > most_memory[0]:
        jax.clear_caches()
        gc.collect()
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        if hasattr(libc, "malloc_trim"):  # glibc keeps what is freed
            libc.malloc_trim(0)
        most_memory[0] = max(MOST_MEMORY, resident() + MOST_MEMORY // 8)


@pytest.fixture
def standard_dtype_promotion():
    """For tests that run an optax optimizer: Adam's bias correction is a float to an integer
    power.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield
