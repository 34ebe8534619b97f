from jaxspec.analysis.theory.best_acceptance import best_acceptance

__all__ = ["best_acceptance"]
