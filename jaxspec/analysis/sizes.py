"""The sizes of published networks, counted beforehand: to list them needs no jax."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "data" / "sizes.json"


class Size(NamedTuple):
    """The size of a network, in bytes by dtype. `memory.of_config` counts it."""

    name: str
    parameters: int  # how many there are
    memory_bytes: dict[str, int]  # bytes of all parameters
    # bytes of each row; layers with sliding windows stop at their windows
    cache_bytes_per_token: dict[str, int]


class SizeTable(NamedTuple):
    """The sizes of all networks that have a name."""

    families: dict[str, tuple[Size, ...]]  # by the family's title
    heads: dict[str, int]  # parameters of draft heads

    def to_json(self) -> str:
        """Writes the sizes, one a line."""
        families = []
        for title, sizes in self.families.items():
            rows = ",\n".join(f"    {json.dumps(size._asdict())}" for size in sizes)
            families.append(
                f"  {json.dumps(title)}: [\n{rows}\n  ]" if sizes else f"  {json.dumps(title)}: []"
            )
        joined = ",\n".join(families)
        return f'{{"families": {{\n{joined}\n}},\n"heads": {json.dumps(self.heads)}}}\n'


@functools.lru_cache
def read() -> SizeTable:
    """Reads the sizes that come with jaxspec.

    >>> [size.parameters for size in read().families["GPT-2"] if size.name == "gpt-6m"]
    [6036480]
    """
    table = json.loads(FILE.read_text("utf-8"))
    families = {
        title: tuple(Size(**size) for size in sizes) for title, sizes in table["families"].items()
    }
    return SizeTable(families, table["heads"])


def count(config: Any, name: str = "") -> Size:
    """Counts the size of a network by its configuration."""
    from jaxspec.analysis import memory

    size = memory.of_config(name, config)
    return Size(name, size.parameters, size.memory_bytes, size.cache_bytes_per_token)


def count_all() -> SizeTable:
    """Counts the sizes of all networks that have a name. It takes a minute."""
    from jaxspec.weights.hf_families import FAMILIES

    families = {
        family.title: tuple(count(config, name) for name, config in family.sizes.items())
        for family in FAMILIES
    }
    return SizeTable(families, count_heads())


def count_heads() -> dict[str, int]:
    """Counts the parameters of draft heads of published sizes, by name."""
    import jax
    import jax.numpy as jnp

    from jaxspec.draft_heads import KINDS

    counts = {}
    for head in KINDS:
        for name, config in head.published.items():
            leaves = jax.tree.leaves(
                jax.eval_shape(functools.partial(head.init, config), jax.random.key(0))
            )
            counts[name] = sum(x.size for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))
    return counts
