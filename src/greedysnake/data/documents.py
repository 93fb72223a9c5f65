"""What rows become: documents, and before that the texts that have to be tokenised for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


Tokenise = Callable[[Any, list[str]], Iterator[Any]]
"""From a tokenizer and texts to what it finds in each of them."""


@dataclass(frozen=True)
class Texts:
    """What a row asks to be tokenised. The texts of all rows with the same `tokenise` can go into one call of it."""

    texts: Sequence[str]
    tokenise: Tokenise
    documents: Callable[[list[Any]], list[Document]]
    """From what was found in each of the texts to the documents of the row."""


def common_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many tokens both begin with.

    What the last letters of a prompt become may depend on what follows them: a token that holds letters of both is not
    in the prefix of prompt and whole.
    """
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter
