"""Kernels for GPUs that no card has timed yet, with what puts them in the networks."""
