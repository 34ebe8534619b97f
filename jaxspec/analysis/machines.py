"""Published memory bandwidths and peak rates, for the roofline; what a program reaches is less."""

from __future__ import annotations

import difflib
from typing import NamedTuple


class Machine(NamedTuple):
    """One accelerator, or one CPU socket.

    Attributes:
        bandwidth: of its main memory, bytes/s.
        bfloat16, float32: peak of dense matrix products, operations/s (a multiplication and an addition are two); None
            where the maker gives no figure.
    """

    bandwidth: float
    bfloat16: float | None
    float32: float | None

    def peak(self, dtype: str) -> float:
        """Operations per second in "bfloat16" or "float32".

        Raises:
            ValueError: another dtype, or no figure for it.

        >>> MACHINES["a100"].peak("bfloat16")
        312000000000000.0
        """
        found = getattr(self, dtype) if dtype in ("bfloat16", "float32") else None
        if found is None:
            raise ValueError(f"no peak is published in {dtype!r} for this machine: give one, or use bfloat16")
        return found


# Per chip, without structured sparsity. float32 is that of the general cores: TPUs have no such figure (they build a
# float32 product of several bfloat16 ones).
MACHINES = {
    "h200": Machine(4.8e12, 989e12, 67e12),  # NVIDIA H200 data sheet, SXM (it gives bfloat16 with sparsity: twice this)
    "h100": Machine(3.35e12, 989e12, 67e12),  # NVIDIA H100 data sheet, SXM
    "a100": Machine(2.039e12, 312e12, 19.5e12),  # NVIDIA A100 data sheet, 80 GB SXM
    "tpu-v4": Machine(1.2e12, 275e12, None),  # Cloud TPU documentation, as the next three: the paper's machine
    "tpu-v5e": Machine(0.819e12, 197e12, None),
    "tpu-v5p": Machine(2.765e12, 459e12, None),
    "tpu-v6e": Machine(1.638e12, 918e12, None),
    # AMD's page for the EPYC 9654: 460.8 GB/s per socket, 96 cores of 2.4 GHz; a Zen 4 core retires two 256-bit
    # multiply-adds a cycle (32 operations in float32, twice that in bfloat16).
    "epyc-9654": Machine(0.4608e12, 14.7e12, 7.4e12),
}


def machine(name: str) -> Machine:
    """A machine by its name.

    Raises:
        ValueError: it is not in the table.

    >>> machine("tpu-v5e").bandwidth
    819000000000.0
    """
    if name not in MACHINES:
        near = difflib.get_close_matches(name, MACHINES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no machine {name!r}{hint}: expected one of {', '.join(MACHINES)}")
    return MACHINES[name]
