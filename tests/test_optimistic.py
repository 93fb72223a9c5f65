"""Clipping without waiting for the norm: updates that are done before it is known, and revoked where it says so, leave
the same bits as updates that wait."""

from __future__ import annotations

import io
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import greedysnake as gs
from greedysnake.errors import ConfigError, PlanError
from greedysnake.ops import Kind, Op
from greedysnake.runtime import footprint
from greedysnake.runtime.actions import Actions
from greedysnake.runtime.layout import ExtentSpec
from greedysnake.runtime.optimism import Optimism
from greedysnake.runtime.slots import Attempt, SlotTable
from reference import OPTIMIZER, Batch, Trained, make_batches, make_parts, num_targets, take_values, train_engine
from test_bitwise import Poison, require_equal
from training import values_in

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 17
CLIP = 20.0
NAN_STEP = 3
SPIKES = {NAN_STEP: float("nan"), 7: 1e3, 8: 1e3, 15: 1e3}
"""Steps whose loss is multiplied by something that clipping has to deal with; the others stay below the norm."""


def batches(step: int) -> list[Batch]:
    made = make_batches(3, step)
    for batch in made:
        batch["factor"] = torch.tensor(SPIKES.get(step, 1.0))
    return made


def model(*, tied: bool = True) -> gs.Sequential:
    parts = make_parts(uneven=True, tied=tied, frozen=["layers.2.up"], dropout=0.1)
    return gs.Sequential(parts.embed, parts.layers, Poison(parts.head), num_targets=num_targets)


def train(directory: Path, *, num_steps: int = NUM_STEPS, **options: object) -> Trained:
    given_options = {"chunk_params": 4096, "alpha": 0.25, "max_grad_norm": CLIP, "storage": [directory], **options}
    return train_engine(model(), batches, num_steps, **given_options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """All updates wait for the norm."""
    found = train(tmp_path_factory.mktemp("expected"))
    clipped = [step for step, norm in enumerate(found.norms) if not norm <= CLIP]
    assert clipped == sorted(SPIKES), found.norms
    assert [result.skipped for result in found.results] == [step == NAN_STEP for step in range(NUM_STEPS)]
    return found


def require_same(found: Trained, expected: Trained) -> None:
    require_equal(found, expected)
    for mine, theirs in ((found.losses, expected.losses), (found.norms, expected.norms)):
        assert mine[:NAN_STEP] + mine[NAN_STEP + 1 :] == theirs[:NAN_STEP] + theirs[NAN_STEP + 1 :]


VARIANTS: dict[str, dict[str, object]] = {
    "all on ssd": {},
    "alpha 0": {"alpha": 0.0},
    "alpha 1": {"alpha": 1.0},
    "weights in ram": {"placement": gs.Placement(weights_ram=1)},
    "some in ram": {"placement": gs.Placement(weights_ram=0.6, optimizer_ram=0.3)},
    "state in ram": {"placement": gs.Placement(optimizer_ram=1)},
    "gradients spilled": {"placement": gs.Placement(gradients_ram=0)},
    "half of them spilled, weights in ram": {"placement": gs.Placement(gradients_ram=0.5, weights_ram=1)},
    "weights kept on the device": {"placement": gs.Placement(weights_device=0.5, graphs_device=0.3)},
    "weights kept there and in ram": {"placement": gs.Placement(weights_device=1, weights_ram=0.6)},
    "small chunks": {"chunk_params": 2048},
    "one slot of each": {"slots": gs.Slots(1, 1, 1, 1, 1)},
    "many slots": {"slots": gs.Slots(8, 8, 20, 20, 20)},
    "no checkpoints": {"checkpoints": False},
    "moments not compressed": {"compress_moments": False},
    "float32": {"dtype": "float32"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_result_is_that_of_updates_that_wait(name: str, tmp_path: Path, expected: Trained) -> None:
    if name == "float32":
        expected = train(tmp_path / "waiting", dtype="float32")
    revoked: list[int] = []
    found = train(
        tmp_path / "found",
        optimistic=True,
        between=lambda engine, step: revoked.append(engine.num_revoked),
        **VARIANTS[name],
    )
    require_same(found, expected)
    nothing_is_tentative = name in ("alpha 1", "state in ram")
    # They are expected not to be clipped: 3 after 0 and 1; 7 after 4 and 5, twice as many; 15 after 9 to 12 and the
    # attempt of 14, which was confirmed. A step's list is written while the one before runs.
    wanted = [step for step in (3, 7, 15) if not nothing_is_tentative or name == "alpha 1"]
    assert [step for step in range(1, NUM_STEPS) if revoked[step] > revoked[step - 1]] == wanted


@pytest.mark.parametrize("seed", range(10))
def test_the_result_does_not_depend_on_how_long_ops_take(
    seed: int, tmp_path: Path, expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tail of updates and writes that a confirmed step leaves behind is the place for races: those dawdle most."""
    generator, run = random.Random(seed), Actions.run

    def dawdle(self: Actions, op: Op, context: object) -> object:
        if generator.random() < (0.5 if op.kind in (Kind.UPDATE, Kind.WRITE) else 0.1):
            time.sleep(generator.choice((0.0005, 0.002, 0.005)))
        return run(self, op, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Actions, "run", dawdle)
    placement = (
        gs.Placement(),
        gs.Placement(weights_ram=1),
        gs.Placement(weights_ram=0.5, gradients_ram=0.5),
        gs.Placement(weights_ram=0.3, optimizer_ram=0.3, activations_ram=0),
        gs.Placement(weights_device=1),
    )[seed % 5]
    require_same(train(tmp_path, optimistic=True, placement=placement), expected)


@pytest.mark.parametrize(
    "placement", [gs.Placement(), gs.Placement(weights_ram=1), gs.Placement(weights_device=1, weights_ram=0.3)]
)
def test_the_result_does_not_depend_on_what_is_called_between_steps(
    placement: gs.Placement, tmp_path: Path, expected: Trained
) -> None:
    def between(engine: gs.Engine, step: int) -> None:
        if step % 3 == 1:
            engine.evaluate(batches(0)[:2])
        if step % 4 == 1:
            engine.flush()
        if step in (2, 3, 7, 11):
            engine.save()
        if step == 5:
            dict(engine.named_parameters())

    require_same(train(tmp_path, optimistic=True, placement=placement, between=between), expected)


def test_steps_of_other_sizes_may_come_at_any_time(tmp_path: Path) -> None:
    def sizes(step: int) -> list[Batch]:
        made = make_batches((2, 2, 2, 5, 1, 1, 1)[step % 7], step)
        for batch in made:
            batch["factor"] = torch.tensor(SPIKES.get(step, 1.0))
        return made

    def run(directory: Path, **options: object) -> Trained:
        return train_engine(
            model(), sizes, NUM_STEPS, storage=[directory], chunk_params=4096, max_grad_norm=CLIP, **options
        )

    require_equal(run(tmp_path / "found", optimistic=True), run(tmp_path / "waiting"))


# Checkpoints


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_run_goes_on_from_its_checkpoint_with_or_without(
    before: bool, after: bool, tmp_path: Path, expected: Trained
) -> None:
    """Whatever was tentative when the engine was closed has left no trace, and a spare slot may come and go."""
    placement = gs.Placement(weights_ram=0.5)
    options = {"ram": "64MiB", "chunk_params": 4096, "alpha": 0.25, "max_grad_norm": CLIP, "placement": placement}
    with gs.Engine(model(), OPTIMIZER, storage=[tmp_path], optimistic=before, **options) as engine:  # type: ignore[arg-type]
        for step in range(7):
            engine.step(batches(step))
        engine.save()
        for step in range(7, 12):  # lost
            engine.step(batches(step))
    found = train(tmp_path, resume=True, optimistic=after, placement=placement)
    require_equal(found, expected)
    assert found.losses[2:] == expected.losses[9:]


def test_an_interrupted_step_leaves_the_checkpoint(
    tmp_path: Path, expected: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of a tentative update fails in the middle of a step."""
    run = Actions.run
    armed = False

    def fail(self: Actions, op: Op, context: object) -> object:
        if armed and op.tentative and op.kind is Kind.WRITE and op.block == 2:
            raise OSError("the drive is gone")
        return run(self, op, context)  # type: ignore[arg-type]

    monkeypatch.setattr(Actions, "run", fail)
    options = {"ram": "64MiB", "chunk_params": 4096, "alpha": 0.25, "max_grad_norm": CLIP}
    engine = gs.Engine(model(), OPTIMIZER, storage=[tmp_path], optimistic=True, **options)  # type: ignore[arg-type]
    for step in range(3):
        engine.step(batches(step))
    engine.save()
    armed = True
    with pytest.raises(Exception, match=r"W2\.\d+: OSError: the drive is gone"):
        for step in range(3, 7):
            engine.step(batches(step))
    armed = False
    require_equal(train(tmp_path, resume=True, optimistic=True), expected)


# Bytes


def test_a_step_that_is_not_clipped_moves_as_much_as_one_without_clipping(tmp_path: Path) -> None:
    def last(directory: Path, **options: object) -> gs.StepResult:
        found = train_engine(
            model(),
            lambda step: batches(0),
            6,
            storage=[directory],
            chunk_params=4096,
            compress_moments=False,
            **options,
        )
        return found.results[-1]

    without = last(tmp_path / "without")
    with_clipping = last(tmp_path / "with", max_grad_norm=1e9, optimistic=True)
    assert (with_clipping.ssd_read_bytes, with_clipping.ssd_write_bytes) == (
        without.ssd_read_bytes,
        without.ssd_write_bytes,
    )


# Room


def trainer(directory: Path, *, num_steps: int = 2, **engine: Any) -> gs.Trainer:
    values = values_in(directory, max_steps=num_steps)
    values["engine"] |= engine
    return gs.Trainer(values, console=Console(file=io.StringIO(), width=200))


def train_foreseen(directory: Path, **engine: Any) -> gs.Trainer:
    """Trains; what the run takes of the drive must be what was foreseen."""
    made = trainer(directory, **engine)
    made.train()
    files = [directory / "run" / "store" / f"greedysnake.{name}" for name in ("extents", "scratch")]
    taken = sum(file.stat().st_size for file in files if file.exists())
    assert taken == sum(made.prepared.footprint.disk_bytes)
    return made


def leave(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives as the footprint sees them have so much room."""
    status = SimpleNamespace(f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(footprint, "os", SimpleNamespace(stat=os.stat, statvfs=lambda path: status))


@pytest.mark.parametrize("optimistic", [None, True])
def test_a_run_without_tentative_updates_has_no_room_for_them(optimistic: bool | None, tmp_path: Path) -> None:
    found = train_foreseen(tmp_path, optimistic=optimistic, placement={"optimizer_ram": 1.0}).prepared.footprint
    assert not found.plan.may_be_tentative
    assert found.num_slots == 2


@pytest.mark.parametrize("resumed", [None, True, False])
def test_a_continued_run_keeps_its_slots_and_foresees_them(resumed: bool | None, tmp_path: Path) -> None:
    train_foreseen(tmp_path, optimistic=True)
    found = train_foreseen(tmp_path, num_steps=4, optimistic=resumed).prepared.footprint
    assert (found.num_slots, found.plan.may_be_tentative) == (3, resumed is not False)


def test_a_continued_run_stays_optimistic_on_a_drive_that_has_filled_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third slot is there already; only scratch, which an export gives back, has to be found again."""
    placement = {"gradients_ram": 0.0}
    train_foreseen(tmp_path, placement=placement)
    os.truncate(tmp_path / "run" / "store" / "greedysnake.scratch", 0)
    whole = trainer(tmp_path, num_steps=4, placement=placement).prepared.footprint
    leave(sum(whole.disk_bytes) - 3 * sum(whole.slot_bytes), monkeypatch)
    found = train_foreseen(tmp_path, num_steps=4, placement=placement).prepared.footprint
    assert found.plan.may_be_tentative and not found.waits
    leave(0, monkeypatch)
    with pytest.raises(PlanError, match="or keep more of the activations and gradients in RAM"):
        trainer(tmp_path, num_steps=6, placement={"gradients_ram": 0.0, "activations_ram": 0.0})


def test_a_drive_without_room_for_a_third_slot_and_an_export_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = sum(trainer(tmp_path).prepared.footprint.slot_bytes)
    leave(4 * slot, monkeypatch)
    assert trainer(tmp_path).prepared.footprint.plan.may_be_tentative
    leave(2 * slot, monkeypatch)
    with pytest.raises(PlanError, match="or set optimistic to false, which takes a third off"):
        trainer(tmp_path, optimistic=True)
    leave(4 * slot - 2048, monkeypatch)
    found = train_foreseen(tmp_path).prepared.footprint
    assert (found.num_slots, found.plan.may_be_tentative) == (2, False)
    assert found.waits == "with engine.optimistic, or 2 KiB more of free disk, they would not"
    leave(2 * slot, monkeypatch)
    assert train_foreseen(tmp_path, num_steps=4).prepared.footprint.plan.may_be_tentative  # only one is to be added


def test_a_budget_without_room_for_tentative_weights_does_without(tmp_path: Path) -> None:
    placement = {"weights_ram": 1.0}

    def fits(ram: int) -> bool:
        try:
            trainer(tmp_path, ram=ram, optimistic=False, placement=placement)
        except PlanError:
            return False
        return True

    enough, too_little = 64 << 20, 0
    while enough - too_little > 1024:
        middle = (enough + too_little) // 2
        enough, too_little = (middle, too_little) if fits(middle) else (enough, middle)
    found = train_foreseen(tmp_path, ram=enough, placement=placement).prepared.footprint
    assert not found.plan.may_be_tentative
    assert found.waits == "engine.ram has no room for doing them before it is known"


def test_ram_is_not_taken_for_tentative_weights_where_it_saves_more_traffic_elsewhere(tmp_path: Path) -> None:
    """With most of the state in RAM: weights that are there twice push state out of it."""
    seen = set()
    for ram in range(560, 1100, 60):
        whole = {name: trainer(tmp_path, ram=ram << 10, fill_ram=True, optimistic=name) for name in (None, True, False)}
        bytes_of = {name: made.prepared.footprint.step_ssd_bytes for name, made in whole.items()}
        chosen = whole[None].prepared.footprint
        costs = bytes_of[True] > 1.1 * bytes_of[False]
        assert chosen.plan.may_be_tentative is (not costs and whole[True].prepared.footprint.plan.may_be_tentative)
        assert chosen.step_ssd_bytes == (bytes_of[False] if costs else bytes_of[True])
        assert chosen.waits == ("engine.ram has no room for doing them before it is known" if costs else "")
        seen.add(costs)
    assert seen == {True, False}


@pytest.mark.filterwarnings("ignore:single_slot")
@pytest.mark.parametrize("engine", [{"single_slot": True}, {"schedule": "horizontal"}, {"optimistic": False}])
def test_nothing_is_said_where_nothing_can_be_done(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(1 << 20, monkeypatch)
    assert not train_foreseen(tmp_path, **engine).prepared.footprint.waits


# Slots


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.sampled_from(["write", "try", "confirm", "revoke", "publish"]), max_size=30))
def test_tentative_writes_touch_neither_the_checkpoint_nor_what_is_newest(pins: bool, events: list[str]) -> None:
    """A drive with one extent, as a table of what each slot holds."""
    table = SlotTable([ExtentSpec((4096,))], 3 if pins else 2)
    drive: dict[int, int] = {}
    newest, number, attempt, tried = 0, 0, Attempt(), None
    pinned: int | None = None

    def put(slots: dict[int, int]) -> None:
        nonlocal number
        number += 1
        drive[slots[0]] = number

    put(slots := table.start_write(0, range(1)))
    table.settle(0, slots, {0: number})
    newest = number
    for event in events:
        if event == "write" and tried is None:
            put(slots := table.start_write(0, range(1)))
            table.settle(0, slots, {0: number})
            newest = number
        elif event == "try" and tried is None:
            put(slots := table.start_tentative_write(0, range(1)))
            tried = number
            table.settle_tentative(attempt, 0, slots, {0: number})
        elif event in ("confirm", "revoke"):
            table.end_attempt(attempt, confirmed=event == "confirm")
            newest = tried if tried is not None and event == "confirm" else newest
            attempt, tried = Attempt(), None
        elif event == "publish" and pins and tried is None:
            table.pin()
            pinned = newest
        slots, crcs = table.to_read(0, range(1))
        assert drive[slots[0]] == newest == crcs[0]
        assert pinned is None or pinned in drive.values()


def test_a_write_that_ends_after_its_attempt_counts_all_the_same() -> None:
    table = SlotTable([ExtentSpec((4096,))], 3)
    table.settle(0, table.start_write(0, range(1)), {0: 1})
    attempt = Attempt()
    slots = table.start_tentative_write(0, range(1))
    table.end_attempt(attempt, confirmed=True)
    table.settle_tentative(attempt, 0, slots, {0: 2})
    assert table.to_read(0, range(1)) == (slots, {0: 2})


# When


def test_the_more_often_it_is_wrong_the_longer_it_waits() -> None:
    optimism = Optimism()
    assert not optimism.expects  # the first steps of a training are the likeliest to be clipped
    patience = []
    for _ in range(8):
        num_before = 0
        while not optimism.expects:
            optimism.learn(clipped=False, tried=False)
            num_before += 1
        patience.append(num_before)
        optimism.learn(clipped=True, tried=True)
    assert patience == [1, 2, 4, 8, 16, 32, 64, 64]
    for _ in range(64):
        optimism.learn(clipped=False, tried=False)
    for _ in range(70):
        assert optimism.expects
        optimism.learn(clipped=False, tried=True)
    optimism.learn(clipped=True, tried=True)  # at last
    optimism.learn(clipped=False, tried=False)
    optimism.learn(clipped=False, tried=False)
    assert optimism.expects


# Words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": None}, "optimistic=True and max_grad_norm is None"),
        ({"schedule": "horizontal"}, "optimistic=True needs the vertical schedule, schedule is 'horizontal'"),
        ({"storage": []}, "optimistic=True needs a storage directory"),
        ({"single_slot": True}, "optimistic=True needs two more slots"),
    ],
)
def test_what_cannot_be_optimistic_is_refused(options: dict[str, object], message: str, tmp_path: Path) -> None:
    values = {"storage": [tmp_path], "ram": "64MiB", "max_grad_norm": 1.0, "optimistic": True, **options}
    with pytest.raises(ConfigError, match=message):
        gs.Engine(model(), OPTIMIZER, **values)  # type: ignore[arg-type]


def test_the_clipped_and_the_unclipped_take_the_same_values_from_a_closed_engine(tmp_path: Path) -> None:
    """Values read right after a step are those after its updates, confirmed or revoked."""

    def values(optimistic: bool, check: Callable[[gs.Engine], None]) -> None:
        with gs.Engine(
            model(),
            OPTIMIZER,
            storage=[tmp_path / str(optimistic)],
            ram="64MiB",
            chunk_params=4096,
            max_grad_norm=CLIP,
            optimistic=optimistic,
        ) as engine:
            for step in range(6):
                engine.step(batches(step))
                check(engine)

    seen: list[Trained] = []

    def remember(engine: gs.Engine) -> None:
        seen.append(Trained())
        take_values(engine, seen[-1])

    values(False, remember)
    expected_values, seen = seen, []
    values(True, remember)
    for found, wanted in zip(seen, expected_values, strict=True):
        require_equal(found, wanted)
