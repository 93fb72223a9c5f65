"""Sends metrics to experiment trackers: TensorBoard when it is installed, others by name, imported when asked for.

Nothing is sent anywhere that `report_to` does not name.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from greedysnake.errors import ConfigError

Settings = Mapping[str, object]


class Tracker(Protocol):
    """Takes the metrics of one step after another."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def require_trackers(report_to: Sequence[str] | None) -> None:
    """ConfigError unless everything that `report_to` names is installed."""
    for name in report_to or ():
        package = _PACKAGES[name]
        if find_spec(package) is None:
            raise ConfigError(
                f"report_to names {name}, which is not installed: pip install {package}, or take it from the list"
            )


def open_trackers(
    report_to: Sequence[str] | None, directory: Path, *, run_name: str, settings: Settings, first_step: int
) -> list[Tracker]:
    """Without a list, TensorBoard when it is installed. A resumed run hides what was logged after `first_step`."""
    names = report_to if report_to is not None else ["tensorboard"] if find_spec("tensorboard") else []
    require_trackers(names)
    trackers: list[Tracker] = []
    for name in names:
        try:
            trackers.append(Careful(name, _OPEN[name](directory, run_name, settings, first_step)))
        except Exception as error:  # whatever a package of others raises
            for tracker in trackers:
                tracker.close()
            raise ConfigError(
                f"training.report_to: {name} did not start ({_sentence(error)}): set it up, or take it from the list"
            ) from error
    return trackers


def numbers_of(record: Mapping[str, object]) -> dict[str, float]:
    """What trackers can draw."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step"
    }


class Careful:
    """A tracker that may fail, as servers do, without ending a training: it is left out from then on."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda tracker: tracker.log(step, metrics), f"at step {step}")

    def close(self) -> None:
        self._try(lambda tracker: tracker.close(), "at the end")

    def _try(self, call: Callable[[Tracker], None], when: str) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except Exception as error:
            self._tracker = None
            warnings.warn(
                f"{self._name} failed {when} ({_sentence(error)}): training goes on without it, and metrics.jsonl has "
                "everything",
                RuntimeWarning,
                stacklevel=3,
            )


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, directory: Path, run_name: str, settings: Settings, first_step: int) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(directory / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLike:
    """Weights & Biases, and trackio, which has the same three calls."""

    def __init__(self, package: str, run_name: str, settings: Settings, **options: object) -> None:
        self._module: Any = import_module(package)
        self._module.init(project="greedysnake", name=run_name, config=dict(settings), **options)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


class Mlflow:
    """A run of the tracking server that MLflow is set up for; its id is kept, so that a resumed run continues it."""

    def __init__(self, directory: Path, run_name: str, settings: Settings, first_step: int) -> None:
        self._module: Any = import_module("mlflow")
        kept = directory / "mlflow-run-id"
        if first_step and kept.exists():
            self._module.start_run(run_id=kept.read_text())
            return
        kept.write_text(self._module.start_run(run_name=run_name).info.run_id)
        self._module.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._module.end_run()


def _wandb(directory: Path, run_name: str, settings: Settings, first_step: int) -> Tracker:
    # A resumed run continues. One that begins anew is another, also in the same folder: wandb drops steps it has had.
    kept = directory / "wandb-run-id"
    if not (first_step and kept.exists()):
        kept.write_text(uuid.uuid4().hex[:16])
    return WandbLike("wandb", run_name, settings, dir=str(directory), id=kept.read_text(), resume="allow")


def _trackio(directory: Path, run_name: str, settings: Settings, first_step: int) -> Tracker:
    return WandbLike("trackio", run_name, settings, resume="allow")


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.:')}" if lines else type(error).__name__


_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
_OPEN: dict[str, Callable[[Path, str, Settings, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": _wandb,
    "mlflow": Mlflow,
    "trackio": _trackio,
}
