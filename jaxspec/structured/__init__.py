"""Structured output: patterns, their automata over the tokens of a vocabulary, and the processor
that masks tokens.

In the order of their use:

    patterns    options of `generate` to patterns, one for each row
    schemas     a JSON schema to a regular expression
    byte_dfa    a regular expression to an automaton over bytes
    spelling    the bytes of each token
    automaton   an automaton over bytes to one over tokens
    tables      the automata of a batch, in one set of tables
    processor   the logits processor, on the device
"""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
