"""The manifest: the one file whose presence makes a checkpoint. Text to object and back; opens no files.

Line 1 is JSON, line 2 its CRC32C in hex, so that a torn or altered manifest is never believed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np

from greedysnake import _native
from greedysnake.errors import DISCARD, ConfigError, StorageError
from greedysnake.runtime.layout import ExtentSpec, RunLengths, run_lengths

T = TypeVar("T")

FORMAT = "greedysnake-store"
VERSION = 1
COMPRESSED_VERSION = 2
"""Of a manifest with parts that are stored in fewer bytes than they have, which not every program can read."""


class Contents(NamedTuple):
    """What is stored of a part."""

    crc: int
    """CRC32C."""
    nbytes: int
    """Fewer than the part has if it is compressed."""


PartRecord = tuple[int, Contents] | None
"""Slot and contents of a part at the checkpoint; None when it was never written."""


Mark = tuple[int, int, str]
"""Step, how many checkpoints there were before it, and a word of its own. A later checkpoint has a larger one."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint consists of."""

    store: str
    """Id of the store, the same in the identity file of each of its directories."""
    step: int
    fingerprint: str
    num_members: int
    num_slots: int
    extents: RunLengths
    parts: list[list[PartRecord]]
    metadata: Mapping[str, object]
    mark: Mark
    """The same in all manifests of one checkpoint that several stores keep together, and in no other."""

    def encode(self) -> bytes:
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["parts"] = _plain(self.parts, self.extents)
        is_compressed = any(part is not None and len(part) > 2 for parts in fields["parts"] for part in parts)
        version = COMPRESSED_VERSION if is_compressed else VERSION
        line = json.dumps({"format": FORMAT, "version": version, **fields}, separators=(",", ":")).encode()
        return b"%s\n%08x\n" % (line, crc32c_of(line))

    @staticmethod
    def decode(data: bytes, path: str) -> Manifest:
        """The manifest in `data`; StorageError naming `path` when it is damaged or of another version."""
        line, _, checksum = data.partition(b"\n")
        if checksum != b"%08x\n" % crc32c_of(line):
            raise StorageError(
                f"{path} is damaged: its checksum does not match its {len(data)} bytes, so the checkpoint "
                f"cannot be trusted: restore the file from a copy, or start anew {DISCARD}",
                path=path,
            )
        fields = json.loads(line)
        check_version(fields, path, (VERSION, COMPRESSED_VERSION))
        extents = [(count, tuple(parts)) for count, parts in fields["extents"]]
        return Manifest(
            store=fields["store"],
            step=fields["step"],
            fingerprint=fields["fingerprint"],
            num_members=fields["num_members"],
            num_slots=fields["num_slots"],
            extents=extents,
            parts=_records(fields["parts"], extents),
            metadata=fields["metadata"],
            mark=(fields["step"], *fields.get("mark", (0, 0, ""))[1:]),
        )

    def differences(self, *, fingerprint: str, num_slots: int, extents: Sequence[ExtentSpec]) -> list[str]:
        """Sentences on what the checkpoint has and what is asked for, where they differ."""
        found = []
        if fingerprint != self.fingerprint:
            found.append(f"the checkpoint was written for {self.fingerprint!r}, this run is {fingerprint!r}")
        if (num_slots == 1) != (self.num_slots == 1):  # a spare slot may come and go
            found.append(f"the checkpoint has single_slot={self.num_slots == 1}, this run single_slot={num_slots == 1}")
        wanted = run_lengths(extents)
        if wanted != self.extents:
            found.append(_layout_difference(self.extents, wanted))
        return found


def plain_json(metadata: Mapping[str, object]) -> Mapping[str, object]:
    """`metadata` as a manifest will give it back (tuples become lists); ConfigError when it cannot."""
    try:
        plain: Mapping[str, object] = json.loads(json.dumps(dict(metadata)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"checkpoint metadata must be plain JSON values: {error}") from error
    return plain


def check_version(fields: Mapping[str, object], path: str, known: Sequence[int] = (VERSION,)) -> None:
    """Refuse a file of another format or version."""
    if fields.get("format") != FORMAT or fields.get("version") not in known:
        versions = " or ".join(map(str, known))
        raise StorageError(
            f"{path} has format {fields.get('format')!r} version {fields.get('version')!r}, "
            f"this program reads {FORMAT!r} version {versions}: use what wrote it, or another directory",
            path=path,
        )


def crc32c_of(data: bytes) -> int:
    """CRC32C of bytes that Python holds."""
    view = np.frombuffer(data, dtype=np.uint8)
    return _native.crc32c(view.ctypes.data, view.nbytes)


def _plain(records: Sequence[Sequence[PartRecord]], extents: RunLengths) -> list[list[list[int] | None]]:
    """[slot, CRC32C] of each part, and how many bytes are stored where these are fewer than it has."""
    return [
        [
            None if record is None else [record[0], *record[1][: 1 + (record[1].nbytes != size)]]
            for record, size in found
        ]
        for found in _with_sizes(records, extents)
    ]


def _records(plain: Sequence[Sequence[Sequence[int] | None]], extents: RunLengths) -> list[list[PartRecord]]:
    """The other way round."""
    return [
        [(part[0], Contents(part[1], part[2] if len(part) > 2 else size)) if part else None for part, size in found]
        for found in _with_sizes(plain, extents)
    ]


def _with_sizes(parts: Sequence[Sequence[T]], extents: RunLengths) -> Iterator[Iterator[tuple[T, int]]]:
    """Each part's value with its size."""
    sizes = chain.from_iterable(repeat(sizes, count) for count, sizes in extents)
    return (zip(values, of_extent, strict=True) for values, of_extent in zip(parts, sizes, strict=True))


def _layout_difference(had: RunLengths, wanted: RunLengths) -> str:
    had_count, wanted_count = (sum(count for count, _ in runs) for runs in (had, wanted))
    if had_count != wanted_count:
        return f"the checkpoint has {had_count} extents, this run has {wanted_count}"
    had_flat, wanted_flat = ([parts for count, parts in runs for _ in range(count)] for runs in (had, wanted))
    extent = next(index for index in range(had_count) if had_flat[index] != wanted_flat[index])
    return (
        f"extent {extent} has parts of {list(had_flat[extent])} bytes in the checkpoint, "
        f"{list(wanted_flat[extent])} in this run"
    )
