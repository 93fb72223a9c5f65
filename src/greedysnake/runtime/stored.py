"""A checkpoint to be read without training: of one rank, or of several whose parts it puts together.

What passes through are flat vectors, one for each kind of value (weight, residual, moments), so that a checkpoint can
be given to another number of ranks bit for bit, and its moments stored in another kind.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import torch

from greedysnake import _native
from greedysnake.errors import ANEW, ConfigError, StorageError
from greedysnake.models.sequential import Model
from greedysnake.runtime.arena import Arena
from greedysnake.runtime.arguments import check_moments
from greedysnake.runtime.chunking import ParameterCollecting
from greedysnake.runtime.directory import num_ranks_in, own_directories
from greedysnake.runtime.fitting import MOST_CHUNK_PARAMS
from greedysnake.runtime.flat import DecayRule, FlatBlock, align, decays_by_default, survey
from greedysnake.runtime.io import IoEngine
from greedysnake.runtime.manifest import Mark
from greedysnake.runtime.moments import decode, encode
from greedysnake.runtime.opening import NONE, Exchange, saved_mark, stored_in
from greedysnake.runtime.state import extent_numbers, extent_spec, fingerprint, split_vectors
from greedysnake.runtime.store import Store, StoreTicket
from greedysnake.shapes import PRECISIONS, Chunk, Precision, Share

NUM_BUFFERS = 3
"""Chunks that are read ahead."""


@dataclass(frozen=True)
class _Rank:
    """One rank's part: its blocks, and the store that they are in."""

    blocks: Sequence[FlatBlock]
    store: Store
    extent: Mapping[tuple[int, int], int]


class StoredModel:
    """Reads the checkpoint in `directories`, which stays as it is. Holds the locks of its stores until it is closed."""

    def __init__(
        self,
        model: Model,
        directories: Sequence[str | Path],
        precision: Precision = PRECISIONS["bfloat16"],
        *,
        decays: DecayRule = decays_by_default,
    ) -> None:
        self.precision = precision
        num_ranks = num_ranks_in(Path(directories[0]))
        shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
        own = [own_directories(directories, share) for share in shares]
        marks = [saved_mark(paths[0]) for paths in own]
        if max(marks) == NONE:
            raise StorageError(f"{directories[0]} holds no checkpoint to read: {ANEW}")
        check_moments(precision.moments, stored_in(own[0][0]).moments)
        self.decays = decays
        self.chunk_params = [stored_in(paths[0]).chunk_params or MOST_CHUNK_PARAMS for paths in own]
        """Of each rank."""
        with ExitStack() as undo:
            io = undo.enter_context(IoEngine())
            self.pool = _native.ThreadPool(os.cpu_count() or 1, None)
            undo.callback(self.pool.close)
            self._ranks: list[_Rank] = []
            for share, paths in zip(shares, own, strict=True):
                blocks = survey(model, self.chunk_params[share.rank], decays, needs_values=False, share=share)
                exchange = partial(_as_if_all_said, marks, share.rank)
                self._ranks.append(_open(blocks, paths, precision, share, io, self.pool, undo, exchange, resume=True))
            blocks = [block for rank in self._ranks for block in rank.blocks]
            largest = max(chunk.num_params for block in blocks for chunk in block.shape.chunks)
            self._arena = undo.enter_context(Arena(NUM_BUFFERS * precision.chunk_bytes(largest)))
            whole = self._arena.allocate(self._arena.budget_bytes, "chunks that are read")
            self._buffers = deque(whole.split(precision.chunk_bytes(largest)))
            self._places = {
                place.name: (number, place) for number, block in enumerate(self.blocks) for place in block.places
            }
            self._last: tuple[int, int, int] | None = None
            """The chunk (rank, block, number) that is in the first buffer."""
            self._resources = undo.pop_all()

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def num_steps(self) -> int:
        """Steps done at the checkpoint."""
        step = self._ranks[0].store.step
        assert step is not None
        return step

    @property
    def metadata(self) -> Mapping[str, object]:
        """What `save` of the engine was given."""
        user = self.own_metadata(0).get("user", {})
        assert isinstance(user, dict)
        return user

    def own_metadata(self, rank: int) -> Mapping[str, object]:
        """What the engine of a rank noted for itself as well."""
        return self._ranks[rank].store.metadata

    @property
    def blocks(self) -> Sequence[FlatBlock]:
        """As the first rank has them."""
        return self._ranks[0].blocks

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master), block by block, each as soon as it is read. Of a layer the large ones come last, so that
        whoever waits for all of it waits for no other layer."""
        joined = torch.empty(max(self.chunk_params), dtype=torch.float32, device="cpu")
        for number, block in enumerate(self.blocks):
            found = ParameterCollecting(block)
            for chunk, values in self._read(number):
                if self.precision.residual_bytes:
                    master = joined[: chunk.num_params]
                    addresses = values["weight"].data_ptr(), values["residual"].data_ptr(), master.data_ptr()
                    _native.join(self.pool, *addresses, chunk.num_params)
                else:
                    master = values["weight"].view(torch.float32)
                yield from found.add(chunk, master)

    def read_parameter(self, name: str, first: int, targets: Mapping[str, torch.Tensor], num_params: int) -> None:
        """Fills vectors, by the names that the precision has for them, with those of so many elements of a parameter
        from the first on; what follows on it up to a multiple of MOMENT_GROUP belongs to it. Ranges that follow on each
        other read no chunk twice."""
        number, place = self._places[name]
        start = place.offset + first
        for rank, part in enumerate(self._ranks):
            for index, chunk in enumerate(part.blocks[number].shape.chunks):
                low, high = max(chunk.start, start), min(chunk.start + chunk.num_params, start + num_params)
                if low < high:
                    values = self._chunk(rank, number, index)
                    for vector in self.precision.vectors(trainable=chunk.trainable):
                        found = values[vector.name][vector.size(low - chunk.start) : vector.size(high - chunk.start)]
                        targets[vector.name][vector.size(low - start) : vector.size(high - start)].copy_(found)

    def _chunk(self, rank: int, number: int, index: int) -> dict[str, torch.Tensor]:
        """The values of a chunk, unless it is the last that was asked for, read now."""
        part, buffer = self._ranks[rank], self._buffers[0]
        if self._last != (rank, number, index):
            self._last = None
            part.store.wait(part.store.read(part.extent[number, index], buffer.data_ptr()))
            self._last = (rank, number, index)
        return split_vectors(buffer, part.blocks[number].shape.chunks[index], self.precision)

    def _read(self, number: int) -> Iterator[tuple[Chunk, dict[str, torch.Tensor]]]:
        """(chunk, its values as bytes) of all chunks of a block, those of norms and biases first; the values are gone
        with the next."""
        chunks = [
            (chunk.trainable and chunk.start + chunk.num_params <= part.blocks[number].decay_end, rank, index)
            for rank, part in enumerate(self._ranks)
            for index, chunk in enumerate(part.blocks[number].shape.chunks)
        ]
        wanted = deque((rank, index) for _, rank, index in sorted(chunks))
        reading: deque[tuple[int, int, torch.Tensor, StoreTicket]] = deque()
        self._last = None  # it goes through the same buffers
        try:
            while wanted or reading:
                while wanted and len(reading) < NUM_BUFFERS:
                    rank, index = wanted.popleft()
                    buffer = self._buffers.popleft()
                    store, extent = self._ranks[rank].store, self._ranks[rank].extent[number, index]
                    self._buffers.append(buffer)
                    reading.append((rank, index, buffer, store.read(extent, buffer.data_ptr())))
                rank, index, buffer, ticket = reading.popleft()
                self._ranks[rank].store.wait(ticket)
                chunk = self._ranks[rank].blocks[number].shape.chunks[index]
                yield chunk, split_vectors(buffer, chunk, self.precision)
        finally:
            for rank, _, _, ticket in reading:
                self._ranks[rank].store.wait(ticket)

    def close(self) -> None:
        """Gives up files and locks. Calling it again does nothing."""
        self._resources.close()

    def __enter__(self) -> StoredModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def copy_for_ranks(
    model: Model,
    stored: StoredModel,
    directories: Sequence[str | Path],
    num_ranks: int,
    *,
    moments: str | None = None,
    single_slot: bool = False,
) -> None:
    """Writes the checkpoint to new directories, as so many ranks would have saved it, in the blocks of `model`, which
    may have other layers together. All bits stay as they are, but for moments of another kind than before: those are
    rounded to the nearest, once."""
    if num_ranks < 1:
        raise ConfigError(f"the number of ranks is {num_ranks}: give at least 1")
    precision = replace(stored.precision, moments=moments or stored.precision.moments)
    written = [int(str(stored.own_metadata(rank).get("ssd_written_bytes", 0))) for rank in range(stored.num_ranks)]
    with ExitStack() as undo:
        io = undo.enter_context(IoEngine())
        ranks: list[_Rank] = []
        said: list[object] = []
        for rank in range(num_ranks):
            share = Share(rank, num_ranks)
            blocks = survey(model, stored.chunk_params[0], stored.decays, needs_values=False, share=share)
            paths = own_directories(directories, share)
            exchange = partial(_as_the_first_said, said)
            ranks.append(
                _open(blocks, paths, precision, share, io, stored.pool, undo, exchange, single_slot=single_slot)
            )
        largest = max(chunk.num_params for block in ranks[0].blocks for chunk in block.shape.chunks)
        sizes = [kind.chunk_bytes(largest) for kind in (stored.precision, precision)]
        arena = undo.enter_context(Arena(sum(sizes)))
        whole = arena.allocate(arena.budget_bytes, "a chunk as it was, and as it is written")
        as_read, to_write = whole.split(sizes)
        for number in range(len(ranks[0].blocks)):
            for part in ranks:
                _copy(stored, part, precision, number, (as_read, to_write))
        for rank, part in enumerate(ranks):
            written_bytes = sum(written) if rank == 0 else 0
            changed = {"moments": precision.moments, "ssd_written_bytes": written_bytes}
            part.store.publish(stored.num_steps, {**stored.own_metadata(0), **changed})


def _copy(
    stored: StoredModel, part: _Rank, precision: Precision, number: int, buffers: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A rank's chunks of one block. What lies between and after its parameters is zero."""
    block, (as_read, to_write) = part.blocks[number], buffers
    for index, chunk in enumerate(block.shape.chunks):
        vectors = stored.precision.vectors(trainable=chunk.trainable)
        found = split_vectors(as_read.zero_(), chunk, stored.precision)
        for place in block.places:
            low, high = max(place.offset, chunk.start), min(align(place.end), chunk.start + chunk.num_params)
            if low < high:
                before, after = low - chunk.start, high - chunk.start
                targets = {each.name: found[each.name][each.size(before) : each.size(after)] for each in vectors}
                stored.read_parameter(place.name, low - place.offset, targets, high - low)
        _convert(found, stored.precision.moments, split_vectors(to_write.zero_(), chunk, precision), precision.moments)
        part.store.wait(part.store.write(part.extent[number, index], to_write.data_ptr()))


def _convert(found: Mapping[str, torch.Tensor], kind: str, targets: Mapping[str, torch.Tensor], new_kind: str) -> None:
    """The vectors of one chunk with moments of a new kind. Frozen chunks have none."""
    changes = new_kind != kind and "exp_avg" in found
    for name in found.keys() & targets.keys():
        if not (changes and name.startswith("exp_avg")):
            targets[name].copy_(found[name])
    if changes:
        encode(new_kind, *decode(kind, found), targets)


def _open(
    blocks: Sequence[FlatBlock],
    directories: Sequence[Path],
    precision: Precision,
    share: Share,
    io: IoEngine,
    pool: _native.ThreadPool,
    undo: ExitStack,
    exchange: Exchange,
    *,
    resume: bool = False,
    single_slot: bool = False,
) -> _Rank:
    """A rank's store: with `resume` the one that is there, else a new one."""
    chunks = [chunk for block in blocks for chunk in block.shape.chunks]
    specs = [extent_spec(chunk, precision) for chunk in chunks]
    if resume:
        single_slot = stored_in(directories[0]).num_slots == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of single_slot, which the run has heard
        store = Store(
            directories,
            specs,
            io=io,
            single_slot=single_slot,
            fingerprint=fingerprint(blocks, precision, share),
            resume=resume,
            pool=pool,
            exchange=exchange,
        )
    undo.callback(store.close)
    return _Rank(blocks, store, extent_numbers([block.shape for block in blocks]))


def _as_if_all_said(marks: Sequence[Mark], rank: int, value: object) -> Sequence[object]:
    """What the ranks would answer: this one what it says, the others what is in their manifests, or will be."""
    return [value if number == rank else max(marks) for number in range(len(marks))]


def _as_the_first_said(said: list[object], value: object) -> Sequence[object]:
    """For stores that are written one after the other: the mark of the first is that of all."""
    if isinstance(value, tuple):
        said.append(value)
        return said
    return [value]
