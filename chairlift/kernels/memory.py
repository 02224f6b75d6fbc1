"""Memory in huge pages, where the system has them: to read all of it once, as a step does, otherwise spends a tenth of
the time on address translation. Refuses to know what lies in it.
"""

import mmap
from typing import Any

import torch

HUGE_PAGE = 2 << 20
PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # a shared mapping gets no huge pages


def map_memory(size: int) -> tuple[mmap.mmap, int]:
    """A mapping of zeros and the offset of `size` bytes in it that begin with a huge page.

    It takes memory as it is written to, and gives it back with the last tensor made `torch.frombuffer` of it.
    """
    mapping = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE, **PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping, -torch.frombuffer(mapping, dtype=torch.uint8).data_ptr() % HUGE_PAGE
