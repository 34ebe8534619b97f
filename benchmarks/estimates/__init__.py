"""How long the parts of a generation should take on TPUs and GPUs that are not here, by their
compilers' own texts.
"""
