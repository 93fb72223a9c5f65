"""Best fit decreasing, cutting, and the order of an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from greedysnake.data.packing import best_fit, cut
from greedysnake.data.shuffle import shuffled


def best_fit_by_search(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same by looking at every sequence for every piece; the latest of equally good ones."""
    sequences: list[list[int]] = []
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        rooms = [capacity - sum(lengths[other] for other in sequence) for sequence in sequences]
        fitting = [index for index, room in enumerate(rooms) if room >= lengths[piece]]
        if fitting:
            sequences[min(fitting, key=lambda index: rooms[index])].append(piece)
        else:
            sequences.append([piece])
    return sequences


@given(st.integers(1, 50).flatmap(lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity)))))
def test_best_fit_is_that_of_a_search_over_all_sequences(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    packed = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(piece for sequence in packed for piece in sequence) == list(range(len(lengths)))
    filled = [sum(lengths[piece] for piece in sequence) for sequence in packed]
    assert all(used <= capacity for used in filled)
    # Of sequences with equal room any may be taken: how full they get is the same.
    reference = best_fit_by_search(lengths, capacity)
    assert sorted(filled) == sorted(sum(lengths[piece] for piece in sequence) for sequence in reference)


@pytest.mark.parametrize("median", [200, 700, 1500])
def test_packing_leaves_little_room(median: int) -> None:
    """Lengths as in chat data (log-normal), sequences of 4096."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 0.8, 20_000)
    _, lengths = cut(np.zeros(20_000, np.int64), np.clip(drawn, 2, None).astype(np.int64), 4096, "split")
    packed = best_fit(lengths, 4096)
    assert lengths.sum() / (len(packed) * 4096) > 0.999


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(2, 30))
def test_pieces_cover_every_document_once(lengths: list[int], sequence_length: int) -> None:
    ends = np.cumsum([0, *lengths])
    starts, cut_lengths = cut(ends[:-1], np.array(lengths, np.int64), sequence_length, "split")
    covered = [
        place for start, length in zip(starts, cut_lengths, strict=True) for place in range(start, start + length)
    ]
    assert covered == list(range(ends[-1]))
    assert all(1 <= length <= sequence_length for length in cut_lengths)


@given(st.integers(1, 300), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_has_every_place_once(count: int, seed: int, epoch: int) -> None:
    order = [shuffled(place, count, seed=seed, epoch=epoch) for place in range(count)]
    assert sorted(order) == list(range(count))


def test_every_order_of_a_few_is_about_equally_likely() -> None:
    """Which of 5 comes first over 2000 epochs: 400 each expected, deviation 18."""
    first = np.bincount([shuffled(0, 5, seed=0, epoch=epoch) for epoch in range(2000)], minlength=5)
    assert all(abs(first - 400) < 5 * 18)
