"""The other side of `jaxspec.analysis.peer`: our models as PyTorch modules, decoded by transformers' `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.base import Model, Prompt
from jaxspec.nets.t5 import T5Config
from jaxspec.weights import huggingface


def check() -> None:
    """Raises ImportError, with what to do, where there is no PyTorch."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "the comparison runs transformers' models, which need PyTorch: pip install torch (a build for CPUs will do)"
        ) from error


def load(model: Model, folder: Path, eos: int | None) -> Any:
    """Our model as transformers loads it, on the CPU; greedy, and ended by nothing but `eos`.

    Args:
        model: a T5 or a GPT in float32.
        folder: where to export it to.
        eos: the token that ends a text; None where none does.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind = "AutoModelForSeq2SeqLM" if isinstance(model.config, T5Config) else "AutoModelForCausalLM"
    exported = huggingface.save(model, folder)
    module = getattr(transformers, kind).from_pretrained(exported, dtype=torch.float32).eval()
    if isinstance(model.config, T5Config):
        # `generate` (5.23) sizes the decoder's cache by the encoder's depth, and breaks where the decoder is deeper.
        # The layers are made by now: this changes the size of the cache and nothing else.
        module.config.num_layers = module.config.num_decoder_layers
    settings = module.generation_config
    settings.do_sample, settings.eos_token_id, settings.pad_token_id = False, eos, 0
    return module


def assisted(assistant: Any, gamma: int) -> dict[str, Any]:
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


def decode(module: Any, given: dict[str, Any], new_tokens: int, **how: Any) -> list[list[int]]:
    """The new tokens of each row, up to and with its end token."""
    ids = module.generate(**given, max_new_tokens=new_tokens, **how)
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


def _cut(row: list[int], eos: int | None) -> list[int]:
    """A row without the padding after its end.

    >>> _cut([5, 1, 0, 0], 1), _cut([5, 1, 0, 0], None)
    ([5, 1], [5, 1, 0, 0])
    """
    return row[: row.index(eos) + 1] if eos in row else row
