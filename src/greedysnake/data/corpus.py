"""The tokenised documents of a set of files, in memory-mapped files of a cache.

Neither building nor reading needs RAM of the corpus' size.

| file | holds |
|---|---|
| tokens.bin | tokens of all documents, uint16 or uint32 |
| ignored.bin | one byte per token, 1 if it carries no loss; absent if all tokens carry it |
| ends.bin | int64 per document: where it ends in tokens.bin |
| hashes.bin | uint32 per document: hash of the tokens of its row, by which documents are held out |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from greedysnake.data.cache import Meta, cache_key, cached_folder
from greedysnake.data.documents import Document
from greedysnake.data.encode import BadRow, Encoder
from greedysnake.data.files import find_sources
from greedysnake.data.options import DataOptions
from greedysnake.data.rows import read_rows
from greedysnake.data.tokenizers import Tokenizer, tokenizer_identity
from greedysnake.errors import ConfigError

FORMAT = 3
"""Part of the key: raised when the same rows would give other files."""

KEPT_MESSAGES = 100
PROGRESS_ROWS = 1000
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Counts:
    """What became of the rows."""

    num_rows: int
    num_documents: int
    num_tokens: int
    num_targets: int
    num_bad_rows: int
    num_rows_without_targets: int
    max_token_id: int


class Corpus:
    """Documents of a set of files. `key` identifies files, tokenizer and format."""

    def __init__(self, folder: Path, key: str, meta: Meta) -> None:
        self.key = key
        self.counts = Counts(**meta["counts"])
        self.bad_rows: tuple[str, ...] = tuple(meta["bad_rows"])
        self.tokens: NDArray[Any] = np.memmap(folder / "tokens.bin", np.dtype(meta["dtype"]), "r")
        self.ends: NDArray[np.int64] = np.memmap(folder / "ends.bin", np.int64, "r")
        self.hashes: NDArray[np.uint32] = np.memmap(folder / "hashes.bin", np.uint32, "r")
        ignored = folder / "ignored.bin"
        self.ignored: NDArray[np.bool_] | None = np.memmap(ignored, np.bool_, "r") if ignored.exists() else None


def open_corpus(
    options: DataOptions, key: str, tokenizer: Tokenizer, cache: Path, progress: Progress | None = None
) -> Corpus:
    """The corpus of `options.paths` or `options.validation_paths` (`key` says which), tokenised if it is not cached.

    `progress` is called now and then with the numbers of rows and tokens so far.
    """
    paths = options.paths if key == "paths" else options.validation_paths
    sources = find_sources(f"data.{key}", paths)
    encoder = Encoder(options, tokenizer)
    name = cache_key(FORMAT, [source.digest() for source in sources], tokenizer_identity(tokenizer), encoder.identity)

    def build(folder: Path) -> Meta:
        with _Writer(folder, _token_type(tokenizer)) as writer:
            for source in sources:
                rows = read_rows(source, text_column=options.text_column, columns=encoder.columns)
                for result in encoder.documents(rows):
                    writer.add(result, options.max_bad_rows)
                    if progress is not None and writer.num_rows % PROGRESS_ROWS == 0:
                        progress(writer.num_rows, writer.num_tokens)
        _check_targets(writer.counts(), f"data.{key}", paths)
        return {"counts": asdict(writer.counts()), "bad_rows": writer.bad_rows, "dtype": writer.token_type.name}

    folder, meta = cached_folder(cache, f"tokens-{name}", build)
    corpus = Corpus(folder, name, meta)
    if corpus.counts.num_bad_rows > options.max_bad_rows:  # tokenised when the limit was higher
        shown = min(options.max_bad_rows, len(corpus.bad_rows) - 1)
        raise _too_many_bad_rows(corpus.bad_rows[shown], options.max_bad_rows)
    return corpus


class _Writer:
    """Appends documents to the files of a corpus and counts what becomes of the rows."""

    def __init__(self, folder: Path, token_type: np.dtype[Any]) -> None:
        self.token_type = token_type
        self.num_rows = self.num_tokens = 0
        self.bad_rows: list[str] = []
        self._num_documents = self._num_targets = self._num_bad_rows = self._num_without_targets = 0
        self._max_token_id = -1
        self._ignored_path = folder / "ignored.bin"
        self._open = ExitStack()
        self._tokens, self._ends, self._hashes = (
            self._open.enter_context((folder / name).open("wb")) for name in ("tokens.bin", "ends.bin", "hashes.bin")
        )
        self._ignored: BinaryIO | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._ignored is not None:
            self._ignored.truncate(self.num_tokens)
        self._open.close()

    def add(self, result: Sequence[Document] | BadRow, max_bad_rows: int) -> None:
        """Append the documents of a row; rows that are bad or have no target are counted only."""
        self.num_rows += 1
        if isinstance(result, BadRow):
            self._num_bad_rows += 1
            self.bad_rows += [result.message] if len(self.bad_rows) < KEPT_MESSAGES else []
            if self._num_bad_rows > max_bad_rows:
                raise _too_many_bad_rows(result.message, max_bad_rows)
            return
        documents = [document for document in result if document.num_targets]
        self._num_without_targets += not documents
        for document in documents:  # the turns of a conversation are held out together
            self._append(document, blake2b(documents[-1].tokens.tobytes(), digest_size=4).digest())

    def _append(self, document: Document, digest: bytes) -> None:
        if document.ignored is not None:
            self._append_ignored(document.ignored)
        tokens = document.tokens
        self._max_token_id = max(self._max_token_id, int(tokens.max()))
        assert self._max_token_id <= np.iinfo(self.token_type).max
        self._tokens.write(tokens.astype(self.token_type).tobytes())
        self.num_tokens += len(tokens)
        self._ends.write(np.int64(self.num_tokens).tobytes())
        self._hashes.write(digest)
        self._num_documents += 1
        self._num_targets += document.num_targets

    def _append_ignored(self, ignored: NDArray[np.bool_]) -> None:
        """What is skipped before is a hole in the file and reads as 0: with loss."""
        if self._ignored is None:
            self._ignored = self._open.enter_context(self._ignored_path.open("wb"))
        if self._ignored.tell() != self.num_tokens:
            self._ignored.seek(self.num_tokens)
        self._ignored.write(ignored.tobytes())

    def counts(self) -> Counts:
        """So far."""
        return Counts(
            num_rows=self.num_rows,
            num_documents=self._num_documents,
            num_tokens=self.num_tokens,
            num_targets=self._num_targets,
            num_bad_rows=self._num_bad_rows,
            num_rows_without_targets=self._num_without_targets,
            max_token_id=self._max_token_id,
        )


def _token_type(tokenizer: Any) -> np.dtype[Any]:
    """The smallest type that holds every token."""
    if hasattr(tokenizer, "get_vocab"):
        largest = max(tokenizer.get_vocab().values())
    else:
        largest = len(tokenizer) - 1 if hasattr(tokenizer, "__len__") else 2**31
    return np.dtype(np.uint16 if largest < 2**16 else np.uint32)


def _too_many_bad_rows(message: str, limit: int) -> ConfigError:
    return ConfigError(f"{message}: fix the row, or raise data.max_bad_rows (now {limit})")


def _check_targets(counts: Counts, key: str, paths: Sequence[str]) -> None:
    shown = ", ".join(map(repr, paths[:3])) + (" ..." if len(paths) > 3 else "")
    if not counts.num_rows:
        raise ConfigError(f"{key}: no rows in {shown}: the files are empty")
    if counts.num_targets:
        return
    if counts.num_bad_rows == counts.num_rows:
        raise ConfigError(f"{key}: all {counts.num_rows} rows in {shown} are bad, and data.max_bad_rows allows it")
    raise ConfigError(
        f"{key}: none of the {counts.num_rows} rows in {shown} has a token to train on: rows with messages need a turn "
        "of the role 'assistant', and every document two tokens"
    )
