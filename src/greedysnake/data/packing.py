"""Documents into sequences: cut what is too long, then best fit decreasing, window by window. Knows lengths only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

WINDOW_DOCUMENTS = 2**16
"""Documents that are packed together: enough to fill all but a few sequences, few enough to hold in memory."""


def cut(starts: Numbers, lengths: Numbers, sequence_length: int, long_documents: str) -> tuple[Numbers, Numbers]:
    """Starts and lengths of pieces no longer than a sequence; `long_documents` is "split", "truncate" or "skip"."""
    if long_documents == "skip":
        fits = lengths <= sequence_length
        starts, lengths = starts[fits], lengths[fits]
    if long_documents == "truncate":
        lengths = np.minimum(lengths, sequence_length)
    num_pieces = -(-lengths // sequence_length)
    document = np.repeat(np.arange(len(lengths)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    offsets = (np.arange(len(document)) - first_piece[document]) * sequence_length
    return starts[document] + offsets, np.minimum(lengths[document] - offsets, sequence_length)


def best_fit(lengths: Numbers, capacity: int) -> list[list[int]]:
    """Pieces of each sequence: longest first, each to the fullest sequence that has room for it."""
    sequences: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    # Bit n is set if a sequence has room for exactly n more tokens: the best fit is the lowest bit from a length on.
    rooms = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            sequence = with_room[room].pop()
            rooms ^= 0 if with_room[room] else 1 << room
        else:
            room, sequence = capacity, len(sequences)
            sequences.append([])
        sequences[sequence].append(piece)
        if room > length:
            with_room.setdefault(room - length, []).append(sequence)
            rooms |= 1 << (room - length)
    return sequences
