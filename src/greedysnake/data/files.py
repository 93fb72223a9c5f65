"""From `paths` to files: folders and globs, Python's standard library, and what identifies a file's content."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from greedysnake.data.options import STANDARD_LIBRARY
from greedysnake.errors import ConfigError, explained

Kind = Literal["jsonl", "json", "parquet", "text", "dataset"]

ROW_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
TEXT_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("txt", "text", "md", "rst", "tex", "html", "htm", "xml", "csv", "tsv", "yaml", "yml", "toml", "sql", "sh"),
        *("py", "pyi", "c", "h", "cc", "cpp", "hpp", "cu", "cuh", "rs", "go", "java", "kt", "js", "ts", "tsx", "jsx"),
        *("rb", "php", "pl", "lua", "r", "jl", "scala", "swift", "cs", "hs", "ml", "clj", "ex", "erl", "cmake"),
    )
)
COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"})
# Files up to this size are hashed whole; of larger ones samples are, with size and time of the last change.
WHOLE_FILE_BYTES = 16 * 2**20
NUM_SAMPLES = 64
SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Source:
    """A file, or a folder written by `datasets`, and how to read it."""

    path: Path
    kind: Kind

    def digest(self) -> str:
        """Identifies the content, wherever it lies; see `content_digest`."""
        if self.kind != "dataset":
            return f"{self.kind} {content_digest(self.path)}"
        files = sorted(path for path in self.path.rglob("*") if path.is_file())
        return f"dataset {[(path.relative_to(self.path).as_posix(), content_digest(path)) for path in files]}"


@explained("use")
def find_sources(key: str, paths: Sequence[str]) -> list[Source]:
    """The files that `paths` stand for, each once, in the order given and sorted within a folder or glob.

    `key` is the configuration's name for the paths, for messages.
    """
    found: dict[str, Source] = {}
    for path in paths:
        for source in _expand(key, path):
            found.setdefault(os.path.realpath(source.path), source)
    return list(found.values())


def _expand(key: str, name: str) -> Iterator[Source]:
    path = Path(name).expanduser()
    if name == STANDARD_LIBRARY:
        yield from (Source(file, "text") for file in standard_library_files())
    elif path.is_dir():
        yield from _in_folder(key, path)
    elif path.exists():
        yield _source(path)
    elif has_magic(name):
        matches = sorted(Path(match) for match in glob(str(path), recursive=True))
        files = [_source(match) for match in matches if not match.is_dir()]
        if not files:
            raise ConfigError(f"{key}: no file matches {name!r}: check the pattern (relative to {os.getcwd()})")
        yield from files
    else:
        raise ConfigError(f"{key}: {name!r} does not exist: check the path (relative to {os.getcwd()})")


def _source(path: Path) -> Source:
    if path.exists() and not path.is_file():  # a pipe, which would be waited for, or a device, which may never end
        raise ConfigError(f"{path} is neither a file nor a folder: put the data into a file")
    if path.suffix.lower() in COMPRESSED:
        raise ConfigError(f"{path} is compressed, which is not read: unpack it")
    return Source(path, ROW_KINDS.get(path.suffix.lower(), "text"))


def _in_folder(key: str, folder: Path) -> Iterator[Source]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        raise ConfigError(
            f"{key}: {str(folder)!r} holds several splits of a data set ({', '.join(splits)}): give the folder of one"
        )
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        yield Source(folder, "dataset")
        return
    files = [file for file in _walk(folder, frozenset({"__pycache__"})) if _is_data(file)]
    if not files:
        raise ConfigError(
            f"{key}: folder {str(folder)!r} has no data files: put .jsonl, .json, .parquet or text files such as .txt "
            "there, or name other files one by one"
        )
    sources = [_source(file) for file in files]
    texts, rows = (
        [source.path for source in sources if (source.kind == "text") == is_text] for is_text in (True, False)
    )
    if texts and rows:
        # Most often rows with a page about them, or with the program that made them.
        raise ConfigError(
            f"{key}: folder {str(folder)!r} has rows, such as {rows[0].name}, and texts, such as {texts[0].name}: name "
            f"those to train on by patterns, such as {str(folder / '**' / ('*' + rows[0].suffix))!r}"
        )
    yield from sources


def _is_data(file: Path) -> bool:
    """Whether the name is one of data, packed or not: to leave out those that are would be to train on a part."""
    last, before = file.suffix.lower(), Path(file.stem).suffix.lower()
    return (before if last in COMPRESSED else last) in TEXT_SUFFIXES | ROW_KINDS.keys()


def _walk(folder: Path, left_out: frozenset[str]) -> list[Path]:
    """Files below a folder but hidden ones and those in folders of the names left out, sorted by relative path."""
    found: list[Path] = []
    seen: set[str] = set()
    for where, folders, names in os.walk(folder, onerror=_fail, followlinks=True):
        if os.path.realpath(where) in seen:  # by a link that leads back
            folders.clear()
            continue
        seen.add(os.path.realpath(where))
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        found += [Path(where, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(folder).as_posix())


def _fail(error: OSError) -> None:
    """A folder that cannot be listed would be left out, and nobody would know."""
    raise error


def standard_library_files() -> list[Path]:
    """Python's own source files, sorted by relative path: no tests, no installed packages, nothing generated."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
    files = [file for file in _walk(folder, left_out) if file.suffix == ".py"]
    # _sysconfigdata is written when Python is built and describes the machine, not the language.
    files = [file for file in files if not file.name.startswith("_sysconfigdata") and _is_utf8(file)]
    if not files:
        raise ConfigError(f"{STANDARD_LIBRARY}: Python's source files are not in {folder}: give data.paths")
    return files


def standard_library_text() -> list[str]:
    """The documents that "standard-library" in `paths` stands for: one per source file, in a fixed order."""
    texts = [file.read_text(encoding="utf-8") for file in standard_library_files()]
    return [text for text in texts if text.strip()]


def _is_utf8(file: Path) -> bool:
    try:
        file.read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def content_digest(path: Path) -> str:
    """Hash of a file's content. Above 16 MiB: of 64 samples of it, its size and the time of its last change.

    The whole of a large corpus would take minutes to hash at every start; a change that keeps the size, all samples and
    the time goes unnoticed.
    """
    digest = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size <= WHOLE_FILE_BYTES:
                digest.update(file.read())
                return digest.hexdigest()
            digest.update(f"{status.st_size} {status.st_mtime_ns} ".encode())
            for sample in range(NUM_SAMPLES):
                file.seek((status.st_size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        is_dangling = path.is_symlink() and not path.exists()
        cure = "correct the link, which leads nowhere" if is_dangling else "check its permissions"
        raise ConfigError(f"{path} cannot be read ({error.strerror}): {cure}") from None
    return digest.hexdigest()
