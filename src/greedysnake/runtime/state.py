"""The model's values in their homes: puts them there, reads them back, writes what lives in RAM to the store."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from greedysnake import _native
from greedysnake.ops import Plan
from greedysnake.placement import Home
from greedysnake.runtime.chunking import ChunkFilling
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.layout import ExtentSpec, Words
from greedysnake.runtime.memory import HostMemory
from greedysnake.runtime.moments import decode
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.store import Store, StoreTicket
from greedysnake.shapes import WORD_BYTES, BlockShape, Chunk, Precision, Share

WEIGHT, STATE = 0, 1
"""Parts of an extent."""


def extent_specs(plan: Plan, *, checkpoints: bool) -> list[ExtentSpec]:
    """One extent per chunk: its weight, then everything else of it that is stored. Without checkpoints, what lives in
    RAM is never written."""
    specs = []
    for block, homes in zip(plan.blocks, plan.homes, strict=True):
        for chunk, home in zip(block.chunks, homes, strict=True):
            in_ram = [part for part, where in ((WEIGHT, home.weight), (STATE, home.state)) if where is Home.RAM]
            specs.append(extent_spec(chunk, plan.precision, frozenset(() if checkpoints else in_ram)))
    return specs


def extent_spec(chunk: Chunk, precision: Precision, absent: frozenset[int] = frozenset()) -> ExtentSpec:
    """Of the state the moments, which come last, may be compressed."""
    parts = tuple(part for part in part_bytes(chunk, precision) if part)
    moment_bytes = WORD_BYTES.get(precision.moments)
    words = None
    if chunk.trainable and moment_bytes:
        words = Words(STATE, chunk.num_params * precision.residual_bytes, moment_bytes)
    return ExtentSpec(parts, absent, words)


def part_bytes(chunk: Chunk, precision: Precision) -> tuple[int, int]:
    """Bytes of a chunk's weight and of the rest of it."""
    state_bytes = precision.state_bytes(chunk.num_params, trainable=chunk.trainable)
    return chunk.num_params * precision.weight_bytes, state_bytes


def split_vectors(buffer: torch.Tensor, chunk: Chunk, precision: Precision) -> dict[str, torch.Tensor]:
    """The bytes of a chunk in a buffer that it begins with, by the name of what they hold."""
    vectors = precision.vectors(trainable=chunk.trainable)
    sizes = [vector.size(chunk.num_params) for vector in vectors]
    parts = buffer[: sum(sizes)].split(sizes)
    return {vector.name: part for vector, part in zip(vectors, parts, strict=True)}


def fingerprint(blocks: Sequence[FlatBlock], precision: Precision, share: Share | None = None) -> str:
    """Names what the extents hold: every parameter with its place, the precision, and which rank's part it is."""
    digest = hashlib.sha256(precision.name.encode())
    if precision.moments != "float32":
        digest.update(f"moments {precision.moments}".encode())
    if share and share.num_ranks > 1:
        digest.update(f"rank {share.rank} of {share.num_ranks}".encode())
    for block in blocks:
        for place in block.places:
            digest.update(f"{block.name} {place.name} {place.offset} {tuple(place.shape)} {place.trainable}".encode())
    return digest.hexdigest()[:32]


def extent_numbers(blocks: Sequence[BlockShape]) -> dict[tuple[int, int], int]:
    keys = [(block, index) for block, shape in enumerate(blocks) for index in range(len(shape.chunks))]
    return {key: number for number, key in enumerate(keys)}


class _Turns:
    """Two update slots, or the one there is: one is filled while the other is written. At the end nothing is under way,
    whatever came in between."""

    def __init__(self, host: HostMemory, store: Store | None) -> None:
        self._store = store
        self._slots = deque(host.updates[:2])
        self._under_way: dict[int, StoreTicket] = {}
        """What is being written, by the address of its slot."""

    def next(self) -> torch.Tensor:
        """A slot that is free; the one before may still be written."""
        self._slots.rotate()
        self._wait(self._slots[0].data_ptr())
        return self._slots[0]

    def write(self, extent: int, address: int, parts: slice) -> None:
        """Begins to write out of the slot that was given last."""
        assert self._store is not None
        self._under_way[self._slots[0].data_ptr()] = self._store.write(extent, address, parts)

    def _wait(self, slot: int) -> None:
        ticket = self._under_way.pop(slot, None)
        if ticket is not None:
            assert self._store is not None
            self._store.wait(ticket)

    def __enter__(self) -> _Turns:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as waiting:  # for all of them, also when one has failed
            for slot in list(self._under_way):
                waiting.callback(self._wait, slot)


class ModelState:
    """Whole chunks pass through the first update slots: nothing else may be under way."""

    def __init__(
        self,
        plan: Plan,
        blocks: Sequence[FlatBlock],
        host: HostMemory,
        store: Store | None,
        pool: _native.ThreadPool,
        ranks: Ranks,
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._blocks = blocks
        self._host = host
        self._store = store
        self._pool = pool
        self._extent = extent_numbers(plan.blocks)
        self._dirty = {
            (block, index)
            for block, homes in enumerate(plan.homes)
            for index, home in enumerate(homes)
            if Home.RAM in (home.weight, home.state)
        }

    @contextmanager
    def filling(self, number: int) -> Iterator[ChunkFilling]:
        """Takes the values of a block's parameters, to which it sets the block, with zero moments."""
        precision = self._plan.precision
        with _Turns(self._host, self._store) as turns:

            def put(index: int, master: torch.Tensor) -> None:
                slot = turns.next()
                state = slot.data_ptr() + len(master) * precision.weight_bytes
                if precision.residual_bytes:
                    _native.split(self._pool, master.data_ptr(), slot.data_ptr(), state, len(master))
                else:
                    slot[: master.nbytes].copy_(master.view(torch.uint8))
                moments = len(master) * (precision.weight_bytes + precision.residual_bytes)
                slot[moments : sum(self._sizes(number, index))].zero_()
                self._keep_in_ram(number, index, slot)
                self._write_parts(number, index, slot, turns, Home.SSD)

            filling = ChunkFilling(self._blocks[number], put)
            yield filling
            assert filling.is_done, "parameters are missing"

    def write_ram_parts(self) -> None:
        """Writes what lives in RAM to the store, so that a checkpoint has all of it."""
        with _Turns(self._host, self._store) as turns:
            for number, index in sorted(self._dirty):
                slot = turns.next()
                self._load(number, index, slot, Home.RAM)
                self._write_parts(number, index, slot, turns, Home.RAM)

    def read_ram_parts(self) -> None:
        """The other way round, after resuming."""
        for number, index in sorted(self._dirty):
            slot = self._host.updates[0]
            assert self._store is not None
            self._store.wait(self._store.read(self._extent[number, index], slot.data_ptr()))
            self._keep_in_ram(number, index, slot)

    def parameters_of(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master) of one block, which is read as a whole before this returns. All ranks ask at once."""
        block = self._blocks[number]
        master = torch.zeros(block.shape.num_params, dtype=torch.float32, device="cpu")
        for index, chunk in enumerate(block.shape.chunks):
            slot = self._host.updates[0]
            self._load(number, index, slot)
            target = master[chunk.start : chunk.start + chunk.num_params]
            self._join(slot, chunk, target)
        self._ranks.exchange("named_parameters()", number)  # all have read theirs
        for part in (master[: block.shape.num_trainable], master[block.shape.num_trainable :]):
            self._ranks.gather_parts(part)
        return ((place.name, master[place.offset : place.end].view(place.shape)) for place in block.places)

    def moments_of(self, number: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, exp_avg, exp_avg_sq) of the trained parameters of one block, likewise."""
        precision, block = self._plan.precision, self._blocks[number]
        moments = torch.zeros(2, block.shape.num_trainable, dtype=torch.float32, device="cpu")
        for index, chunk in enumerate(block.shape.chunks):
            if chunk.trainable:
                slot = self._host.updates[0]
                self._load(number, index, slot)
                vectors = split_vectors(slot, chunk, precision)
                both = decode(precision.moments, vectors)
                for moment, values in zip(moments, both, strict=True):
                    moment[chunk.start : chunk.start + chunk.num_params].copy_(values)
        self._ranks.exchange("named_moments()", number)
        for moment in moments:
            self._ranks.gather_parts(moment)
        places = [place for place in block.places if place.trainable]
        both_of = ((place, moments[:, place.offset : place.end].clone()) for place in places)
        return ((place.name, both[0].view(place.shape), both[1].view(place.shape)) for place, both in both_of)

    def _join(self, slot: torch.Tensor, chunk: Chunk, target: torch.Tensor) -> None:
        precision = self._plan.precision
        if precision.residual_bytes:
            residual = slot.data_ptr() + chunk.num_params * precision.weight_bytes
            _native.join(self._pool, slot.data_ptr(), residual, target.data_ptr(), chunk.num_params)
        else:
            target.copy_(slot[: target.nbytes].view(torch.float32))

    def _sizes(self, number: int, index: int) -> tuple[int, int]:
        return part_bytes(self._plan.blocks[number].chunks[index], self._plan.precision)

    def _load(self, number: int, index: int, slot: torch.Tensor, wanted: Home | None = None) -> None:
        """Gathers a whole chunk, from RAM and SSD, in an update slot; or what has the home that is wanted."""
        home = self._plan.homes[number][index]
        weight_bytes, state_bytes = self._sizes(number, index)
        for part, part_home, start in ((WEIGHT, home.weight, 0), (STATE, home.state, weight_bytes)):
            nbytes = state_bytes if part == STATE else weight_bytes
            if not nbytes or wanted not in (None, part_home):
                continue
            if part_home is Home.RAM:
                values = self._host.weights if part == WEIGHT else self._host.state
                slot[start : start + nbytes].copy_(values[number, index])
            else:
                assert self._store is not None
                address = slot.data_ptr() + start
                self._store.wait(self._store.read(self._extent[number, index], address, slice(part, part + 1)))

    def _write_parts(self, number: int, index: int, slot: torch.Tensor, turns: _Turns, wanted: Home) -> None:
        """Begins to write the parts of a chunk that have a home to the store."""
        home = self._plan.homes[number][index]
        weight_bytes, state_bytes = self._sizes(number, index)
        parts = [part for part, where in ((WEIGHT, home.weight), (STATE, home.state)) if where is wanted]
        if not state_bytes:
            parts = [part for part in parts if part == WEIGHT]
        if parts:
            address = slot.data_ptr() + (weight_bytes if parts[0] == STATE else 0)
            turns.write(self._extent[number, index], address, slice(parts[0], parts[-1] + 1))

    def _keep_in_ram(self, number: int, index: int, slot: torch.Tensor) -> None:
        home = self._plan.homes[number][index]
        weight_bytes, state_bytes = self._sizes(number, index)
        if home.weight is Home.RAM:
            self._host.weights[number, index].copy_(slot[:weight_bytes])
        if home.state is Home.RAM and state_bytes:
            self._host.state[number, index].copy_(slot[weight_bytes : weight_bytes + state_bytes])
