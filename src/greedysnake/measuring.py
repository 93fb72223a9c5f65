"""How fast this machine is with one model: its drives by a file of their own, the rest by a short training.

The short training has the embedding, some layers of each kind and the head of the user's own model, with micro-batches
of the run's shape. Nothing of the run is written or changed.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from greedysnake.config import Config
from greedysnake.errors import StorageError
from greedysnake.locks import locked
from greedysnake.models.huggingface import CausalLM
from greedysnake.models.sequential import Batch, BlockSource, Model
from greedysnake.ops import Plan
from greedysnake.placement import num_compute_blocks
from greedysnake.planning.costs import BlockTimes, Rates
from greedysnake.planning.observe import Observed, observe
from greedysnake.preparation import Outline, open_engine
from greedysnake.runtime.directory import TRIAL
from greedysnake.runtime.drive import Bandwidth, look_at_drive
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.footprint import device_bytes, nearest_existing
from greedysnake.shapes import GRANULE, WORD_BYTES, Precision
from greedysnake.threads import torch_threads

TRIAL_STEPS, TRIAL_MICRO_BATCHES = 3, 3
"""The first step is not counted: code is compiled and buffers are touched for the first time."""
TRIAL_LAYERS = {"cpu": 4, "cuda": 1}
"""Of each kind. Where the CPU computes, the updates and transfers of other layers take its time: some must be there."""
USED_VRAM = 0.92
"""Of what is free on a GPU: memory that is freed and taken in pieces of other sizes has gaps."""
ABANDONED_S = 60.0
"""A trial's folder is locked before it is so old, until the trial ends."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Machine:
    """This machine, as far as steps of one model depend on it."""

    device: str
    rates: Rates
    times: tuple[BlockTimes, ...]
    """Of each block of the whole model."""
    layers_per_block: int = 1
    room_bytes: int | None = None
    """Memory of the device for buffers and homes, besides what computing needs; None where it is RAM."""
    graph_bytes: tuple[int, ...] | None = None
    """Of each block: what the device holds of a graph that is kept, for one micro-batch. None where none was tried."""

    def has_room_for(self, device_bytes: int) -> bool:
        return self.room_bytes is None or device_bytes <= self.room_bytes

    def of_one_of(self, num_ranks: int) -> Machine:
        """What one of so many ranks has of it: drives and cores are shared, GPUs and their links are not. What passes
        between GPUs is taken to be fast: it was not measured."""
        rates = self.rates
        shared = {"ssd_bytes_per_s", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s"}
        shared |= {"cpu_params_per_s", "cpu_bytes_per_s"}
        if self.device == "cpu":
            shared |= {"h2d_bytes_per_s", "d2h_bytes_per_s"}
        rates = replace(rates, **{name: value / num_ranks for name in shared if (value := getattr(rates, name))})
        slower = num_ranks if self.device == "cpu" else 1
        return replace(self, rates=rates, times=tuple(each.times(slower) for each in self.times))

    def with_graphs_of(self, other: Machine) -> Machine:
        """As it was measured, with what another measurement says of graphs that are kept."""
        both = zip(self.times, other.times, strict=True)
        times = (replace(mine, kept_backward_s=theirs.kept_backward_s) for mine, theirs in both)
        return replace(self, times=tuple(times), graph_bytes=other.graph_bytes)

    def with_state_of(self, precision: Precision, *, measured: Precision) -> Machine:
        """As it would be with other moments than those it was measured with. Compression takes away what neighbours
        have in common, their exponents, which are as many bytes of each in both kinds."""
        share = 1.0
        if precision.moments in WORD_BYTES:
            spared = (1.0 - self.rates.state_share) * measured.state_bytes(GRANULE)
            share = max(0.0, 1.0 - spared / precision.state_bytes(GRANULE))
        return replace(self, rates=replace(self.rates, state_share=share))

    def with_blocks_of(self, layers_per_block: int) -> Machine:
        """As it would be with so many layers in a block, from what was measured with one."""
        assert self.layers_per_block == 1
        embed, *layers, head = self.times
        groups = [layers[first : first + layers_per_block] for first in range(0, len(layers), layers_per_block)]
        blocks = [
            BlockTimes(sum(each.forward_s for each in group), sum(each.backward_s for each in group))
            for group in groups
        ]
        return replace(self, times=(embed, *blocks, head), layers_per_block=layers_per_block)


def measure_drives(config: Config, say: Say) -> Bandwidth:
    """By a file that is gone afterwards."""
    directories = [nearest_existing(directory) for directory in config.storage]
    say("measuring " + ", ".join(map(str, directories)))
    return _bandwidth(directories)


def measure(
    config: Config,
    model: CausalLM,
    model_config: Any,
    outlined: Outline,
    plan: Plan,
    drives: Bandwidth,
    *,
    device: str,
    ram: int,
    say: Say,
    graphs: bool = False,
) -> Machine:
    """All but its drives, by a few steps of a shortened model; with `graphs`, those of its layers are kept."""
    kinds = _kinds(outlined.blocks, getattr(model_config.get_text_config(), "layer_types", None))
    kept = [number for numbers in kinds for number in numbers[: TRIAL_LAYERS[device]]]
    num_compute = sum(map(len, kinds))
    what = "layers" if model.layers_per_block == 1 else f"blocks of {model.layers_per_block} layers"
    how = ", keeping their graphs" if graphs else ""
    say(f"training {len(kept) - 2} of {num_compute - 2} {what} for {TRIAL_STEPS} steps on {device}{how}")
    if graphs:
        plan = replace(plan, placement=replace(plan.placement, graphs_device=1.0))
    batches = _batches(config, int(model_config.get_text_config().vocab_size))
    with torch_threads(config.engine.compute_threads):
        seen, room_bytes, weights = _try(
            config,
            _Shortened(model, kept),
            batches,
            plan,
            activation_bytes=outlined.activation_bytes,
            device=device,
            ram=ram,
        )
    of_block = dict(zip(sorted(kept), seen.times, strict=True))
    weight = {number: weights.get(position, 0) for position, number in enumerate(sorted(kept))}
    times, graph_bytes = {}, {}
    for numbers in kinds:
        tried = [number for number in numbers if number in of_block]
        typical, heaviest = _typical([of_block[number] for number in tried]), max(weight[number] for number in tried)
        times.update(dict.fromkeys(numbers, typical))
        graph_bytes.update(dict.fromkeys(numbers, heaviest))
    rates = replace(
        seen.rates,
        ssd_bytes_per_s=drives.mixed_bytes_per_s,
        ssd_read_bytes_per_s=drives.read_bytes_per_s,
        ssd_write_bytes_per_s=drives.write_bytes_per_s,
    )
    of_blocks = tuple(times[number] for number in range(num_compute))
    are_weighed = weights and all(position in weights for position in range(1, len(kept) - 1))
    of_graphs = tuple(graph_bytes[number] for number in range(num_compute)) if are_weighed else None
    return Machine(device, rates, of_blocks, model.layers_per_block, room_bytes, of_graphs)


def _typical(times: Sequence[BlockTimes]) -> BlockTimes:
    kept = [each.kept_backward_s for each in times if each.kept_backward_s is not None]
    return BlockTimes(
        median(each.forward_s for each in times),
        median(each.backward_s for each in times),
        median(kept) if kept else None,
    )


def _bandwidth(directories: Sequence[Path]) -> Bandwidth:
    """Of all drives together. Every directory gets as many bytes as any other, so the slowest drive sets the pace, and
    one that has two of them has twice as much to do."""
    found: dict[int | None, tuple[Bandwidth, int]] = {}
    for directory in directories:
        drive = look_at_drive(directory)
        if drive.bandwidth is None:
            why = drive.write_error or drive.why_no_bandwidth
            raise StorageError(
                f"engine.storage: how fast {directory} is cannot be measured ({why}): see to that, or "
                "train without --plan"
            )
        found[drive.device_number] = (drive.bandwidth, found.get(drive.device_number, (None, 0))[1] + 1)

    def together(name: str) -> float:
        return len(directories) * min(float(getattr(each, name)) / count for each, count in found.values())

    return Bandwidth(together("read_bytes_per_s"), together("write_bytes_per_s"), together("mixed_bytes_per_s"))


class _Shortened:
    """Some blocks of a model."""

    def __init__(self, model: Model, kept: Sequence[int]) -> None:
        self._model = model
        self._kept = frozenset(kept)

    def sources(self) -> Iterator[BlockSource]:
        return (source for number, source in enumerate(self._model.sources()) if number in self._kept)

    def num_targets(self, batch: Batch) -> int:
        return self._model.num_targets(batch)


def _kinds(blocks: Sequence[FlatBlock], layer_types: Sequence[str] | None) -> list[list[int]]:
    """The blocks that run, those together that are alike: they take equally long."""
    num_compute = num_compute_blocks([block.shape for block in blocks])
    kinds: dict[object, list[int]] = {}
    for number, block in enumerate(blocks[:num_compute]):
        kind: object = number
        if 0 < number < num_compute - 1:
            names = [place.name.split(".", 2) for place in block.places]  # layers.7.mlp.weight
            layers = list(dict.fromkeys(int(layer) for _, layer, _ in names))
            places = tuple(
                (layers.index(int(layer)), name, place.shape)
                for (_, layer, name), place in zip(names, block.places, strict=True)
            )
            kind = (places, tuple(layer_types[layer] for layer in layers) if layer_types else None)
        kinds.setdefault(kind, []).append(number)
    return list(kinds.values())


def _num_tried(config: Config) -> int:
    """Micro-batches of the short training: no more than the run has, whose activations fit."""
    return min(TRIAL_MICRO_BATCHES, config.training.gradient_accumulation_steps)


def _batches(config: Config, vocabulary: int) -> list[Batch]:
    """Micro-batches of the run's shape, of random tokens; packed rows have two documents."""
    training, length = config.training, config.training.sequence_length
    shape = (training.per_device_train_batch_size, length)
    half = torch.arange(length) % (length // 2)
    generator = torch.Generator().manual_seed(training.seed)
    batches: list[Batch] = []
    for _ in range(_num_tried(config)):
        ids = torch.randint(vocabulary, shape, generator=generator)
        with_documents = (
            {"position_ids": half.expand(shape)} if config.data.packing else {"attention_mask": torch.ones_like(ids)}
        )
        batches.append({"input_ids": ids, "labels": ids, **with_documents})
    return batches


def _beside(directory: Path) -> Path:
    """A folder on the drive of a directory: not the directory itself, if that is there and another can be had, since a
    store shares it with nothing, not even with what a process left that was killed."""
    existing, parent = nearest_existing(directory), nearest_existing(directory).parent
    is_free = existing != directory.absolute() or existing.stat().st_dev != parent.stat().st_dev
    return existing if is_free or not os.access(parent, os.W_OK) else parent


def _take_away_what_was_left(directory: Path) -> None:
    """By processes that were killed while they planned: what nobody has locked and nobody has just made. When they
    did, less of the path to this directory may have been there."""
    existing = nearest_existing(directory)
    for folder in (existing, *existing.parents):
        with suppress(OSError):  # one that may not be read
            for left in folder.glob(f"{TRIAL}*"):
                with suppress(OSError), locked(left) as is_ours:
                    if is_ours and time.time() - left.stat().st_mtime > ABANDONED_S:
                        shutil.rmtree(left)


def _try(
    config: Config,
    model: Model,
    batches: Sequence[Batch],
    plan: Plan,
    *,
    activation_bytes: int,
    device: str,
    ram: int,
) -> tuple[Observed, int | None, Mapping[int, int]]:
    """Steps with the run's own shares in RAM and on the drive: where the CPU computes, all of them take its time.

    Returns what was seen, the room that a GPU has beside what computing needs, and what graphs that are kept take."""
    free_bytes = 0
    if device == "cuda":
        gc.collect()  # of the trial before
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
    beside = _beside(config.storage[0])
    _take_away_what_was_left(config.storage[0])
    with ExitStack() as resources:
        folder = tempfile.TemporaryDirectory(prefix=TRIAL, dir=beside)
        storage = resources.enter_context(folder)
        resources.enter_context(locked(Path(storage)))
        options = replace(config.engine, storage=(storage,), single_slot=False)
        trial = replace(config, engine=options)
        engine = resources.enter_context(
            open_engine(trial, model, device=device, ram=ram, resume=False, plan=plan, is_trial=True)
        )
        for step in range(TRIAL_STEPS):
            engine.step(batches)
            if step == 0:
                engine.flush()
                engine.records.clear()
        engine.flush()
        seen = observe(engine.records, engine.plan)
        graph_bytes = dict(engine.graph_bytes)
        if device != "cuda":
            return seen, None, graph_bytes
        held_bytes = device_bytes(engine.plan, _num_tried(config), activation_bytes)
        held_bytes += sum(graph_bytes.values()) * _num_tried(config)
        computing_bytes = torch.cuda.max_memory_allocated() - held_bytes
        return seen, int(USED_VRAM * free_bytes) - computing_bytes, graph_bytes
