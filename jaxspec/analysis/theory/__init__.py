"""The formulas: what speculative decoding yields and costs. NumPy only."""
