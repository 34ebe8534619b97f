"""Writes jaxspec/data/sizes.json, which `jaxspec models` lists: the parameters, memory and caches
of published sizes.

    python -m benchmarks.sizes      a minute; no weights are read

Run it after a family or a size was added. A test compares the file with what is counted.
"""

from __future__ import annotations

from jaxspec.analysis import sizes

if __name__ == "__main__":
    sizes.FILE.write_text(sizes.count_all().to_json(), "utf-8")
