"""Logits to distributions, in one order everywhere:

    ids past the tokenizer removed, bias and bans, repetition penalty, presence and frequency penalties,
    temperature, top-k, top-p, min-p.

The order is that of transformers (vLLM takes min-p before top-k). All values are traced and per row, so changing them
recompiles nothing. What is static is which stages a program contains: a greedy program has no softmax, only top-k and
top-p sort the vocabulary, and tokens are counted only for penalties. Temperature 0 is the limit: all mass on the
largest logit, ties to the lowest id.
"""

from jaxspec.warp.controls import Controls
from jaxspec.warp.law import chain, fit, greedy, only, sampling
from jaxspec.warp.penalties import (
    count_tokens,
    logit_bias,
    presence_and_frequency_penalties,
    repetition_penalty,
)
from jaxspec.warp.truncate import cool, keep_min_p, keep_top_k, keep_top_p

__all__ = [
    "Controls",
    "chain",
    "cool",
    "count_tokens",
    "fit",
    "greedy",
    "keep_min_p",
    "keep_top_k",
    "keep_top_p",
    "logit_bias",
    "only",
    "presence_and_frequency_penalties",
    "repetition_penalty",
    "sampling",
]
