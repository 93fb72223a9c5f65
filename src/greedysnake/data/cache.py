"""Folders of computed files that appear whole or not at all. Knows nothing of what is in them.

A folder is made under the name NAME.partial and renamed when its files are on the drive, `meta.json` with their sizes
last. Whoever builds holds a lock, so a .partial found under the lock is of a process that died.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from greedysnake.durable import sync
from greedysnake.errors import NEXT_MOVE, StorageError

META = "meta.json"
KEY_BYTES = 12
_PARTIAL = re.compile(rf"[a-z]+-[0-9a-f]{{{2 * KEY_BYTES}}}\.partial")
Meta = dict[str, Any]


def cache_key(*parts: object) -> str:
    """A short name for what `parts` print as."""
    return blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=KEY_BYTES).hexdigest()


def cached_folder(cache: Path, name: str, build: Callable[[Path], Meta]) -> tuple[Path, Meta]:
    """The folder `name` in `cache` and what its builder returned; built if it is not there whole.

    `name` is a word, a hyphen and a `cache_key`: what a dead process left under such a name is removed.
    Blocks while another process builds in the same cache.
    """
    folder = cache / name
    meta = _read_meta(folder)
    if meta is None:
        with _writable(cache), _locked(cache):
            meta = _read_meta(folder) or _build(folder, build)
    return folder, meta


def _read_meta(folder: Path) -> Meta | None:
    """What the builder returned; None if the folder is missing or is not as it was when it was finished."""
    try:
        stored = json.loads((folder / META).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in stored["sizes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(stored["meta"]) if sizes == stored["sizes"] else None


def _build(folder: Path, build: Callable[[Path], Meta]) -> Meta:
    unfinished = [path for path in folder.parent.iterdir() if _PARTIAL.fullmatch(path.name)]
    for left_over in (*unfinished, folder):
        if left_over.exists():
            shutil.rmtree(left_over)
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir()
    try:
        meta = build(partial)
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        (partial / META).write_text(json.dumps({"sizes": sizes, "meta": meta}), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return meta


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _writable(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        move = NEXT_MOVE.get(error.errno or 0, "free space there, or give another folder")
        raise StorageError(f"the data cache {cache} cannot be made ({error}): {move}") from error
