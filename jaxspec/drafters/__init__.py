"""Drafters, one per file."""

from jaxspec.drafters.argmax import argmax
from jaxspec.drafters.lookup import lookup
from jaxspec.drafters.model import model
from jaxspec.drafters.ngram import bigram, ngram, unigram

__all__ = ["argmax", "bigram", "lookup", "model", "ngram", "unigram"]
