"""Drafters, one per file."""

from jaxspec.drafters.abstaining import abstaining
from jaxspec.drafters.argmax import argmax
from jaxspec.drafters.first_of import first_of
from jaxspec.drafters.lookup import lookup
from jaxspec.drafters.model import model
from jaxspec.drafters.ngram import bigram, ngram, unigram
from jaxspec.drafters.online_ngram import online_ngram
from jaxspec.drafters.random import random
from jaxspec.drafters.retrieval import retrieval

__all__ = [
    "abstaining",
    "argmax",
    "bigram",
    "first_of",
    "lookup",
    "model",
    "ngram",
    "online_ngram",
    "random",
    "retrieval",
    "unigram",
]
