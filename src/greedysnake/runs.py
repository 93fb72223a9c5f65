"""The folder of a run: what is noted there, whose checkpoint is in its storage, and whether it is continued.

A run has an id, in its folder and in its checkpoints: a store may come to hold the checkpoint of another run.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from greedysnake import settings
from greedysnake.config import HAS_CHECKPOINT, METRICS, RUN, RUN_ID, Config, difference, holds_run
from greedysnake.durable import sync
from greedysnake.errors import ConfigError, explained
from greedysnake.locks import locked
from greedysnake.runtime.opening import holds_checkpoint, holds_store


@dataclass(frozen=True)
class Run:
    """What a folder says of the run in it."""

    config: Config
    run_id: str | None
    """None for runs that began before they had one."""
    has_checkpoint: bool
    """Whether one was saved."""
    home: Path
    """Its folder when that was noted: another one than now if it was moved or copied since."""

    def require_own(self, metadata: Mapping[str, object], storage: Path) -> None:
        """ConfigError when `metadata`, of the checkpoint in `storage`, are those of another run."""
        found, noted = metadata.get(RUN_ID), self.config.storage[0]
        if found is None or found == self.run_id:
            return
        if noted.exists() and not noted.samefile(storage):
            raise ConfigError(
                f"engine.storage: {storage} holds the checkpoint of another run, that of {self.config.output_dir} was "
                f"in {noted}: give that directory"
            )
        raise ConfigError(
            f"engine.storage: {storage} holds the checkpoint of another run, which has overwritten "
            f"that of {self.config.output_dir}: give the output_dir of that run"
            + ("" if self.run_id else f"; if {RUN} was written by hand, add the line {RUN_ID}: {found!r} to it")
        )


@contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Keeps other trainings out of the folder of a run: their storage may be another, and the folder is not."""
    with locked(directory) as is_ours:
        if is_ours is False:
            raise ConfigError(
                f"output_dir is {str(directory)!r}, in which a training is under way: wait for its end, or name "
                "another folder"
            )
        yield


def begin_run(config: Config, continued: Run | None) -> Run:
    """Makes the folder of a run and notes the configuration there."""
    run_id = continued.run_id if continued else None
    # What run.yaml says is given to later commands, which are not to discard this run.
    config = replace(config, overwrite_output_dir=False)
    run = Run(config, run_id or uuid.uuid4().hex, continued is not None, Path(config.output_dir))
    note_run(run)
    return run


def note_run(run: Run) -> None:
    """Writes run.yaml, which is a configuration as well; durable on return."""
    directory = Path(run.config.output_dir)
    new = directory / (RUN + ".new")
    text = run.config.as_yaml() + settings.write_yaml({RUN_ID: run.run_id, HAS_CHECKPOINT: run.has_checkpoint})
    with explained("write", new):
        directory.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        sync(new)
        os.replace(new, directory / RUN)
        sync(directory)


def load_run(directory: Path) -> Run:
    """The run in a folder, wherever the folder is now."""
    path = directory / RUN
    if not path.is_file():
        raise ConfigError(f"{directory} holds no run, there is no {RUN} in it: give the output_dir of a training")
    try:
        values = settings.read_yaml(path.read_text(encoding="utf-8"), str(path))
        run_id, has_checkpoint = values.pop(RUN_ID, None), values.pop(HAS_CHECKPOINT, False)
        config = settings.build(Config, {**values, "output_dir": str(directory)})
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not what a training wrote there ({error}): restore it from a copy, or copy the YAML file of "
            "that training there; the checkpoint, which is in the storage, is not harmed"
        ) from error
    home = Path(str(values.get("output_dir", directory)))
    return Run(config, None if run_id is None else str(run_id), has_checkpoint is True, home)


def find_run(config: Config) -> Run | None:
    """The run whose checkpoint is continued; ConfigError when output_dir or storage holds another one."""
    directory, first = Path(config.output_dir), config.storage[0]
    if not directory.is_dir() and os.path.lexists(directory):
        what = "file" if directory.exists() else "link that leads nowhere"
        raise ConfigError(f"output_dir is {config.output_dir!r}, which is a {what}: name a folder")
    if config.overwrite_output_dir:
        return None
    if not (directory / RUN).exists():
        if holds_checkpoint(first):
            raise ConfigError(
                f"engine.storage: {first} holds the checkpoint of another run: give other directories, the "
                "output_dir of that run, or set overwrite_output_dir=true to discard it"
            )
        if (directory / METRICS).exists():
            raise ConfigError(
                f"output_dir is {config.output_dir!r}, which has a {METRICS} but no {RUN}: give another folder"
            )
        return None
    require_store(config, first)
    run = load_run(directory)
    if not holds_checkpoint(first):
        require_first(config)
        require_none_lost(run, first)
        return None  # that run came to nothing
    changed = difference(run.config, config)
    if changed:
        raise ConfigError(
            f"output_dir is {config.output_dir!r}, which holds another run: {changed}: give another folder, "
            "the same settings, or overwrite_output_dir=true to discard that run"
        )
    for other in config.storage[1:]:
        require_store(config, other)
    require_not_shared(run, first)
    return run


def require_store(config: Config, directory: Path) -> None:
    """ConfigError where a drive is not mounted, or where another list of them is given."""
    if not holds_store(directory):
        raise ConfigError(
            f"engine.storage: {directory} has nothing of the run in {config.output_dir}: mount the drive, give the "
            "directories of that run, or set overwrite_output_dir=true to discard it"
        )


def require_not_shared(run: Run, storage: Path) -> None:
    """ConfigError for a copy of a run whose storage was not copied: the original would go on behind its own back."""
    directory = Path(run.config.output_dir)
    if run.run_id is None or not holds_run(run.home, run.run_id) or run.home.samefile(directory):
        return
    theirs = load_run(run.home).config.storage[0]
    if theirs.exists() and theirs.samefile(storage):
        raise ConfigError(
            f"engine.storage: {storage} holds the checkpoint of the run in {run.home}, of which {directory} is a copy: "
            "give that output_dir, or copy the storage as well and name its copy"
        )


def require_first(config: Config) -> None:
    """A store's checkpoint is noted in the first of its directories."""
    for directory in config.storage[1:]:
        if holds_checkpoint(directory):
            raise ConfigError(
                f"engine.storage: {directory} was the first directory of the run in {config.output_dir}: give the "
                "directories in the order that they had"
            )


def load_saved_run(directory: Path) -> Run:
    """The run in a folder, which has a checkpoint."""
    run = load_run(directory)
    if not holds_checkpoint(run.config.storage[0]):
        require_none_lost(run, run.config.storage[0])
        raise ConfigError(f"RUN is {str(directory)!r}, which has no checkpoint yet: train until the first one is saved")
    return run


def require_none_lost(run: Run, storage: Path) -> None:
    """Where a checkpoint was saved and is no more, to begin anew would be a surprise."""
    if run.has_checkpoint:
        raise ConfigError(
            f"engine.storage: the checkpoint of the run in {run.config.output_dir} is gone from {storage}: restore it, "
            "or set overwrite_output_dir=true to begin anew"
        )
