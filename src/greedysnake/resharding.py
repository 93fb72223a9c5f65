"""A run's last checkpoint as a new run: for more or fewer processes, with moments of another kind, in other blocks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from greedysnake.config import METRICS, Config
from greedysnake.durable import sync
from greedysnake.errors import ConfigError, explained
from greedysnake.run_model import make_model, model_configuration, require_same_model, values_of
from greedysnake.runs import Run, load_saved_run, note_run
from greedysnake.runtime.stored import StoredModel, copy_for_ranks
from greedysnake.shapes import MOMENTS, MomentsName


@explained("use")
def reshard_run(
    run: Path,
    out: Path,
    *,
    num_ranks: int | None = None,
    moments: str | None = None,
    layers_per_block: int | None = None,
    storage: Sequence[Path] = (),
) -> tuple[Config, int]:
    """Makes the new folder `out` a run that goes on from the last checkpoint of the one in `run`, on so many ranks,
    with moments of this kind and so many layers in a block; what is not given stays, and so do the micro-batches of a
    step. The old run stays as it is. The new store comes to `storage`, or into `out`.

    Returns the configuration of the new run and its number of ranks. What was begun is taken away after an error.
    """
    if num_ranks is None and moments is None and layers_per_block is None:
        raise ConfigError("there is nothing to change: give --ranks, --moments or --layers-per-block")
    if num_ranks is not None and num_ranks < 1:
        raise ConfigError(f"--ranks is {num_ranks}: give at least 1")
    if layers_per_block is not None and layers_per_block < 1:
        raise ConfigError(f"--layers-per-block is {layers_per_block}: give at least 1")
    if moments is not None and moments not in MOMENTS:
        raise ConfigError(f"--moments is {moments!r}: give one of {', '.join(MOMENTS)}")
    for name, folder in (("OUT", out), *(("--storage", folder) for folder in storage)):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{name} is {str(folder)!r}, which exists: name a new or empty folder")
    noted = load_saved_run(run)
    config = noted.config
    model_config = model_configuration(config, is_new=False)
    model = make_model(config, model_config)
    with ExitStack() as resources:
        stored = resources.enter_context(StoredModel(model, config.storage, config.precision))
        for folder in (out, *storage):
            resources.enter_context(_taken_away_after_an_error(folder))
        noted.require_own(stored.metadata, config.storage[0])
        require_same_model(stored, values_of(model_config), str(run))
        num_ranks = num_ranks or stored.num_ranks
        new = _changed(config, out, stored.num_ranks, num_ranks, moments, storage)
        if layers_per_block is not None:
            model = model.in_blocks_of(layers_per_block)
            new = replace(new, engine=replace(new.engine, layers_per_block=layers_per_block))
        copy_for_ranks(model, stored, new.storage, num_ranks, moments=moments, single_slot=config.engine.single_slot)
        if (run / METRICS).exists():
            with explained("write", out / METRICS):
                shutil.copyfile(run / METRICS, out / METRICS)
                sync(out / METRICS)
        note_run(Run(new, noted.run_id, True, out))  # last: from here on it is a run
    return new, num_ranks


def _changed(
    config: Config, out: Path, had: int, num_ranks: int, moments: str | None, storage: Sequence[Path]
) -> Config:
    """A step keeps its micro-batches, so that data, rates and losses go on as they would have."""
    in_a_step = config.training.gradient_accumulation_steps * had
    if in_a_step % num_ranks:
        raise ConfigError(
            f"--ranks is {num_ranks}, and a step of the run has {in_a_step} micro-batches "
            f"({config.training.gradient_accumulation_steps} on each of {had}): give a number that divides them"
        )
    training = replace(config.training, gradient_accumulation_steps=in_a_step // num_ranks)
    if moments is not None:
        training = replace(training, adam_moments=cast(MomentsName, moments))
    engine = replace(config.engine, storage=tuple(str(path.absolute()) for path in storage))
    return replace(config, output_dir=str(out), training=training, engine=engine)


@contextmanager
def _taken_away_after_an_error(folder: Path) -> Iterator[None]:
    was_there = folder.exists()
    os.makedirs(folder, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        if was_there:
            folder.mkdir(exist_ok=True)
        raise
