"""How many threads torch computes with, for a while. Tensors that are small are slower with more than one, and on a
busy machine many times slower: each operation waits for a thread that has no core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """`count` of them; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
