"""Which pieces of which documents make each sequence: tables in memory-mapped files of the cache.

| file | holds |
|---|---|
| starts.bin | int64 per piece: where it starts in the corpus' tokens |
| lengths.bin | int32 per piece |
| ends.bin | int64 per sequence: where its pieces end in the two above |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from greedysnake.data.cache import Meta, cache_key, cached_folder
from greedysnake.data.corpus import Corpus
from greedysnake.data.options import DataOptions
from greedysnake.data.packing import WINDOW_DOCUMENTS, Numbers, best_fit, cut
from greedysnake.errors import ConfigError

FORMAT = 1
"""Part of the key: raised when the same documents would give other sequences."""


@dataclass(frozen=True)
class SequenceCounts:
    """What became of the documents of a split."""

    num_documents: int
    num_long_documents: int
    num_pieces_without_targets: int
    num_sequences: int
    num_tokens: int
    num_targets: int


class Sequences:
    """The sequences of one split. `key` identifies all that they depend on."""

    def __init__(self, folder: Path, key: str, meta: Meta) -> None:
        self.key = key
        self.counts = SequenceCounts(**meta)
        self._starts: NDArray[np.int64] = np.memmap(folder / "starts.bin", np.int64, "r")
        self._lengths: NDArray[np.int32] = np.memmap(folder / "lengths.bin", np.int32, "r")
        self._ends: NDArray[np.int64] = np.memmap(folder / "ends.bin", np.int64, "r")

    def pieces(self, sequence: int) -> list[tuple[int, int]]:
        """Start and length in the corpus' tokens of each piece of a sequence."""
        first = int(self._ends[sequence - 1]) if sequence else 0
        last = int(self._ends[sequence])
        return list(zip(self._starts[first:last].tolist(), self._lengths[first:last].tolist(), strict=True))


def open_sequences(corpus: Corpus, options: DataOptions, split: str, sequence_length: int, cache: Path) -> Sequences:
    """The sequences of a split of a corpus, "train" or "validation", computed if they are not cached.

    With `validation_paths` each split has a corpus of its own.
    """
    share = options.validation_share
    how = (sequence_length, options.packing, options.long_documents, share, split if share else "")
    key = cache_key(FORMAT, corpus.key, how)

    def build(folder: Path) -> Meta:
        with (
            (folder / "starts.bin").open("wb") as starts,
            (folder / "lengths.bin").open("wb") as lengths,
            (folder / "ends.bin").open("wb") as ends,
        ):
            builder = _Builder(corpus, options, sequence_length, starts, lengths, ends)
            for window_starts, window_lengths in _windows(corpus, share, split):
                builder.add(window_starts, window_lengths)
        _check(builder.counts(), options, split, sequence_length)
        return asdict(builder.counts())

    folder, meta = cached_folder(cache, f"sequences-{key}", build)
    return Sequences(folder, key, meta)


def _windows(corpus: Corpus, share: float, split: str) -> Iterator[tuple[Numbers, Numbers]]:
    """Starts and lengths of the split's documents, a window at a time."""
    for first in range(0, len(corpus.ends), WINDOW_DOCUMENTS):
        ends = np.array(corpus.ends[first : first + WINDOW_DOCUMENTS])
        starts = np.concatenate(([corpus.ends[first - 1] if first else 0], ends[:-1]))
        held_out = corpus.hashes[first : first + WINDOW_DOCUMENTS] < share * 2**32
        chosen = held_out if share and split == "validation" else ~held_out
        yield starts[chosen], (ends - starts)[chosen]


class _Builder:
    """Packs windows of documents and writes the tables."""

    def __init__(
        self,
        corpus: Corpus,
        options: DataOptions,
        sequence_length: int,
        starts: BinaryIO,
        lengths: BinaryIO,
        ends: BinaryIO,
    ) -> None:
        self._ignored = corpus.ignored
        self._options = options
        self._sequence_length = sequence_length
        self._starts, self._lengths, self._ends = starts, lengths, ends
        self._num_pieces = 0
        self._num_documents = self._num_long = self._num_without_targets = 0
        self._num_sequences = self._num_tokens = self._num_targets = 0

    def add(self, starts: Numbers, lengths: Numbers) -> None:
        """Write the sequences of a window."""
        self._num_documents += len(lengths)
        self._num_long += int((lengths > self._sequence_length).sum())
        starts, lengths = cut(starts, lengths, self._sequence_length, self._options.long_documents)
        num_targets = self._targets_of(starts, lengths)
        trained = num_targets > 0
        self._num_without_targets += int((~trained).sum())
        starts, lengths = starts[trained], lengths[trained]
        if self._options.packing:
            sequences = best_fit(lengths, self._sequence_length)
        else:
            sequences = [[piece] for piece in range(len(lengths))]
        self._write(starts, lengths, sequences)
        self._num_targets += int(num_targets.sum())

    def _targets_of(self, starts: Numbers, lengths: Numbers) -> Numbers:
        """Targets of each piece: the first token of a piece is none, for nothing comes before it."""
        if self._ignored is None:
            return lengths - 1
        pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
        ignored = [int(self._ignored[start + 1 : start + length].sum()) for start, length in pieces]
        return lengths - 1 - np.array(ignored, np.int64)

    def _write(self, starts: Numbers, lengths: Numbers, sequences: list[list[int]]) -> None:
        order = np.array([piece for sequence in sequences for piece in sequence], np.int64)
        ends = self._num_pieces + np.cumsum([len(sequence) for sequence in sequences], dtype=np.int64)
        self._starts.write(starts[order].astype(np.int64).tobytes())
        self._lengths.write(lengths[order].astype(np.int32).tobytes())
        self._ends.write(ends.tobytes())
        self._num_pieces += len(order)
        self._num_sequences += len(sequences)
        self._num_tokens += int(lengths.sum())

    def counts(self) -> SequenceCounts:
        """So far."""
        return SequenceCounts(
            num_documents=self._num_documents,
            num_long_documents=self._num_long,
            num_pieces_without_targets=self._num_without_targets,
            num_sequences=self._num_sequences,
            num_tokens=self._num_tokens,
            num_targets=self._num_targets,
        )


def _check(counts: SequenceCounts, options: DataOptions, split: str, sequence_length: int) -> None:
    if counts.num_sequences:
        return
    if not counts.num_documents:
        raise ConfigError(
            f"data.validation_share is {options.validation_share} and leaves no document for {split}: change it, or "
            "give data.validation_paths"
        )
    raise ConfigError(
        f"no sequence of {split} has a token to train on: {counts.num_long_documents} of {counts.num_documents} "
        f"documents are longer than sequence_length {sequence_length}: raise it, or change data.long_documents "
        f"(now {options.long_documents!r})"
    )
