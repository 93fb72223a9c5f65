"""The engine: a model in its homes, and one training step after another."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from os import PathLike
from types import TracebackType

import torch

from greedysnake.errors import ConfigError, PlanError, RankError
from greedysnake.models.sequential import Batch, Model
from greedysnake.ops import Cursor, Lane, Op, Plan
from greedysnake.placement import Placement, Slots
from greedysnake.runtime import arguments
from greedysnake.runtime.actions import Actions
from greedysnake.runtime.arena import Arena
from greedysnake.runtime.arguments import IoOptions
from greedysnake.runtime.buffers import Buffers
from greedysnake.runtime.building import build_blocks
from greedysnake.runtime.compute import Compute
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.directory import own_directories
from greedysnake.runtime.fitting import choose_chunk_params, make_plan, net_order, require_ram
from greedysnake.runtime.flat import DecayRule, decays_by_default, survey
from greedysnake.runtime.io import IoCounters, IoEngine
from greedysnake.runtime.lifetime import Lifetime
from greedysnake.runtime.memory import DeviceMemory, HostMemory
from greedysnake.runtime.opening import Stored, stored_in
from greedysnake.runtime.optimism import Optimism
from greedysnake.runtime.optimizer import AdamW
from greedysnake.runtime.randomness import random_state_kept
from greedysnake.runtime.ranks import Ranks
from greedysnake.runtime.result import SparedBytes, StepResult, make_result
from greedysnake.runtime.room import Room
from greedysnake.runtime.runner import Runner
from greedysnake.runtime.state import ModelState, extent_specs, fingerprint
from greedysnake.runtime.steps import Action, Steps, find_schedule
from greedysnake.runtime.store import Store
from greedysnake.runtime.updates import Updates, start_pool
from greedysnake.shapes import precision_of
from greedysnake.sizes import parse_size
from greedysnake.trace import Record

__all__ = ["Engine", "StepResult"]


class Engine:
    """Trains a model whose weights and optimizer state live on SSD and in RAM.

    One thread calls its methods, one at a time: a call while another is under way, as from a signal handler in a step,
    is refused. After an error in a step the engine is closed; what was saved is intact.

    A parameter that a step does not use has a gradient of zero: its moments and, with weight decay, its values shrink.
    (torch.optim.AdamW leaves out a parameter whose `grad` is None.) What is not to change is frozen by
    `requires_grad_(False)` before the engine is made.

    Where torch.distributed is set up with several ranks, they train one model together: each holds an equal part of its
    state, gives micro-batches of its own to `step`, and makes the same calls in the same order. Memory, drives, bytes
    and times are those of the rank; losses and norms are those of all.
    """

    def __init__(
        self,
        model: Model,
        optimizer: AdamW,
        *,
        storage: Sequence[str | PathLike[str]] = (),
        ram: int | str,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "bfloat16",
        schedule: str = "vertical",
        alpha: float = 0.25,
        max_grad_norm: float | None = None,
        placement: Placement | None = None,
        slots: Slots | None = None,
        chunk_params: int | None = None,
        seed: int = 0,
        resume: bool = False,
        overwrite: bool = False,
        single_slot: bool = False,
        optimistic: bool = False,
        compress_moments: bool = True,
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
        `optimistic` is for clipping: after steps that were not clipped the following ones do their updates in the
        backward, before the norm is known, and once more if it was clipped after all; the more often that happens, the
        less. It takes half as much disk space again.
        With `compress_moments` moments cross the drives in fewer bytes, bit for bit, for some work of the CPU.
        Without `checkpoints` only what lives on SSD has room there, and `save` is refused. `num_threads` threads
        update chunks on the CPU, pinned to `cpus` if given.
        `chunk_params` parameters make a chunk, the unit of SSD transfer and of optimizer work: by default as many as
        suit the budget, or as the checkpoint that is resumed has.
        `decays(name, parameter)` says which parameters weight decay applies to."""
        self.device = arguments.checked_device(device)
        self.trace = trace
        self.records: list[Record] = []
        """With trace=True, what every op did; yours to read and to clear."""
        self._model = model
        self._optimizer = optimizer
        self._vertical = schedule == "vertical"
        self._checkpoints = checkpoints
        self._step = 0
        self._num_skipped = 0
        self._num_revoked = 0
        self._written_before = 0
        self._metadata: Mapping[str, object] = {}
        self._ranks = Ranks(self.device)
        self._life = Lifetime(self, self._ranks)
        resources, share = self._life.resources, self._ranks.share
        with ExitStack() as undo, self._ranks.together("Engine()"):
            undo.callback(resources.close)
            arguments.check_numbers(alpha, max_grad_norm, chunk_params, seed)
            arguments.check_threads(num_threads, cpus)
            dtype = arguments.checked_dtype(dtype)
            arguments.checked_kind("optimizer", optimizer, AdamW)
            placement = arguments.checked_kind("placement", placement or Placement(), Placement)
            slots = arguments.checked_kind("slots", slots or Slots(), Slots)
            io = arguments.checked_kind("io", IoOptions() if io is None else io, IoOptions)
            storage = arguments.checked_storage(storage, resume=resume, checkpoints=checkpoints)
            arguments.check_optimistic(optimistic, schedule, max_grad_norm, storage, single_slot=single_slot)
            write = find_schedule(schedule)
            self._dtype = arguments.DTYPES[dtype]
            precision, ram = precision_of(dtype, optimizer.moments), parse_size(ram)
            directories = own_directories(storage, share)
            stored = stored_in(directories[0]) if resume else Stored()
            arguments.check_moments(optimizer.moments, stored.moments)
            self._chunk_params = choose_chunk_params(chunk_params, stored.chunk_params, ram, precision)
            self._blocks = survey(model, self._chunk_params, decays, needs_values=not resume, share=share)
            self._plan = make_plan(
                self._blocks,
                precision,
                placement,
                slots,
                alpha=alpha,
                clipping=max_grad_norm is not None,
                has_ssd=bool(storage),
                tentative=optimistic,
            )
            write(self._plan, Cursor(self._plan), 1)  # a plan that it cannot follow is refused here
            require_ram(self._plan, ram)
            options = {"optimizer": optimizer, "max_grad_norm": max_grad_norm, "schedule": schedule, "seed": seed}
            options |= {"resume": resume, "storage": bool(storage), "checkpoints": checkpoints}
            self._ranks.agree("Engine()", options | net_order(self._plan))
            undo.pop_all()
        # What is made under inference mode could not be trained with, wherever the engine is made.
        with torch.inference_mode(False), ExitStack() as undo, self._ranks.together("Engine()"):
            undo.callback(resources.close)
            self._arena = resources.enter_context(Arena(ram, device=self.device))
            self._pool = start_pool(num_threads or arguments.default_threads(self.device, share.num_here), cpus)
            resources.callback(self._pool.close)
            self._store: Store | None = None
            self._io: IoEngine | None = None
            if storage:
                self._io = resources.enter_context(IoEngine(**vars(io)))
                self._store = resources.enter_context(
                    Store(
                        directories,
                        extent_specs(self._plan, checkpoints=checkpoints),
                        io=self._io,
                        single_slot=single_slot,
                        fingerprint=fingerprint(self._blocks, self._plan.precision, share),
                        resume=resume,
                        overwrite=overwrite,
                        checkpoints=checkpoints,
                        spare_slot=self._plan.may_be_tentative,
                        verify_reads=verify_reads,
                        compress=compress_moments,
                        pool=self._pool,
                        exchange=partial(self._ranks.exchange, "the opening or saving of a checkpoint"),
                    )
                )
            device_memory = DeviceMemory(self._plan, self._dtype, self.device)
            host = HostMemory(self._arena, self._plan)
            self._buffers = Buffers(self._plan, device_memory, host, self._dtype)
            self._state = ModelState(self._plan, self._blocks, host, self._store, self._pool, self._ranks)
            build_blocks(
                model, self._blocks, self._state, self._ranks, dtype=self._dtype, device=self.device, resume=resume
            )
            self._compute = Compute(
                self._blocks,
                self._buffers,
                device=self.device,
                seed=seed,
                vertical=self._vertical,
                compile=compile,
                weigh_graphs=trace,
            )
            self._updates = Updates(
                self._blocks, self._buffers, self._pool, optimizer, self._ranks, max_grad_norm=max_grad_norm
            )
            self._actions = Actions(self._buffers, self._store, self._compute, self._updates, self._ranks, self.device)
            if resume:
                self._take_over()
            self._runner = Runner(self.device, self._ranks)
            resources.callback(self._runner.close)
            # Once more after an interrupt in the first: before memory is freed.
            resources.callback(self._runner.close)
            self._life.stop_by(self._runner.stop)
            undo.pop_all()
        self._steps = Steps(self._runner, self._plan, schedule)
        self._room = Room(
            self._arena,
            self._buffers,
            self._compute,
            self._store,
            self._runner,
            self.device,
            vertical=self._vertical,
        )
        self._optimism = Optimism()
        self._busy_s: dict[str, float] = {}
        self._spared = SparedBytes()
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
    def num_revoked(self) -> int:
        """Steps whose updates were done before the norm was known, and then done again because it was clipped; since
        the engine was made."""
        return self._num_revoked

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
    def graph_bytes(self) -> Mapping[int, int]:
        """By block: what the device held of its graph for one micro-batch, where graphs are kept (`graphs_device`).
        With trace=True on a GPU, else empty."""
        return self._compute.graph_bytes

    @property
    def plan(self) -> Plan:
        """Where everything lives."""
        return self._plan

    @property
    def ranks(self) -> Ranks:
        """The processes that train together; one where torch.distributed is not set up."""
        return self._ranks

    def step(self, micro_batches: Sequence[Batch], lr: float | None = None) -> StepResult:
        """One training step over all micro-batches. Late updates and reads for the next step go on after it."""
        start_s = time.perf_counter()
        with self._life.alone("step()"), self._life.together("step()"):
            rate = arguments.checked_rate(self._optimizer.lr if lr is None else lr)
            context = self._context(micro_batches, rate, training=True)
            self._compute.require_trainable()
            self._collect()
            with random_state_kept(self.device):
                largest = self._largest("step()", context)
                self._life.guard(self._prepare, "step()", context, *largest, spare=(PlanError, RankError))
                return self._life.guard(self._train, context, start_s)

    def evaluate(self, micro_batches: Sequence[Batch]) -> float:
        """The loss alone, after pending late updates; nothing is trained."""
        with self._life.alone("evaluate()"), self._life.together("evaluate()"):
            context = self._context(micro_batches, 0.0, training=False)
            with random_state_kept(self.device):
                largest = self._largest("evaluate()", context)
                self._life.guard(self._prepare, "evaluate()", context, *largest, spare=(PlanError, RankError))
                return self._life.guard(self._evaluate, context)

    def flush(self) -> None:
        """Finishes pending late updates and waits until nothing is under way."""
        with self._life.alone("flush()"):
            self._life.guard(self._flush)

    def save(self, metadata: Mapping[str, object] | None = None) -> None:
        """Publishes a checkpoint in the storage directories; a crash from then on returns to it. `metadata`, plain
        JSON values, is published with it: both or neither. Of several ranks all publish it or none; it is the first
        one's metadata that count."""
        if self._store is None:
            raise ConfigError("there is no storage directory to save to: give storage=[...] when making the engine")
        if not self._checkpoints:
            raise ConfigError("the engine was made with checkpoints=False, which keeps no room for one: leave it out")
        with self._life.alone("save()"), self._life.together("save()"):
            metadata = self._ranks.exchange("save()", metadata)[0]
            self._life.guard(self._flush)
            try:
                self._state.write_ram_parts()
                own = {
                    "num_updates": self._updates.num_updates,
                    "num_skipped": self._num_skipped,
                    "chunk_params": self._chunk_params,
                    "moments": self._optimizer.moments,
                    "ssd_written_bytes": self.ssd_written_bytes,  # with the RAM parts, which were just written
                }
                self._store.publish(self._step, {**own, "user": dict(metadata or {})})
            except KeyboardInterrupt:
                # The new checkpoint may be in place without the store knowing it: nothing may be written any more.
                self._life.free("KeyboardInterrupt in save()")
                raise
            self._metadata = _user_metadata(self._store)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master on the CPU), block by block; one block at a time is in memory."""
        for number in range(len(self._blocks)):
            # For each block: steps may come in between.
            with self._life.alone("named_parameters()"), self._life.together("named_parameters()"):
                self._life.guard(self._flush)
                parameters = self._state.parameters_of(number)
            yield from parameters

    def named_moments(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, exp_avg, exp_avg_sq) of every trained parameter, block by block."""
        for number in range(len(self._blocks)):
            with self._life.alone("named_moments()"), self._life.together("named_moments()"):
                self._life.guard(self._flush)
                moments = self._state.moments_of(number)
            yield from moments

    def close(self) -> None:
        """Ends what is under way, then frees everything. Publishes nothing; calling it again does nothing."""
        if not self._life.is_open:
            return
        with self._life.alone("close()"):
            try:
                self._wait()
            except RankError:
                pass  # what others have not done any more was for a step that does not come
            finally:
                self._life.free("it was closed")

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self) -> None:
        """Continues from the checkpoint that the store was opened with."""
        assert self._store is not None and self._store.step is not None
        self._step = self._store.step
        self._num_skipped = int(str(self._store.metadata["num_skipped"]))
        self._written_before = int(str(self._store.metadata.get("ssd_written_bytes", 0)))
        self._metadata = _user_metadata(self._store)
        self._updates.num_updates = int(str(self._store.metadata["num_updates"]))

    # Running

    def _context(self, micro_batches: Sequence[Batch], lr: float, *, training: bool) -> StepContext:
        torch.clear_autocast_cache()  # in which a parameter stands for the values it had in the step before
        micro_batches = arguments.checked_batches(micro_batches)
        num_targets = arguments.count_targets(self._model, micro_batches)
        self._compute.require_untouched()
        with torch.inference_mode(False), self._runner.on_compute_stream():
            batches = [arguments.to_device(batch, self.device) for batch in micro_batches]
        return StepContext(
            self._step,
            batches,
            num_targets,
            lr,
            training,
            tentative=self._buffers.host.tentative_weights(),
            num_updates=self._updates.num_updates,
        )

    # From here on a failure, Ctrl-C included, closes the engine: ops that other ops wait for would not come.

    def _train(self, context: StepContext, start_s: float) -> StepResult:
        self._compute.set_training(True)
        moved = self._steps.train(self._step, len(context.batches), self._action(context))
        # The next forward waits for these lanes too, so waiting for them here costs nothing.
        self._wait(Lane.COMPUTE, Lane.DOWNLOAD, Lane.NORM)
        skipped = self._judge(context)
        self._settle(context)
        self._step += 1
        return self._result(context, moved, time.perf_counter() - start_s, skipped)

    def _settle(self, context: StepContext) -> None:
        """Clipping is decided: confirms or revokes tentative updates."""
        if not self._plan.may_be_tentative:
            return
        as_expected = self._updates.changed_nothing
        self._optimism.learn(clipped=not as_expected, tried=self._steps.is_open)
        self._steps.tentative = self._optimism.expects
        if self._steps.is_open:
            assert self._store is not None
            self._store.end_attempt(context.attempt, confirmed=as_expected)
            if as_expected:
                self._buffers.host.confirm()
            self._num_revoked += not as_expected
            self._steps.settle(self._step, self._action(context), confirmed=as_expected)

    def _evaluate(self, context: StepContext) -> float:
        self._compute.set_training(False)
        self._steps.evaluate(self._step, len(context.batches), self._action(context))
        self._wait()
        self._collect()
        self._spared.skip(context.spared)
        return math.fsum(self._ranks.exchange("evaluate()", self._updates.own_loss_sum())) / context.num_targets

    def _flush(self) -> None:
        self._steps.flush(self._step, self._action(StepContext(self._step, (), 0, 0.0)))
        self._wait()
        self._collect()

    def _action(self, context: StepContext) -> Action:
        """What lanes call for an op; as long as one may, the engine is held."""
        return lambda op: self._actions.run(op, context)

    def _largest(self, call: str, context: StepContext) -> tuple[int, int]:
        """How many micro-batches the rank with the most has, and how large the largest tensor between blocks is: all
        ranks make room for that, or none has to."""
        sizes = [self._life.guard(self._room.activation_bytes, *item) for item in enumerate(context.batches)]
        return context.agree(self._ranks, call, max(sizes), as_many=not self._vertical)

    def _prepare(self, call: str, context: StepContext, num_micro_batches: int, activation_bytes: int) -> None:
        """Makes room for this many micro-batches of this size, if there is not enough yet."""
        if len(context.batches) != self._num_micro_batches:
            self._life.guard(self._steps.drop_next)
            self._wait()  # homes of tensors move with the number of micro-batches
            self._num_micro_batches = len(context.batches)
        if not self._room.fits(num_micro_batches, activation_bytes):
            self._life.guard(self._flush)
            meet = partial(self._ranks.exchange, call, None)  # all have room, or none goes on
            self._plan, memory = self._room.make(self._plan, num_micro_batches, activation_bytes, meet)
            self._steps.use(self._plan)
            self._life.guard(self._room.use, self._plan, memory)

    def _judge(self, context: StepContext) -> bool:
        """Whether the step was skipped: notes one whose gradient is not finite."""
        blocks, skipped = self._updates.blocks_not_finite(), context.skipped
        if not skipped and blocks:
            warnings.warn(
                f"step {self._step}: the gradient of {', '.join(blocks[:3])}{' ...' if len(blocks) > 3 else ''} is not "
                "finite and was not applied; blocks above had their update before this was known: with max_grad_norm "
                "set (inf clips nothing), such a step is skipped as a whole",
                RuntimeWarning,
                stacklevel=5,
            )
        skipped = skipped or bool(blocks)
        self._num_skipped += skipped
        return skipped

    def _result(self, context: StepContext, moved: Sequence[Op], elapsed_s: float, skipped: bool) -> StepResult:
        before_s = self._busy_s
        self._collect()
        busy_s = {link: total - before_s.get(link, 0.0) for link, total in self._busy_s.items()}
        loss = context.loss_sum / context.num_targets
        return make_result(context, moved, busy_s, self._spared, loss=loss, elapsed_s=elapsed_s, skipped=skipped)

    def _collect(self) -> None:
        """Takes over the records of the ops that have ended, and how long each link was busy until now."""
        records = self._runner.take_records()
        if self.trace:
            self.records.extend(records)
        self._busy_s = self._runner.busy_s()
        if self._io is not None:
            self._busy_s["ssd"] = self._io.counters().busy_s

    def _wait(self, *lanes: Lane) -> None:
        self._life.guard(self._runner.wait, *lanes)


def _user_metadata(store: Store) -> Mapping[str, object]:
    user = store.metadata.get("user", {})
    assert isinstance(user, dict)
    return user
