"""How a step is run must not show in its result: all weights and moments are equal to the bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import child
import greedysnake as gs
from greedysnake.ops import Op
from greedysnake.runtime.actions import Actions
from greedysnake.runtime.io import io_uring_available
from reference import OPTIMIZER, Batch, Trained, make_batches, make_parts, num_targets, take_values, train_engine

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10
MICRO_BATCHES = 3
CLIPS = (None, 0.5)


def batches(step: int) -> list[Batch]:
    return make_batches(MICRO_BATCHES, step)


def model(**options: object) -> gs.Sequential:
    """Layers of different sizes, tied ends, something frozen, random numbers."""
    return make_parts(uneven=True, tied=True, frozen=["layers.2.up"], dropout=0.1, **options).sequential()


def train(directory: Path, **options: object) -> Trained:
    return train_engine(
        model(), batches, NUM_STEPS, **{"storage": [directory], "chunk_params": 4096, "alpha": 0.25, **options}
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float | None], Trained]:
    """What the plainest run gives, with and without clipping; the others compress their moments, unless they say so."""
    made: dict[float | None, Trained] = {}

    def get(clip: float | None) -> Trained:
        if clip not in made:
            made[clip] = train(
                tmp_path_factory.mktemp("expected"), alpha=0.0, compress_moments=False, max_grad_norm=clip
            )
        return made[clip]

    return get


VARIANTS: dict[str, dict[str, object]] = {
    "alpha 0.25": {},
    "alpha 0.5": {"alpha": 0.5},
    "alpha 1": {"alpha": 1.0},
    "all in ram": {"placement": gs.Placement(weights_ram=1, optimizer_ram=1), "storage": []},
    "weights in ram": {"placement": gs.Placement(weights_ram=1)},
    "state in ram": {"placement": gs.Placement(optimizer_ram=1)},
    "some in ram": {"placement": gs.Placement(weights_ram=0.4, optimizer_ram=0.7), "alpha": 0.5},
    "activations on device": {"placement": gs.Placement(activations_device=1, activations_ram=0)},
    "activations on ssd": {"placement": gs.Placement(activations_ram=0, gradients_device=0)},
    "activations everywhere": {"placement": gs.Placement(activations_device=0.4, activations_ram=0.3)},
    "some graphs kept": {"placement": gs.Placement(graphs_device=0.5), "alpha": 0.5},
    "all graphs kept": {"placement": gs.Placement(graphs_device=1, activations_ram=0, gradients_device=0)},
    "weights on device": {"placement": gs.Placement(weights_device=1)},
    "weights on device, some in ram": {"placement": gs.Placement(weights_device=0.5, weights_ram=0.5), "alpha": 0.5},
    "weights on device, one slot of each": {
        "placement": gs.Placement(weights_device=1),
        "slots": gs.Slots(1, 1, 1, 1, 1),
    },
    "gradients spilled": {"placement": gs.Placement(gradients_ram=0), "alpha": 1.0},
    "half of them spilled": {"placement": gs.Placement(gradients_ram=0.5), "alpha": 0.5},
    "threads": {"io": gs.IoOptions(backend="threads")},
    "one thread": {"io": gs.IoOptions(backend="threads", num_threads=1, piece_bytes=4096)},
    "small chunks": {"chunk_params": 2048, "alpha": 0.5},
    "odd chunks": {"chunk_params": 3 * 2048, "alpha": 0.5},
    "one chunk per block": {"chunk_params": 1 << 20, "alpha": 0.5},
    "several update threads": {"num_threads": 3},
    "one slot of each": {"slots": gs.Slots(1, 1, 1, 1, 1)},
    "many slots": {"slots": gs.Slots(8, 8, 20, 20, 20), "alpha": 0.5},
    "traced": {"trace": True},
    "reads not verified": {"verify_reads": False},
    "moments not compressed": {"compress_moments": False, "alpha": 0.5},
    "large chunks": {"chunk_params": 1 << 20, "alpha": 0.5, "num_threads": 2},
    "everywhere, one slot of each": {
        "placement": gs.Placement(weights_ram=0.4, optimizer_ram=0.4, weights_device=0.4, gradients_ram=0.5),
        "slots": gs.Slots(1, 1, 1, 1, 1),
    },
}


NO_NEWS_WITH_CLIPPING = {"alpha 0.25", "alpha 0.5", "threads", "one thread", "traced", "reads not verified"}
"""Clipping makes all updates late, and what these change does not meet what it changes."""


@pytest.mark.parametrize(
    ("name", "clip"),
    [(name, clip) for name in VARIANTS for clip in CLIPS if clip is None or name not in NO_NEWS_WITH_CLIPPING],
)
def test_result_does_not_depend_on(
    name: str, clip: float | None, tmp_path: Path, expected: Callable[[float | None], Trained]
) -> None:
    require_equal(train(tmp_path, max_grad_norm=clip, **VARIANTS[name]), expected(clip))


@pytest.mark.skipif(not io_uring_available()[0], reason=f"io_uring: {io_uring_available()[1]}")
def test_result_does_not_depend_on_io_uring(tmp_path: Path, expected: Callable[[float | None], Trained]) -> None:
    io = gs.IoOptions(backend="io_uring", queue_depth=2, piece_bytes=8192)
    require_equal(train(tmp_path, io=io), expected(None))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("num_directories", [2, 3])
def test_result_does_not_depend_on_the_number_of_drives(
    num_directories: int, clip: float | None, tmp_path: Path, expected: Callable[[float | None], Trained]
) -> None:
    directories = [tmp_path / str(number) for number in range(num_directories)]
    found = train(
        tmp_path, storage=directories, max_grad_norm=clip, placement=gs.Placement(activations_ram=0, gradients_ram=0)
    )
    require_equal(found, expected(clip))


@pytest.mark.parametrize("seed", range(6))
def test_result_does_not_depend_on_how_long_ops_take(
    seed: int, tmp_path: Path, expected: Callable[[float | None], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops that dawdle at random let other lanes run as far ahead as the schedule allows: a missing dependency shows
    as a wrong result."""
    generator, clip = random.Random(seed), CLIPS[seed % 2]
    run = Actions.run

    def dawdle(self: Actions, op: Op, context: object) -> object:
        if generator.random() < 0.2:
            time.sleep(generator.choice((0.0005, 0.002, 0.005)))
        result = run(self, op, context)  # type: ignore[arg-type]
        if callable(result) and generator.random() < 0.2:
            time.sleep(0.002)  # a transfer that is under way while its lane is slow
        return result

    monkeypatch.setattr(Actions, "run", dawdle)
    placement = (
        gs.Placement(activations_ram=0.5, gradients_device=0.3, gradients_ram=0.5),
        gs.Placement(weights_ram=0.3, optimizer_ram=0.5, activations_device=0.3, activations_ram=0.3),
        gs.Placement(weights_device=0.5, weights_ram=0.2),
    )[seed % 3]
    require_equal(train(tmp_path, max_grad_norm=clip, alpha=0.4, placement=placement), expected(clip))


def test_weights_that_stay_on_the_device_survive_a_flush(tmp_path: Path) -> None:
    """With one slot for the other layers a flush has late updates to do of those that stay."""

    def train_flushed(name: str, weights_device: float) -> Trained:
        return train_engine(
            model(num_layers=6),
            batches,
            NUM_STEPS,
            storage=[tmp_path / name],
            chunk_params=4096,
            alpha=1.0,
            slots=gs.Slots(weights=1),
            placement=gs.Placement(weights_device=weights_device),
            between=lambda engine, _: engine.flush(),
        )

    require_equal(train_flushed("stay", 0.5), train_flushed("fetched", 0.0))


@pytest.mark.parametrize("weights_device", [0.0, 0.7])
@pytest.mark.parametrize("clip", CLIPS)
def test_result_does_not_depend_on_what_is_called_between_steps(
    clip: float | None, weights_device: float, tmp_path: Path, expected: Callable[[float | None], Trained]
) -> None:
    losses = []

    def between(engine: gs.Engine, step: int) -> None:
        if step % 3 == 0:
            losses.append(engine.evaluate(make_batches(2, 99)))
        if step % 4 == 1:
            engine.flush()
        if step in (2, 3, 7):
            engine.save()
        if step == 5:
            dict(engine.named_parameters())
        if step % 3 == 0:
            losses.append(engine.evaluate(make_batches(4, 99)[:2]))  # after other calls, the same again
            engine.evaluate(make_batches(5, step))  # another number of micro-batches

    placement = gs.Placement(weights_device=weights_device)
    found = train(tmp_path, max_grad_norm=clip, alpha=0.5, placement=placement, between=between)
    require_equal(found, expected(clip))
    assert losses[::2] == losses[1::2]


@pytest.mark.parametrize("clip", CLIPS)
def test_result_does_not_depend_on_the_order_of_steps_of_other_sizes(clip: float | None, tmp_path: Path) -> None:
    """Room made for a larger step earlier on changes nothing later."""

    def sizes(step: int) -> list[Batch]:
        return make_batches((2, 5, 1, 3)[step % 4], step)

    placement = gs.Placement(activations_device=0.2, activations_ram=0.5)
    small = train_engine(
        model(), sizes, 6, storage=[tmp_path / "small"], max_grad_norm=clip, placement=placement, alpha=0.5
    )
    with gs.Engine(
        model(),
        OPTIMIZER,
        storage=[tmp_path / "large"],
        ram="64MiB",
        max_grad_norm=clip,
        placement=placement,
        alpha=0.5,
    ) as engine:
        engine.evaluate(make_batches(8, 0, length=40))
        for step in range(6):
            engine.step(sizes(step))
        large = Trained()
        take_values(engine, large)
    require_equal(large, small)


def resume(directory: str, options: str, path: str) -> None:
    """Goes on to the last step and leaves everything in a file."""
    found = train(Path(directory), resume=True, **eval(options))
    assert len(found.losses) == 5, found.losses
    torch.save({"parameters": found.parameters, "moments": found.moments, "losses": found.losses}, path)


@pytest.mark.parametrize(
    "options",
    [
        "dict(alpha=0.5)",
        "dict(alpha=0.5, max_grad_norm=0.5)",
        "dict(alpha=1.0, placement=gs.Placement(weights_ram=0.5, optimizer_ram=0.5))",
        "dict(alpha=0.0, placement=gs.Placement(activations_ram=0, weights_ram=1, optimizer_ram=1))",
    ],
)
def test_a_run_resumed_in_a_new_process_goes_on_as_if_it_had_not_stopped(
    options: str, tmp_path: Path, expected: Callable[[float | None], Trained]
) -> None:
    arguments = eval(options)
    storage = tmp_path / "store"
    with gs.Engine(model(), OPTIMIZER, storage=[storage], ram="64MiB", chunk_params=4096, **arguments) as engine:
        for step in range(5):
            engine.step(batches(step))
        engine.save()
        engine.step(make_batches(2, 77))  # lost: it comes after the checkpoint
    child.call("test_bitwise", "resume", str(storage), options, str(tmp_path / "found.pt"))
    saved = torch.load(tmp_path / "found.pt")
    whole = expected(arguments.get("max_grad_norm"))
    require_equal(Trained(parameters=saved["parameters"], moments=saved["moments"]), whole)
    assert saved["losses"] == whole.losses[5:]


# Steps that do not count


def poisoned(step: int) -> list[Batch]:
    """The head's loss for step 3 is not a number."""
    made = batches(step)
    for batch in made:
        batch["factor"] = torch.tensor(float("nan") if step == 3 else 1.0)
    return made


class Poison(torch.nn.Module):
    """A head whose loss is multiplied by what the batch says."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.head(hidden, batch) * batch["factor"]
        return loss


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_step_whose_loss_is_not_finite_leaves_no_trace(clip: float | None, alpha: float, tmp_path: Path) -> None:
    def poisoned_model() -> gs.Sequential:
        parts = make_parts(uneven=True, dropout=0.0)
        return gs.Sequential(parts.embed, parts.layers, Poison(parts.head), num_targets=num_targets)

    def without(step: int) -> list[Batch]:
        return poisoned(step if step < 3 else step + 1)

    options: dict[str, object] = {"max_grad_norm": clip, "alpha": alpha, "chunk_params": 4096}
    found = train_engine(poisoned_model(), poisoned, NUM_STEPS, storage=[tmp_path / "found"], **options)
    clean = train_engine(poisoned_model(), without, NUM_STEPS - 1, storage=[tmp_path / "clean"], **options)
    require_equal(found, clean)
    assert [result.skipped for result in found.results] == [step == 3 for step in range(NUM_STEPS)]
    assert found.losses[:3] + found.losses[4:] == clean.losses


class Explosive(torch.nn.Module):
    """Passes its input on; in the backward of step 3 the gradient of its parameter is infinite."""

    armed = False

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Explosion.apply(hidden, self.scale, Explosive.armed)
        return output


class _Explosion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor, scale: torch.Tensor, armed: bool) -> torch.Tensor:
        ctx.rest = scale, armed  # type: ignore[attr-defined]
        return hidden.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        scale, armed = ctx.rest  # type: ignore[attr-defined]
        return gradients[0], torch.full_like(scale, float("inf") if armed else 0.01), None


def explosive_run(directory: Path, clip: float | None, armed_at: int | None) -> tuple[Trained, int]:
    parts = make_parts(num_layers=4)
    parts.layers.insert(2, Explosive())

    def take(step: int) -> list[Batch]:
        Explosive.armed = step == armed_at
        return batches(step if armed_at is None or step <= armed_at else step - 1)

    counted: list[int] = []
    found = train_engine(
        parts.sequential(),
        take,
        6,
        storage=[directory],
        max_grad_norm=clip,
        alpha=0.5,
        between=lambda engine, step: counted.append(engine.num_skipped),
    )
    return found, counted[-1]


def test_an_infinite_gradient_in_one_layer_skips_the_step_when_clipping(tmp_path: Path) -> None:
    found, num_skipped = explosive_run(tmp_path / "found", 0.5, armed_at=3)
    clean = train_engine(
        _with_explosive().sequential(), batches, 5, storage=[tmp_path / "clean"], max_grad_norm=0.5, alpha=0.5
    )
    require_equal(found, clean)
    assert num_skipped == 1
    assert [result.skipped for result in found.results] == [False] * 3 + [True] + [False] * 2


def test_an_infinite_gradient_without_clipping_is_not_applied_and_said(tmp_path: Path) -> None:
    """Blocks above had their update before it was known; the layer itself keeps all its values finite."""
    with pytest.warns(RuntimeWarning, match=r"step 3: the gradient of layers\.2 is not finite"):
        found, num_skipped = explosive_run(tmp_path, None, armed_at=3)
    assert num_skipped == 1
    assert [result.skipped for result in found.results] == [False] * 3 + [True] + [False] * 2
    for name, value in found.parameters.items():
        assert value.isfinite().all(), name


def _with_explosive() -> object:
    parts = make_parts(num_layers=4)
    parts.layers.insert(2, Explosive())
    Explosive.armed = False
    return parts


def require_equal(found: Trained, expected: Trained) -> None:
    assert found.parameters.keys() == expected.parameters.keys()
    assert found.moments.keys() == expected.moments.keys()
    for name, value in expected.parameters.items():
        assert torch.equal(found.parameters[name], value), f"{name} differs"
    for name, (exp_avg, exp_avg_sq) in expected.moments.items():
        assert torch.equal(found.moments[name][0], exp_avg), f"exp_avg of {name} differs"
        assert torch.equal(found.moments[name][1], exp_avg_sq), f"exp_avg_sq of {name} differs"
