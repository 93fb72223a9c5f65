"""Values on their way to the drive: one chunk is prepared while the one before is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import greedysnake as gs
from greedysnake.errors import StorageError
from greedysnake.runtime.store import Store, StoreTicket
from reference import make_batches, make_engine, make_parts

IN_RAM = gs.Placement(weights_ram=1.0, optimizer_ram=1.0)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many writes were under way after each that was begun."""
    counts, under_way = [], set[int]()
    write, wait = Store.write, Store.wait

    def counting(self: Store, *values: Any, **options: Any) -> StoreTicket:
        ticket = write(self, *values, **options)
        under_way.add(id(ticket))
        counts.append(len(under_way))
        return ticket

    def waited(self: Store, ticket: StoreTicket) -> None:
        under_way.discard(id(ticket))
        wait(self, ticket)

    monkeypatch.setattr(Store, "write", counting)
    monkeypatch.setattr(Store, "wait", waited)
    return counts


@pytest.mark.parametrize(("num_slots", "at_once"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_chunk_is_prepared_while_the_one_before_is_written(
    num_slots: int, at_once: int, dtype: str, tmp_path: Path, most: list[int]
) -> None:
    parts = make_parts()
    wanted = {name: value.detach().clone() for name, value in parts.named_parameters().items()}
    options: dict[str, Any] = {"slots": gs.Slots(updates=num_slots), "dtype": dtype, "chunk_params": 1024}
    with make_engine(parts, tmp_path, **options) as engine:
        assert max(most) == at_once
        for name, value in engine.named_parameters():
            assert torch.equal(value, wanted[name]), name
        for name, average, square in engine.named_moments():
            assert not average.any() and not square.any(), name


def test_a_checkpoint_of_what_lives_in_ram_is_written_so_too(tmp_path: Path, most: list[int]) -> None:
    with make_engine(make_parts(), tmp_path, placement=IN_RAM, chunk_params=1024) as engine:
        engine.step(make_batches(2, 0))
        most.clear()
        engine.save()
        assert max(most) == 2
        wanted = dict(engine.named_parameters())
    with make_engine(make_parts(), tmp_path, placement=IN_RAM, resume=True) as engine:
        assert all(torch.equal(value, wanted[name]) for name, value in engine.named_parameters())


@pytest.mark.parametrize(
    "placement",
    [gs.Placement(weights_ram=1.0), gs.Placement(optimizer_ram=1.0), gs.Placement(weights_ram=0.5, optimizer_ram=0.7)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_reads_nothing_that_is_on_the_drive_already(
    dtype: str, placement: gs.Placement, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "placement": placement, "chunk_params": 1024}
    with make_engine(make_parts(frozen=["layers.1"]), tmp_path, **options) as engine:
        engine.step(make_batches(2, 0))
        engine.flush()
        before = engine.io_counters
        engine.save()
        after = engine.io_counters
        assert before is not None and after is not None
        assert after.read_bytes == before.read_bytes
        wanted = dict(engine.named_parameters()), list(engine.named_moments())
    with make_engine(make_parts(frozen=["layers.1"]), tmp_path, **options, resume=True) as engine:
        assert all(torch.equal(value, wanted[0][name]) for name, value in engine.named_parameters())
        for found, moments in zip(engine.named_moments(), wanted[1], strict=True):
            assert torch.equal(found[1], moments[1]) and torch.equal(found[2], moments[2]), found[0]


def test_after_a_write_that_failed_none_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are used again, and so is what is written to."""
    write, wait, under_way = Store.write, Store.wait, set[int]()

    def noted(self: Store, *values: Any) -> StoreTicket:
        ticket = write(self, *values)
        under_way.add(id(ticket))
        return ticket

    def failing(self: Store, ticket: StoreTicket) -> None:
        wait(self, ticket)
        under_way.discard(id(ticket))
        if under_way:
            raise StorageError("the drive is gone")

    with make_engine(make_parts(), tmp_path, placement=IN_RAM, chunk_params=1024) as engine:
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="the drive is gone"):
            patch.setattr(Store, "write", noted)
            patch.setattr(Store, "wait", failing)
            engine.save()
        assert not under_way
        engine.save()
