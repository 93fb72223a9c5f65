"""What a run would take, and how it would be fastest: the simulator is asked, with a machine that was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, get_args

import torch

from greedysnake.config import Config
from greedysnake.errors import ConfigError, OpError, PlanError
from greedysnake.measuring import Machine, Say, measure, measure_drives
from greedysnake.models.huggingface import CausalLM
from greedysnake.placement import Home, last_layers
from greedysnake.planning.costs import Costs
from greedysnake.planning.simulate import Forecast, forecast
from greedysnake.planning.solve import Choice, solve
from greedysnake.preparation import (
    Outline,
    device_and_configuration,
    footprint_of,
    outline_of,
    ram_budget,
    require_room,
)
from greedysnake.run_model import make_model
from greedysnake.runs import find_run
from greedysnake.runtime.directory import own_directories
from greedysnake.runtime.drive import Bandwidth
from greedysnake.runtime.filling import homes_bytes
from greedysnake.runtime.footprint import Footprint, missing_room
from greedysnake.runtime.opening import Stored, stored_in
from greedysnake.settings import Size
from greedysnake.shapes import MomentsName, Share

SATURATED = 0.97
"""Of a step, computing: more micro-batches would gain no more than the rest."""
MOST_DOUBLINGS = 6
LAYERS_PER_BLOCK = (2, 4, 8)
NO_MEMORY = ("OutOfMemoryError", "ALLOC_FAILED")
"""What torch, and the libraries that it uses, say where a device has no more of it."""
LEAST_GRAPH = 8
"""Tensors as large as a layer's output that its graph has at least: those of a Llama have 20."""
GRAPH_SHARES = 8
"""Into how many parts the layers are divided whose graphs would fit, to find out how many of them pay."""
UNLIMITED = 1 << 62
"""Bytes of RAM."""
WORTH_IT = 0.03
"""Of a step: less is not worth another trial, nor the memory that larger blocks take."""


@dataclass(frozen=True)
class Option:
    """A way to run, and what is expected of it."""

    config: Config
    """Written out: nothing is left to be chosen when it runs."""
    footprint: Footprint
    forecast: Forecast
    clipped: Forecast | None = None
    """Of steps that are clipped, where that makes a difference: their updates wait for the norm."""

    @property
    def num_tokens(self) -> int:
        """Of a step, all ranks' together, padding included."""
        training = self.config.training
        per_micro_batch = training.per_device_train_batch_size * training.sequence_length
        return per_micro_batch * training.gradient_accumulation_steps * self.num_ranks

    @property
    def num_ranks(self) -> int:
        return self.footprint.plan.num_ranks

    @property
    def disk_bytes(self) -> int:
        """All ranks' together."""
        return sum(self.footprint.disk_bytes) * self.num_ranks

    @property
    def written_bytes(self) -> float:
        """To the drives in a step, by all ranks."""
        return self.forecast.written_bytes * self.num_ranks

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.forecast.step_s

    @property
    def typical_s(self) -> float:
        """Of steps half of which are clipped, where that makes a difference."""
        return (self.forecast.step_s + (self.clipped or self.forecast).step_s) / 2


@dataclass(frozen=True)
class Planned:
    """The answer: the run as it is configured, as it would be fastest, and with larger steps."""

    machine: Machine
    given: Option
    chosen: Option
    larger: tuple[Option, ...]
    """With more micro-batches, each twice as many as before; up to one that is saturated, or that does not fit."""
    compact: tuple[Option, ...] = ()
    """With moments in fewer bytes, and the alpha and slots that suit them, as long as the device is not busy all the
    time. They change the training, so they are shown and not chosen."""

    @staticmethod
    def is_saturated(option: Option) -> bool:
        """Whether the device computes for practically all of a step."""
        return option.forecast.least_s["compute"] >= SATURATED * option.forecast.step_s


def plan_run(config: Config, say: Say, num_ranks: int = 1) -> Planned:
    """`say` is told what is being done. What `train` would refuse is refused here too, but for weights and data that
    are not there yet. `num_ranks` processes would train together, each on a device like the one that is measured."""
    if num_ranks < 1:
        raise ConfigError(f"--ranks is {num_ranks}: give at least 1")
    share = Share(0, num_ranks, num_ranks)
    run = find_run(config)
    if run is not None:
        config = config.with_default_blocks(run.config.engine.layers_per_block or 1)
    device, model_config = device_and_configuration(config, is_new=run is None)
    model, ram = make_model(config, model_config), ram_budget(config, share)
    stored = stored_in(own_directories(config.storage, share)[0]) if run else None
    subject = _Subject(config, model, model_config, device, ram, stored, share, say)
    require_room(config, subject.footprint(), share)  # a run that does not fit is refused before anything is measured
    drives = measure_drives(config, say)
    machine = subject.measure(drives)
    expecting = subject.expecting(machine)
    given = expecting.as_configured()
    say("looking for the best alpha and slots")
    best = expecting.best(given)
    if config.engine.layers_per_block is None and config.engine.schedule == "vertical":
        subject, machine, best = _with_larger_blocks(subject, machine, best, drives)
    machine, best = _with_graphs(subject, machine, best, drives)
    chosen, choice, expecting = best
    say("looking at larger steps")
    compact: Iterator[Option] = iter(())
    if run is None:  # one that is continued keeps its moments
        compact = expecting.compact(chosen, choice, subject.outline)
    return Planned(machine, given, chosen, tuple(expecting.larger(chosen, choice)), tuple(compact))


@dataclass(frozen=True)
class _Subject:
    """What is planned, and where."""

    config: Config
    model: CausalLM
    model_config: Any
    device: str
    ram: int
    stored: Stored | None
    share: Share
    say: Say

    def with_blocks_of(self, layers_per_block: int) -> _Subject:
        engine = replace(self.config.engine, layers_per_block=layers_per_block)
        return replace(
            self, config=replace(self.config, engine=engine), model=self.model.in_blocks_of(layers_per_block)
        )

    def outline(self, config: Config | None = None) -> Outline:
        return outline_of(config or self.config, self.model, self.model_config, self.ram, self.stored, self.share)

    def footprint(self) -> Footprint:
        return footprint_of(self.config, self.outline(), self.ram, self.stored)

    def measure(self, drives: Bandwidth, *, graphs: bool = False) -> Machine:
        outlined, plan = self.outline(), self.footprint().plan
        options: Any = {"device": self.device, "ram": self.ram, "say": self.say, "graphs": graphs}
        return measure(self.config, self.model, self.model_config, outlined, plan, drives, **options)

    def measured(self, drives: Bandwidth, what: str, *, graphs: bool = False) -> Machine | None:
        """None where RAM or the device has no room for `what`, which is said."""
        try:
            return self.measure(drives, graphs=graphs)
        except (OpError, torch.OutOfMemoryError) as error:
            if not any(name in f"{type(error).__name__} {error}" for name in NO_MEMORY):
                raise
            self.say(f"the device has no room for {what}")
        except PlanError:  # RAM has none for what is configured, only for what was hoped for
            pass
        return None

    def expecting(self, machine: Machine) -> _Expecting:
        share = machine.of_one_of(self.share.num_ranks)
        return _Expecting(self.config, share, self.outline(), self.ram, self.stored)

    def best(self, machine: Machine) -> Best | None:
        """None where RAM or the device has no room."""
        expecting = self.expecting(machine)
        try:
            best = expecting.best(expecting.as_configured())
        except PlanError:
            return None
        return best if machine.has_room_for(best[0].footprint.device_bytes) else None


def _with_larger_blocks(
    subject: _Subject, machine: Machine, best: Best, drives: Bandwidth
) -> tuple[_Subject, Machine, Best]:
    """With more layers in a block, if that is faster: activations take less room then, and the device computes a
    little more, in more memory. What is expected of it, by what was measured of single layers, is measured before it
    counts."""
    num_layers, num_micro_batches = len(machine.times) - 2, subject.config.training.gradient_accumulation_steps
    fits = machine.has_room_for(best[0].footprint.device_bytes)
    if (fits and Planned.is_saturated(best[0])) or not subject.model.may_be_grouped:
        return subject, machine, best
    subject.say("looking at more layers in a block")
    hopes = []
    for count in (count for count in LAYERS_PER_BLOCK if count <= num_layers // 2):
        other = subject.with_blocks_of(count)
        with suppress(PlanError):  # no room
            hoped = other.expecting(machine.with_blocks_of(count)).option_with(best[1], num_micro_batches)
            if machine.has_room_for(hoped.footprint.device_bytes):
                hopes.append((hoped.typical_s, count, other))
    enough_s = best[0].typical_s * (1 - WORTH_IT) if fits else math.inf
    for hoped_s, count, other in sorted(hopes, key=lambda hope: hope[:2]):
        if hoped_s > enough_s:
            break
        tried = other.measured(drives, f"blocks of {count} layers")
        found = other.best(tried) if tried else None
        if tried and found and found[0].typical_s <= enough_s:
            return other, tried, found
    return subject, machine, best


def _with_graphs(subject: _Subject, machine: Machine, best: Best, drives: Bandwidth) -> tuple[Machine, Best]:
    """With the graphs of as many layers kept on the device as make the step shorter, if it has room for them: nothing
    of these layers is computed twice. How large they are, and what they save, is measured before it counts."""
    option, choice, expecting = best
    engine, room = subject.config.engine, machine.room_bytes
    if room is None or engine.schedule != "vertical" or engine.placement.graphs_device:
        return machine, best
    enough_s = option.typical_s * (1 - WORTH_IT)
    least_bytes = LEAST_GRAPH * expecting.activation_bytes
    hoped = replace(machine, graph_bytes=(least_bytes,) * len(machine.times))
    hoping = expecting.on(hoped.of_one_of(subject.share.num_ranks))
    if all(other.typical_s > enough_s for other, _ in hoping.with_graphs(choice)):
        return machine, best
    weighed = subject.measured(drives, "graphs of layers", graphs=True)
    if weighed is None or weighed.graph_bytes is None:
        return machine, best
    machine = machine.with_graphs_of(weighed)
    expecting = expecting.on(machine.of_one_of(subject.share.num_ranks))
    found = min(expecting.with_graphs(choice), key=lambda each: each[0].typical_s, default=None)
    if found is None or found[0].typical_s > enough_s:
        return machine, best
    return machine, (*expecting.fastest(*found), expecting)


class _Expecting:
    """What a configuration would give on a machine, with other choices and more micro-batches."""

    def __init__(self, config: Config, machine: Machine, outlined: Outline, ram: int, stored: Stored | None) -> None:
        self._config = config
        self._machine = machine
        self._outlined = outlined
        self._ram = ram
        self._stored = stored

    def as_configured(self) -> Option:
        return self._option(self._config, more_slots=True, fill_device=False)

    def best(self, given: Option) -> Best:
        """The best of what is not set, and who expects that. Whether updates wait for the norm is decided by what it
        saves here, if there is room."""
        found = [(*self.fastest(given), self)]
        engine = self._config.engine
        if engine.optimistic is None and self._config.may_be_optimistic and not given.footprint.plan.may_be_tentative:
            other = replace(self._config, engine=replace(engine, optimistic=True))
            trying = _Expecting(other, self._machine, self._outlined, self._ram, self._stored)
            try:
                start = trying.as_configured()
                if not missing_room(start.footprint, other.storage, self._outlined.share):
                    found.append((*trying.fastest(start), trying))
            except PlanError:
                pass  # no RAM for it
        return min(found, key=lambda each: each[0].typical_s)

    def on(self, machine: Machine) -> _Expecting:
        """The same configuration on another machine."""
        return _Expecting(self._config, machine, self._outlined, self._ram, self._stored)

    @property
    def activation_bytes(self) -> int:
        return self._outlined.activation_bytes

    def fastest(self, given: Option, start: Choice | None = None) -> tuple[Option, Choice]:
        """By alpha and slots alone, from what was chosen before or what is configured."""
        plan, alpha = given.footprint.plan, self._config.engine.alpha
        found = {} if self._machine.room_bytes and start is None else {start: given}
        start = start or Choice(alpha, plan.slots.updates, plan.slots.staging)

        def step_s(choice: Choice) -> float:
            if choice not in found:
                try:
                    option = self.option_with(choice, self._config.training.gradient_accumulation_steps)
                except PlanError:
                    return math.inf
                if choice.graphs and not self._machine.has_room_for(option.footprint.device_bytes):
                    return math.inf
                found[choice] = option
            return found[choice].typical_s

        waits = plan.clipping and not plan.may_be_tentative  # then every update is late, whatever alpha says
        choice = solve(step_s, start, least_s=given.forecast.least_s["compute"], vary_alpha=not waits)
        return found.get(choice, given), choice  # given: with no more on the device than it has room for, RAM has none

    def with_graphs(self, choice: Choice) -> Iterator[tuple[Option, Choice]]:
        """The choice with graphs of more and more layers on the device, as far as it has room."""
        count, machine = self._config.training.gradient_accumulation_steps, self._machine
        assert machine.room_bytes is not None and machine.graph_bytes is not None
        layers = machine.graph_bytes[1:-1]
        totals = list(accumulate(nbytes * count for nbytes in reversed(layers)))
        allowed = self._config.engine.vram
        room = machine.room_bytes if allowed is None else min(allowed, machine.room_bytes)
        most = sum(total <= room for total in totals)
        for part in sorted({math.ceil(most * part / GRAPH_SHARES) for part in range(1, GRAPH_SHARES + 1)} - {0}):
            trying = replace(choice, graphs=part)
            try:
                option = self.option_with(trying, count)
            except PlanError:
                return
            if not machine.has_room_for(option.footprint.device_bytes):
                return
            yield option, trying

    def larger(self, option: Option, choice: Choice) -> Iterator[Option]:
        for _ in range(MOST_DOUBLINGS):
            if Planned.is_saturated(option):
                return
            choice = replace(choice, graphs=choice.graphs // 2)  # each takes twice the room
            try:
                option = self.option_with(choice, 2 * option.config.training.gradient_accumulation_steps)
            except PlanError:
                return
            yield option

    def compact(self, option: Option, choice: Choice, outline: Callable[[Config], Outline]) -> Iterator[Option]:
        """What is stored decides how large chunks are, so the model is cut anew for each kind."""
        training = self._config.training
        kinds: tuple[MomentsName, ...] = get_args(MomentsName)
        for moments in kinds[kinds.index(training.adam_moments) + 1 :]:
            if Planned.is_saturated(option):
                return
            config = replace(self._config, training=replace(training, adam_moments=moments))
            machine = self._machine.with_state_of(config.precision, measured=self._config.precision)
            trying = _Expecting(config, machine, outline(config), self._ram, self._stored)
            try:
                option = trying.option_with(choice, training.gradient_accumulation_steps)
            except PlanError:
                return  # larger chunks have larger buffers
            option, choice = trying.fastest(option, choice)
            yield option

    def option_with(self, choice: Choice, num_micro_batches: int) -> Option:
        training, engine = self._config.training, self._config.engine
        slots, placement = replace(engine.slots, updates=choice.updates, staging=choice.staging), engine.placement
        if choice.graphs:
            placement = replace(placement, graphs_device=choice.graphs / (len(self._machine.times) - 2))
        config = replace(
            self._config,
            training=replace(training, gradient_accumulation_steps=num_micro_batches),
            engine=replace(engine, alpha=choice.alpha, slots=slots, placement=placement),
        )
        return self._option(config, more_slots=False, fill_device=True)

    def _option(self, config: Config, *, more_slots: bool, fill_device: bool) -> Option:
        machine = self._machine
        room = machine.room_bytes if config.engine.schedule == "vertical" else None
        graph_bytes = self._graph_bytes(config)
        if fill_device and room is not None and graph_bytes is not None:
            config = replace(config, engine=replace(config.engine, vram=self._spare(config, room, graph_bytes)))
        footprint = footprint_of(config, self._outlined, self._ram, self._stored, more_slots=more_slots)
        if graph_bytes:
            homes = dict(footprint.homes)
            buffers = homes.pop("buffers")
            homes |= {"graphs": {Home.DEVICE: graph_bytes}, "buffers": buffers}
            footprint = replace(footprint, homes=homes)
        plan = footprint.plan
        costs = Costs(plan, machine.rates, machine.times, activation_bytes=self._outlined.activation_bytes)
        count, kind = config.training.gradient_accumulation_steps, config.engine.schedule
        engine = replace(
            config.engine,
            ram=Size(self._ram * self._outlined.share.num_here),
            layers_per_block=config.engine.layers_per_block or 1,
            vram=None,
            fill_ram=False,
            placement=plan.placement,
            slots=plan.slots,
            optimistic=plan.may_be_tentative if plan.clipping else config.engine.optimistic,
        )
        clipped = forecast(plan, costs, count, clipped=True) if plan.may_be_tentative else None
        return Option(replace(config, engine=engine), footprint, forecast(plan, costs, count, kind=kind), clipped)

    def _graph_bytes(self, config: Config) -> int | None:
        """Of the layers whose graph is kept; None where it is not known how large these are."""
        share, sizes = config.engine.placement.graphs_device, self._machine.graph_bytes
        if not share:
            return 0
        if sizes is None:
            return None
        blocks = [block.shape for block in self._outlined.blocks]
        return sum(sizes[number] for number in last_layers(blocks, share)) * (
            config.training.gradient_accumulation_steps
        )

    def _spare(self, config: Config, room: int, graph_bytes: int) -> Size:
        """What is left of the device's room beside graphs, buffers and what was put there by hand; no more than
        `vram` says."""
        allowed = config.engine.vram
        config = replace(config, engine=replace(config.engine, vram=None, fill_ram=False))  # RAM makes no difference
        footprint = footprint_of(config, self._outlined, UNLIMITED, self._stored, more_slots=False)
        count = config.training.gradient_accumulation_steps
        by_hand = homes_bytes(footprint.plan, count, self._outlined.activation_bytes)
        spare = room - footprint.device_bytes + by_hand
        return Size(max(0, (spare if allowed is None else min(spare, allowed)) - graph_bytes))


Best = tuple[Option, Choice, _Expecting]
"""The best option, what was chosen for it, and who expects that."""
