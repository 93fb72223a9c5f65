"""Several layers in a block: the same training with fewer activations, chosen by `plan` where that is faster."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import child
import greedysnake as gs
from families import MIXED, OPTIMIZER, SIZES, make_batches, make_config
from greedysnake import agreement, measuring, planner, settings
from greedysnake.config import load_config
from greedysnake.errors import ConfigError, OpError
from greedysnake.exporting import export_run
from greedysnake.measuring import Machine
from greedysnake.placement import Home
from greedysnake.planner import Planned, plan_run
from greedysnake.planning.costs import BlockTimes, Rates
from greedysnake.preparation import prepare
from greedysnake.report.plan_text import machine_text, plan_text
from greedysnake.resharding import reshard_run
from greedysnake.runtime.drive import Bandwidth, Drive
from reference import Trained
from training import Run, curve, metrics_of, quiet, train, train_for, values_in

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 3
Values = dict[str, Any]


def train_steps(config: Any, folder: Path, layers_per_block: int, **options: Any) -> Trained:
    engine_options = {"ram": "64MiB", "dtype": "float32", "max_grad_norm": 1.0, "chunk_params": 4096, **options}
    model = gs.load_model(config, seed=1, layers_per_block=layers_per_block)
    trained = Trained()
    with gs.Engine(model, OPTIMIZER, storage=[folder], **engine_options) as engine:
        for step in range(NUM_STEPS):
            trained.losses.append(engine.step(make_batches(step)).loss)
        trained.parameters = dict(engine.named_parameters())
        trained.losses.append(engine.evaluate(make_batches(0)))
    return trained


def assert_close(found: Trained, wanted: Trained, tolerance: float = 1e-5) -> None:
    """To the rounding of float32: sums over a block's parameters have another order."""
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.parameters.keys() == wanted.parameters.keys()
    for name, value in wanted.parameters.items():
        assert float((found.parameters[name] - value).abs().max()) <= tolerance, name


@pytest.mark.parametrize("family", ["llama tied", "gemma3", "qwen3 window", "gpt2", "opt projected", "mixtral"])
def test_families_train_alike(family: str, tmp_path: Path) -> None:
    """Three layers: one block of two and one of one, then one of three, with plain, padded and packed rows."""
    config = make_config(family)
    wanted = train_steps(config, tmp_path / "1", 1)
    assert_close(train_steps(config, tmp_path / "2", 2, alpha=0.5, optimistic=True), wanted)
    kept = gs.Placement(weights_device=1.0, activations_ram=0.0)
    assert_close(train_steps(config, tmp_path / "3", 3, placement=kept), wanted)


def test_dropout_is_the_same_in_the_recompute(tmp_path: Path) -> None:
    """A kept graph has the masks of the forward; a recompute must draw the same."""
    config = make_config("gpt2", resid_pdrop=0.3)
    wanted = train_steps(config, tmp_path / "kept", 2, placement=gs.Placement(graphs_device=1.0))
    assert_close(train_steps(config, tmp_path / "recomputed", 2), wanted)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_compiled_blocks_train_alike_and_share_their_code(device: str, tmp_path: Path) -> None:
    config, counters = make_config("llama", num_hidden_layers=4), torch._dynamo.utils.counters
    num_graphs = []
    for count in (1, 2):
        torch._dynamo.reset()
        counters.clear()
        wanted = train_steps(config, tmp_path / f"plain {count}", count, device=device)
        found = train_steps(config, tmp_path / f"compiled {count}", count, device=device, compile=True)
        assert_close(found, wanted, tolerance=1e-5 if device == "cpu" else 1e-4)  # a GPU adds up in an order of its own
        assert not counters["graph_break"], dict(counters["graph_break"])
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[1] == num_graphs[0]


def test_layers_with_a_part_in_the_loss_have_blocks_of_their_own(tmp_path: Path) -> None:
    model = gs.load_model(make_config("mixtral balanced"), layers_per_block=2)
    with pytest.raises(ConfigError, match=r"layers\.0 has a side_gradient .* set layers_per_block to 1"):
        gs.Engine(model, OPTIMIZER, storage=[tmp_path], ram="64MiB")
    assert not model.may_be_grouped and gs.load_model(make_config("mixtral")).may_be_grouped


def test_layers_of_a_block_are_made_and_exported_one_by_one(tmp_path: Path) -> None:
    """All of them together would be as much as the weights in float32."""
    found = child.call("model_memory", "measure_group", str(tmp_path), 32, 384, "32MiB", timeout_s=300)
    assert found["weights"] > 200e6
    assert found["made"] < (32 << 20) + found["weights"] / 4, found
    assert found["exported"] < found["weights"] / 4, found


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_numbers_that_are_none_are_refused(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"layers_per_block is .*: give a whole number, 1 or more"):
        gs.load_model(make_config("llama"), layers_per_block=count)


def test_half_as_many_activations_wait(tmp_path: Path) -> None:
    for count, blocks in ((1, 6), (2, 3), (4, 2)):
        values = with_engine(values_in(tmp_path), layers_per_block=count)
        values["model"]["config"]["num_hidden_layers"] = 6
        homes = prepare(load_config(values)).footprint.homes
        one = 2 * 32 * 16 * 4  # rows, tokens, hidden size, float32
        assert homes["activations"][Home.RAM] == 2 * blocks * one  # of each of two micro-batches


# A run


def with_engine(values: Values, **engine: Any) -> Values:
    return {**values, "engine": {**values["engine"], **engine}}


def test_a_run_goes_on_with_the_blocks_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        folder.mkdir()
    console = quiet()
    train(with_engine(values_in(whole), layers_per_block=2), console)
    assert isinstance(console.file, io.StringIO) and "2 layers in a block, run in" in console.file.getvalue()
    values = with_engine(values_in(part), layers_per_block=2)
    train_for(5, values, monkeypatch)
    noted = settings.read_yaml((part / "run" / "run.yaml").read_text(), "run.yaml")["engine"]
    assert isinstance(noted, dict) and noted["layers_per_block"] == 2
    with pytest.raises(ConfigError, match=r"engine\.layers_per_block was 2 and is 1"):
        train(with_engine(values, layers_per_block=1))
    train(with_engine(values, layers_per_block=None))  # whatever it has
    assert curve(part / "run") == curve(whole / "run")
    assert exported(part / "run", tmp_path / "a") == exported(whole / "run", tmp_path / "b")


def exported(run: Path, out: Path) -> dict[str, bytes]:
    export_run(run, out)
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_the_export_has_the_names_of_the_model(tmp_path: Path) -> None:
    """And a resharded run keeps its blocks."""
    values = with_engine(values_in(tmp_path), layers_per_block=2)
    values["model"]["config"]["num_hidden_layers"] = 3
    train(values)
    reshard_run(tmp_path / "run", tmp_path / "two", num_ranks=2)
    for number, run in enumerate((tmp_path / "run", tmp_path / "two")):
        out = tmp_path / f"out{number}"
        export_run(run, out, dtype="float32")
        names = set(load_file(out / "model.safetensors"))
        assert {f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(3)} <= names
    found, wanted = (load_file(tmp_path / f"out{number}" / "model.safetensors") for number in (1, 0))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_run_goes_on_with_other_blocks(tmp_path: Path, run: Run) -> None:
    values = with_engine(values_in(tmp_path, max_steps=4), layers_per_block=1)
    train(values)
    alone, pairs = tmp_path / "run", tmp_path / "pairs"
    code, printed, _ = run("reshard", alone, pairs, "--layers-per-block", 2)
    assert code == 0 and f"greedysnake train {pairs}/run.yaml" in printed
    assert exported(alone, tmp_path / "a") == exported(pairs, tmp_path / "b")
    for folder in (alone, pairs):
        train(
            settings.read_yaml((folder / "run.yaml").read_text(), "run.yaml")
            | {"training": values["training"] | {"max_steps": 8}}
        )
    assert prepare(load_config(pairs / "run.yaml")).model.layers_per_block == 2
    wanted = [line["loss"] for line in metrics_of(alone)]
    assert [line["loss"] for line in metrics_of(pairs)] == pytest.approx(wanted, rel=1e-5)
    assert (
        "--layers-per-block is 0: give at least 1" in run("reshard", alone, tmp_path / "x", "--layers-per-block", 0)[2]
    )


def test_the_check_of_a_model_has_the_blocks_of_its_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    load = agreement.load_model

    def noting(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        seen.append(model.layers_per_block)
        return model

    monkeypatch.setattr(agreement, "load_model", noting)
    console = quiet()
    assert agreement.compare(load_config(with_engine(values_in(tmp_path), layers_per_block=2)), console)
    assert seen == [2]


# plan


def crowded(directory: Path, **engine: Any) -> Values:
    """Activations of 8 layers would fill most of the RAM, beside which state would live there."""
    training = {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 8, "max_grad_norm": 0.0}
    values = with_engine(values_in(directory, **training), fill_ram=True, ram="2500KiB", **engine)
    values["model"]["config"].update({"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 64})
    return values


def known_machine(
    monkeypatch: pytest.MonkeyPatch, *, penalty: float = 0.0, room: int | None = None, fails: str | None = None
) -> list[int]:
    """A drive that is the bound, and a device on which blocks of more layers take `penalty` more time. Returns the
    numbers of layers in a block that were tried."""
    tried: list[int] = []

    def measure(config: Any, model: Any, *_: Any, **__: Any) -> Machine:
        count = model.layers_per_block
        tried.append(count)
        if fails and count > 1:
            raise OpError(f"F1.0: {fails}", op="F1.0")
        seconds = 1e-3 * count * (1 + penalty * (count > 1))
        blocks = [BlockTimes(seconds, 3 * seconds)] * math.ceil(8 / count)
        times = (BlockTimes(0.0, 0.0), *blocks, BlockTimes(0.0, 0.0))
        return Machine("cpu", Rates(4e6, *[math.inf] * 4), times, count, room)

    drive = Drive("", exists=True, device_number=1, bandwidth=Bandwidth(4e6, 4e6, 4e6))
    monkeypatch.setattr(measuring, "look_at_drive", lambda path: drive)
    monkeypatch.setattr(planner, "measure", measure)
    return tried


def plan(values: Values, said: list[str] | None = None) -> Planned:
    return plan_run(load_config(values), (said if said is not None else []).append)


def test_more_layers_are_planned_where_their_room_saves_the_drive_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = known_machine(monkeypatch)
    planned = plan(crowded(tmp_path))
    chosen, alone = planned.chosen, plan(crowded(tmp_path, layers_per_block=1)).chosen
    count = chosen.config.engine.layers_per_block
    assert count in (2, 4) and tried == [1, count, 1]  # those that are set are not looked for
    assert planned.given.config.engine.layers_per_block == alone.config.engine.layers_per_block == 1
    assert chosen.typical_s <= 0.97 * alone.typical_s
    assert chosen.forecast.least_s["ssd"] < 0.97 * alone.forecast.least_s["ssd"]
    assert f"engine.layers_per_block {count} instead of 1" in plan_text(planned)
    assert f"{count} layers: " in machine_text(planned.machine, chosen.config)
    assert all(option.config.engine.layers_per_block == count for option in (*planned.larger, *planned.compact))
    path = tmp_path / "planned.yaml"
    path.write_text(chosen.config.as_yaml())
    assert prepare(load_config(path)).footprint.plan == chosen.footprint.plan


def test_what_was_hoped_for_is_measured_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = known_machine(monkeypatch, penalty=100.0)
    planned = plan(crowded(tmp_path))
    assert planned.chosen.config.engine.layers_per_block == 1 and tried[0] == 1 and len(tried) > 1


def test_blocks_that_the_device_has_no_room_for_are_said_and_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    known_machine(monkeypatch, fails="OutOfMemoryError: CUDA out of memory")
    assert plan(crowded(tmp_path), said).chosen.config.engine.layers_per_block == 1
    assert any(line.startswith("the device has no room for blocks of") for line in said)
    known_machine(monkeypatch, fails="RuntimeError: something else")
    with pytest.raises(OpError, match="something else"):
        plan(crowded(tmp_path))


def test_a_plan_that_fits_is_not_said_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was put on the device by hand is too much there, and not with fewer activations."""
    values = crowded(tmp_path, placement={"activations_device": 0.6, "activations_ram": 0.2})
    known_machine(monkeypatch)
    alone, pairs = (plan(with_engine(values, layers_per_block=count)).given.footprint.device_bytes for count in (1, 2))
    assert pairs < alone
    known_machine(monkeypatch, room=(alone + pairs) // 2, penalty=0.5)
    planned = plan(values)
    assert planned.chosen.config.engine.layers_per_block != 1
    assert "it will not fit" not in plan_text(planned)


def test_buffers_of_larger_blocks_stay_within_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_machine(monkeypatch)
    needed = plan(crowded(tmp_path, layers_per_block=1)).given.footprint.device_bytes
    tried = known_machine(monkeypatch, room=needed + 10_000)
    chosen = plan(crowded(tmp_path)).chosen
    assert chosen.config.engine.layers_per_block == 1 and tried == [1]
    known_machine(monkeypatch, room=4 * needed)
    assert plan(crowded(tmp_path)).chosen.footprint.device_bytes <= 4 * needed


def test_a_run_that_has_begun_is_planned_with_the_blocks_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(with_engine(values_in(tmp_path), layers_per_block=2))
    tried = known_machine_of(monkeypatch, 2)
    planned = plan(with_engine(values_in(tmp_path), layers_per_block=None))
    assert tried == [2] and planned.chosen.config.engine.layers_per_block == 2


def known_machine_of(monkeypatch: pytest.MonkeyPatch, num_layers: int) -> list[int]:
    tried = known_machine(monkeypatch)
    measure = planner.measure

    def shortened(*arguments: Any, **options: Any) -> Machine:
        machine = measure(*arguments, **options)
        num_blocks = math.ceil(num_layers / machine.layers_per_block)
        return replace(machine, times=(machine.times[0], *machine.times[1:-1][:num_blocks], machine.times[-1]))

    monkeypatch.setattr(planner, "measure", shortened)
    return tried


def test_groups_of_the_same_kinds_of_layers_are_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Drive("", exists=True, device_number=1, bandwidth=Bandwidth(3e9, 4e9, 3.5e9))
    monkeypatch.setattr(measuring, "look_at_drive", lambda path: drive)
    monkeypatch.setitem(measuring.TRIAL_LAYERS, "cpu", 1)
    sizes = {**SIZES, "vocab_size": 264, "max_position_embeddings": 64, "num_hidden_layers": 6}
    model = {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "layer_types": MIXED * 2}
    for count, num_tried, num_blocks in ((2, 3, 3), (3, 1, 2), (4, 2, 2)):
        values = with_engine(values_in(tmp_path), layers_per_block=count)
        values["model"]["config"] = {**sizes, **model}
        said: list[str] = []
        planned = plan(values, said)
        assert f"training {num_tried} of {num_blocks} blocks of {count} layers for 3 steps on cpu" in said
        assert len(planned.machine.times) == num_blocks + 2
