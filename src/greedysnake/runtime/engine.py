"""The engine: a model in its homes, and one training step after another."""

from __future__ import annotations

import gc
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike, cpu_count, getpid
from types import TracebackType
from typing import TypeVar

import torch

from greedysnake import _native, schedule
from greedysnake.errors import ConfigError, GreedySnakeError
from greedysnake.models.sequential import Batch, MicroBatch, Model
from greedysnake.ops import Cursor, Lane, Op, Plan
from greedysnake.placement import Placement, Slots
from greedysnake.runtime.actions import Actions, StepContext
from greedysnake.runtime.arena import Arena
from greedysnake.runtime.fitting import fit_gradients, make_plan, require_ram
from greedysnake.runtime.flat import DecayRule, decays_by_default, survey, take_values
from greedysnake.runtime.io import IoCounters, IoEngine
from greedysnake.runtime.memory import DeviceMemory, HostMemory, StepMemory
from greedysnake.runtime.optimizer import AdamW
from greedysnake.runtime.runner import Linked, Runner
from greedysnake.runtime.state import ModelState, extent_specs, fingerprint, require_parameters
from greedysnake.runtime.store import Store
from greedysnake.shapes import GRANULE, PRECISIONS
from greedysnake.sizes import parse_size
from greedysnake.trace import Record, bound

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Schedule = Callable[[Plan, Cursor, int], list[Op]]
SCHEDULES: dict[str, Schedule] = {"vertical": schedule.vertical, "horizontal": schedule.horizontal}
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss: float
    """Sum of the losses of all target tokens of the step, divided by their number."""
    grad_norm: float | None
    """Norm of the whole gradient before clipping; None when clipping is off."""
    num_tokens: int
    """Target tokens."""
    elapsed_s: float
    ssd_read_bytes: int
    ssd_write_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    """The busiest resource: ssd, pcie, compute or cpu."""
    bound_fraction: float
    """Share of the step during which it was busy."""
    skipped: bool
    """The gradient was not finite and was not applied."""


@dataclass(frozen=True)
class IoOptions:
    """How the drives are used."""

    backend: str = "auto"
    """ "io_uring", "threads", or "auto" to ask the kernel."""
    queue_depth: int = 32
    num_threads: int = 8
    piece_bytes: int = 1 << 20
    read_bytes_per_s: float | None = None
    """Rate limits, for users who share a drive; None is no limit."""
    write_bytes_per_s: float | None = None
    total_bytes_per_s: float | None = None


@dataclass(frozen=True)
class _Next:
    """A step that was written and linked ahead of its call, and the cursor to go back to."""

    make: Schedule
    num_micro_batches: int
    cursor: Cursor
    ops: list[Op]
    linked: Linked


class Engine:
    """Trains a model whose weights and optimizer state live on SSD and in RAM.

    One thread calls its methods. After an error in a step the engine is closed; what was saved is intact.
    """

    def __init__(
        self,
        model: Model,
        optimizer: AdamW,
        *,
        storage: Sequence[str | PathLike[str]] = (),
        ram: int | str,
        device: str | torch.device = "cpu",
        dtype: str = "bfloat16",
        schedule: str = "vertical",
        alpha: float = 0.25,
        max_grad_norm: float | None = None,
        placement: Placement | None = None,
        slots: Slots | None = None,
        chunk_params: int = 4 << 20,
        seed: int = 0,
        resume: bool = False,
        overwrite: bool = False,
        single_slot: bool = False,
        checkpoints: bool = True,
        verify_reads: bool = True,
        io: IoOptions | None = None,
        num_threads: int | None = None,
        cpus: Sequence[int] | None = None,
        decays: DecayRule = decays_by_default,
        compile: bool = False,
        trace: bool = False,
    ) -> None:
        """`storage` are directories, one per drive; none is needed when everything lives in RAM. `ram` is a hard
        budget for all host buffers. `single_slot` halves the disk space: a crash then loses the last checkpoint too.
        Without `checkpoints` only what lives on SSD has room there, and `save` is refused. `num_threads` threads
        update chunks on the CPU, pinned to `cpus` if given.
        `decays(name, parameter)` says which parameters weight decay applies to."""
        _check(dtype, schedule, alpha, max_grad_norm, chunk_params)
        if isinstance(storage, (str, PathLike)):
            raise ConfigError(f"storage is {str(storage)!r}: give a list of directories, one per drive")
        if resume and not storage:
            raise ConfigError("resume=True needs the storage directories of the checkpoint: give storage=[...]")
        if resume and not checkpoints:
            raise ConfigError("resume=True with checkpoints=False: a run without checkpoints cannot continue one")
        self.device = _checked_device(device)
        self.trace = trace
        self.records: list[Record] = []
        """With trace=True, what every op did; yours to read and to clear."""
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._checkpoints = checkpoints
        self._dtype = DTYPES[dtype]
        self._step = 0
        self._num_skipped = 0
        self._written_before = 0
        self._metadata: Mapping[str, object] = {}
        self._closed: str | None = None
        self._owner = getpid()
        self._blocks = survey(model, max(GRANULE, chunk_params // GRANULE * GRANULE), decays, needs_values=not resume)
        self._plan = make_plan(
            self._blocks,
            PRECISIONS[dtype],
            placement or Placement(),
            slots or Slots(),
            alpha=alpha,
            clipping=max_grad_norm is not None,
            has_ssd=bool(storage),
        )
        SCHEDULES[schedule](self._plan, Cursor(self._plan), 1)  # a plan that it cannot follow is refused here
        require_ram(self._plan, parse_size(ram))
        with ExitStack() as undo:
            self._arena = undo.enter_context(Arena(parse_size(ram), device=self.device))
            self._store: Store | None = None
            self._io: IoEngine | None = None
            if storage:
                self._io = undo.enter_context(IoEngine(**vars(io or IoOptions())))
                self._store = undo.enter_context(
                    Store(
                        [str(directory) for directory in storage],
                        extent_specs(self._plan, checkpoints=checkpoints),
                        io=self._io,
                        single_slot=single_slot or not checkpoints,
                        fingerprint=fingerprint(self._blocks, self._plan.precision),
                        resume=resume,
                        overwrite=overwrite,
                        verify_reads=verify_reads,
                    )
                )
            self._pool = _native.ThreadPool(num_threads or _default_threads(self.device), cpus)
            undo.callback(self._pool.close)
            device_memory = DeviceMemory(self._plan, self._dtype, self.device)
            host = HostMemory(self._arena, self._plan)
            self._state = ModelState(self._plan, self._blocks, host, self._store, self._pool)
            self._build(resume)
            self._actions = Actions(
                self._plan,
                self._blocks,
                device_memory,
                host,
                self._store,
                self._pool,
                optimizer,
                device=self.device,
                dtype=self._dtype,
                max_grad_norm=max_grad_norm,
                seed=seed,
                vertical=schedule == "vertical",
                compile=compile,
            )
            if resume:
                self._take_over()
            self._runner = Runner(self.device)
            undo.callback(self._runner.close)
            self._resources = undo.pop_all()
        # Also when the interpreter ends: the threads of an engine that is still open must not outlive it.
        weakref.finalize(self, _free_in_this_process, self._resources, self._owner)
        self._step_memory: StepMemory | None = None
        self._next: _Next | None = None
        self._busy_s: dict[str, float] = {}
        self._cursor = Cursor(self._plan)
        self._ahead: list[Op] = []
        self._activation_bytes: dict[object, int] = {}
        self._num_micro_batches = 0

    # What a user calls

    @property
    def num_steps(self) -> int:
        """Steps done, skipped ones included."""
        return self._step

    @property
    def num_skipped(self) -> int:
        """Steps whose gradient was not finite."""
        return self._num_skipped

    @property
    def arena(self) -> Arena:
        """The host memory: budget, peak and who holds it."""
        return self._arena

    @property
    def io_counters(self) -> IoCounters | None:
        """What the drives were asked to do since the engine was made; None without storage."""
        return None if self._io is None else self._io.counters()

    @property
    def ssd_written_bytes(self) -> int:
        """Bytes written to the drives since the run began: by this engine, and by those that saved the checkpoint
        it resumed from."""
        return self._written_before + (0 if self._io is None else self._io.counters().write_bytes)

    @property
    def metadata(self) -> Mapping[str, object]:
        """What `save` was given at the last checkpoint, as JSON gives it back; empty before the first."""
        return self._metadata

    @property
    def plan(self) -> Plan:
        """Where everything lives."""
        return self._plan

    def step(self, micro_batches: Sequence[Batch], lr: float | None = None) -> StepResult:
        """One training step over all micro-batches. Late updates and reads for the next step go on after it."""
        rate = self._optimizer.lr if lr is None else lr
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(f"lr is {rate}: give a finite number, 0 or more")
        start_s = time.perf_counter()
        context = self._context(micro_batches, rate, training=True)
        self._collect()
        with self._random_state_kept():
            self._prepare(context)
            return self._call(self._train, context, start_s)

    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """The loss alone, after pending late updates; nothing is trained."""
        context = self._context(micro_batches, 0.0, training=False)
        with self._random_state_kept():
            self._prepare(context)
            return self._call(self._evaluate, context)

    def flush(self) -> None:
        """Finishes pending late updates and waits until nothing is under way."""
        self._require_open()
        self._call(self._flush)

    def save(self, metadata: Mapping[str, object] | None = None) -> None:
        """Publishes a checkpoint in the storage directories; a crash from then on returns to it. `metadata`, plain
        JSON values, is published with it: both or neither."""
        if self._store is None:
            raise ConfigError("there is no storage directory to save to: give storage=[...] when making the engine")
        if not self._checkpoints:
            raise ConfigError("the engine was made with checkpoints=False, which keeps no room for one: leave it out")
        self.flush()
        own = {
            "num_updates": self._actions.num_updates,
            "num_skipped": self._num_skipped,
            "ssd_written_bytes": self.ssd_written_bytes,
        }
        try:
            self._state.write_ram_parts()
            self._store.publish(self._step, {**own, "user": dict(metadata or {})})
        except KeyboardInterrupt:
            # The new checkpoint may be in place without the store knowing it: nothing may be written any more.
            self._free("KeyboardInterrupt in save()")
            raise
        self._metadata = _user_metadata(self._store)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the CPU), block by block; one block at a time is in memory."""
        for number in range(len(self._blocks)):
            self.flush()  # before each block: steps may come in between
            yield from self._state.parameters_of(number)

    def named_moments(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, exp_avg, exp_avg_sq) of every trained parameter, block by block."""
        for number in range(len(self._blocks)):
            self.flush()
            yield from self._state.moments_of(number)

    def close(self) -> None:
        """Ends what is under way, then frees everything. Publishes nothing; calling it again does nothing."""
        if self._closed is not None or getpid() != self._owner:
            return
        try:
            self._wait()
        finally:
            self._free("it was closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Building

    def _build(self, resume: bool) -> None:
        """Makes the blocks one by one and moves their values to their homes. Buffers go to the device."""
        shared: dict[str, torch.nn.Parameter] = {}
        for number, source in enumerate(self._model.sources()):
            block = self._blocks[number]
            module, parameters = source.build(values=not resume)
            require_parameters(block, parameters)
            for name, shared_name in block.shared.items():
                shared.setdefault(shared_name, parameters[name])
            if not resume:
                self._state.fill(number, parameters)
            block.module, block.parameters = module, parameters
            for name, parameter in parameters.items():
                if name not in block.shared:
                    take_values(parameter, self._dtype, self.device)
            module.to(self.device)
        if shared:
            block = self._blocks[-1]
            block.parameters = {place.name: shared[place.name] for place in block.places}
            if not resume:
                self._state.fill(len(self._blocks) - 1, block.parameters)
            for parameter in block.parameters.values():
                take_values(parameter, self._dtype, self.device)
            for block in self._blocks[:-1]:
                block.adopt(shared)
        if resume:
            self._state.read_ram_parts()

    def _take_over(self) -> None:
        """Continues from the checkpoint that the store was opened with."""
        assert self._store is not None and self._store.step is not None
        self._step = self._store.step
        self._num_skipped = int(str(self._store.metadata["num_skipped"]))
        self._written_before = int(str(self._store.metadata.get("ssd_written_bytes", 0)))
        self._metadata = _user_metadata(self._store)
        self._actions.num_updates = int(str(self._store.metadata["num_updates"]))

    # Running

    def _context(self, micro_batches: Sequence[Batch], lr: float, *, training: bool) -> StepContext:
        self._require_open()
        micro_batches = _checked_batches(micro_batches)
        counts = [int(self._model.num_targets(batch)) for batch in micro_batches]
        if sum(counts) <= 0:
            raise ConfigError(f"the {len(counts)} micro-batches have no target tokens: there is no loss to compute")
        with torch.inference_mode(False), self._on_compute_stream():
            batches = [
                MicroBatch({name: _usable(value).to(self.device, non_blocking=True) for name, value in batch.items()})
                for batch in micro_batches
            ]
        return StepContext(self._step, batches, sum(counts), lr, training)

    # From here on a failure, Ctrl-C included, closes the engine: ops that other ops wait for would not come.

    def _train(self, context: StepContext, start_s: float) -> StepResult:
        moved = self._run(SCHEDULES[self._schedule], context)
        # The next forward waits for these lanes too, so waiting for them here costs nothing.
        self._wait(Lane.COMPUTE, Lane.DOWNLOAD, *((Lane.CPU,) if self._plan.clipping else ()))
        skipped = self._judge(context)
        self._step += 1
        return self._result(context, moved, time.perf_counter() - start_s, skipped)

    def _evaluate(self, context: StepContext) -> float:
        self._run(partial(schedule.evaluation, vertical=self._schedule == "vertical"), context)
        self._wait()
        self._collect()
        return self._actions.loss_sum() / context.num_targets

    def _flush(self) -> None:
        self._drop_next()
        context = StepContext(self._step, (), 0, 0.0)
        linked = self._runner.link(schedule.flush(self._plan, self._cursor))
        self._runner.run(linked, self._step, lambda op: self._actions.run(op, context))
        self._wait()

    def _run(self, make: Schedule, context: StepContext) -> list[Op]:
        """Runs a schedule; returns the ops whose bytes belong to it."""
        self._actions.set_training(context.training)
        ops, linked = self._take_next(make, len(context.batches))
        meanwhile = self._make_next if context.training else None
        self._runner.run(linked, context.step, lambda op: self._actions.run(op, context), meanwhile)
        moved = self._ahead + [op for op in ops if not op.ahead]
        self._ahead = [op for op in ops if op.ahead]
        return moved

    def _make_next(self) -> None:
        """While the device computes: writes and links the next step, which most likely is like this one."""
        cursor = self._cursor.copy()
        make = SCHEDULES[self._schedule]
        with _no_garbage_collection():  # of everything that torch has loaded: 0.2 s in which nothing is launched
            ops = make(self._plan, self._cursor, self._num_micro_batches)
            linked = self._runner.link(ops)
        self._next = _Next(make, self._num_micro_batches, cursor, ops, linked)

    def _take_next(self, make: Schedule, num_micro_batches: int) -> tuple[list[Op], Linked]:
        following = self._next
        if following and following.make is make and following.num_micro_batches == num_micro_batches:
            self._next = None
            return following.ops, following.linked
        self._drop_next()
        ops = make(self._plan, self._cursor, num_micro_batches)
        return ops, self._runner.link(ops)

    def _drop_next(self) -> None:
        """Goes back to before the next step was written: something else comes first."""
        if self._next:
            self._cursor, self._next = self._next.cursor, None
            self._runner.unlink()

    def _prepare(self, context: StepContext) -> None:
        """Makes room for this many micro-batches of this size, if there is not enough yet."""
        num_micro_batches = len(context.batches)
        activation_bytes = max(self._size_of_activation(batch) for batch in context.batches)
        if num_micro_batches != self._num_micro_batches:
            self._call(self._drop_next)
            self._wait()  # homes of tensors move with the number of micro-batches
            self._num_micro_batches = num_micro_batches
        if self._step_memory is not None and self._step_memory.fits(num_micro_batches, activation_bytes):
            return
        self.flush()
        if self._step_memory is not None:
            num_micro_batches = max(num_micro_batches, self._step_memory.num_micro_batches)
            activation_bytes = max(activation_bytes, self._step_memory.activation_bytes)
            self._step_memory.release()
            self._step_memory = None  # a step that does not fit leaves the engine without, not with what was freed
        vertical = self._schedule == "vertical"
        free_bytes = self._arena.budget_bytes - self._arena.used_bytes
        self._plan, kept = fit_gradients(
            self._plan, num_micro_batches, activation_bytes, free_bytes, vertical=vertical, has_ssd=bool(self._store)
        )
        self._cursor = Cursor(self._plan)
        self._step_memory = StepMemory(
            self._arena,
            self._plan,
            self.device,
            num_micro_batches=num_micro_batches,
            activation_bytes=activation_bytes,
            kept=kept,
            vertical=vertical,
        )
        if self._store is not None:
            self._call(self._store.resize_scratch, self._step_memory.scratch_sizes())
        self._actions.use(self._plan, self._step_memory)

    def _size_of_activation(self, batch: Batch) -> int:
        key = tuple(sorted((name, tuple(value.shape), value.dtype) for name, value in batch.items()))
        if key not in self._activation_bytes:
            with self._on_compute_stream():
                self._activation_bytes[key] = self._actions.size_of_activation(batch)
        return self._activation_bytes[key]

    def _judge(self, context: StepContext) -> bool:
        """Whether the step was skipped: notes one whose gradient is not finite."""
        blocks = self._actions.blocks_not_finite()
        # Not context.skipped: without clipping nobody has waited for the lane that sets it.
        skipped = context.skipped if self._plan.clipping else not math.isfinite(self._actions.loss_sum())
        if not skipped and blocks:
            warnings.warn(
                f"step {self._step}: the gradient of {', '.join(blocks[:3])}{' ...' if len(blocks) > 3 else ''} is not "
                "finite and was not applied; blocks above had their update before this was known: with max_grad_norm "
                "set, such a step is skipped as a whole",
                RuntimeWarning,
                stacklevel=5,
            )
        skipped = skipped or bool(blocks)
        self._num_skipped += skipped
        return skipped

    def _result(self, context: StepContext, moved: Sequence[Op], elapsed_s: float, skipped: bool) -> StepResult:
        before_s = self._busy_s
        self._collect()
        busy_in_step_s = {link: total - before_s.get(link, 0.0) for link, total in self._busy_s.items()}
        nbytes: dict[str, int] = {}
        for lane, count in context.nbytes.items():
            link = Lane(lane).link
            nbytes[link] = nbytes.get(link, 0) + count
        for op in moved:
            nbytes[op.lane.link] = nbytes.get(op.lane.link, 0) + op.nbytes
        name, fraction = bound(busy_in_step_s, elapsed_s)
        return StepResult(
            loss=self._actions.loss_sum() / context.num_targets,
            grad_norm=context.grad_norm,
            num_tokens=context.num_targets,
            elapsed_s=elapsed_s,
            ssd_read_bytes=nbytes.get("ssd_read", 0),
            ssd_write_bytes=nbytes.get("ssd_write", 0),
            h2d_bytes=nbytes.get("h2d", 0),
            d2h_bytes=nbytes.get("d2h", 0),
            bound=name,
            bound_fraction=fraction,
            skipped=skipped,
        )

    def _collect(self) -> None:
        """Takes over the records of the ops that have ended, and how long each link was busy until now."""
        records = self._runner.take_records()
        if self.trace:
            self.records.extend(records)
        self._busy_s = self._runner.busy_s()
        if self._io is not None:
            self._busy_s["ssd"] = self._io.counters().busy_s

    def _wait(self, *lanes: Lane) -> None:
        self._call(self._runner.wait, *lanes)

    def _call(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Any failure closes the engine: what is stored is that of the last checkpoint."""
        try:
            return call(*arguments)
        except BaseException as error:
            self._runner.stop(error)
            if self._closed is None:
                self._free(f"{type(error).__name__}: {error}".removesuffix(": "))
            raise

    def _free(self, why: str) -> None:
        self._closed = why
        self._resources.close()

    def _require_open(self) -> None:
        if getpid() != self._owner:
            raise GreedySnakeError(f"the engine belongs to process {self._owner}: a forked child cannot use it")
        if self._closed is not None:
            raise GreedySnakeError(f"the engine is closed ({self._closed}): make a new one, with resume=True to go on")

    def _on_compute_stream(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._runner.compute_stream)

    def _random_state_kept(self) -> ExitStack:
        """Blocks draw from streams of their own; the user's random state is put back afterwards."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(False))  # what is made in it cannot be trained with later
        devices = [self.device] if self.device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        return stack


def _check(dtype: str, schedule_name: str, alpha: float, max_grad_norm: float | None, chunk_params: int) -> None:
    if dtype in ("float16", "fp16", "half"):
        raise ConfigError("dtype is float16, which needs loss scaling: use bfloat16, which has the range of float32")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: use 'bfloat16' or 'float32'")
    if schedule_name not in SCHEDULES:
        raise ConfigError(f"schedule is {schedule_name!r}: use 'vertical' or 'horizontal'")
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"alpha is {alpha}: give a fraction between 0 and 1")
    if max_grad_norm is not None and not (math.isfinite(max_grad_norm) and max_grad_norm > 0):
        raise ConfigError(f"max_grad_norm is {max_grad_norm}: give a positive number, or None for no clipping")
    if not isinstance(chunk_params, int) or chunk_params < 1:
        raise ConfigError(f"chunk_params is {chunk_params}: give a whole number, 1 or more")


def _checked_batches(micro_batches: Iterable[Batch]) -> list[Batch]:
    if isinstance(micro_batches, Mapping):
        raise ConfigError("one batch was given: give a list of micro-batches, [batch] for one")
    batches = list(micro_batches)
    if not batches:
        raise ConfigError("a step needs at least one micro-batch")
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise ConfigError(f"micro-batch {index} is a {type(batch).__name__}: give a dict of tensors")
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                raise ConfigError(f"{name!r} of micro-batch {index} is a {type(value).__name__}: give a tensor")
    return batches


def _usable(value: torch.Tensor) -> torch.Tensor:
    """A tensor made under inference_mode cannot be saved for a backward; a copy made outside of it can."""
    return value.clone() if value.is_inference() else value


def _checked_device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(device)!r}: use 'cpu' or 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {str(device)!r} and torch finds no CUDA device: use 'cpu', or install a driver")
    return device


def _free_in_this_process(resources: ExitStack, owner: int) -> None:
    """A forked child has the engine's memory and files, but they are its parent's to free."""
    if getpid() == owner:
        resources.close()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _user_metadata(store: Store) -> Mapping[str, object]:
    user = store.metadata.get("user", {})
    assert isinstance(user, dict)
    return user


def _default_threads(device: torch.device) -> int:
    """On a GPU machine the thread that launches kernels keeps cores to itself."""
    cores = cpu_count() or 1
    return max(1, cores - 4) if device.type == "cuda" else max(1, cores // 2)
