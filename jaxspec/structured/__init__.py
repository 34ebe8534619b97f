"""Structured output: patterns, their automata over the tokens of a vocabulary, and the processor that masks tokens.

In the order in which they are used: `patterns` reads the options, `schemas` turns a JSON schema into a regular
expression, `byte_dfa` that into an automaton over bytes, `spelling` says which bytes each token has, `automaton` reads
tokens, `tables` joins the automata of a batch, and `processor` is what runs on the device.
"""
