"""Extents on SSD that survive a crash: two slots for each part, checkpoints published without copying.

Extents are known by number; the store knows nothing of models or torch. On-disk format: docs/store-format.md.
"""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import permutations
from os import path
from pathlib import Path
from types import TracebackType

from greedysnake import _native
from greedysnake.errors import ConfigError, RankError, StorageError
from greedysnake.runtime.compression import Compressor
from greedysnake.runtime.directory import (
    EXTENTS,
    MANIFEST,
    MANIFEST_IN_USE,
    NEW,
    SCRATCH,
    StoreDirectory,
)
from greedysnake.runtime.io import File, IoEngine
from greedysnake.runtime.layout import ExtentSpec, Layout, Place, run_lengths
from greedysnake.runtime.manifest import Contents, Manifest, plain_json
from greedysnake.runtime.opening import (
    Exchange,
    allocate_scratch,
    alone,
    create_store,
    require_scratch,
    resume_store,
    settle_manifest,
)
from greedysnake.runtime.slots import Attempt, SlotTable, lying_together
from greedysnake.runtime.transfers import Kind, Piece, StoreTicket, Sum, Transfers, verify

__all__ = ["ExtentSpec", "Store", "StoreTicket"]

ALL = slice(None)

_SINGLE_SLOT_WARNING = (
    "single_slot: updates overwrite the checkpoint in place. Disk use is halved, but a run that ends between "
    "checkpoints cannot be resumed; only a checkpoint published as the last thing before the end can."
)


class Store:
    """Reads and writes extents, and publishes checkpoints of all of them.

    Threads may work on different extents at the same time; order on one extent is the caller's business.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        extents: Sequence[ExtentSpec],
        *,
        io: IoEngine,
        single_slot: bool = False,
        fingerprint: str,
        resume: bool = False,
        overwrite: bool = False,
        checkpoints: bool = True,
        spare_slot: bool = False,
        scratch: Sequence[int] = (),
        verify_reads: bool = True,
        compress: bool = False,
        pool: _native.ThreadPool | None = None,
        exchange: Exchange = alone,
    ) -> None:
        """Open the store in `directories`: new, or with `resume` at its last checkpoint.

        `fingerprint` names what the extents hold; a checkpoint of another one is refused. `overwrite`
        discards a checkpoint that is there. Without `checkpoints` none is published, and one slot is enough. Tentative
        writes need a `spare_slot`. `scratch` gives the sizes of ranges that no checkpoint keeps. With `compress` words
        are written in fewer bytes, by the threads of `pool`.

        Several stores may keep a checkpoint together, all of them or none: `exchange` gives what each of them says.
        """
        if resume and overwrite:
            raise ConfigError("resume and overwrite contradict each other: give one of them")
        self.directories = _distinct(directories)
        self.verify_reads = verify_reads
        self._extents = tuple(extents)
        self._fingerprint = fingerprint
        self._io = io
        self._transfers = Transfers(io)
        self._compressor = Compressor(pool, compresses=compress)
        self._exchange = exchange
        self._is_one_of_several = False
        if single_slot and checkpoints:
            warnings.warn(_SINGLE_SLOT_WARNING, RuntimeWarning, stacklevel=2)
        num_slots = count_slots(single_slot=single_slot, checkpoints=checkpoints, spare_slot=spare_slot)
        self._layout = Layout.build(self._extents, scratch, num_members=len(self.directories), num_slots=num_slots)
        self._checkpoint: Manifest | None = None
        self._lock = threading.Lock()
        self._scratch_sums: dict[int, tuple[int, Contents]] = {}
        """Of a scratch range: where and what was last written."""
        self._publishing = False
        self._in_place = False
        """single_slot: the checkpoint has been overwritten in part, and its manifest is marked so."""
        self._broken: str | None = None
        with ExitStack() as undo:
            self._members = [_enter(StoreDirectory(directory, resume=resume), undo) for directory in self.directories]
            if resume:
                settle_manifest(self._members[0], exchange)
                manifest, self._layout = resume_store(self._members, self._layout, self._extents, fingerprint)
                self._checkpoint, self._store_id = manifest, manifest.store
            else:
                self._store_id = create_store(self._members, self._layout, self._extents, overwrite)
            self._slots = SlotTable(self._extents, self._layout.num_slots)
            if self._checkpoint:
                self._slots.load(self._checkpoint.parts)
            self._files = [self._open(member, EXTENTS, undo) for member in range(len(self._members))]
            self._scratch_resources = undo.enter_context(ExitStack())
            self._scratch_files = [
                self._open(member, SCRATCH, self._scratch_resources) for member in range(len(self._members))
            ]
            self._resources = undo.pop_all()

    @property
    def disk_bytes(self) -> int:
        """Bytes that the data files take in all directories together."""
        return self._layout.disk_bytes

    @property
    def has_checkpoint(self) -> bool:
        """Whether a crash now would leave something to resume from."""
        return self._checkpoint is not None and not self._in_place

    @property
    def step(self) -> int | None:
        """Step of the last checkpoint; None before the first."""
        return self._checkpoint.step if self._checkpoint else None

    @property
    def metadata(self) -> Mapping[str, object]:
        """What `publish` was given at the last checkpoint, as JSON gives it back; empty before the first."""
        return self._checkpoint.metadata if self._checkpoint else {}

    def read(self, extent: int, address: int, parts: slice | range = ALL, urgent: bool = False) -> StoreTicket:
        """Start to read the newest contents of a run of parts into memory at `address`."""
        chosen = self._chosen(extent, parts)
        slots, contents = self._slots.to_read(extent, chosen)
        return self._submit("read", extent, address, slots, contents, urgent)

    def write(
        self,
        extent: int,
        address: int,
        parts: slice | range = ALL,
        urgent: bool = False,
        attempt: Attempt | None = None,
    ) -> StoreTicket:
        """Start to write a run of parts from memory at `address`; the last checkpoint stays as it is. As part of an
        `attempt`, the newest contents stay as they are too, until `end_attempt` confirms it. Words are compressed in
        memory, and stay so unless the write fails."""
        chosen = self._chosen(extent, parts)
        with self._lock:
            self._require_writable()
            if self._layout.num_slots == 1 and self.has_checkpoint:
                self._members[0].rename(MANIFEST, MANIFEST_IN_USE)
                self._in_place = True
            if attempt:
                slots = self._slots.start_tentative_write(extent, chosen)
            else:
                slots = self._slots.start_write(extent, chosen)
        contents = self._compressor.compress(self._extents[extent], chosen, address)
        try:
            return self._submit("write", extent, address, slots, contents, urgent, attempt)
        except BaseException:
            with suppress(ValueError):
                self._compressor.restore(self._extents[extent], contents, address)  # so that it can be repeated
            raise

    def end_attempt(self, attempt: Attempt, *, confirmed: bool) -> None:
        """Its writes, those still to come included, count from now on; or never did."""
        self._slots.end_attempt(attempt, confirmed=confirmed)

    def read_scratch(self, index: int, address: int, nbytes: int, offset: int = 0, urgent: bool = False) -> StoreTicket:
        """Start to read `nbytes` at `offset` of a scratch range; checked if that is what was last written to it."""
        return self._submit_scratch("read", index, address, nbytes, offset, urgent)

    def write_scratch(
        self, index: int, address: int, nbytes: int, offset: int = 0, urgent: bool = False
    ) -> StoreTicket:
        """Start to write `nbytes` at `offset` of a scratch range, which no checkpoint keeps."""
        return self._submit_scratch("write", index, address, nbytes, offset, urgent)

    def poll(self, ticket: StoreTicket) -> bool:
        """Whether `wait` would return, or raise, without blocking."""
        return self._transfers.poll(ticket)

    def wait(self, ticket: StoreTicket) -> None:
        """Block until a transfer is done; StorageError when it failed or, for a read, when a CRC differs."""
        extent = None if ticket.extent is None else self._extents[ticket.extent]
        try:
            self._transfers.wait(ticket)
        except BaseException:
            if extent and ticket.kind == "write":
                with suppress(StorageError):  # the first one is what matters
                    self._compressor.decompress(extent, ticket)  # so that it can be repeated
            raise
        if ticket.kind == "read":
            if self.verify_reads:
                verify(ticket)
            if extent:
                self._compressor.decompress(extent, ticket)
        elif ticket.extent is not None:
            for piece in ticket.pieces:
                slots = dict.fromkeys(piece.sums, piece.slot)
                contents = {part: written.contents for part, written in piece.sums.items()}
                if ticket.attempt:
                    self._slots.settle_tentative(ticket.attempt, ticket.extent, slots, contents)
                else:
                    self._slots.settle(ticket.extent, slots, contents)

    def require_scratch(self, sizes: Sequence[int]) -> None:
        """PlanError unless there is room for such scratch ranges; changes nothing."""
        require_scratch(self._members, self._with_scratch(sizes))

    def resize_scratch(self, sizes: Sequence[int]) -> None:
        """Replace the scratch ranges, whose contents are lost; none may be under way."""
        layout = self._with_scratch(sizes)
        self._scratch_sums.clear()
        self._scratch_resources.close()
        allocate_scratch(self._members, layout)
        self._layout = layout
        with ExitStack() as undo:
            self._scratch_files = [self._open(member, SCRATCH, undo) for member in range(len(self._members))]
            self._scratch_resources = undo.pop_all()

    def publish(self, step: int, metadata: Mapping[str, object]) -> None:
        """Make what was written the checkpoint of `step`; durable on return. Blocks on the drives.

        Every write must have been waited for. On an error the checkpoint before stays. Of several stores that keep a
        checkpoint together, each has its manifest ready before one puts it in place, and all have it in place before
        one writes on: whenever they are cut off, those that lag behind can follow.
        """
        with self._lock:
            self._require_writable()
            self._require_settled(step)
            self._publishing = True
        try:
            manifest = self._manifest(step, metadata)
            encoded = manifest.encode()
            self._sync_data()
            self._members[0].stage(MANIFEST, encoded)
            # Until the slots say so too, no exception, a signal handler's included, may lead to another write: it would
            # go over what the new manifest names.
            self._broken = f"publishing the checkpoint of step {step} was interrupted"
            self._meet(step)
            self._put_in_place()
            self._exchange(step)
            self._slots.pin()
            self._checkpoint, self._in_place = manifest, False
            self._broken = None
        finally:
            self._publishing = False

    def close(self) -> None:
        """Wait for transfers under way, then give up files and locks. Publishes nothing."""
        try:
            self._transfers.drain()  # without a publish it changes no checkpoint
        finally:
            self._scratch_resources.close()
            self._resources.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Opening

    def _with_scratch(self, sizes: Sequence[int]) -> Layout:
        slots = self._layout.num_slots
        return Layout.build(self._extents, sizes, num_members=len(self._members), num_slots=slots)

    def _open(self, member: int, name: str, undo: ExitStack) -> File | None:
        if self._members[member].size(name) == 0:
            return None
        file = self._io.open(str(self._members[member].path / name))
        undo.callback(file.close)
        return file

    # Transfers

    def _chosen(self, extent: int, parts: slice | range) -> range:
        if not 0 <= extent < len(self._extents):
            raise ConfigError(f"extent {extent} of a store that has {len(self._extents)}")
        every = range(len(self._extents[extent].parts))
        chosen = every[parts] if isinstance(parts, slice) else parts
        if not chosen or chosen.step != 1 or chosen.start < 0 or chosen.stop > every.stop:
            raise ConfigError(f"{parts} is not a run of the {len(every)} parts of extent {extent}")
        return chosen

    def _require_writable(self) -> None:
        """Called with the lock held, before anything of a write or a publish happens."""
        if self._broken:
            raise StorageError(
                f"{self._broken}; since then it is unknown what the drive keeps: close the store and resume"
            )
        if self._publishing:
            raise StorageError("a checkpoint is being published: write again when publish() has returned")

    def _submit(
        self,
        kind: Kind,
        extent: int,
        address: int,
        slots: Mapping[int, int],
        contents: Mapping[int, Contents],
        urgent: bool,
        attempt: Attempt | None = None,
    ) -> StoreTicket:
        place, spec = self._layout.extents[extent], self._extents[extent]
        file = self._file(self._files, place)
        first = spec.offsets[next(iter(slots))]
        short = {part for part, (_, nbytes) in contents.items() if nbytes < spec.parts[part]}
        pieces: list[Piece] = []
        for parts in lying_together(slots, short):
            slot = slots[parts.start]
            begin, end = spec.offsets[parts.start], spec.offsets[parts[-1]] + contents[parts[-1]].nbytes
            offset = slot * self._layout.slot_bytes[place.member] + place.offset + begin
            sums = {part: Sum(spec.offsets[part] - begin, contents[part]) for part in parts}
            pieces.append(Piece(file, offset, address + begin - first, end - begin, sums, slot))
        return self._transfers.submit(kind, extent, pieces, urgent=urgent, attempt=attempt)

    def _submit_scratch(
        self, kind: Kind, index: int, address: int, nbytes: int, offset: int, urgent: bool
    ) -> StoreTicket:
        if not 0 <= index < len(self._layout.scratch):
            raise ConfigError(f"scratch range {index} of a store that has {len(self._layout.scratch)}")
        place = self._layout.scratch[index]
        if offset < 0 or nbytes <= 0 or offset + nbytes > place.num_bytes:
            raise ConfigError(
                f"{nbytes} bytes at {offset} do not lie in scratch range {index} of {place.num_bytes} bytes"
            )
        file = self._file(self._scratch_files, place)
        start = place.offset + offset
        if kind == "write":
            self._scratch_sums[index] = (offset, Contents(_native.crc32c(address, nbytes), nbytes))
        at, written = self._scratch_sums.get(index, (None, Contents(0, 0)))
        sums = {0: Sum(0, written)} if (at, written.nbytes) == (offset, nbytes) else {}
        return self._transfers.submit(kind, None, [Piece(file, start, address, nbytes, sums)], urgent=urgent)

    @staticmethod
    def _file(files: Sequence[File | None], place: Place) -> File:
        file = files[place.member]
        assert file is not None, "a directory that holds a place has the file"
        return file

    # Publishing

    def _require_settled(self, step: int) -> None:
        unsettled = [f"{extent}.{part}" for extent, part in self._slots.unsettled()]
        if unsettled:
            raise StorageError(
                f"cannot publish step {step}: {len(unsettled)} parts were written without success "
                f"(extent.part {', '.join(unsettled[:3])}{', ...' if len(unsettled) > 3 else ''}): "
                "wait for each write, and repeat those that failed"
            )

    def _meet(self, step: int) -> None:
        """All stores have their manifest ready, or the checkpoint before stays that of all."""
        try:
            if self._is_one_of_several:
                self._members[0].sync()  # so that a power cut leaves what is ready, for those that lag behind
            self._exchange(step)
        except RankError as error:
            if not error.is_gone:  # else another may have put it in place
                self._broken = None
            raise

    def _manifest(self, step: int, metadata: Mapping[str, object]) -> Manifest:
        number = self._checkpoint.mark[1] + 1 if self._checkpoint else 0
        marks = self._exchange((step, number, uuid.uuid4().hex))
        self._is_one_of_several = len(marks) > 1
        mark = marks[0]
        assert isinstance(mark, tuple)
        return Manifest(
            mark=mark,
            store=self._store_id,
            step=step,
            fingerprint=self._fingerprint,
            num_members=len(self._members),
            num_slots=self._layout.num_slots,
            extents=run_lengths(self._extents),
            parts=self._slots.records(),
            metadata=plain_json(metadata),
        )

    def _sync_data(self) -> None:
        for member, file in zip(self._members, self._files, strict=True):
            if file is None:
                continue
            member.require_in_place(file.fd, EXTENTS)
            try:
                file.sync()
            except StorageError as error:
                # The kernel may drop what it could not write and report success next time: no second try.
                self._broken = str(error)
                raise

    def _put_in_place(self) -> None:
        try:
            self._members[0].rename(MANIFEST + NEW, MANIFEST)
            if self._layout.num_slots == 1:
                self._members[0].remove([MANIFEST_IN_USE])
        except StorageError as error:
            # Either manifest may be the one that lasts, so both slots are pinned and neither may be written.
            self._broken = str(error)
            raise


def count_slots(*, single_slot: bool, checkpoints: bool, spare_slot: bool) -> int:
    """How many places every extent has: for a checkpoint, for what is newest, for what may become so."""
    return (1 if single_slot or not checkpoints else 2) + spare_slot


def _enter(directory: StoreDirectory, undo: ExitStack) -> StoreDirectory:
    undo.callback(directory.close)
    return directory


def _distinct(directories: Sequence[str | Path]) -> tuple[Path, ...]:
    if isinstance(directories, (str, Path)) or not directories:
        raise ConfigError(f"directories must be a list of at least one path, not {directories!r}")
    absolute = tuple(Path(path.abspath(directory)) for directory in directories)
    real = [path.realpath(directory) for directory in absolute]
    for index, directory in enumerate(real):
        if directory in real[:index]:
            raise ConfigError(f"{absolute[index]} is given twice: a drive holds one directory of a store")
    for (inner, directory), (outer, around) in permutations(enumerate(real), 2):
        if Path(directory).is_relative_to(around):
            raise ConfigError(
                f"{absolute[inner]} lies in {absolute[outer]}, which may hold nothing but files of the store: give "
                "directories beside each other"
            )
    return absolute
