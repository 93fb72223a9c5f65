"""What `plan` answers: that it is what would run, that it leaves nothing behind, and what it measures."""

from __future__ import annotations

import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from families import EXPERTS, MIXED, SIZES
from greedysnake import cli, measuring, planner, settings
from greedysnake.config import load_config
from greedysnake.errors import ConfigError, PlanError, StorageError
from greedysnake.locks import locked
from greedysnake.measuring import Machine
from greedysnake.planner import Planned, plan_run
from greedysnake.planning.costs import BlockTimes, Rates
from greedysnake.preparation import prepare
from greedysnake.report.plan_text import plan_table, plan_text, print_plan
from greedysnake.runtime.directory import TRIAL
from greedysnake.runtime.drive import Bandwidth, Drive
from greedysnake.runtime.engine import Engine
from greedysnake.shapes import precision_of
from plans import FAST, Values, plan, quiet, with_engine
from training import everything_in, train, values_in

pytestmark = pytest.mark.usefixtures("known_drive")


def test_what_a_killed_planning_left_is_taken_away_by_the_next(tmp_path: Path) -> None:
    left, in_use, just_made = (tmp_path / f"{TRIAL}{name}" for name in ("left", "in_use", "just_made"))
    for folder in (left, in_use, just_made):
        folder.mkdir()
        (folder / "extents").write_bytes(b"x")
        if folder != just_made:
            os.utime(folder, (1, 1))
    (tmp_path / "a" / "b").mkdir(parents=True)  # more of the path is there now than when they were made
    with locked(in_use):
        plan(with_engine(values_in(tmp_path), storage=[str(tmp_path / "a" / "b" / "c")]))
        assert not left.exists() and in_use.exists() and just_made.exists()


def test_ram_that_a_plan_may_not_use_is_named(tmp_path: Path) -> None:
    values = with_engine(values_in(tmp_path), fill_ram=True, ram="700KiB")
    assert hint_of(values) == []
    planned = plan(values)
    again = replace(planned.chosen.config, engine=replace(planned.chosen.config.engine, ram="4MiB"))
    (hint,) = hint_of(settings.plain(again))
    assert "of engine.ram are not used" in hint
    filled = with_engine(settings.plain(again), fill_ram=True, placement={})
    assert hint_of(filled) == [] and plan(filled).chosen.footprint.ram_bytes > planned.chosen.footprint.ram_bytes


def hint_of(values: Values) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    print_plan(console, plan(values), load_config(values))
    file = console.file
    assert isinstance(file, io.StringIO)
    return [line for line in file.getvalue().splitlines() if "engine.fill_ram=true" in line]


def rows_of(planned: Planned) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(plan_table(planned))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


@pytest.mark.usefixtures("one_thread")
class TestPlan:
    @pytest.mark.parametrize("engine", [{}, {"fill_ram": True, "ram": "2MiB"}, {"optimistic": False}, {"alpha": 0.9}])
    @pytest.mark.parametrize("norm", [0.0, 1.0])
    def test_the_planned_configuration_runs_as_it_was_planned(
        self, engine: Values, norm: float, tmp_path: Path
    ) -> None:
        planned = plan(with_engine(values_in(tmp_path, max_grad_norm=norm), **engine))
        path = tmp_path / "planned.yaml"
        for option in (planned.given, planned.chosen, *planned.larger):
            path.write_text(option.config.as_yaml())
            assert prepare(load_config(path)).footprint.plan == option.footprint.plan
        assert planned.chosen.typical_s <= planned.given.typical_s

    def test_nothing_is_left_behind(self, tmp_path: Path) -> None:
        values = values_in(tmp_path)
        before = everything_in(tmp_path)
        plan(values)
        assert everything_in(tmp_path) == before

    def test_an_interrupt_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: object) -> None:
            assert list(tmp_path.glob(".greedysnake-plan-*"))
            raise KeyboardInterrupt

        values = values_in(tmp_path)
        before = everything_in(tmp_path)
        monkeypatch.setattr(Engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            plan(values)
        assert everything_in(tmp_path) == before

    def test_the_trial_stays_out_of_a_store_that_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = []
        enter = Engine.__enter__

        def noting(engine: Engine) -> Engine:
            used.extend(tmp_path.rglob(".greedysnake-plan-*"))
            return enter(engine)

        monkeypatch.setattr(Engine, "__enter__", noting)
        (tmp_path / "disk").mkdir()
        plan(with_engine(values_in(tmp_path), storage=[str(tmp_path / "disk")]))
        assert [path.parent for path in used] == [tmp_path]

    def test_larger_steps_double_until_the_device_is_busy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = Bandwidth(5e6, 5e6, 5e6)
        drive = Drive("", exists=True, device_number=1, bandwidth=slow)
        monkeypatch.setattr(measuring, "look_at_drive", lambda path: drive)
        values = values_in(tmp_path)
        values["engine"]["placement"] = {"activations_device": 1.0}
        planned = plan(values)
        counts = [option.config.training.gradient_accumulation_steps for option in planned.larger]
        assert planned.given.forecast.bound == "ssd"
        assert counts == [4 * 2**number for number in range(len(counts))]
        assert all(not planned.is_saturated(option) for option in (planned.chosen, *planned.larger[:-1]))
        speeds = [option.tokens_per_s for option in (planned.chosen, *planned.larger)]
        assert speeds == sorted(speeds)

    def test_moments_in_fewer_bytes_are_shown_where_the_drive_is_the_bound_and_not_chosen(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drive = Drive("", exists=True, device_number=1, bandwidth=Bandwidth(5e6, 5e6, 5e6))
        monkeypatch.setattr(measuring, "look_at_drive", lambda path: drive)
        planned = plan(with_engine(values_in(tmp_path), compress_moments=False))
        assert planned.chosen.config.training.adam_moments == "float32"
        kinds = [option.config.training.adam_moments for option in planned.compact]
        assert kinds == ["bfloat16", "int8"]
        options = (planned.chosen, *planned.compact)
        bytes_needed = [option.forecast.least_s["ssd"] for option in options]
        assert bytes_needed == sorted(bytes_needed, reverse=True)
        speeds = [option.tokens_per_s for option in options]
        assert speeds == sorted(speeds) and speeds[-1] > 1.2 * speeds[0]
        lines = rows_of(planned)
        assert any(line.startswith("moments bfloat16") for line in lines)
        assert any(line.startswith("moments int8") for line in lines)

    def test_a_run_that_is_continued_keeps_its_moments(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drive = Drive("", exists=True, device_number=1, bandwidth=Bandwidth(5e6, 5e6, 5e6))
        monkeypatch.setattr(measuring, "look_at_drive", lambda path: drive)
        values = values_in(tmp_path, adam_moments="int8")
        train(values)
        assert plan(values).compact == ()

    def test_the_late_share_is_chosen_where_drive_and_device_balance(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a machine that is known: a step of eight layers computes for 2 x 8 x (1 + 3) seconds, and the drive needs
        as long for 28 bytes per parameter."""
        values = with_engine(values_in(tmp_path, max_grad_norm=0.0), alpha=1.0, slots={"updates": 8})
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
        values["model"]["config"].update(sizes)
        num_params = sum(block.num_params for block in plan(values).given.footprint.plan.blocks)
        times = [BlockTimes(0.0, 0.0), *[BlockTimes(1.0, 3.0)] * 8, BlockTimes(0.0, 0.0)]
        machine = Machine("cpu", Rates(28 * num_params / 64.0, *[math.inf] * 4), tuple(times))
        monkeypatch.setattr(planner, "measure", lambda *_, **__: machine)
        planned = plan(values)
        assert planned.chosen.config.engine.alpha in (0.1, 0.15, 0.2, 0.25, 0.3)
        assert planned.given.forecast.step_s > 80.0
        assert 64.0 <= planned.chosen.forecast.step_s < 70.0

    def test_a_gpu_that_has_room_is_filled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a machine that is known, as there may be no GPU: each option keeps within the room."""
        values = with_engine(values_in(tmp_path), ram="2MiB", fill_ram=True)
        found = plan(values)
        needed, most = found.given.footprint.device_bytes, 1 << 40
        for room in (0, needed, needed + 12_000, needed + 100_000, most):
            machine = replace(found.machine, room_bytes=room)
            monkeypatch.setattr(planner, "measure", lambda *_, machine=machine, **__: machine)
            planned = plan(values)
            assert planned.given.footprint.plan == found.given.footprint.plan
            if room > needed:
                assert all(option.footprint.device_bytes <= room for option in (planned.chosen, *planned.larger[:1]))
            shares = planned.chosen.config.engine.placement
            assert (shares.activations_device > 0) == (room > needed)
            assert (shares.activations_device, shares.weights_device) == (1.0, 1.0) or room < most
            path = tmp_path / "planned.yaml"
            path.write_text(planned.chosen.config.as_yaml())
            assert prepare(load_config(path)).footprint.plan == planned.chosen.footprint.plan
            assert ("it will not fit" in plan_text(planned)) == (room < needed)

    @pytest.mark.parametrize("engine", [{"vram": "9000"}, {"placement": {"activations_device": 0.5}}, {"vram": "1TiB"}])
    def test_what_was_put_on_a_gpu_by_hand_counts(
        self, engine: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = with_engine(values_in(tmp_path), ram="2MiB", fill_ram=True, **engine)
        values["model"]["config"]["num_hidden_layers"] = 8
        found = plan(values)
        for spare in range(0, 90_000, 15_000):
            machine = replace(found.machine, room_bytes=found.given.footprint.device_bytes + spare)
            monkeypatch.setattr(planner, "measure", lambda *_, machine=machine, **__: machine)
            assert plan(values).chosen.footprint.device_bytes <= (machine.room_bytes or 0)

    def test_what_neither_a_gpu_nor_ram_has_room_for_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = values_in(tmp_path, gradient_accumulation_steps=1, max_grad_norm=0.0)
        values = with_engine(values, ram="500KiB", fill_ram=True, layers_per_block=1, vram=100_000)
        machine = replace(plan(values).machine, device="cuda", room_bytes=30_000)
        monkeypatch.setattr(planner, "measure", lambda *_, **__: machine)
        planned = plan(values)
        assert planned.chosen == planned.given
        assert "it will not fit" in plan_text(planned)

    def test_a_run_that_does_not_fit_is_refused_before_anything_is_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measuring, "look_at_drive", None)
        with pytest.raises(PlanError, match=r"^engine\.ram: needs"):
            plan(with_engine(values_in(tmp_path), ram="64KiB"))

    def test_what_train_refuses_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measuring, "look_at_drive", None)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("")
        for values, words in (
            (with_engine(values_in(tmp_path), storage=[str(tmp_path / "mine")]), "not part of a GreedySnake store"),
            (with_engine(values_in(tmp_path), ram="100TiB"), "the machine has"),
            (values_in(tmp_path, sequence_length=65), "positions"),
        ):
            with pytest.raises((PlanError, StorageError, ConfigError), match=words):
                plan(values)

    def test_a_run_of_one_large_micro_batch_is_tried_with_one(self, tmp_path: Path) -> None:
        values = values_in(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=64)
        values = with_engine(values, ram="1300KiB")
        prepare(load_config(values))
        assert plan(values).given.footprint.ram_bytes <= 1300 << 10

    def test_a_drive_that_cannot_be_measured_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drive = Drive("x", exists=True, why_no_bandwidth="12 MiB are free, measuring asks for 1 GiB")
        monkeypatch.setattr(measuring, "look_at_drive", lambda path: drive)
        with pytest.raises(StorageError, match=r"^engine\.storage: how fast .* \(12 MiB are free"):
            plan(values_in(tmp_path))

    def test_the_drive_with_most_to_do_sets_the_pace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        names = {"a": 1, "b": 1, "c": 2}
        for name in names:
            (tmp_path / name).mkdir()
        monkeypatch.setattr(
            measuring,
            "look_at_drive",
            lambda path: Drive(str(path), exists=True, device_number=names[path.name], bandwidth=FAST),
        )
        rates = plan(with_engine(values_in(tmp_path), storage=[str(tmp_path / name) for name in names])).machine.rates
        assert rates.ssd_bytes_per_s == 1.5 * FAST.mixed_bytes_per_s  # the first has two thirds of the bytes
        assert rates.ssd_read_bytes_per_s == 1.5 * FAST.read_bytes_per_s

    @pytest.mark.parametrize(
        ("model", "num_tried"),
        [
            ({"model_type": "llama", "num_hidden_layers": 7}, 4),
            ({"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": True}, 2),
            ({"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "layer_types": MIXED * 3}, 7),
            (
                {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 24, **EXPERTS}
                | {"mlp_only_layers": [1], "num_hidden_layers": 6},
                5,
            ),
        ],
        ids=["alike", "few", "two kinds of attention", "experts but in one"],
    )
    def test_some_layers_of_each_kind_are_tried(self, model: Values, num_tried: int, tmp_path: Path) -> None:
        values = values_in(tmp_path)
        sizes = {**SIZES, "vocab_size": 264, "max_position_embeddings": 64}
        values["model"]["config"] = {**sizes, "num_hidden_layers": len(MIXED * 3), **model}
        said: list[str] = []
        planned = plan_run(load_config(values), said.append)
        num_layers = values["model"]["config"]["num_hidden_layers"]
        assert f"training {num_tried} of {num_layers} layers for 3 steps on cpu" in said
        assert len(planned.machine.times) == num_layers + 2
        assert all(math.isfinite(each.backward_s) and each.backward_s > 0 for each in planned.machine.times)

    def test_a_run_that_has_begun_can_be_planned(self, tmp_path: Path) -> None:
        from greedysnake.trainer import Trainer

        values = values_in(tmp_path, max_steps=2)
        Trainer(values).train()
        before = everything_in(tmp_path)
        planned = plan(values)
        assert everything_in(tmp_path) == before
        path = tmp_path / "planned.yaml"
        path.write_text(planned.chosen.config.as_yaml())
        assert Trainer(load_config(path, ["training.max_steps=4"])).train().num_steps == 4


@pytest.mark.usefixtures("one_thread")
def test_the_command_prints_tables_or_json_and_writes_a_file(tmp_path: Path) -> None:
    config, out = tmp_path / "train.yaml", tmp_path / "planned.yaml"
    config.write_text(settings.write_yaml(values_in(tmp_path)))
    trace = tmp_path / "trace.json"
    options = ["--out", str(out), "--trace", str(trace)]
    shown = CliRunner().invoke(cli.app, ["plan", str(config), *options], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    for words in ("as configured", "as planned", "written to SSD per step", f"next: greedysnake train {out}"):
        assert words in shown.output
    assert not load_config(out).engine.fill_ram
    assert {event["name"] for event in json.loads(trace.read_text())["traceEvents"]} >= {"F0.0", "B3.0", "W1.0"}
    done = CliRunner().invoke(cli.app, ["plan", str(config), "training.gradient_accumulation_steps=3", "--json"])
    found = json.loads(done.stdout)
    assert found["as_planned"]["micro_batches"] == 3
    assert found["rates"]["ssd_bytes_per_s"] == FAST.mixed_bytes_per_s
    again = CliRunner().invoke(cli.app, ["plan", str(config), "--out", str(out)])
    assert "exists: give another name" in str(again.exception)
    both = ["--out", str(tmp_path / "x"), "--trace", str(tmp_path / "x")]
    assert "give two names" in str(CliRunner().invoke(cli.app, ["plan", str(config), *both]).exception)
    lost = CliRunner().invoke(cli.app, ["plan", str(config), "--out", str(tmp_path / "no" / "planned.yaml")])
    assert "is no folder, or not yours" in str(lost.exception)


@pytest.mark.usefixtures("one_thread")
def test_a_run_of_several_ranks_is_planned_as_each_of_them_would_run_it(tmp_path: Path) -> None:
    """And what is written is what they train with."""
    values = values_in(tmp_path, max_steps=4)
    planned = plan_run(load_config(values), quiet, num_ranks=2)
    footprint, config = planned.chosen.footprint, planned.chosen.config
    assert footprint.plan.num_ranks == 2 and footprint.ram_budget_bytes == 32 << 20
    assert config.engine.ram == 64 << 20  # of the host
    assert planned.chosen.num_tokens == 2 * config.training.gradient_accumulation_steps * 2 * 32
    mine = planned.machine.of_one_of(2)
    assert mine.rates.ssd_bytes_per_s == planned.machine.rates.ssd_bytes_per_s / 2
    assert mine.times[1].forward_s == 2 * planned.machine.times[1].forward_s  # two share the cores
    assert planned.chosen.disk_bytes == 2 * sum(footprint.disk_bytes)
    with pytest.raises(ConfigError, match="--ranks is 0"):
        plan_run(load_config(values), quiet, num_ranks=0)


def test_gpus_and_their_links_are_not_shared() -> None:
    machine = Machine("cuda", Rates(4e9, 5e10, 6e10, 4e9, 8e10, 3e9, None), (BlockTimes(1.0, 3.0),))
    mine = machine.of_one_of(4)
    assert mine.times == machine.times
    assert mine.rates == Rates(1e9, 5e10, 6e10, 1e9, 2e10, 0.75e9, None)


@pytest.mark.gpu
def test_a_gpu_is_measured_and_filled_and_trains_within_its_room(tmp_path: Path) -> None:
    import torch

    from greedysnake.trainer import Trainer

    values = with_engine(values_in(tmp_path, max_steps=3), device="cuda", dtype="bfloat16", ram="256MiB")
    values["model"]["config"].update({"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6})
    planned = plan(values)
    room, total = planned.machine.room_bytes, torch.cuda.get_device_properties(0).total_memory
    assert room is not None and 0 < room < total
    shares = planned.chosen.config.engine.placement
    assert (shares.activations_device, shares.weights_device) == (1.0, 1.0)
    path = tmp_path / "planned.yaml"
    path.write_text(planned.chosen.config.as_yaml())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert Trainer(path).train().num_steps == 3
    needed = planned.chosen.footprint.device_bytes
    computing = total - room  # and what is left free on purpose
    assert needed <= torch.cuda.max_memory_allocated() <= needed + computing


@pytest.mark.parametrize(("moments", "share"), [("float32", 0.88), ("bfloat16", 0.8), ("int8", 1.0)])
def test_compression_spares_as_many_bytes_of_moments_that_have_fewer(moments: str, share: float) -> None:
    """An exponent has a byte in both. Of 10 bytes of state 1.2 are 12 %, of 6 they are 20 %."""
    machine = Machine("cpu", Rates(1.0, 1.0, 1.0, 1.0, 1.0, state_share=0.88), ())
    found = machine.with_state_of(precision_of("bfloat16", moments), measured=precision_of("bfloat16", "float32"))
    assert found.rates == replace(machine.rates, state_share=pytest.approx(share))
