"""Where the lines of steps go: metrics.jsonl, trackers and the console. Of several ranks the first has it. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from greedysnake.report.metrics import MetricsFile
from greedysnake.report.progress import Progress
from greedysnake.report.trackers import Tracker, numbers_of


class Journal:
    """Takes one line after another. Who made the parts closes them."""

    def __init__(self, metrics: MetricsFile, trackers: Sequence[Tracker], progress: Progress) -> None:
        self._metrics = metrics
        self._trackers = trackers
        self._progress = progress

    @property
    def last(self) -> Mapping[str, object] | None:
        """The line of the last step."""
        return self._metrics.last

    def write(self, record: Mapping[str, object]) -> None:
        """One step. StorageError when the file has no room for it; then it is nowhere else either."""
        self._metrics.write(record)
        self._log(record)
        self._progress.step(record)

    def write_late(self, record: Mapping[str, object]) -> None:
        """A line that found no room in its own time."""
        self._metrics.write(record)

    def amend(self, values: Mapping[str, object]) -> None:
        """Adds `values` to the last line."""
        self._metrics.amend(values)
        assert self.last is not None
        self._log({**values, "step": self.last["step"]})

    def say(self, sentence: str) -> None:
        self._progress.say(sentence)

    def evaluating(self, done: int, count: int) -> None:
        self._progress.evaluating(done, count)

    def evaluated(self) -> None:
        self._progress.evaluated()

    def sync(self) -> None:
        """The lines are on the drive on return."""
        self._metrics.sync()

    def _log(self, record: Mapping[str, object]) -> None:
        for tracker in self._trackers:
            tracker.log(int(str(record["step"])), numbers_of(record))
