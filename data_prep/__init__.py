"""Making this project's own training data; not a part of the installed package. Run from a
checkout's root.
"""
