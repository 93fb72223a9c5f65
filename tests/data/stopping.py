"""Tokenises in a process of its own, to be killed in the middle."""

from __future__ import annotations

import signal
from pathlib import Path

from greedysnake.data.batches import Batches
from greedysnake.data.options import DataOptions
from greedysnake.data.tokenizers import ByteTokenizer


def tokenise_and_stop(cache: str, path: str) -> None:
    """Tells that it has begun, and waits."""

    def wait(num_rows: int, num_tokens: int) -> None:
        Path(cache, "reached").write_text(f"{num_rows} {num_tokens}")
        signal.pause()

    options = DataOptions(paths=(path,))
    Batches(options, ByteTokenizer(), sequence_length=32, micro_batch_size=2, seed=0, cache=cache, progress=wait)
