"""Several ranks train one model as one process does that is given all of their micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import greedysnake as gs
import reference
import together
from greedysnake.verify import step_ssd_bytes
from reference import Batch, Trained, make_batches, make_parts, train_engine, train_reference

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 4
TOLERANCE = 1e-5
"""Of a tensor's largest value: the same sums in another order, as in tests/test_parity.py."""
CUDA_TOLERANCE = 1e-4
"""Likewise, with products that a GPU adds up in an order of its own."""
OPTIMIZER = replace(reference.OPTIMIZER, eps=1e-3)
"""Adam divides a gradient by its own size: where one is tiny, this keeps its noise from reaching the weight in full."""

CASES: dict[str, dict[str, object]] = {
    "ssd": {"alpha": 0.25},
    "all early": {"alpha": 0.0},
    "all late, little in ram": {
        "alpha": 1.0,
        "placement": {"activations_ram": 0, "gradients_device": 0, "gradients_ram": 0},
    },
    "clipped": {"alpha": 0.5, "max_grad_norm": 0.5},
    "clipped, optimistic": {"alpha": 0.25, "max_grad_norm": 3.0, "optimistic": True},
    "tied": {"alpha": 0.5, "model": {"tied": True}},
    "ram": {"placement": {"weights_ram": 1, "optimizer_ram": 1}, "model": {"uneven": True}},
    "partly frozen": {"model": {"frozen": ["layers.1.up", "layers.2.norm", "layers.2.down", "head.norm"]}},
    "lower half frozen": {"model": {"frozen": ["embed", "layers.0", "layers.1"]}},
    "mixed": {"model": {"mixed": True, "uneven": True, "tied": True, "dropout": 0.1}, "alpha": 0.5},
    "kept": {"placement": {"weights_device": 0.5, "graphs_device": 0.25}},
    "horizontal": {"schedule": "horizontal", "alpha": 0.5},
}


def micro_batches(step: int) -> list[Batch]:
    return make_batches(6, step)


def own_batches(step: int) -> list[Batch]:
    """Rank 0 has more of them than the others, but for a horizontal step."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    batches = micro_batches(step)
    ends = [len(batches) - (count - 1 - number) for number in range(count)]
    return batches[ends[rank - 1] if rank else 0 : ends[rank]]


def equal_batches(step: int) -> list[Batch]:
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    each = len(micro_batches(step)) // count
    return micro_batches(step)[rank * each : (rank + 1) * each]


def options_of(case: str, directory: str, device: str = "cpu") -> tuple[gs.Sequential, dict[str, object]]:
    options = {**CASES[case], "device": device}
    model = make_parts(**options.pop("model", {})).sequential()  # type: ignore[arg-type]
    options["placement"] = gs.Placement(**options.pop("placement", {}))  # type: ignore[arg-type]
    defaults = {"dtype": "float32", "chunk_params": 2048, "storage": [directory], "overwrite": True}
    return model, {**defaults, **options}


def train_cases(directory: str, cases: list[str], device: str = "cpu") -> None:
    """Every rank leaves what it trained in a file."""
    rank = torch.distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    for case in cases:
        model, options = options_of(case, directory, device)
        batches = equal_batches if options.get("schedule") == "horizontal" else own_batches
        torch.save(
            vars(train_engine(model, batches, NUM_STEPS, optimizer=OPTIMIZER, **options)), f"{directory}-{case}-{rank}"
        )


def load(directory: Path, case: str, rank: int) -> Trained:
    return Trained(**torch.load(f"{directory}-{case}-{rank}", weights_only=False))


def train_plainly(case: str) -> Trained:
    parts = make_parts(**CASES[case].get("model", {}))  # type: ignore[arg-type]
    clip = CASES[case].get("max_grad_norm")
    return train_reference(parts, OPTIMIZER, micro_batches, NUM_STEPS, max_grad_norm=clip)  # type: ignore[arg-type]


def require_close(found: Trained, wanted: Trained, tolerance: float = TOLERANCE) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
    assert set(found.parameters) == set(wanted.parameters)
    for name, values in wanted.parameters.items():
        assert (found.parameters[name] - values).abs().max() <= tolerance * values.abs().max(), name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_train_as_plain_pytorch_does_with_all_of_their_micro_batches(num_ranks: int, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    together.call(num_ranks, "test_ranks", "train_cases", str(directory), list(CASES))
    for case in CASES:
        first = load(directory, case, 0)
        require_close(first, train_plainly(case))
        for rank in range(1, num_ranks):  # all ranks tell the same, to the bit
            other = load(directory, case, rank)
            assert (other.losses, other.norms) == (first.losses, first.norms), case
            assert all(torch.equal(other.parameters[name], value) for name, value in first.parameters.items()), case


@pytest.mark.gpu
def test_ranks_with_a_gpu_each_train_as_plain_pytorch_does(tmp_path: Path) -> None:
    num_ranks = min(torch.cuda.device_count(), 3)
    if num_ranks < 2:
        pytest.skip("there is one GPU")
    cases = [case for case in CASES if case != "mixed"]  # whose dropout draws from other generators on a GPU
    together.call(num_ranks, "test_ranks", "train_cases", str(tmp_path / "store"), cases, "cuda", timeout_s=600)
    for case in cases:
        require_close(load(tmp_path / "store", case, 0), train_plainly(case), CUDA_TOLERANCE)


ALIKE: dict[str, dict[str, object]] = {
    "early": {"alpha": 0.0},
    "late": {"alpha": 1.0, "placement": {"gradients_ram": 0, "activations_ram": 0, "gradients_device": 0}},
    "half in ram": {"alpha": 0.4, "placement": {"weights_ram": 0.6, "optimizer_ram": 0.3}, "chunk_params": 4096},
    "few slots": {"alpha": 0.25, "slots": {"weights": 3, "gradients": 1, "staging": 1, "updates": 1, "transfers": 1}},
}


def train_alike(directory: str) -> list[tuple[int, int]]:
    """The same training in several ways. Returns what the last step of the first moved on SSD, and what the formulas
    say."""
    rank, moved = torch.distributed.get_rank(), []
    for case, options in ALIKE.items():
        placement = gs.Placement(**options.get("placement", {}))  # type: ignore[arg-type]
        slots = gs.Slots(**options.get("slots", {}))  # type: ignore[arg-type]
        compresses = case != "early"  # whose bytes are counted
        given = {
            "chunk_params": 4096,
            "compress_moments": compresses,
            **options,
            "placement": placement,
            "slots": slots,
        }
        storage = [f"{directory}/{case}"]
        with gs.Engine(make_parts(tied=True).sequential(), OPTIMIZER, storage=storage, ram="64MiB", **given) as engine:  # type: ignore[arg-type]
            results = [engine.step(own_batches(step)) for step in range(NUM_STEPS)]
            if case == "early":
                last = results[-1]
                moved = [(last.ssd_read_bytes, last.ssd_write_bytes), step_ssd_bytes(engine.plan, 1)]
            values = [[value for value in named] for named in (*engine.named_parameters(), *engine.named_moments())]
        torch.save(([result.loss for result in results], values), f"{directory}-{case}-{rank}")
    return moved


def test_alpha_and_placement_change_no_bit_and_a_rank_moves_what_it_holds(tmp_path: Path) -> None:
    directory = tmp_path / "stores"
    for moved, formula in together.call(2, "test_ranks", "train_alike", str(directory)):  # type: ignore[misc]
        assert moved == formula
    wanted_losses, wanted = torch.load(f"{directory}-early-0", weights_only=False)
    for case in ALIKE:
        losses, values = torch.load(f"{directory}-{case}-1", weights_only=False)
        assert losses == wanted_losses, case
        for (name, *tensors), (other, *others) in zip(values, wanted, strict=True):
            assert name == other and all(map(torch.equal, tensors, others)), (case, name)
