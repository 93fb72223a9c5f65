"""Micro-batches of tensors, each a pure function of its position: one integer says where training is in its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from greedysnake.data.cache import cache_key
from greedysnake.data.corpus import Progress, open_corpus
from greedysnake.data.options import DataOptions
from greedysnake.data.sequences import open_sequences
from greedysnake.data.shuffle import shuffled
from greedysnake.data.tokenizers import Tokenizer
from greedysnake.errors import ConfigError

IGNORED = -100
"""Label of a token that is no target."""

MULTIPLE = 8
"""Padded lengths are multiples of this: matrix units work on tiles."""


@dataclass(frozen=True)
class DataReport:
    """What became of the rows, for people to read."""

    num_rows: int
    """Rows in all files, both splits."""

    num_bad_rows: int
    """Rows that could not be used, both splits."""

    bad_rows: tuple[str, ...]
    """What was wrong with them, with file and line; the first hundred."""

    num_rows_without_targets: int
    """Rows left out because they have no token to train on, both splits."""

    num_documents: int
    """Documents of this split."""

    num_long_documents: int
    """Those longer than a sequence, with which `long_documents` deals."""

    num_pieces_without_targets: int
    """Pieces of them left out because they have no token to train on."""

    num_sequences: int
    """Sequences in an epoch."""

    num_tokens: int
    """Tokens in an epoch, padding not counted."""

    num_targets: int
    """Tokens in an epoch that carry loss."""

    fill: float
    """Share of sequence_length that tokens take, on average."""

    def __str__(self) -> str:
        text = (
            f"{self.num_documents:,} documents, {self.num_tokens:,} tokens ({self.num_targets:,} with loss) in "
            f"{self.num_sequences:,} sequences, {self.fill:.1%} full"
        )
        if self.num_long_documents:
            verb = "is" if self.num_long_documents == 1 else "are"
            text += f"; {self.num_long_documents:,} {verb} longer than a sequence"
        skipped = {
            "bad rows": self.num_bad_rows,
            "rows without a token to train on": self.num_rows_without_targets,
        }
        left_out = ", ".join(f"{number:,} {what}" for what, number in skipped.items() if number)
        return f"{text}; skipped {left_out}" if left_out else text


class Batches:
    """The micro-batches of one split, `micro_batch_size` sequences of up to `sequence_length` tokens each.

    The first start tokenises into the folder `cache`; later ones map its files. Every epoch has every sequence once, in
    an order of its own. Rows that the last micro-batch of an epoch lacks are fillers without targets, so that all have
    the same number of rows. Reading needs no lock and no thread.
    """

    def __init__(
        self,
        options: DataOptions,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        micro_batch_size: int,
        seed: int,
        cache: str | Path,
        split: str = "train",
        progress: Progress | None = None,
    ) -> None:
        if sequence_length < 2 or micro_batch_size < 1:
            given = f"sequence_length is {sequence_length} and micro_batch_size {micro_batch_size}"
            raise ConfigError(f"{given}: they must be at least 2 and 1")
        assert split in ("train", "validation")
        if split == "validation" and not options.has_validation:
            raise ConfigError("there is nothing to evaluate on: give data.validation_share or data.validation_paths")
        key = "validation_paths" if split == "validation" and options.validation_paths else "paths"
        self._corpus = open_corpus(options, key, tokenizer, Path(cache), progress)
        self._sequences = open_sequences(self._corpus, options, split, sequence_length, Path(cache))
        self._options = options
        self._sequence_length = sequence_length
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        # Any token would do, for nothing attends to it; but a padding token that was added later may lie beyond the
        # model's vocabulary.
        wanted = (getattr(tokenizer, "pad_token_id", None), tokenizer.eos_token_id)
        self._filler = next((token for token in wanted if token is not None and token <= self.max_token_id), 0)

    @property
    def num_sequences(self) -> int:
        """Sequences in an epoch."""
        return self._sequences.counts.num_sequences

    @property
    def num_tokens(self) -> int:
        """Tokens in an epoch, padding not counted."""
        return self._sequences.counts.num_tokens

    @property
    def num_targets(self) -> int:
        """Tokens in an epoch that carry loss."""
        return self._sequences.counts.num_targets

    @property
    def num_micro_batches_per_epoch(self) -> int:
        """Micro-batches in which every sequence appears once; the last of them may have fillers."""
        return -(-self.num_sequences // self._micro_batch_size)

    @property
    def max_token_id(self) -> int:
        """The largest token that any micro-batch holds: the model's vocabulary must be larger."""
        return self._corpus.counts.max_token_id

    @property
    def fingerprint(self) -> str:
        """Equal if and only if `micro_batches` gives the same: to be checked when a position is restored."""
        return cache_key(self._sequences.key, self._micro_batch_size, self._seed, self._filler, self._options.pad_to)

    @property
    def report(self) -> DataReport:
        """What became of the rows."""
        rows, counts = self._corpus.counts, self._sequences.counts
        return DataReport(
            num_rows=rows.num_rows,
            num_bad_rows=rows.num_bad_rows,
            bad_rows=self._corpus.bad_rows,
            num_rows_without_targets=rows.num_rows_without_targets,
            num_documents=counts.num_documents,
            num_long_documents=counts.num_long_documents,
            num_pieces_without_targets=counts.num_pieces_without_targets,
            num_sequences=counts.num_sequences,
            num_tokens=counts.num_tokens,
            num_targets=counts.num_targets,
            fill=counts.num_tokens / (counts.num_sequences * self._sequence_length),
        )

    def micro_batches(self, position: int, count: int) -> list[dict[str, torch.Tensor]]:
        """Micro-batches `position` to `position + count - 1`, counted from the start of training over all epochs."""
        assert position >= 0 and count >= 0
        return [self._shuffled_micro_batch(index) for index in range(position, position + count)]

    def iter_all(self) -> Iterator[dict[str, torch.Tensor]]:
        """Every sequence once, in the order of the files (packed ones: of the windows), for evaluation."""
        for index in range(self.num_micro_batches_per_epoch):
            yield self._micro_batch(self._places(index))

    def _shuffled_micro_batch(self, position: int) -> dict[str, torch.Tensor]:
        epoch, index = divmod(position, self.num_micro_batches_per_epoch)
        places = self._places(index)
        return self._micro_batch(
            [shuffled(place, self.num_sequences, seed=self._seed, epoch=epoch) for place in places]
        )

    def _places(self, index: int) -> range:
        first = index * self._micro_batch_size
        return range(first, min(first + self._micro_batch_size, self.num_sequences))

    def _micro_batch(self, sequences: list[int] | range) -> dict[str, torch.Tensor]:
        rows = [self._sequences.pieces(sequence) for sequence in sequences]
        shape = (self._micro_batch_size, self._length(rows))
        input_ids = np.full(shape, self._filler, np.int64)
        labels = np.full(shape, IGNORED, np.int64)
        # What no document fills is like one more document without targets: its positions begin at 0 as well.
        positions = np.tile(np.arange(shape[1]), (shape[0], 1))
        # A row of padding alone keeps one token to attend to: the attention of none is not a number.
        num_used = np.ones(shape[0], np.int64)
        for row, pieces in enumerate(rows):
            used = 0
            for start, length in pieces:
                here = slice(used, used + length)
                input_ids[row, here] = self._corpus.tokens[start : start + length]
                labels[row, here] = input_ids[row, here]
                if self._corpus.ignored is not None:
                    labels[row, here][self._corpus.ignored[start : start + length]] = IGNORED
                labels[row, used] = IGNORED  # else the document before would be trained to predict it
                positions[row, here] = np.arange(length)
                used += length
            positions[row, used:] = np.arange(shape[1] - used)
            num_used[row] = used
        batch = {"input_ids": input_ids, "labels": labels}
        if self._options.packing:
            batch["position_ids"] = positions
        else:
            batch["attention_mask"] = (np.arange(shape[1]) < num_used[:, None]).astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _length(self, rows: list[list[tuple[int, int]]]) -> int:
        if self._options.packing or self._options.pad_to == "sequence_length":
            return self._sequence_length
        longest = max(length for row in rows for _, length in row)
        return min(self._sequence_length, -(-longest // MULTIPLE) * MULTIPLE)


def deal(batches: Sequence[dict[str, torch.Tensor]], rank: int, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """What one of several ranks gets of some micro-batches: all get equally many. What is missing to that are copies
    without targets, which change no loss."""
    each = -(-len(batches) // num_ranks)
    own = list(batches[rank * each : (rank + 1) * each])
    without_targets = {**batches[0], "labels": torch.full_like(batches[0]["labels"], IGNORED)}
    return own + [without_targets] * (each - len(own))
