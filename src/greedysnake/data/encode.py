"""From rows to documents: tokens, and which of them carry no loss. Conversations are rendered by chat.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from greedysnake.data.chat import TEMPLATE_COLUMNS, Chat
from greedysnake.data.documents import Document, Texts, Tokenise, common_prefix
from greedysnake.data.options import DataOptions
from greedysnake.data.rows import Row, RowError, check_unicode
from greedysnake.data.tokenizers import Tokenizer, token_ids
from greedysnake.errors import ConfigError

BATCH_ROWS = 1024
BATCH_CHARACTERS = 2**22
"""So many rows, or so much text, are tokenised in one call: enough that long texts, too, keep several threads busy."""


@dataclass(frozen=True)
class BadRow:
    """Why a row could not be used, with file and line."""

    message: str


Result = list[Document] | BadRow


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

    def documents(self, rows: Iterable[Row]) -> Iterator[Result]:
        """What becomes of each row: one document, of some conversations several, or a bad row."""
        for batch in _in_batches(self._texts(row) for row in rows):
            yield from self._tokenised(batch)
            del batch  # before the next one is made

    def _tokenised(self, batch: Sequence[Texts | Result]) -> Iterator[Result]:
        """Tokenise the texts of a batch, those of all rows of a kind in one call."""
        asked: dict[Tokenise, list[str]] = {}
        for row in batch:
            if isinstance(row, Texts):
                asked.setdefault(row.tokenise, []).extend(row.texts)
        found = {tokenise: tokenise(self._tokenizer, texts) for tokenise, texts in asked.items()}
        for row in batch:
            if isinstance(row, Texts):
                yield row.documents([next(found[row.tokenise]) for _ in row.texts])
            else:
                yield row

    def _texts(self, row: Row) -> Texts | Result:
        """What to tokenise for a row: the whole, and what it begins with if not all of it carries loss."""
        try:
            if row.problem:
                raise RowError(row.problem)
            kind = self._kind(row)
            if kind == "text":
                return self._texts_of_text(row, [_text(row, self._options.text_column)])
            if kind == "messages":
                messages = _messages(row, self._options.messages_column)
                return self._chat.texts(messages, row.values, where=row.where, num_prompt=None)
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

    def _texts_of_prompt(self, row: Row) -> Texts | list[Document]:
        prompt, completion = self._options.prompt_column, self._options.completion_column
        if not isinstance(row.values[prompt], list):
            prompted = _text(row, prompt, may_be_empty=True)
            return self._texts_of_text(row, [prompted + _text(row, completion), prompted])
        before = _messages(row, prompt)
        messages = before + _messages(row, completion)
        return self._chat.texts(messages, row.values, where=row.where, num_prompt=len(before))

    def _texts_of_text(self, row: Row, texts: list[str]) -> Texts:
        """A text, or prompt and completion together and the prompt alone."""
        return Texts(texts, token_ids, partial(self._documents_of_text, row.ends))

    def _documents_of_text(self, ends: bool, found: list[list[int]]) -> list[Document]:
        tokens, *prompts = (np.array(ids, np.int64) for ids in found)
        num_prompt = common_prefix(prompts[0], tokens) if prompts else 0
        eos = self._tokenizer.eos_token_id
        if self._options.add_eos and ends and (not len(tokens) or tokens[-1] != eos):
            tokens = np.append(tokens, np.int64(eos or 0))
        return [Document(tokens, np.arange(len(tokens)) < num_prompt if num_prompt else None)]


def _in_batches(rows: Iterable[Texts | Result]) -> Iterator[list[Texts | Result]]:
    batch: list[Texts | Result] = []
    num_characters = 0
    for row in rows:
        batch.append(row)
        num_characters += _num_characters(row)
        if len(batch) == BATCH_ROWS or num_characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _num_characters(row: Texts | Result) -> int:
    """Of what is to be tokenised, which may be the same words many times; tokens of what need not be."""
    if isinstance(row, Texts):
        return sum(map(len, row.texts))
    return 0 if isinstance(row, BadRow) else sum(len(document.tokens) for document in row)


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
