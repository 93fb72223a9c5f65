"""Whether a step is worth doing before its norm is known."""

from __future__ import annotations

LARGEST_PATIENCE = 64


class Optimism:
    """Expects that no step is clipped after enough in a row that were not. An attempt that is revoked has cost its
    traffic on the drives: then twice as many are enough, and one less after each attempt that was confirmed."""

    def __init__(self) -> None:
        self._patience = 1
        self._num_in_a_row = 0

    @property
    def expects(self) -> bool:
        return self._num_in_a_row >= self._patience

    def learn(self, *, clipped: bool, tried: bool) -> None:
        """What became of a step, and whether it was attempted."""
        self._num_in_a_row = 0 if clipped else self._num_in_a_row + 1
        if tried and clipped:
            self._patience = min(LARGEST_PATIENCE, 2 * self._patience)
        elif tried:
            self._patience = max(1, self._patience - 1)
