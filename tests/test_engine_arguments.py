"""What an engine is given: refused in one sentence when it makes no sense, and chosen well when it is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import greedysnake as gs
from greedysnake import _native
from greedysnake.runtime.arguments import checked_device
from reference import OPTIMIZER, Embed, Layer, Parts, make_batches, make_parts, num_targets, train_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def make_engine(parts: Parts | gs.Sequential | None = None, **options: Any) -> gs.Engine:
    model = parts.sequential() if isinstance(parts, Parts) else parts or make_parts().sequential()
    defaults: dict[str, Any] = {"ram": "64MiB", "dtype": "float32", "optimizer": OPTIMIZER}
    options = {**defaults, **options}
    return gs.Engine(model, options.pop("optimizer"), **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"alpha": None}, "alpha is None: give a fraction"),
        ({"alpha": "0.25"}, "alpha is '0.25': give a fraction"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1': give a positive number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm is nan: give a positive number"),
        ({"placement": {"weights_ram": 1}}, r"placement is a dict: give a gs\.Placement"),
        ({"slots": 3}, r"slots is a int: give a gs\.Slots"),
        ({"optimizer": torch.optim.AdamW}, r"optimizer is a type: give a gs\.AdamW"),
        ({"device": "gpu"}, "device is 'gpu': use 'cpu' or 'cuda'"),
        ({"device": 1.5}, "device is 1.5: use 'cpu' or 'cuda'"),
        ({"num_threads": 0}, "num_threads is 0: give a whole number"),
        ({"num_threads": 1.5}, "num_threads is 1.5: give a whole number"),
        ({"cpus": 0}, "cpus is 0: give a list"),
        ({"cpus": "01"}, "cpus is '01': give a list"),
        ({"io": {}}, r"io is a dict: give a gs\.IoOptions"),
        ({"seed": None}, "seed is None: give a whole number"),
        ({"chunk_params": 1.5}, "chunk_params is 1.5: give a whole number"),
        ({"storage": 3}, "storage is 3: give a list of directories"),
        ({"storage": [3]}, "storage names 3: give each directory as a text or a Path"),
        ({"storage": [b"x"]}, "storage names b'x': give each directory as a text or a Path"),
        ({"dtype": torch.float16}, "dtype is float16, which needs loss scaling"),
        ({"dtype": "bf16"}, "dtype is 'bf16': use 'bfloat16' or 'float32'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_one_sentence(
    options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(gs.ConfigError, match=f"^{sentence}"):
        make_engine(**{"storage": [tmp_path / "store"], **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: gs.AdamW(lr="x"), "lr is 'x': give a number"),  # type: ignore[arg-type]
        (lambda: gs.AdamW(lr=1, betas=0.9), "betas is 0.9: give two numbers"),  # type: ignore[arg-type]
        (lambda: gs.AdamW(lr=1, betas=("0.9", 0.99)), r"betas\[0\] is '0.9': give a number"),  # type: ignore[arg-type]
        (
            lambda: gs.Sequential(Embed(5, 8), Layer(8, 8), Embed(5, 8), num_targets=num_targets),  # type: ignore[arg-type]
            "layers is a Layer: give a list of modules",
        ),
        (
            lambda: gs.Sequential(Embed(5, 8), [], Embed(5, 8), num_targets=num_targets, layers_per_block=1.5),  # type: ignore[arg-type]
            "layers_per_block is 1.5: give a whole number",
        ),
    ],
)
def test_so_is_one_of_a_model_or_an_optimizer(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(gs.ConfigError, match=f"^{sentence}"):
        make()


def test_a_cpu_that_there_is_not_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(gs.ConfigError, match=r"^cpus is \[99999\]: cannot pin a thread to CPU 99999"):
        make_engine(storage=[tmp_path], cpus=[99999])
    make_engine(storage=[tmp_path]).close()  # nothing is left locked


@pytest.mark.parametrize("limit", ["lane", "pool"])
def test_a_limit_on_threads_is_one_sentence(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel says when `ulimit -u`, `ulimit -v` or the pids of a container are used up."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    if limit == "lane":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    else:
        monkeypatch.setattr(_native, "ThreadPool", refuse)
    with pytest.raises(gs.GreedySnakeError, match=r"could not start: can't start new thread; .*\(ulimit -a\)$"):
        make_engine(storage=[tmp_path])
    monkeypatch.undo()
    make_engine(storage=[tmp_path]).close()


def test_cuda_without_a_number_is_the_device_that_is_current_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    given = ("cuda", torch.device("cuda"), "cuda:0", "cpu")
    assert list(map(str, map(checked_device, given))) == ["cuda:3", "cuda:3", "cuda:0", "cpu"]


def test_dtype_may_be_that_of_torch(tmp_path: Path) -> None:
    with make_engine(storage=[tmp_path], dtype=torch.bfloat16) as engine:
        assert engine.plan.precision.weight_bytes == 2


@pytest.mark.parametrize(
    ("values", "sentence"), [((None,), "the micro-batches are a NoneType"), (([], "x"), "lr is 'x'")]
)
def test_a_step_without_batches_or_rate_is_refused_and_the_engine_goes_on(
    values: tuple[Any, ...], sentence: str, tmp_path: Path
) -> None:
    with make_engine(storage=[tmp_path]) as engine:
        with pytest.raises(gs.ConfigError, match=sentence):
            engine.step(*values)
        engine.step(make_batches(1, 0))


# Functions that make blocks


def values_needed() -> nn.Module:
    layer = Layer(32, 96)
    layer.dropout = float(layer.up.weight.detach().norm()) * 0
    return layer


def once_only() -> Callable[[], nn.Module]:
    layers: Iterator[nn.Module] = iter([])
    return lambda: next(layers)


@pytest.mark.parametrize("make", [values_needed, once_only()])
def test_a_function_that_cannot_be_called_for_the_shapes_is_named(make: Callable[[], nn.Module]) -> None:
    parts = make_parts()
    model = gs.Sequential(parts.embed, [parts.layers[0], make], parts.head, num_targets=num_targets)
    with pytest.raises(gs.ConfigError, match=r"^layers\.1 could not be made \(.*first under torch\.device\('meta'\)"):
        make_engine(model)


def test_a_function_that_loads_its_values_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    parts = make_parts()
    values = {name: value.clone() for name, value in parts.layers[0].state_dict().items()}

    def loaded() -> nn.Module:
        layer = Layer(32, 96)
        layer.load_state_dict(values)
        return layer

    with make_engine(
        gs.Sequential(parts.embed, [loaded], parts.head, num_targets=num_targets), storage=[tmp_path]
    ) as engine:
        found = dict(engine.named_parameters())
    assert not recwarn.list
    assert torch.equal(found["layers.0.up.weight"], values["up.weight"])


def test_an_error_in_the_embedding_has_the_name_of_its_op_and_closes_the_engine(tmp_path: Path) -> None:
    class Broken(Embed):
        def forward(self, batch: Any) -> torch.Tensor:
            raise RuntimeError("kaboom")

    parts = make_parts()
    engine = make_engine(Parts(Broken(37, 32), parts.layers, parts.head), storage=[tmp_path])
    with pytest.raises(gs.OpError, match=r"^F0\.0: RuntimeError: kaboom") as caught:
        engine.step(make_batches(2, 0))
    assert caught.value.op == "F0.0"
    with pytest.raises(gs.GreedySnakeError, match="the engine is closed"):
        engine.step(make_batches(2, 0))


# Chunks


def test_chunks_suit_a_small_budget_and_stay_what_they_are_in_the_checkpoint(tmp_path: Path) -> None:
    """Without a word about chunks: a model of many times the budget trains, and goes on with another budget."""
    parts = make_parts(hidden=128, width=4096, num_layers=6)
    small = {"ram": "4MiB", "placement": gs.Placement(activations_ram=0)}
    with make_engine(parts, storage=[tmp_path], **small) as engine:
        assert 12 * sum(block.num_params for block in engine.plan.blocks) > 16 * (4 << 20)
        engine.step(make_batches(2, 0))
        engine.save()
        chunks = [block.chunks for block in engine.plan.blocks]
        engine.step(make_batches(2, 1))
        wanted = dict(engine.named_parameters())
    parts = make_parts(hidden=128, width=4096, num_layers=6)
    with make_engine(parts, storage=[tmp_path], ram="1GiB", resume=True) as engine:
        assert [block.chunks for block in engine.plan.blocks] == chunks
        engine.step(make_batches(2, 1))
        for name, value in engine.named_parameters():
            assert torch.equal(value, wanted[name]), name


def test_other_chunks_than_those_of_the_checkpoint_are_refused_by_name(tmp_path: Path) -> None:
    with make_engine(storage=[tmp_path], chunk_params=2048) as engine:
        engine.save()
    with pytest.raises(gs.ConfigError, match="chunk_params is 4096, the checkpoint has chunks of 2048"):
        make_engine(storage=[tmp_path], chunk_params=4096, resume=True)


def test_a_large_budget_has_large_chunks(tmp_path: Path) -> None:
    parts = make_parts(hidden=128, width=40000, num_layers=1)
    with make_engine(parts, ram="4GiB", placement=gs.Placement(weights_ram=1, optimizer_ram=1)) as engine:
        assert max(chunk.num_params for block in engine.plan.blocks for chunk in block.chunks) > 2 << 20


# Clipping that clips nothing


def test_an_infinite_norm_clips_nothing_and_tells_the_norm(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "chunk_params": 4096}

    def batches(step: int) -> Any:
        return make_batches(2, step)

    free = train_engine(make_parts().sequential(), batches, 3, storage=[tmp_path / "free"], **options)
    known = train_engine(
        make_parts().sequential(), batches, 3, storage=[tmp_path / "inf"], max_grad_norm=float("inf"), **options
    )
    assert len(known.norms) == 3 and min(known.norms) > 0
    assert known.losses == free.losses
    for name, value in free.parameters.items():
        assert torch.equal(known.parameters[name], value), name
