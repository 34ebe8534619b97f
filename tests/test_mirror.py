"""The tests mirror the package: who reads a file of jaxspec finds its tests by its path."""

from __future__ import annotations

from pathlib import Path

import jaxspec

PACKAGE, TESTS = Path(jaxspec.__file__).parent, Path(__file__).parent
# Modules, and folders that end in a slash, whose tests stand in a file of another name. The longest
# entry holds.
TESTED_BY = {
    "__main__.py": "cli/test_main.py",
    "optional_imports.py": "test_packaging.py",  # the hints name extras that there are
    "analysis/fitting.py": "analysis/test_table.py",
    "analysis/memory.py": "analysis/test_table.py",
    "analysis/optimal_tree.py": "analysis/test_tree.py",
    "analysis/published.py": "cli/test_plan.py",
    "analysis/random_model.py": "cli/test_workload.py",
    "analysis/result.py": "analysis/test_setting.py",
    "analysis/sizes.py": "cli/test_models.py",
    "cli/entries.py": "cli/test_chat.py",
    "cli/names.py": "cli/test_workload.py",
    "cli/pair.py": "cli/test_decoding.py",
    "cli/prefill.py": "cli/test_decoding.py",
    "cli/signals.py": "cli/test_main.py",
    "core/": "core/test_core.py",
    "core/chunks.py": "core/test_caches.py",
    "core/kv_cache.py": "core/test_caches.py",
    "core/round.py": "core/test_rounds.py",
    "core/checks.py": "decode/test_request.py",
    "decode/": "decode/test_request.py",
    "decode/autoregressive.py": "decode/test_speculative.py",
    "decode/beams.py": "decode/test_beam_search.py",
    "decode/chat_templates.py": "decode/test_prompts.py",
    "decode/causality.py": "testing/test_model_check.py",
    "decode/shared_prefix.py": "decode/test_prefix.py",
    "decode/state.py": "decode/test_rows.py",
    "draft_heads/": "draft_heads/test_drafters.py",
    "draft_heads/save.py": "draft_heads/test_formats.py",
    "drafters/": "drafters/test_conformance.py",
    "drafters/lookups/ngram_model.py": "drafters/test_ngram.py",
    "drafters/trees/": "drafters/test_tree_drafters.py",
    "files/": "files/test_files.py",
    "jobs/input_files.py": "cli/test_batch.py",
    "jobs/openai.py": "cli/test_batch.py",
    "jobs/results.py": "jobs/test_many.py",
    "jobs/slots.py": "jobs/test_many.py",
    "nets/": "nets/test_decoder.py",
    "nets/network.py": "nets/test_networks.py",
    "policies/": "policies/test_policies.py",
    "rules/": "rules/test_conformance.py",
    "sampling/": "sampling/test_chain.py",
    "structured/": "structured/test_structured.py",
    "testing/": "testing/test_certificate.py",
    "training/": "training/test_training.py",
    "training/head_loss.py": "training/test_heads.py",
    "training/online_distillation.py": "training/test_online.py",
    "training/top_tokens.py": "training/test_online.py",
    "vocab/": "vocab/test_remap.py",
    "weights/": "weights/test_loading.py",
    "weights/generation_config.py": "weights/test_huggingface_config.py",
    "weights/gguf_header.py": "weights/test_gguf.py",
    "weights/hf_families/": "weights/test_families.py",
    "weights/hf_families/llama_cpp.py": "weights/test_gguf.py",
    "weights/hf_families/t5.py": "weights/test_t5x.py",
    "weights/hub.py": "weights/test_huggingface.py",
    "weights/orbax_arrays.py": "weights/test_orbax.py",
    "weights/tensorstore_arrays.py": "weights/test_t5x_arrays.py",
}
# tests at the top that are of the project, or need a machine, a browser, another library
OF_NO_MODULE = {
    *(
        "docs",
        "gemma",
        "gpu",
        "grpo",
        "mirror",
        "nano",
        "notebooks",
        "packaging",
        "pages",
        "shipped",
        "style",
        "tpu",
        "wide_types",
        "widgets",
        "widgets_page",
    )
}


def own_tests(module: Path) -> Path | None:
    """The tests of a module: in its folder of the same name here, or in that of its package."""
    names = [folder / f"test_{module.name}" for folder in (module.parent, *module.parent.parents)]
    return next((name for name in names if (TESTS / name).is_file()), None)


def entry_of(module: Path) -> str | None:
    """The entry of the table that holds for a module: its own, or that of the folder nearest to
    it.
    """
    keys = [module.as_posix(), *(f"{folder.as_posix()}/" for folder in module.parents)]
    return next((key for key in keys if key in TESTED_BY), None)


MODULES = [
    file.relative_to(PACKAGE)
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.name != "__init__.py"
]  # folders' own files hand names on


def test_every_module_has_tests_where_a_reader_looks_for_them():
    astray = [
        str(module) for module in MODULES if not own_tests(module) and entry_of(module) is None
    ]
    assert astray == [], "add tests/FOLDER/test_NAME.py, or say in TESTED_BY which file tests it"


def test_the_table_of_tests_elsewhere_is_true():
    assert [file for file in TESTED_BY.values() if not (TESTS / file).is_file()] == []
    read = {entry_of(module) for module in MODULES if not own_tests(module)}
    assert sorted(set(TESTED_BY) - read) == [], "these have tests of their own now: take them out"


def test_loose_tests_are_of_no_package():
    loose = {file.stem.removeprefix("test_") for file in TESTS.glob("test_*.py")}
    modules = {module.stem for module in MODULES if not module.parent.name}
    assert loose - modules == OF_NO_MODULE, "move it beside the tests of its package"
