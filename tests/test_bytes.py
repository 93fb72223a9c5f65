"""What a step reads and writes on SSD is what docs/how-it-works.md says, by our counters and by the kernel's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import child
import greedysnake as gs
from greedysnake.shapes import GRANULE, PRECISIONS, total_params
from reference import OPTIMIZER, Batch, make_batches, make_parts

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, WIDTH, VOCAB = 128, 1024, 64
"""Blocks that fill their granules of 2048 parameters nearly."""
LENGTH = 8


def batches(num_micro_batches: int, step: int) -> list[Batch]:
    return make_batches(num_micro_batches, step, vocab=VOCAB, length=LENGTH, uneven=False)


def make_engine(directory: Path, model: dict[str, object] | None = None, **options: object) -> gs.Engine:
    parts = make_parts(**{"vocab": VOCAB, "hidden": HIDDEN, "width": WIDTH, "num_layers": 3, **(model or {})})
    return gs.Engine(
        parts.sequential(),
        OPTIMIZER,
        **{"storage": [directory], "ram": "128MiB", "chunk_params": 65536, "compress_moments": False, **options},  # type: ignore[arg-type]
    )


def padded(engine: gs.Engine) -> dict[str, int]:
    """Parameters as they are stored: of the layers with the embedding, of the head, of what is shared."""
    blocks = engine.plan.blocks[: engine.plan.num_compute]
    shared = engine.plan.blocks[engine.plan.num_compute :]
    return {"layers": total_params(blocks[:-1]), "head": total_params(blocks[-1:]), "shared": total_params(shared)}


def ssd_bytes(result: gs.StepResult) -> int:
    return result.ssd_read_bytes + result.ssd_write_bytes


def steady_bytes(engine: gs.Engine, num_micro_batches: int) -> int:
    """Bytes of a step that is neither the first nor the last; two of them must agree."""
    results = [engine.step(batches(num_micro_batches, step)) for step in range(4)]
    assert ssd_bytes(results[2]) == ssd_bytes(results[3])
    return ssd_bytes(results[3])


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_everything_on_ssd_costs_26_bytes_per_parameter(alpha: float, tmp_path: Path) -> None:
    for num_micro_batches in (1, 2, 3, 8):
        with make_engine(tmp_path / str(num_micro_batches), alpha=alpha) as engine:
            found = steady_bytes(engine, num_micro_batches)
            assert found == 26 * sum(padded(engine).values())
            num_params = sum(value.numel() for _, value in engine.named_parameters())
            assert 26 * num_params <= found < 26 * num_params * 1.01


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_formulas_for_precision_schedule_and_clipping(
    schedule: str, dtype: str, clip: float | None, tmp_path: Path
) -> None:
    weight, state = PRECISIONS[dtype].weight_bytes, PRECISIONS[dtype].state_bytes(GRANULE) // GRANULE
    assert 3 * weight + 2 * state == {"bfloat16": 26, "float32": 28}[dtype]
    for num_micro_batches in (1, 3):
        fetches = 1 if schedule == "vertical" else num_micro_batches
        saved = weight if clip else 0
        with make_engine(
            tmp_path / str(num_micro_batches), schedule=schedule, dtype=dtype, max_grad_norm=clip, model={"tied": True}
        ) as engine:
            size = padded(engine)
            expected = size["layers"] * (2 * weight * fetches + weight + 2 * state)
            expected += size["head"] * (weight * fetches + 2 * (weight + state) - saved)
            expected += size["shared"] * (3 * weight + 2 * state - saved)
            assert steady_bytes(engine, num_micro_batches) == expected


def test_horizontal_grows_with_the_number_of_micro_batches(tmp_path: Path) -> None:
    found = {}
    for num_micro_batches in (1, 2, 8):
        with make_engine(tmp_path / str(num_micro_batches), schedule="horizontal") as engine:
            found[num_micro_batches] = steady_bytes(engine, num_micro_batches)
            size = padded(engine)
    assert found[2] - found[1] == 4 * size["layers"] + 2 * size["head"]
    assert found[8] - found[1] == 7 * (found[2] - found[1])
    assert found[8] == pytest.approx(54 * sum(size.values()), rel=0.01)  # a head is small


@pytest.mark.parametrize("clip", [None, 0.5])
def test_spilled_gradients_cost_8_bytes_per_parameter(clip: float | None, tmp_path: Path) -> None:
    found = []
    for share in (1.0, 0.0):
        placement = gs.Placement(gradients_ram=share)
        with make_engine(tmp_path / str(share), alpha=0.5, max_grad_norm=clip, placement=placement) as engine:
            found.append(steady_bytes(engine, 2))
            late = [
                chunk.num_params
                for block, homes in zip(engine.plan.blocks, engine.plan.homes, strict=True)
                for chunk, home in zip(block.chunks, homes, strict=True)
                if home.late
            ]
    assert found[1] - found[0] == 8 * sum(late)
    if clip:
        assert sum(late) == sum(padded(engine).values())


def test_frozen_parameters_are_only_read(tmp_path: Path) -> None:
    with make_engine(tmp_path / "middle", model={"frozen": ["layers.1"]}) as engine:
        frozen = engine.plan.blocks[2].num_params
        others = sum(padded(engine).values()) - frozen
        assert steady_bytes(engine, 2) == 26 * others + 4 * frozen
    with make_engine(tmp_path / "below", model={"frozen": ["embed", "layers.0"]}) as engine:
        frozen = total_params(engine.plan.blocks[:2])
        others = sum(padded(engine).values()) - frozen
        assert steady_bytes(engine, 2) == 26 * others + 2 * frozen


def test_what_lives_in_ram_is_not_moved(tmp_path: Path) -> None:
    for placement, expected in (
        (gs.Placement(weights_ram=1), 20),
        (gs.Placement(optimizer_ram=1), 6),
        (gs.Placement(weights_ram=1, optimizer_ram=1), 0),
    ):
        with make_engine(tmp_path / str(expected), placement=placement) as engine:
            assert steady_bytes(engine, 2) == expected * sum(padded(engine).values())


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_weights_that_stay_on_the_device_are_written_and_never_read(
    alpha: float, clip: float | None, tmp_path: Path
) -> None:
    placement = gs.Placement(weights_device=1)
    with make_engine(tmp_path, alpha=alpha, max_grad_norm=clip, placement=placement) as engine:
        layers, params = total_params(engine.plan.blocks[1:-1]), sum(padded(engine).values())
        saved = 2 * padded(engine)["head"] if clip else 0
        assert steady_bytes(engine, 2) == 22 * layers + 26 * (params - layers) - saved


def test_frozen_weights_that_stay_on_the_device_are_read_once_in_a_run(tmp_path: Path) -> None:
    with make_engine(
        tmp_path, model={"frozen": ["embed", "layers.0", "layers.2"]}, placement=gs.Placement(weights_device=1)
    ) as engine:
        embed, _, trained, _, head = (block.num_params for block in engine.plan.blocks)
        assert steady_bytes(engine, 2) == 2 * embed + 22 * trained + 26 * head


def test_activations_on_ssd_are_written_once_and_read_once(tmp_path: Path) -> None:
    num_micro_batches, num_layers = 3, 3
    with make_engine(tmp_path, placement=gs.Placement(activations_ram=0)) as engine:
        activation_bytes = 2 * LENGTH * HIDDEN * 2  # two rows of bfloat16: whole pages
        assert activation_bytes % 4096 == 0
        expected = 26 * sum(padded(engine).values()) + 2 * num_micro_batches * num_layers * activation_bytes
        assert steady_bytes(engine, num_micro_batches) == expected


NUM_COUNTED = 4


def count(
    directory: str, num_micro_batches: int, backend: str, weights_device: float, options: dict[str, object]
) -> dict[str, int]:
    """Bytes of some steps and the flush after them: as the I/O engine counts them, and as the kernel does."""
    placement = gs.Placement(weights_device=weights_device)
    with make_engine(Path(directory), io=gs.IoOptions(backend=backend), placement=placement, **options) as engine:
        for _ in range(2):  # the first one reads zeros ahead, which are next to nothing once they are compressed
            engine.step(batches(num_micro_batches, 0))
            engine.flush()
        before, kernel_before = engine.io_counters, kernel_bytes()
        results = [engine.step(batches(num_micro_batches, step)) for step in range(1, NUM_COUNTED + 1)]
        told = sum(map(ssd_bytes, results))
        engine.flush()
        after, kernel_after = engine.io_counters, kernel_bytes()
        assert before is not None and after is not None
        return {
            "read": after.read_bytes - before.read_bytes,
            "write": after.write_bytes - before.write_bytes,
            "kernel_read": kernel_after["read_bytes"] - kernel_before["read_bytes"],
            "kernel_write": kernel_after["write_bytes"] - kernel_before["write_bytes"],
            "told": told,
            "params": sum(padded(engine).values()),
            "kept": total_params([block for block in engine.plan.blocks if block.pool == "kept"]),
        }


def kernel_bytes() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


@pytest.mark.parametrize(
    ("num_micro_batches", "backend", "weights_device", "options"),
    [
        (2, "threads", 0.0, {"alpha": 0.25}),
        (8, "auto", 0.0, {"alpha": 1.0}),
        (2, "auto", 0.0, {"max_grad_norm": 0.5}),
        (2, "auto", 0.7, {"alpha": 0.25}),
        (3, "auto", 0.0, {"schedule": "horizontal"}),
    ],
)
def test_counters_agree_with_the_kernels(
    num_micro_batches: int, backend: str, weights_device: float, options: dict[str, object], tmp_path: Path
) -> None:
    if not _takes_direct(tmp_path):
        pytest.skip(f"{tmp_path} refuses O_DIRECT (tmpfs, overlay): the kernel counts page cache traffic there")
    arguments = (str(tmp_path / "store"), num_micro_batches, backend, weights_device, options)
    found = child.call("test_bytes", "count", *arguments)
    if "schedule" not in options:
        # All updates of the steps lie between the two flushes; a head that is updated late reads 2 bytes less.
        params, kept = NUM_COUNTED * found["params"], NUM_COUNTED * found["kept"]
        assert found["write"] == 12 * params
        assert found["read"] == pytest.approx(14 * params - 4 * kept, rel=0.01)
    # The interpreter reads a file of its own now and then.
    assert found["write"] <= found["kernel_write"] <= found["write"] * 1.01
    assert found["read"] <= found["kernel_read"] <= found["read"] * 1.01


@pytest.mark.parametrize("options", [{"alpha": 0.25}, {"max_grad_norm": 0.5}, {"dtype": "float32"}])
def test_compressed_moments_are_fewer_bytes_for_the_kernel_too(options: dict[str, object], tmp_path: Path) -> None:
    if not _takes_direct(tmp_path):
        pytest.skip(f"{tmp_path} refuses O_DIRECT (tmpfs, overlay): the kernel counts page cache traffic there")
    found, plain = (
        child.call(
            "test_bytes", "count", str(tmp_path / name), 2, "auto", 0.0, {"compress_moments": compresses, **options}
        )
        for name, compresses in (("compressed", True), ("plain", False))
    )
    # Of 8 bytes of moments at least a tenth.
    assert 0.1 * 8 <= (plain["kernel_write"] - found["kernel_write"]) / (NUM_COUNTED * found["params"]) <= 0.3 * 8
    assert 0.1 * 8 <= (plain["kernel_read"] - found["kernel_read"]) / (NUM_COUNTED * found["params"]) <= 0.3 * 8
    for counted in (found, plain):
        assert counted["read"] <= counted["kernel_read"] <= counted["read"] * 1.01
        assert counted["write"] <= counted["kernel_write"] <= counted["write"] * 1.01
    # What results say is short of what the flush wrote, alike in both.
    assert found["told"] / (found["read"] + found["write"]) == pytest.approx(
        plain["told"] / (plain["read"] + plain["write"]), rel=0.03
    )


BETWEEN: dict[str, Callable[[gs.Engine], object]] = {
    "nothing": lambda engine: None,
    "flush": gs.Engine.flush,
    "save": gs.Engine.save,
    "evaluate": lambda engine: engine.evaluate(batches(1, 9)),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("placement", [gs.Placement(), gs.Placement(weights_ram=1), gs.Placement(weights_device=1)])
@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "optimistic": True}, {"alpha": 1.0}, {"alpha": 0.25}]
)
def test_what_is_spared_is_taken_off_the_step_it_belongs_to(
    options: dict[str, object], placement: gs.Placement, between: str, tmp_path: Path
) -> None:
    """In every step, whatever happens between steps, as much is told as without compression, less what that spares."""
    told: dict[bool, list[tuple[int, int]]] = {}
    for compresses in (True, False):
        given = {"placement": placement, "compress_moments": compresses, **options}
        with make_engine(tmp_path / str(compresses), **given) as engine:
            told[compresses] = []
            for step in range(6):
                result = engine.step(batches(2, step))
                BETWEEN[between](engine)
                told[compresses].append((result.ssd_read_bytes, result.ssd_write_bytes))
    for step, (found, plain) in enumerate(zip(told[True], told[False], strict=True)):
        for mine, whole in zip(found, plain, strict=True):
            assert 0 <= mine <= whole
            # In the first steps there are zeros to read, and some of what is spared is known in the next step only.
            # Updates that an evaluation does are no step's, and weights are not compressed.
            assert step < 3 or between == "evaluate" or 0.8 * whole <= mine <= 0.99 * whole


def _takes_direct(directory: Path) -> bool:
    path = directory / "probe"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True
