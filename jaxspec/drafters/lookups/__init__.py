"""Drafters without a network: they look tokens up in the row, in a store, or in counts."""
