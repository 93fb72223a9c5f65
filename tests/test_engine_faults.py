"""Whatever fails in a step: the caller gets an error with the op's name, threads and memory are given back, and the
store opens again at the last checkpoint."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import child
import greedysnake as gs
from greedysnake.ops import Kind, Op
from greedysnake.runtime.actions import Actions
from greedysnake.runtime.context import StepContext
from greedysnake.runtime.io import IoEngine
from greedysnake.runtime.lanes import Wait
from reference import OPTIMIZER, Batch, Embed, Layer, Parts, Trained, make_batches, make_parts, num_targets, take_values
from threads import num_threads, require_threads

pytestmark = pytest.mark.usefixtures("one_thread")

SECONDS = 60.0
"""In which an error must have reached the caller; it takes a fraction of one, but the machine may be busy."""

VERTICAL: dict[str, object] = {
    "alpha": 0.5,
    "placement": gs.Placement(activations_ram=0.5, gradients_device=0, gradients_ram=0.5),
    "chunk_params": 4096,
}
CLIPPED: dict[str, object] = {**VERTICAL, "max_grad_norm": 0.5}
OPTIMISTIC: dict[str, object] = {
    **VERTICAL,
    "max_grad_norm": 1e9,
    "optimistic": True,
    "placement": gs.Placement(activations_ram=0.5, gradients_device=0, gradients_ram=0.5, weights_ram=0.5),
}
"""From the third step on all updates but the late ones are done before the norm is known."""
HORIZONTAL: dict[str, object] = {
    "alpha": 0.5,
    "placement": gs.Placement(activations_ram=0.5),
    "chunk_params": 4096,
    "schedule": "horizontal",
}
ON_SSD = "RSWYXHJ"

WHERE: list[tuple[str, dict[str, object], str]] = [
    ("vertical", VERTICAL, "FBRUDSAWPGYXHJLN"),
    ("clipped", CLIPPED, "QNASWHJD"),
    ("optimistic", OPTIMISTIC, "QNASWHDRU"),
    ("horizontal", HORIZONTAL, "CFBRUDSAWL"),
]
CASES = [
    pytest.param(options, kind, place, id=f"{name}-{kind}-{place}")
    for name, options, kinds in WHERE
    for kind in kinds
    for place in (("first", "middle", "last") if name == "vertical" else ("middle", "last"))
    + (("ending",) if kind in ON_SSD and name == "vertical" else ())
]


class Planted(Exception):
    pass


def batches(step: int) -> list[Batch]:
    return make_batches(3, step)


def model() -> gs.Sequential:
    return make_parts(uneven=True).sequential()


def make_engine(directory: Path, options: dict[str, object], **more: object) -> gs.Engine:
    return gs.Engine(model(), OPTIMIZER, storage=[directory], ram="64MiB", **{**options, **more})  # type: ignore[arg-type]


def saved_engine(directory: Path, options: dict[str, object]) -> tuple[gs.Engine, Trained]:
    """An engine with a checkpoint of two steps and one step more; returns what the checkpoint holds."""
    engine = make_engine(directory, options)
    engine.step(batches(0))
    engine.step(batches(1))
    engine.save()
    held = Trained()
    take_values(engine, held)
    engine.step(batches(2))
    return engine, held


class Fault:
    """Makes one op of a kind fail: the first, the last or one in the middle of a step, or its end if it goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str, place: str) -> None:
        self.kind, self.place = Kind(kind), place
        self.op: str | None = None
        self.wanted: int | None = None
        self._seen = 0
        self._armed = False
        self._run = Actions.run
        self._lock = threading.Lock()
        fault = self
        monkeypatch.setattr(Actions, "run", lambda actions, op, context: fault.run(actions, op, context))

    def run(self, actions: Actions, op: Op, context: StepContext) -> int | Wait:
        if not self._armed or op.kind is not self.kind:
            return self._run(actions, op, context)
        with self._lock:
            self._seen += 1
            mine = self._seen == self.wanted
        if not mine:
            return self._run(actions, op, context)
        self.op = str(op)
        if self.place != "ending":
            raise Planted(f"in {op}")
        ending = self._run(actions, op, context)
        assert callable(ending)

        def fail() -> int:
            ending()
            raise Planted(f"at the end of {op}")

        return fail

    def count(self, call: Callable[[], object]) -> None:
        """Counts the ops of one call without harming it."""
        self._armed, self._seen = True, 0
        call()
        total, self._armed = self._seen, False
        assert total, f"no {self.kind} in this step"
        self.wanted = {"first": 1, "middle": total // 2 + 1, "last": total, "ending": total // 2 + 1}[self.place]

    def arm(self) -> None:
        self._armed, self._seen = True, 0


@pytest.mark.parametrize(("options", "kind", "place"), CASES)
def test_a_failed_op_closes_the_engine_and_loses_nothing(
    options: dict[str, object], kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, kind, place)
    before = num_threads()
    engine, held = saved_engine(tmp_path, options)
    fault.count(lambda: engine.step(batches(3)))
    fault.arm()
    start_s = time.perf_counter()
    with pytest.raises(gs.OpError, match="Planted") as caught:
        # What fails after the step, in work for the next, is raised by the next call.
        engine.step(batches(4))
        engine.step(batches(5))
        engine.flush()  # on a busy machine the count had some of the step before
    assert time.perf_counter() - start_s < SECONDS
    assert caught.value.op == fault.op
    assert str(caught.value).startswith(f"{fault.op}: ")
    assert isinstance(caught.value.__cause__, Planted)
    require_closed(engine, before)
    monkeypatch.undo()
    require_checkpoint(tmp_path, options, held)


def test_faults_in_an_optimistic_engine_meet_tentative_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Op] = []
    run = Actions.run
    engine, _ = saved_engine(tmp_path, OPTIMISTIC)
    monkeypatch.setattr(Actions, "run", lambda self, op, context: (seen.append(op), run(self, op, context))[1])
    with engine:
        engine.step(batches(3))
    assert {op.kind for op in seen if op.tentative} == {Kind.UPDATE, Kind.WRITE}


def test_a_failure_in_an_evaluation_closes_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch, "E", "last")
    before = num_threads()
    engine, held = saved_engine(tmp_path, VERTICAL)
    fault.count(lambda: engine.evaluate(batches(3)))
    fault.arm()
    with pytest.raises(gs.OpError, match=r"E5\.\d: Planted"):
        engine.evaluate(batches(3))
    require_closed(engine, before)
    require_checkpoint(tmp_path, VERTICAL, held)


@pytest.mark.parametrize("kind", ["A", "W", "S"])
@pytest.mark.parametrize("call", ["flush", "save", "close", "named_parameters"])
def test_a_failure_of_late_updates_is_raised_by_whoever_waits_for_them(
    kind: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**VERTICAL, "alpha": 1.0}
    fault = Fault(monkeypatch, kind, "first")
    fault.wanted = 1
    before = num_threads()
    engine, held = saved_engine(tmp_path, options)
    fault.arm()
    with pytest.raises(gs.OpError, match=rf"{kind}\d+\.\d+: Planted"):
        if call == "named_parameters":
            list(engine.named_parameters())
        elif call == "close":
            engine.step(batches(4))  # its updates end after it
            engine.close()
        else:
            getattr(engine, call)()
    require_closed(engine, before)
    monkeypatch.undo()
    require_checkpoint(tmp_path, options, held)


@pytest.mark.parametrize("backend", ["auto", "threads"])
@pytest.mark.parametrize(
    ("direction", "fault"), [("read", "error"), ("read", "flip"), ("read", "eof"), ("write", "error")]
)
def test_a_failed_transfer_is_named_with_its_op_and_place(
    direction: str, fault: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive fails, ends early or gives back other bits than were written."""
    engines: list[IoEngine] = []
    make = IoEngine.__init__

    def note(self: IoEngine, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        engines.append(self)

    monkeypatch.setattr(IoEngine, "__init__", note)
    options = {**VERTICAL, "placement": gs.Placement(), "io": gs.IoOptions(backend=backend)}
    before = num_threads()
    engine, held = saved_engine(tmp_path, options)
    value = errno.EIO if fault == "error" else 12345
    engines[0]._inject(fault, value, direction=direction, nth=7)  # type: ignore[arg-type]
    start_s = time.perf_counter()
    with pytest.raises(gs.StorageError, match=r"^[RSW]\d+\.\d+: ") as caught:
        engine.step(batches(3))
        engine.step(batches(4))
    assert time.perf_counter() - start_s < SECONDS
    assert caught.value.path is not None and caught.value.path.startswith(str(tmp_path))
    require_closed(engine, before)
    require_checkpoint(tmp_path, options, held)


class Faulty(torch.nn.Module):
    """A layer that raises where it is told to, once it is armed."""

    where: str | None = None
    error: type[BaseException] = Planted

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(7))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        recomputing = torch.is_grad_enabled()
        if Faulty.where == ("recompute" if recomputing else "forward"):
            raise Faulty.error("in the module")
        output: torch.Tensor = _FaultyFunction.apply(hidden, self.weight)
        return output


class _FaultyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden * 1.0

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if Faulty.where == "backward":
            raise Faulty.error("in the module")
        return gradients[0], gradients[0].new_ones(7)


@pytest.mark.parametrize("error", [Planted, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_a_module_that_raises_is_named_by_its_op(where: str, error: type[BaseException], tmp_path: Path) -> None:
    def faulty_model() -> gs.Sequential:
        parts = make_parts()
        return gs.Sequential(
            parts.embed, [*parts.layers[:2], Faulty(), *parts.layers[2:]], parts.head, num_targets=num_targets
        )

    before = num_threads()
    options: dict[str, object] = {"storage": [tmp_path], "ram": "64MiB", "alpha": 0.5, "chunk_params": 4096}
    Faulty.where, Faulty.error = None, error
    engine = gs.Engine(faulty_model(), OPTIMIZER, **options)  # type: ignore[arg-type]
    engine.step(batches(0))
    engine.save()
    held = Trained()
    take_values(engine, held)
    Faulty.where = where
    kind = "F" if where == "forward" else "B"
    try:
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                engine.step(batches(1))
        else:
            with pytest.raises(gs.OpError, match=rf"^{kind}3\.\d: Planted: in the module"):
                engine.step(batches(1))
    finally:
        Faulty.where = None
    require_closed(engine, before)
    with gs.Engine(faulty_model(), OPTIMIZER, resume=True, **options) as resumed:  # type: ignore[arg-type]
        require_values(resumed, held)


def test_a_model_that_cannot_work_is_explained(tmp_path: Path) -> None:
    class Silent(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(hidden)

    class Wide(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.cat([hidden, hidden], -1)

    for layer, message in (
        (Silent(), r"B2\.\d: layers\.1 returned a tensor without a gradient"),
        (Wide(), r"F2\.\d: layers\.1 returned \d+ bytes .* every block must keep the size of its input"),
    ):
        parts = make_parts()
        parts.layers[1] = layer
        before = num_threads()
        engine = gs.Engine(parts.sequential(), OPTIMIZER, storage=[tmp_path / str(id(layer))], ram="64MiB")
        with pytest.raises(gs.GreedySnakeError, match=message):
            engine.step(batches(0))
        require_closed(engine, before)


def test_an_embedding_whose_size_depends_on_values_is_explained(tmp_path: Path) -> None:
    class Growing(Embed):
        def forward(self, batch: Batch) -> torch.Tensor:
            return super().forward(batch).repeat(1, int(batch["times"]), 1)

    parts = make_parts()
    model = Parts(Growing(37, 32), parts.layers, parts.head).sequential()
    batch = make_batches(1, 0)[0]
    engine = gs.Engine(model, OPTIMIZER, storage=[tmp_path], ram="64MiB")
    message = r"F0\.1: embed returned \d+ bytes .* must follow from the shapes of the batch"
    with engine, pytest.raises(gs.GreedySnakeError, match=message):
        engine.step([{**batch, "times": torch.tensor(times)} for times in (1, 2)])


def test_a_failure_while_the_engine_is_built_leaves_nothing_behind(tmp_path: Path) -> None:
    made: list[int] = []

    def broken() -> torch.nn.Module:
        made.append(1)
        if len(made) > 1:  # the first time is for the shapes
            raise Planted("cannot be built")
        return Layer(32, 96)

    parts = make_parts()
    before = num_threads()
    with pytest.raises(Planted):
        gs.Engine(
            gs.Sequential(parts.embed, [parts.layers[0], broken], parts.head, num_targets=num_targets),
            OPTIMIZER,
            storage=[tmp_path],
            ram="64MiB",
        )
    require_threads(at_most=before)
    with make_engine(tmp_path, VERTICAL) as engine:  # no lock was left
        engine.step(batches(0))


# Signals


def interrupted(directory: str, seed: int, rounds: int) -> int:
    """Trains on and on; Ctrl-C comes at random moments. Each time the engine closes and the checkpoint is intact."""
    generator = random.Random(seed)
    path = Path(directory)
    engine, held = saved_engine(path, VERTICAL)
    before = num_threads()
    for number in range(rounds):
        noticed = threading.Event()
        user = threading.Thread(target=press_ctrl_c, args=(generator.uniform(0.0, 0.08), noticed))
        try:
            user.start()
            for step in range(10_000):
                engine.step(batches(step))
        except KeyboardInterrupt:
            noticed.set()
        user.join()
        engine.close()
        assert not lanes_alive(), lanes_alive()
        if number == 0:
            before = num_threads()
        require_threads(at_most=before)
        engine = make_engine(path, VERTICAL, resume=True)
        require_values(engine, held)
    engine.close()
    return rounds


def press_ctrl_c(delay_s: float, noticed: threading.Event) -> None:
    """Again after a second: Python drops an interrupt that comes while it runs a weak reference's callback."""
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGINT)
    while not noticed.wait(2.0):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("seed", [0, 1])
def test_ctrl_c_at_any_moment_closes_the_engine(seed: int, tmp_path: Path) -> None:
    assert child.call("test_engine_faults", "interrupted", str(tmp_path), seed, 25) == 25


def train_forever(directory: str, path: str) -> None:
    """Publishes a checkpoint, says so and trains on."""
    engine, held = saved_engine(Path(directory), VERTICAL)
    torch.save({"parameters": held.parameters, "moments": held.moments}, path)
    print("READY", flush=True)
    step = 3
    while True:
        engine.step(batches(step))
        step += 1


@pytest.mark.parametrize("delay_s", [0.02, 0.3])
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_stopped_in_a_step_resumes_from_its_checkpoint(
    kind: signal.Signals, delay_s: float, tmp_path: Path
) -> None:
    store, values = tmp_path / "store", tmp_path / "values.pt"
    with child.start("test_engine_faults", "train_forever", str(store), str(values)) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line == "READY\n", process.communicate(timeout=SECONDS)
            time.sleep(delay_s)
            process.send_signal(kind)
            try:
                _, errors = process.communicate(timeout=SECONDS / 2)
            except subprocess.TimeoutExpired:
                process.send_signal(kind)  # see press_ctrl_c
                _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode != 0
    if kind is signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    saved = torch.load(values)
    require_checkpoint(store, VERTICAL, Trained(parameters=saved["parameters"], moments=saved["moments"]))


def test_a_process_exits_after_a_failure_that_nobody_catches(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import test_engine_faults as faults
engine, _ = faults.saved_engine(Path({str(tmp_path)!r}), faults.VERTICAL)
run = faults.Actions.run
def fail(self, op, context):
    if str(op) == "A2.0":
        raise RuntimeError("the optimizer broke")
    return run(self, op, context)
faults.Actions.run = fail
for step in range(5):
    engine.step(faults.batches(step))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("OpError: A2.0: RuntimeError: the optimizer broke")


# What must hold afterwards


def require_closed(engine: gs.Engine, threads_before: int) -> None:
    assert not lanes_alive(), lanes_alive()
    require_threads(at_most=threads_before)
    assert engine.arena.used_bytes == 0
    with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
        engine.step(batches(0))
    engine.close()  # nothing is left to do, and nothing is raised


def require_checkpoint(directory: Path, options: dict[str, object], held: Trained) -> None:
    with make_engine(directory, options, resume=True) as engine:
        assert engine.num_steps == 2
        require_values(engine, held)
        engine.step(batches(2))


def require_values(engine: gs.Engine, held: Trained) -> None:
    found = Trained()
    take_values(engine, found)
    for name, value in held.parameters.items():
        assert torch.equal(found.parameters[name], value), name
    for name, moments in held.moments.items():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.moments[name], moments, strict=True)), name


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("greedysnake")]
