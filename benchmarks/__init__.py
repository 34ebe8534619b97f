"""Scripts that measure and draw what docs/ and README show; not a part of the installed package.

Run from a checkout's root, as `python -m benchmarks.NAME`; each file begins with its command, the
machine it is meant for and how long it takes.
"""
