"""Vocabularies that differ: ids mapped, tokenizers bridged, heads trimmed."""
