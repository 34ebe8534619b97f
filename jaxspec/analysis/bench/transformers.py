"""The other library as a backend: our models as PyTorch modules, decoded by transformers' `generate` on the CPU.

Greedily, in float32, eagerly, as is its default: nothing is compiled. It drafts as many tokens in every round as we do
(schedule "constant", no confidence threshold), and refuses to speculate on batches. It has no heads over frequent
tokens only: a model whose head is trimmed drafts with the whole one there. PyTorch has as many threads as
OMP_NUM_THREADS says, else as many as JAX has CPUs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec import drafters, trim
from jaxspec.analysis.bench.setting import JAXSPEC, TRANSFORMERS, Setting, dtype_of
from jaxspec.analysis.measure import batching, environment
from jaxspec.core import Bound, Model, Prompt
from jaxspec.decode.request import Prepared
from jaxspec.nets.decoder import DecoderConfig
from jaxspec.nets.gpt import GPTConfig
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import huggingface

MATCH = 3  # the longest match that either library looks up


def check() -> None:
    """Raises ImportError, with what to do, where there is no PyTorch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the comparison runs transformers' models, which need PyTorch: pip install torch (a build for CPUs will do)"
        ) from error


def decode(
    setting: Setting, parts: Sequence[Prepared], folder: Path
) -> tuple[list[Callable[[], object]], list[list[int]], int]:
    """A call for each part, which decodes it; the new tokens of all rows; and passes of the target.

    Args:
        setting: plain, with a model of the target's kind as a drafter, or with `drafters.prompt_lookup`.
        parts: its batches.
        folder: where models are exported to, once for all settings.

    Raises:
        ImportError: PyTorch is not installed.
        ValueError: JAX runs on an accelerator, a model that is none of ours in float32, or something that the other
            library does not do: sampling as ours, another drafter, drafts for batches.
    """
    check()
    import torch

    refuse(setting, parts[0])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or environment.current().cpus or 1))
    target, new_tokens = parts[0].target, int(np.max(parts[0].request.limit))
    ends = [int(token) for token in np.asarray(parts[0].request.eos)[0] if token >= 0]
    module = _exported(target, folder)
    module.generation_config.eos_token_id = ends or None
    options: Callable[[], dict[str, Any]] = dict
    if isinstance(setting.drafter, Model):
        assistant, gamma = _exported(setting.drafter, folder), parts[0].decoder.gamma
        assistant.generation_config.eos_token_id = ends or None
        options = functools.partial(_assisted, assistant, gamma)
    elif not setting.is_plain:
        lookup = {"prompt_lookup_num_tokens": parts[0].decoder.gamma, "max_matching_ngram_size": MATCH}
        options = functools.partial(dict, lookup)
    given = [inputs(part.prompt, left=target.lm.start_token is None) for part in parts]
    calls = [functools.partial(_decode, module, one, new_tokens, options) for one in given]
    with counting(module) as passes:
        texts = [row for call in calls for row in call()]
    return list(calls), texts, passes[0]


def about(settings: Sequence[Setting]) -> list[str]:
    """What the other library does otherwise at some settings, in sentences."""
    models = {one.drafter_name: one.drafter for one in settings if one.backend == TRANSFORMERS}
    trimmed = [name for name, one in models.items() if isinstance(one, Model) and trim.draft_tokens(one) is not None]
    return [f"{name}: {TRANSFORMERS} drafts with the whole head, {JAXSPEC} with the trimmed one." for name in trimmed]


def refuse(setting: Setting, prepared: Prepared) -> None:
    """Raises ValueError for what the two libraries cannot both do."""
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX runs on {jax.default_backend()}, PyTorch would on the CPU: set JAX_PLATFORMS=cpu for a comparison"
        )
    models = [prepared.target] + ([setting.drafter] if isinstance(setting.drafter, Model) else [])
    for model in models:
        if not isinstance(model.config, T5Config | GPTConfig | DecoderConfig) or dtype_of(model) != "float32":
            raise ValueError(
                f"{model.name or 'a model'} is {model.config}: expected a network of jaxspec.nets in float32"
            )
    if batching.is_sampled(prepared) or set(setting.sampling) - {"temperature"}:
        raise ValueError("transformers is compared with greedily, without sampling options: expected temperature 0")
    if setting.is_plain:
        return
    lookup = drafters.prompt_lookup(MATCH).functions
    known = len(models) == 2 or (isinstance(setting.drafter, Bound) and setting.drafter.functions is lookup)
    if not known or setting.policy is not None or setting.rule.lenience != 1:
        raise ValueError(
            "transformers is compared with the rejection rule, a model or prompt_lookup that drafts, and no policy"
        )
    if setting.batch > 1 or (len(models) == 1 and prepared.target.lm.start_token is not None):
        raise ValueError("transformers drafts for one prompt at a time, and looks up for decoder-only models alone")


@functools.lru_cache(maxsize=4)
def _load(folder: Path, kind: str) -> Any:
    import torch
    import transformers

    module = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    if kind == "AutoModelForSeq2SeqLM":
        # `generate` (5.23) sizes the decoder's cache by the encoder's depth, and breaks where the decoder is deeper.
        # The layers are made by now: this changes the size of the cache and nothing else.
        module.config.num_layers = module.config.num_decoder_layers
    module.generation_config.do_sample, module.generation_config.pad_token_id = False, 0
    return module


def _exported(model: Model, folder: Path) -> Any:
    """Our model as transformers loads it, with its whole head."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = folder / str(id(model.params))
    if not path.exists():
        huggingface.save(trim.untrimmed(model), path)
    return _load(path, "AutoModelForSeq2SeqLM" if isinstance(model.config, T5Config) else "AutoModelForCausalLM")


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


def _decode(
    module: Any, given: dict[str, Any], new_tokens: int, options: Callable[[], dict[str, Any]]
) -> list[list[int]]:
    """The new tokens of each row, up to and with its end token."""
    ids = module.generate(**given, max_new_tokens=new_tokens, **options())
    start = 1 if module.config.is_encoder_decoder else given["input_ids"].shape[1]
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
