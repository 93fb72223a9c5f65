"""A new order of the sequences for every epoch, place by place: no list of the epoch's order is ever in memory.

A Feistel network is a bijection of a power of four; places that fall outside of the range go through it again. It
depends on nothing but its arguments, so the order is the same on every machine and with every version of numpy.
"""

from __future__ import annotations

from hashlib import blake2b

NUM_ROUNDS = 8


def shuffled(place: int, count: int, *, seed: int, epoch: int) -> int:
    """What stands at `place` of a random order of 0 ... count - 1, decided by seed and epoch."""
    assert 0 <= place < count
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(NUM_ROUNDS):
            digest = blake2b(f"{seed} {epoch} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        place = left << half_bits | right
        if place < count:
            return place
