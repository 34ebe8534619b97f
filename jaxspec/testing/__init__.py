"""Proving a decoder exact: language models with known distributions, and the exact distribution of what a decoder
emits.

`certify` is the one call: how far the distribution of a decoder's tokens is from plain sampling's, not estimated.
"""

from jaxspec.testing.bounds import excess
from jaxspec.testing.certificate import certify, certify_prepared, decoder_distribution, total_variation, with_sampler
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
