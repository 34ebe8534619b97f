"""Proving a decoder exact: language models with known laws, and the exact law of what a decoder emits.

`certify` is the one call: how far the law of a decoder's tokens is from plain sampling's, not estimated.
`certify_iterated` is the same for several proposals of one position.
"""

from jaxspec.testing.bounds import excess
from jaxspec.testing.enumerate import certify, decoder_law, total_variation
from jaxspec.testing.one_position import certify_iterated, distinct, independent, likeliest, proposing
from jaxspec.testing.tables import SequenceLaw, plain_law, table_model, table_model_from
from jaxspec.testing.words import word_tokenizer

__all__ = [
    "SequenceLaw",
    "certify",
    "certify_iterated",
    "decoder_law",
    "distinct",
    "excess",
    "independent",
    "likeliest",
    "plain_law",
    "proposing",
    "table_model",
    "table_model_from",
    "total_variation",
    "word_tokenizer",
]
