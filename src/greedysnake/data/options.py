"""What the user decides about data: the `data` section of a configuration. Imports no torch and no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from greedysnake.errors import ConfigError

STANDARD_LIBRARY = "standard-library"
"""Stands in `paths` for the source text of Python's own standard library."""

CHOICES = {
    "format": ("auto", "text", "prompt_completion", "messages"),
    "long_documents": ("split", "truncate", "skip"),
    "pad_to": ("longest", "sequence_length"),
}


@dataclass(frozen=True)
class DataOptions:
    """Which rows to train on, and how they become sequences of tokens."""

    paths: tuple[str, ...] = (STANDARD_LIBRARY,)
    """Files, folders and globs: .jsonl, .json, .parquet, text files, folders written by `datasets`' save_to_disk; or
    "standard-library". A folder stands for the data files in it and below, hidden ones left out."""

    format: Literal["auto", "text", "prompt_completion", "messages"] = "auto"
    """What a row holds. auto looks at the columns of each row, in the order messages, prompt and completion, text."""

    text_column: str = "text"
    """Column with a whole document; every token is trained."""

    prompt_column: str = "prompt"
    """Column with the prompt, text or a list of messages; no token of it is trained."""

    completion_column: str = "completion"
    """Column with what follows the prompt, of the same kind; its tokens are trained."""

    messages_column: str = "messages"
    """Column with a conversation, a list of {role, content}; what the assistant says is trained."""

    chat_template: str = ""
    """File with a Jinja chat template to use instead of the tokenizer's own."""

    add_eos: bool = True
    """End every text and every completion with the end token, if it does not end so already. A chat template decides
    about it itself."""

    packing: bool = True
    """Put several documents into one sequence, kept apart by their positions. Otherwise one per sequence, padded."""

    long_documents: Literal["split", "truncate", "skip"] = "split"
    """What becomes of a document longer than sequence_length: cut into pieces that know nothing of each other, cut off,
    or left out."""

    pad_to: Literal["longest", "sequence_length"] = "longest"
    """Without packing: pad to the longest of the micro-batch, rounded up to a multiple of 8, or to sequence_length.
    Constant shapes suit compiled code."""

    max_bad_rows: int = 0
    """Rows that cannot be used (broken JSON, a missing column, no text) are skipped and counted, but not more."""

    validation_share: float = 0.0
    """Share of the documents, 0 to 1, held out for evaluation: those whose content has a low hash, so that equal
    documents are on the same side."""

    validation_paths: tuple[str, ...] = ()
    """Files for evaluation, given as in `paths`, instead of a share of the training data."""

    def __post_init__(self) -> None:
        for name in ("paths", "validation_paths"):
            object.__setattr__(self, name, _checked_paths(name, getattr(self, name)))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"data.{name} is {getattr(self, name)!r}: it can be {', '.join(allowed)}")
        for name in [field.name for field in fields(self) if field.name.endswith("_column")]:
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ConfigError(f"data.{name} is {getattr(self, name)!r}: give the name of a column")
        for name in ("add_eos", "packing"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"data.{name} is {getattr(self, name)!r}: give true or false")
        if not isinstance(self.max_bad_rows, int) or isinstance(self.max_bad_rows, bool) or self.max_bad_rows < 0:
            raise ConfigError(f"data.max_bad_rows is {self.max_bad_rows!r}: give an integer, 0 or more")
        if not isinstance(self.validation_share, int | float) or not 0 <= self.validation_share < 1:
            raise ConfigError(f"data.validation_share is {self.validation_share!r}: give a number from 0 to below 1")
        if self.validation_share and self.validation_paths:
            raise ConfigError("data.validation_share and data.validation_paths are both given: give one of them")
        if not self.paths:
            raise ConfigError("data.paths is empty: give files, folders or globs")

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self.validation_share or self.validation_paths)


def _checked_paths(name: str, paths: object) -> tuple[str, ...]:
    """A tuple, from a list or from a single path as well."""
    items = (paths,) if isinstance(paths, str) else paths
    if not isinstance(items, Sequence) or not all(isinstance(item, str) and item for item in items):
        raise ConfigError(f"data.{name} is {paths!r}: give a list of files, folders or globs")
    return tuple(items)
