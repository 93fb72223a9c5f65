"""Opening a store: what its directories hold, whether it may be resumed or discarded, room for its files."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from greedysnake.errors import ANEW, DISCARD, StorageError, explained
from greedysnake.runtime.directory import (
    EXTENTS,
    IDENTITY,
    MANIFEST,
    MANIFEST_IN_USE,
    NEW,
    SCRATCH,
    Identity,
    StoreDirectory,
    folders_in,
    require_space,
)
from greedysnake.runtime.layout import ExtentSpec, Layout
from greedysnake.runtime.manifest import Manifest, Mark


def holds_store(directory: Path) -> bool:
    """Whether a directory is one of a store, with a checkpoint or without; of one rank or of several."""
    return any((folder / IDENTITY).exists() for folder in folders_in(directory))


def holds_checkpoint(directory: Path) -> bool:
    """Whether the first directory of a store has a checkpoint, or the remains of one; of one rank or of any of several.
    Takes no lock."""
    return any((folder / name).exists() for folder in folders_in(directory) for name in (MANIFEST, MANIFEST_IN_USE))


@dataclass(frozen=True)
class Stored:
    """What a checkpoint settles for whoever continues it."""

    num_slots: int = 0
    chunk_params: int | None = None
    moments: str | None = None
    """How they are stored; None without a checkpoint."""
    num_steps: int = 0


def stored_in(directory: Path) -> Stored:
    """Of the store whose first directory this is; nothing without a checkpoint. Takes no lock."""
    path = directory / MANIFEST
    with explained("read", path):
        if not path.exists():
            path = directory / (MANIFEST + NEW)  # of several ranks, one may have been cut off in the first checkpoint
        if not path.exists():
            return Stored()
        try:
            manifest = Manifest.decode(path.read_bytes(), str(path))
        except StorageError:
            if path.suffix == NEW:
                return Stored()
            raise
    chunk_params = manifest.metadata.get("chunk_params")
    return Stored(
        manifest.num_slots,
        chunk_params if isinstance(chunk_params, int) else None,
        str(manifest.metadata.get("moments", "float32")),
        manifest.step,
    )


def saved_mark(directory: Path) -> Mark:
    """Of the checkpoint that a rank has in place, in the first of its directories; NONE without one."""
    path = directory / MANIFEST
    with explained("read", path):
        return Manifest.decode(path.read_bytes(), str(path)).mark if path.exists() else NONE


NONE: Mark = (-1, 0, "")
Exchange = Callable[[object], Sequence[object]]
"""What each of several stores says that keep a checkpoint together."""


def alone(value: object) -> Sequence[object]:
    return (value,)


def settle_manifest(directory: StoreDirectory, exchange: Exchange) -> None:
    """Of stores that keep a checkpoint together, some may have been cut off before they put the last one in place. It
    is complete, or none of them would have it: those that lag behind put theirs in place now."""
    found = _manifest(directory, MANIFEST)
    mark = found.mark if found else NONE
    newest = max(each for each in exchange(mark) if isinstance(each, tuple))
    staged = _staged(directory) if mark != newest else None
    if staged is not None and staged.mark == newest:
        directory.rename(MANIFEST + NEW, MANIFEST)
        mark = newest
    for rank, other in enumerate(exchange(mark)):  # none writes on before all are there
        if other != newest:
            assert isinstance(other, tuple)
            at = "without a checkpoint" if other == NONE else f"at step {other[0]}"
            raise StorageError(
                f"the ranks have no checkpoint in common: rank {rank} is {at}, and another one at step {newest[0]} of "
                f"which it has nothing: restore the directories as they were, or {ANEW}"
            )


def _staged(directory: StoreDirectory) -> Manifest | None:
    """The manifest that was ready to be put in place, if it is whole."""
    try:
        return _manifest(directory, MANIFEST + NEW)
    except StorageError:
        return None


def resume_store(
    directories: Sequence[StoreDirectory], layout: Layout, extents: Sequence[ExtentSpec], fingerprint: str
) -> tuple[Manifest, Layout]:
    """The checkpoint in these directories, once it is sure that it is complete and of the same run; and the layout,
    with as many slots as it has or as are asked for, whichever are more."""
    manifest = _checkpoint(directories)
    differences = manifest.differences(fingerprint=fingerprint, num_slots=layout.num_slots, extents=extents)
    if differences:
        raise StorageError(
            f"the checkpoint of step {manifest.step} in {directories[0].path} is of another run: "
            f"{'; '.join(differences)}: give the same configuration, or another directory"
        )
    _require_lengths(directories[0], manifest, extents)
    stored = replace(layout, num_slots=manifest.num_slots)
    for member, directory in enumerate(directories):
        wanted, got = stored.extents_bytes(member), directory.size(EXTENTS)
        if got < wanted:
            raise StorageError(
                f"{directory.path / EXTENTS} is truncated: it has {got} bytes, the checkpoint of step "
                f"{manifest.step} needs {wanted}: restore it from a copy, or start anew {DISCARD}",
                path=str(directory.path / EXTENTS),
                wanted=wanted,
                got=got,
            )
    layout = replace(layout, num_slots=max(layout.num_slots, manifest.num_slots))
    grows = layout.num_slots > manifest.num_slots  # else what was left for manifests is there still
    or_else = ", or set engine.optimistic=false (in Python optimistic=False)" if grows else ""
    _require_space(directories, layout, _manifest_bytes(extents) if grows else 0, or_else)
    _allocate(directories, layout)
    return manifest, layout


def _require_lengths(directory: StoreDirectory, manifest: Manifest, extents: Sequence[ExtentSpec]) -> None:
    """What a manifest says to be stored goes to memory for the parts as they are: it must not be more."""
    for extent, (spec, records) in enumerate(zip(extents, manifest.parts, strict=True)):
        for part, record in enumerate(records):
            if record is None or (type(record[1].nbytes) is int and spec.may_hold(part, record[1].nbytes)):
                continue
            path = str(directory.path / MANIFEST)
            raise StorageError(
                f"{path} is damaged: {record[1].nbytes!r} bytes cannot be what is stored of part {part} of extent "
                f"{extent}, which has {spec.parts[part]}: restore the file from a copy, or start anew {DISCARD}",
                path=path,
            )


def create_store(
    directories: Sequence[StoreDirectory], layout: Layout, extents: Sequence[ExtentSpec], overwrite: bool
) -> str:
    """Make these directories a store without a checkpoint; returns its id. Checks all, then changes."""
    identities = [directory.identity() for directory in directories]  # a damaged or newer one is refused here
    if not overwrite:
        _refuse_to_discard(directories, identities)
    smaller = {
        2: ", or set engine.single_slot=true (in Python single_slot=True), which halves it",
        3: ", or set engine.optimistic=false (in Python optimistic=False), which takes a third off",
    }
    or_else = ", add a directory on another drive" + smaller.get(layout.num_slots, "")
    _require_space(directories, layout, 2 * _manifest_bytes(extents), or_else)
    reusable = None if overwrite else _reusable_store(identities)
    store = reusable or uuid.uuid4().hex
    # The manifests go first: from here on nothing that is about to be overwritten counts as a checkpoint.
    for directory in directories:
        directory.remove([MANIFEST, MANIFEST + NEW, MANIFEST_IN_USE])
    if not reusable:
        for member, directory in enumerate(directories):
            directory.claim(Identity(store, member, len(directories)))
    _allocate(directories, layout)
    return store


def require_scratch(directories: Sequence[StoreDirectory], layout: Layout) -> None:
    """PlanError unless the scratch files can have the sizes of `layout`."""
    sizes = layout.scratch_bytes
    missing = [directory.missing_bytes(SCRATCH, size) for directory, size in zip(directories, sizes, strict=True)]
    require_space(directories, missing, ", or keep more of the activations and gradients in RAM")


def allocate_scratch(directories: Sequence[StoreDirectory], layout: Layout) -> None:
    """Give the scratch files the sizes of `layout`, after checking that there is room."""
    require_scratch(directories, layout)
    for directory, size in zip(directories, layout.scratch_bytes, strict=True):
        directory.allocate(SCRATCH, size)


def _manifest_bytes(extents: Sequence[ExtentSpec]) -> int:
    """About 16 bytes for a part, 12 more for one that may be compressed, and the metadata of the caller. For a moment
    there are two manifests."""
    num_parts, num_compressed = (
        sum(len(spec.parts) for spec in extents),
        sum(spec.words is not None for spec in extents),
    )
    return 16 * num_parts + 12 * num_compressed + (64 << 10)


def _require_space(directories: Sequence[StoreDirectory], layout: Layout, more_bytes: int, or_else: str) -> None:
    missing = [
        directory.missing_bytes(EXTENTS, sum(map(len, layout.backed_ranges(member))))
        + directory.missing_bytes(SCRATCH, layout.scratch_bytes[member])
        for member, directory in enumerate(directories)
    ]
    missing[0] += more_bytes
    require_space(directories, missing, or_else)


def _allocate(directories: Sequence[StoreDirectory], layout: Layout) -> None:
    for member, directory in enumerate(directories):
        directory.allocate(EXTENTS, layout.extents_bytes(member), layout.backed_ranges(member))
        directory.allocate(SCRATCH, layout.scratch_bytes[member])


def _checkpoint(directories: Sequence[StoreDirectory]) -> Manifest:
    store = _one_store(directories)
    manifest = _manifest(directories[0], MANIFEST)
    if manifest is not None:
        if (manifest.store, manifest.num_members) != (store, len(directories)):
            raise StorageError(
                f"{directories[0].path / MANIFEST} belongs to another store than the directory it lies in: "
                "restore the directory as it was"
            )
        return manifest
    mixed = _manifest(directories[0], MANIFEST_IN_USE)
    if mixed is not None:
        raise StorageError(
            f"{directories[0].path} cannot be resumed: the run used single_slot and ended after it had begun "
            f"to overwrite the checkpoint of step {mixed.step} in place, so what is there mixes two steps: {ANEW}"
        )
    raise StorageError(
        f"{directories[0].path} holds no checkpoint to resume: the run ended before its first one; {ANEW}"
    )


def _refuse_to_discard(directories: Sequence[StoreDirectory], identities: Sequence[Identity | None]) -> None:
    """StorageError when a new store in these directories would destroy a checkpoint, or might."""
    first_of = {identity.store for identity in identities if identity and identity.member == 0}
    for directory, identity in zip(directories, identities, strict=True):
        manifest = _manifest(directory, MANIFEST)
        if manifest is not None:
            raise StorageError(
                f"{directory.path} holds the checkpoint of step {manifest.step}: continue from it (with the output_dir "
                f"of that run; in Python resume=True), or discard it {DISCARD}"
            )
        if identity and identity.store not in first_of:
            raise StorageError(
                f"{directory.path} is directory {identity.member + 1} of {identity.num_members} of another "
                "store, which may hold a checkpoint: give other directories, all of that store to continue from it (in "
                f"Python with resume=True), or discard it {DISCARD}"
            )


def _reusable_store(identities: Sequence[Identity | None]) -> str | None:
    """The id of the store that directories with these identities already are, in this order; else None."""
    first = identities[0]
    if first is None:
        return None
    wanted = [Identity(first.store, member, len(identities)) for member in range(len(identities))]
    return first.store if list(identities) == wanted else None


def _one_store(directories: Sequence[StoreDirectory]) -> str:
    """The id of the store whose directories these are, all of them and in order."""
    known = [directory.require_identity() for directory in directories]
    store, num_members = known[0].store, known[0].num_members
    for directory, identity in zip(directories, known, strict=True):
        if identity.store != store:
            raise StorageError(
                f"{directory.path} belongs to store {identity.store}, {directories[0].path} to store "
                f"{store}; a checkpoint lies in the directories of one store: give those"
            )
    if num_members != len(directories):
        raise StorageError(
            f"the store of {directories[0].path} has {num_members} directories and "
            f"{len(directories)} were given: give all of them, in the order of the first run"
        )
    if [identity.member for identity in known] != list(range(num_members)):
        ordered = sorted(zip(known, directories, strict=True), key=lambda pair: pair[0].member)
        names = ", ".join(str(directory.path) for _, directory in ordered)
        raise StorageError(f"the directories are not in the order of the store: give {names}")
    return store


def _manifest(directory: StoreDirectory, name: str) -> Manifest | None:
    data = directory.load(name)
    return None if data is None else Manifest.decode(data, str(directory.path / name))
