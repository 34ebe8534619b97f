"""Proving a decoder exact: language models with known distributions, and the exact distribution of
a decoder's texts.

`certify` is the one call: it computes how far the distribution of a decoder's tokens is from plain
sampling's.

The enumerator's files, from the top down:

- `certificate`: `certify` and `decoder_distribution`: call after call of a decoder, from each text
  that was committed so far, with its probability.
- `independence`: the keys of a path's draws, which must all differ, or be plain sampling's own.
- `outcomes`: one call: its paths, which fix as many draws as decide the outcome, with their
  probabilities.
- `splitting`: the draw that an unfinished path is split by, and where.
- `paths`: a path as arrays, the runs of a call along many paths at once, and the comparison of
  their results.
- `script`: the call, compiled, with the draws as its argument and its result.
- `tape`: the functions of `core.noise` that play a script while a call is traced, and record the
  draws.

`check_model` tries a model of your own: causality, cache, ragged rows, rewinds (`model_check`).

`exactness` has the certificate of a rule (`jaxspec verify`), `tables` the models and plain
sampling's distribution, `bounds` the promise of inexact rules, `words` a tokenizer.
"""

from jaxspec import optional_imports
from jaxspec.testing.bounds import excess
from jaxspec.testing.certificate import (
    certify,
    certify_prepared,
    decoder_distribution,
    total_variation,
    with_sampler,
)
from jaxspec.testing.model_check import check_model
from jaxspec.testing.tables import (
    SequenceDistribution,
    plain_distribution,
    prepared_table,
    table_model,
    table_model_from,
)
from jaxspec.testing.words import word_tokenizer

__all__ = [
    "SequenceDistribution",
    "certify",
    "certify_prepared",
    "check_model",
    "decoder_distribution",
    "excess",
    "plain_distribution",
    "prepared_table",
    "table_model",
    "table_model_from",
    "total_variation",
    "with_sampler",
    "word_tokenizer",
]

__getattr__ = optional_imports.submodules(__name__)
