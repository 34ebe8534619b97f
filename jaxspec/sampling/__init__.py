"""Logits to distributions, in one order everywhere:

    ids past the tokenizer removed, bias and bans, repetition penalty, presence and frequency
    penalties, logits processors, temperature, truncations in the order of `SamplingOptions`.

The order matches transformers (vLLM takes min-p before top-k). All values are traced and per row,
so changing them recompiles nothing. Only the choice of processors is static: a greedy program has
no softmax, only top-k and top-p sort the vocabulary, and only penalties count tokens. Temperature 0
is the limit: all mass on the largest logit, ties to the lowest id.

A sampling option is a field of `SamplingParams`, a function that reads it, and an entry of
`SamplingOptions`, of which calls, jobs, commands and pages are made.
"""

from jaxspec import optional_imports
from jaxspec.sampling.params import SamplingOptions
from jaxspec.sampling.penalties import (
    count_tokens,
    logit_bias,
    presence_and_frequency_penalties,
    repetition_penalty,
)
from jaxspec.sampling.samplers import (
    SamplingParams,
    at_temperature,
    chain,
    greedy,
    mask_padding_ids,
    match_vocab,
)
from jaxspec.sampling.truncate import apply_temperature, keep_min_p, keep_top_k, keep_top_p
from jaxspec.sampling.words import banned_words, forced_end

__all__ = [
    name for name, value in list(globals().items()) if callable(value) and not name.startswith("_")
]

__getattr__ = optional_imports.submodules(__name__)
