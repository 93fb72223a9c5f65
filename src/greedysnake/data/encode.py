"""From rows to documents: tokens, and which of them carry no loss. Conversations are rendered by chat.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedysnake.data.chat import TEMPLATE_COLUMNS, Chat, common_prefix
from greedysnake.data.options import DataOptions
from greedysnake.data.rows import Row, RowError, check_unicode
from greedysnake.data.tokenizers import Tokenizer, token_ids
from greedysnake.errors import ConfigError

BATCH_ROWS = 1024
BATCH_CHARACTERS = 2**22
"""So many rows, or so much text, are tokenised in one call: enough that long texts, too, keep several threads busy."""


@dataclass(frozen=True)
class Document:
    """Tokens of one row, or of one turn of it. `ignored` marks those without loss; None means that all have it."""

    tokens: NDArray[np.int64]
    ignored: NDArray[np.bool_] | None

    @property
    def num_targets(self) -> int:
        """Tokens that are predicted: the first one has nothing before it."""
        if self.ignored is None:
            return max(0, len(self.tokens) - 1)
        return int((~self.ignored[1:]).sum())


class Texts:
    """What a row asks to be tokenised."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts


@dataclass(frozen=True)
class BadRow:
    """Why a row could not be used, with file and line."""

    message: str


class Encoder:
    """Turns rows into documents, batch by batch, in their order."""

    def __init__(self, options: DataOptions, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._template = _read_template(options.chat_template)
        self._chat = Chat(tokenizer, self._template)
        if options.add_eos and tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end token (eos_token): set data.add_eos to false")

    @property
    def identity(self) -> str:
        """What, besides rows and tokenizer, decides which documents come out."""
        return repr((self._options.format, self._columns, self._options.add_eos, self._template))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a row that are looked at."""
        return (*self._columns, *TEMPLATE_COLUMNS)

    @property
    def _columns(self) -> tuple[str, ...]:
        options = self._options
        return (options.text_column, options.prompt_column, options.completion_column, options.messages_column)

    def documents(self, rows: Iterable[Row]) -> Iterator[list[Document] | BadRow]:
        """What becomes of each row: one document, of some conversations several, or a bad row."""
        for batch in _in_batches(rows):
            yield from self._encode(batch)

    def _encode(self, rows: Sequence[Row]) -> Iterator[list[Document] | BadRow]:
        """Tokenise the texts of a batch in one call; `texts` of a row are what it asks to be tokenised."""
        results: list[list[Document] | BadRow | Texts] = [self._texts(row) for row in rows]
        texts = [text for result in results if isinstance(result, Texts) for text in result.texts]
        encoded = token_ids(self._tokenizer, texts) if texts else iter(())
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, Texts):
                yield [self._document(row, [next(encoded) for _ in result.texts])]
            else:
                yield result

    def _texts(self, row: Row) -> list[Document] | BadRow | Texts:
        """What to tokenise for a row: the whole, and the prompt before it if there is one."""
        try:
            if row.problem:
                raise RowError(row.problem)
            kind = self._kind(row)
            if kind == "text":
                return Texts(_text(row, self._options.text_column))
            if kind == "messages":
                messages = _messages(row, self._options.messages_column)
                return self._documents_of_chat(row, messages, num_prompt=None)
            return self._texts_of_prompt(row)
        except RowError as error:
            return BadRow(f"{row.where}: {error}")

    def _kind(self, row: Row) -> str:
        options = self._options
        wanted = {
            "messages": [options.messages_column],
            "prompt_completion": [options.prompt_column, options.completion_column],
            "text": [options.text_column],
        }
        kinds = wanted if options.format == "auto" else [options.format]
        found = [kind for kind in kinds if all(column in row.values for column in wanted[kind])]
        # In files with fixed columns those that a row does not use are null.
        used = [kind for kind in found if all(row.values[column] is not None for column in wanted[kind])]
        if found:
            return [*used, *found][0]
        has = f"it has {', '.join(map(repr, row.values))}" if row.values else "it is empty"
        missing = " or ".join(" and ".join(map(repr, wanted[kind])) for kind in kinds)
        raise RowError(f"no column {missing} ({has})")

    def _texts_of_prompt(self, row: Row) -> list[Document] | Texts:
        prompt, completion = self._options.prompt_column, self._options.completion_column
        if not isinstance(row.values[prompt], list):
            prompted = _text(row, prompt, may_be_empty=True)
            return Texts(prompted + _text(row, completion), prompted)
        before = _messages(row, prompt)
        return self._documents_of_chat(row, before + _messages(row, completion), num_prompt=len(before))

    def _documents_of_chat(self, row: Row, messages: list[dict[str, Any]], *, num_prompt: int | None) -> list[Document]:
        encoded = self._chat.encode(messages, row.values, where=row.where, num_prompt=num_prompt)
        return [Document(np.array(tokens, np.int64), np.array(ignored, np.bool_)) for tokens, ignored in encoded]

    def _document(self, row: Row, encoded: list[list[int]]) -> Document:
        """The tokens of a text, or of prompt and completion together and of the prompt alone."""
        tokens = np.array(encoded[0], np.int64)
        num_prompt = common_prefix(encoded[0], encoded[1]) if len(encoded) == 2 else 0
        eos = self._tokenizer.eos_token_id
        if self._options.add_eos and row.ends and (not len(tokens) or tokens[-1] != eos):
            tokens = np.append(tokens, np.int64(eos or 0))
        return Document(tokens, np.arange(len(tokens)) < num_prompt if num_prompt else None)


def _in_batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    num_characters = 0
    for row in rows:
        batch.append(row)
        num_characters += _num_characters(row.values)
        if len(batch) == BATCH_ROWS or num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _num_characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_num_characters(part) for part in parts)


def _read_template(name: str) -> str | None:
    if not name:
        return None
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"data.chat_template: {name!r} cannot be read ({error}): give a file with a Jinja template"
        raise ConfigError(message) from None


def _text(row: Row, column: str, *, may_be_empty: bool = False) -> str:
    value = row.values[column]
    if not isinstance(value, str):
        raise RowError(f"{_kind_of(value)} in column {column!r}, not text")
    if not value.strip() and not may_be_empty:
        raise RowError(f"no text in column {column!r}")
    check_unicode(value, f"column {column!r}")
    return value


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    value = row.values[column]
    if not isinstance(value, list):
        raise RowError(f"{_kind_of(value)} in column {column!r}, not a list of messages")
    if not value:
        raise RowError(f"no messages in column {column!r}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowError(f"no role in message {number} of column {column!r}")
        content = message.get("content")
        if isinstance(content, str):
            check_unicode(content, f"column {column!r}")
        elif content is None and not message.get("tool_calls"):
            raise RowError(f"no content in message {number} of column {column!r}")
        elif content is not None and not isinstance(content, list):
            raise RowError(f"{_kind_of(content)} as content in message {number} of column {column!r}, not text")
    # Some templates ask whether a message has a key. Some ask whether its content is none.
    return [{key: part for key, part in one.items() if part is not None or key == "content"} for one in value]


def _kind_of(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
