"""Ops that touch the same bytes are kept apart by what they wait for, and not by luck: on a GPU, too, where lanes are
streams that run at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import greedysnake as gs
import together
from greedysnake.ops import Kind, Lane, Op
from greedysnake.runtime.memory import HostMemory
from races import Period, Traced, Waits, races, recorded, relinked, without
from reference import OPTIMIZER, Batch, make_batches, make_parts, num_targets
from test_bitwise import Poison

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10
LARGE_STEP = 8
"""Has more micro-batches than any before it: memory changes hands."""
CLIP = 20.0
SPIKES = {3: float("nan"), 7: 1e3}
"""Factors of the loss. Step 3 is skipped; both are steps with tentative updates where there may be any."""
CLIPPED = {"max_grad_norm": CLIP}
OPTIMISTIC = {"max_grad_norm": CLIP, "optimistic": True}
ONE_SLOT = gs.Slots(1, 1, 1, 1, 1)
LOWER_HALF = ("embed", "layers.0", "layers.1.up")

Options = dict[str, object]
Record = Callable[[str], list[Period]]
Recordings = Iterable[Callable[[], list[Period]]]
CONFIGURATIONS: dict[str, tuple[Options, Options]] = {
    # Placement, and everything else.
    "nothing kept": ({}, {"alpha": 0.25}),
    "weights kept": ({"weights_device": 1}, {"alpha": 0.25}),
    "weights kept, all updates early": ({"weights_device": 1}, {"alpha": 0.0}),
    "half of the weights kept": ({"weights_device": 0.5, "weights_ram": 0.4, "optimizer_ram": 0.3}, {"alpha": 0.4}),
    "half of the graphs kept": ({"graphs_device": 0.5}, {"alpha": 0.5}),
    "clipped": ({"weights_device": 0.5, "gradients_ram": 0.5}, CLIPPED),
    "optimistic": ({"gradients_ram": 0.5}, OPTIMISTIC),
    "optimistic, half of the weights kept": ({"weights_device": 0.5, "weights_ram": 0.6}, OPTIMISTIC),
    "activations everywhere": (
        {"activations_device": 0.3, "activations_ram": 0.3, "gradients_device": 0, "gradients_ram": 0},
        {"alpha": 0.5, "frozen": LOWER_HALF, "tied": False, "dtype": "float32"},
    ),
    "layers in pairs": ({}, {"layers_per_block": 2, "num_layers": 8, "moments": "int8"}),
    "one slot of each": (
        {"activations_ram": 0, "gradients_device": 0, "gradients_ram": 0.5},
        {"slots": ONE_SLOT, "alpha": 0.5},
    ),
    "one slot of each, half of the weights kept": (
        {"weights_device": 0.5, "weights_ram": 1, "optimizer_ram": 0.5},
        {"slots": ONE_SLOT, "alpha": 0.5},
    ),
    "compressed": ({}, {"compress_moments": True, "alpha": 0.5}),
    "compressed, optimistic": ({"weights_device": 0.5, "gradients_ram": 0.5}, {"compress_moments": True, **OPTIMISTIC}),
    "horizontal": ({"activations_ram": 0}, {"schedule": "horizontal", "alpha": 0.5}),
    "horizontal, clipped": ({}, {"schedule": "horizontal", **CLIPPED}),
}
FEWEST_CONFLICTS = 4000
"""Pairs of ops that have to be kept apart, in each of the configurations: 4,500 to 13,000."""


def batches(step: int, num_micro_batches: int = 3) -> list[Batch]:
    made = make_batches(num_micro_batches, step)
    for batch in made:
        batch["factor"] = torch.tensor(SPIKES.get(step, 1.0))
    return made


def train(
    directory: str | Path,
    placement: Options,
    *,
    layers_per_block: int = 1,
    moments: str = "float32",
    num_layers: int = 4,
    tied: bool = True,
    frozen: Iterable[str] = ("layers.2.up",),
    **options: object,
) -> gs.Engine:
    """Steps of all kinds, with calls between them after which the next one is not what was written ahead."""
    parts = make_parts(uneven=True, tied=tied, frozen=tuple(frozen), dropout=0.1, num_layers=num_layers)
    model = gs.Sequential(
        parts.embed, parts.layers, Poison(parts.head), num_targets=num_targets, layers_per_block=layers_per_block
    )
    defaults = {"storage": [directory], "ram": "64MiB", "chunk_params": 4096, "placement": gs.Placement(**placement)}
    defaults["compress_moments"] = False
    with gs.Engine(model, replace(OPTIMIZER, moments=moments), **defaults | options) as engine:  # type: ignore[arg-type]
        for step in range(NUM_STEPS):
            engine.step(batches(step, 5 if step == LARGE_STEP else 3))
            if step == 1:
                engine.evaluate(batches(0, 2))
            if step == 4:
                engine.flush()
            if step == LARGE_STEP:
                engine.save()
    return engine


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """What was recorded in a configuration, once for all tests."""
    made: dict[str, list[Period]] = {}

    def get(name: str) -> list[Period]:
        if name not in made:
            placement, options = CONFIGURATIONS[name]
            with recorded() as periods:
                engine = train(tmp_path_factory.mktemp("store"), placement, **options)  # type: ignore[arg-type]
            num_revoked = 2 if "optimistic" in options else 0
            assert (engine.num_skipped, engine.num_revoked) == (1, num_revoked), "the steps are not what they are for"
            made[name] = periods
        return made[name]

    return get


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ops_that_touch_the_same_wait_for_each_other(name: str, record: Record) -> None:
    periods = record(name)
    require_no_races(periods)
    assert num_conflicts(periods) >= FEWEST_CONFLICTS


def require_no_races(periods: list[Period]) -> None:
    found = [race for period in periods for race in races(period)]
    assert not found, "\n".join([f"{len(found)} races, among them", *found[:20]])


def num_conflicts(periods: list[Period]) -> int:
    return sum(len(period.conflicts) for period in periods)


# That a race would be seen


def test_all_kinds_of_ops_are_recorded_with_every_byte_that_they_move(record: Record) -> None:
    seen: set[Kind] = set()
    for name in CONFIGURATIONS:
        compresses = "compress_moments" in CONFIGURATIONS[name][1]
        for traced in (traced for period in record(name) for traced in period.ops if traced.step is not None):
            seen.add(traced.op.kind)
            assert traced.touches, traced
            if compresses and traced.op.kind in (Kind.LOAD_STATE, Kind.WRITE):
                continue  # fewer bytes cross the drive, and more are touched in memory
            written = sum(touch.end - touch.start for touch in traced.touches if touch.writes and touch.has_bytes)
            # The first chunk of a gradient brings a number along that says whether the block's is finite.
            more = 4 if traced.op.kind is Kind.DOWNLOAD else 0
            assert not traced.op.nbytes or traced.op.nbytes <= written <= traced.op.nbytes + more, traced
    assert seen == set(Kind) - {Kind.GATHER, Kind.REDUCE}


def test_lanes_wait_for_what_follows_from_what_ops_read_and_write(record: Record) -> None:
    """And so it can be asked what they would wait for if ops said something else."""
    for period in record("optimistic"):
        for traced, after in zip(period.ops, relinked(lambda op: op)(period), strict=True):
            assert set(traced.after) == set(after), traced


NEEDED: dict[Kind, tuple[Lane, ...]] = {
    Kind.FORWARD: (Lane.UPLOAD, Lane.PARK, Lane.FETCH, Lane.RENEW),
    Kind.BACKWARD: (Lane.UPLOAD, Lane.PARK, Lane.FETCH, Lane.DOWNLOAD),
    Kind.EVALUATE: (Lane.UPLOAD,),
    Kind.READ_WEIGHTS: (Lane.UPLOAD, Lane.WRITE),
    Kind.UPLOAD: (Lane.READ, Lane.COMPUTE, Lane.DOWNLOAD, Lane.CPU, Lane.RENEW),
    Kind.RENEW: (Lane.CPU,),
    Kind.DOWNLOAD: (Lane.COMPUTE, Lane.CPU, Lane.WRITE, Lane.RENEW, Lane.NORM),
    Kind.TAKE: (Lane.UPLOAD, Lane.WRITE, Lane.RENEW),
    Kind.LOAD_STATE: (Lane.WRITE, Lane.RENEW, Lane.UPLOAD),
    Kind.UPDATE: (Lane.DOWNLOAD, Lane.NORM, Lane.LOAD, Lane.TAKE),
    Kind.WRITE: (Lane.CPU,),
    Kind.PARK: (Lane.COMPUTE, Lane.SPILL),
    Kind.GET: (Lane.PARK, Lane.COMPUTE, Lane.RECALL),
    Kind.SPILL: (Lane.PARK,),
    Kind.RECALL: (Lane.SPILL, Lane.FETCH),
    Kind.SPILL_GRADIENT: (Lane.DOWNLOAD,),
    Kind.RECALL_GRADIENT: (Lane.WRITE, Lane.NORM),
    Kind.ACCUMULATE: (Lane.DOWNLOAD,),
    Kind.SQUARES: (Lane.DOWNLOAD, Lane.CPU),
    Kind.LOSS: (Lane.COMPUTE,),
    Kind.VERDICT: (Lane.DOWNLOAD,),
}
"""What each kind of op waits for. It waits for other lanes, too, but there for nothing that is not over anyway when all
else is that it waits for."""
NEEDED_OF_RANKS: dict[Kind, tuple[Lane, ...]] = {
    Kind.GATHER: (Lane.UPLOAD,),
    Kind.FORWARD: (Lane.GATHER,),
    Kind.BACKWARD: (Lane.GATHER,),
    Kind.EVALUATE: (Lane.GATHER,),
    Kind.REDUCE: (Lane.COMPUTE,),
    Kind.DOWNLOAD: (Lane.REDUCE,),
}


def test_a_race_is_found_where_one_kind_of_op_does_not_wait_for_one_lane(record: Record) -> None:
    assert set(NEEDED) == set(Kind) - {Kind.GATHER, Kind.REDUCE}
    assert needless(NEEDED, [partial(record, name) for name in CONFIGURATIONS]) == []


def needless(waits: Mapping[Kind, Iterable[Lane]], recordings: Recordings) -> list[str]:
    """Those of the waits that are not missed in any of the recordings."""
    pairs = [(kind, lane) for kind, lanes in waits.items() for lane in lanes]
    return [f"{kind.name} for {lane.name}" for kind, lane in pairs if not breaks(hurried(kind, lane), recordings)]


def hurried(kind: Kind, lane: Lane) -> Waits:
    """Ops of a kind do not wait for a lane."""
    return without(lambda traced, awaited: (traced.op.kind, awaited.op.lane) == (kind, lane))


def breaks(waits: Waits, recordings: Recordings) -> bool:
    """Whether there is a race in one of the recordings if ops wait so."""
    return any(races(period, waits) for recording in recordings for period in recording())


@pytest.mark.parametrize(
    "name",
    [
        *("weights", "gradients", "staging", "update.gradient", "update.weight", "update.state"),
        *("between", "transfer", "spill", "losses"),
    ],
)
def test_a_race_is_found_where_a_slot_is_taken_before_its_last_user_is_done(name: str, record: Record) -> None:
    def is_for_the_slot_alone(traced: Traced, awaited: Traced) -> bool:
        reads, writes = set(awaited.op.reads), set(awaited.op.writes)
        wanted = {resource for resource in traced.op.writes if resource[0] == name}
        return bool(wanted & (reads | writes)) and not writes & set(traced.op.reads)

    assert breaks(without(is_for_the_slot_alone), [partial(record, name) for name in CONFIGURATIONS])


def test_a_race_is_found_where_ops_conceal_one_of_the_things_that_they_share(record: Record) -> None:
    recordings = [partial(record, name) for name in CONFIGURATIONS]
    ops = [traced.op for recording in recordings for period in recording() for traced in period.ops]
    names = {str(resource[0]) for op in ops for resource in (*op.reads, *op.writes)}
    concealed = {name for name in names if not breaks(relinked(partial(conceal, name)), recordings)}
    assert concealed == {"graph", "squares"}, "these two are touched on one lane alone"


def conceal(name: str, op: Op) -> Op:
    """An op that does not say that it touches things of this name."""
    reads, writes = ([part for part in parts if part[0] != name] for parts in (op.reads, op.writes))
    return replace(op, reads=tuple(reads), writes=tuple(writes))


def test_a_race_is_found_where_two_chunks_overlap_in_a_slot_whose_parts_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were chunks put to the begin of their slot, the state of a small one would lie where a large one has its weight:
    bytes tell, names do not."""
    monkeypatch.setattr(HostMemory, "update_slot", lambda host, slot, num_params: host.updates[slot])
    placement, options = CONFIGURATIONS["clipped"]
    with recorded() as periods:
        train(tmp_path, placement, **options)  # type: ignore[arg-type]
    found = [race for period in periods for race in races(period)]
    assert found and all(race.startswith("S") and "does not wait for U" in race for race in found), found


# Several ranks


def test_ops_of_ranks_that_touch_the_same_wait_for_each_other(tmp_path: Path) -> None:
    for found in together.call(2, "test_races", "check_rank", str(tmp_path)):
        assert found == [], "without these there is no race"


def check_rank(directory: str) -> list[str]:
    """Returns which waits for other ranks are not missed."""
    with recorded() as periods:
        train(directory, {"weights_device": 0.5}, alpha=0.5, chunk_params=2048)
    require_no_races(periods)
    assert num_conflicts(periods) >= FEWEST_CONFLICTS
    return needless(NEEDED_OF_RANKS, [lambda: periods])
