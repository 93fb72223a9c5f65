"""A checkpoint is read without an engine, and given to another number of ranks, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import greedysnake as gs
import together
from greedysnake.runtime.stored import StoredModel, copy_for_ranks
from greedysnake.shapes import precision_of
from reference import OPTIMIZER, make_batches, make_parts

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = {"tied": True, "uneven": True, "num_layers": 5, "frozen": ["layers.1.up", "head.norm"]}
Values = dict[str, list[torch.Tensor]]


def open_engine(
    directories: list[str], moments: str = "float32", *, layers_per_block: int = 1, **options: object
) -> gs.Engine:
    defaults = {"ram": "64MiB", "chunk_params": None if options.get("resume") else 4096}
    optimizer = replace(OPTIMIZER, moments=moments)
    model = make_parts(**MODEL).sequential(layers_per_block=layers_per_block)
    return gs.Engine(model, optimizer, storage=directories, **{**defaults, **options})  # type: ignore[arg-type]


def values_of(engine: gs.Engine) -> Values:
    values = {name: [value] for name, value in engine.named_parameters()}
    for name, *moments in engine.named_moments():
        values[name] += moments
    return values


def train(directories: list[str], dtype: str, moments: str, out: str, layers_per_block: int = 1) -> None:
    """Two steps, a checkpoint, and what it holds in a file."""
    rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    options: dict[str, object] = {"dtype": dtype, "placement": gs.Placement(0.5, 0.3)}
    with open_engine(directories, moments, layers_per_block=layers_per_block, **options) as engine:
        for step in range(2):
            engine.step(make_batches(6, step)[rank::count])
        engine.save({"is": "kept"})
        torch.save(values_of(engine), f"{out}-{rank}")


def resume(directories: list[str], dtype: str, moments: str, out: str, layers_per_block: int = 1) -> tuple[int, str]:
    with open_engine(directories, moments, dtype=dtype, resume=True, layers_per_block=layers_per_block) as engine:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.save(values_of(engine), f"{out}-{rank}")
        engine.step(make_batches(2, 2))
        return engine.num_steps, str(engine.metadata)


def require_equal(found: Values, wanted: Values) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        assert len(found[name]) == len(values) and all(map(torch.equal, found[name], values)), name


@pytest.mark.parametrize(
    ("had", "gets", "dtype", "moments"),
    [
        (3, 2, "bfloat16", "float32"),
        (2, 1, "float32", "float32"),
        (1, 2, "bfloat16", "int8"),
        (3, 2, "bfloat16", "int8"),
        (1, 1, "float32", "bfloat16"),
    ],
)
def test_a_checkpoint_goes_to_another_number_of_ranks_bit_for_bit(
    had: int, gets: int, dtype: str, moments: str, tmp_path: Path
) -> None:
    old, new = ([str(tmp_path / name / drive) for drive in ("one", "two")] for name in ("old", "new"))
    if had > 1:
        together.call(had, "runtime.test_stored", "train", old, dtype, moments, str(tmp_path / "trained"))
    else:
        train(old, dtype, moments, str(tmp_path / "trained"))
    wanted: Values = torch.load(tmp_path / "trained-0")
    model = make_parts(**MODEL).sequential()
    with StoredModel(model, old, precision_of(dtype, moments)) as stored:
        assert (stored.num_ranks, stored.num_steps, stored.metadata) == (had, 2, {"is": "kept"})
        require_equal(
            {name: [value] for name, value in stored.named_parameters()},
            {name: values[:1] for name, values in wanted.items()},
        )
        copy_for_ranks(model, stored, new, gets)
    out = str(tmp_path / "resumed")
    if gets > 1:
        answers = together.call(gets, "runtime.test_stored", "resume", new, dtype, moments, out)
    else:
        answers = [list(resume(new, dtype, moments, out))]
    assert answers == [[3, "{'is': 'kept'}"]] * gets
    for rank in range(gets):
        require_equal(torch.load(f"{out}-{rank}"), wanted)


@pytest.mark.parametrize(
    ("had", "gets", "dtype", "moments"),
    [
        ((1, 1), (1, 2), "bfloat16", "float32"),
        ((1, 3), (1, 1), "float32", "float32"),
        ((2, 1), (1, 2), "bfloat16", "int8"),
        ((1, 2), (2, 3), "bfloat16", "bfloat16"),
    ],
)
def test_a_checkpoint_goes_to_other_blocks_bit_for_bit(
    had: tuple[int, int], gets: tuple[int, int], dtype: str, moments: str, tmp_path: Path
) -> None:
    """(ranks, layers in a block) before and after."""
    old, new = ([str(tmp_path / name)] for name in ("old", "new"))
    arguments = dtype, moments, str(tmp_path / "trained"), had[1]
    if had[0] > 1:
        together.call(had[0], "runtime.test_stored", "train", old, *arguments)
    else:
        train(old, *arguments)
    before, after = (make_parts(**MODEL).sequential(layers_per_block=count) for _, count in (had, gets))
    with StoredModel(before, old, precision_of(dtype, moments)) as stored:
        copy_for_ranks(after, stored, new, gets[0])
    arguments = dtype, moments, str(tmp_path / "resumed"), gets[1]
    if gets[0] > 1:
        together.call(gets[0], "runtime.test_stored", "resume", new, *arguments)
    else:
        resume(new, *arguments)
    for rank in range(gets[0]):
        require_equal(torch.load(tmp_path / f"resumed-{rank}"), torch.load(tmp_path / "trained-0"))


@pytest.mark.parametrize(
    ("had", "gets", "kinds"),
    [
        (1, 1, ("float32", "int8")),
        (1, 1, ("float32", "bfloat16")),
        (1, 2, ("int8", "float32")),
        (2, 1, ("bfloat16", "int8")),
        (1, 1, ("int8", "bfloat16")),
    ],
)
def test_moments_change_their_kind_and_nothing_else_does(
    had: int, gets: int, kinds: tuple[str, str], tmp_path: Path
) -> None:
    old, new = [str(tmp_path / "old")], [str(tmp_path / "new")]
    if had > 1:
        together.call(had, "runtime.test_stored", "train", old, "bfloat16", kinds[0], str(tmp_path / "trained"))
    else:
        train(old, "bfloat16", kinds[0], str(tmp_path / "trained"))
    model = make_parts(**MODEL).sequential()
    with StoredModel(model, old, precision_of("bfloat16", kinds[0])) as stored:
        copy_for_ranks(model, stored, new, gets, moments=kinds[1])
    out = str(tmp_path / "resumed")
    if gets > 1:
        together.call(gets, "runtime.test_stored", "resume", new, "bfloat16", kinds[1], out)
    else:
        resume(new, "bfloat16", kinds[1], out)
    # Half a place of the new kind: 8 binary digits, or 4 and for small ones 2^-16 of the largest of the group.
    near = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": 2.0**-4}[kinds[1]]
    wanted: Values = torch.load(tmp_path / "trained-0")
    for rank in range(gets):
        found: Values = torch.load(f"{out}-{rank}")
        assert set(found) == set(wanted)
        for name, (weight, *moments) in wanted.items():
            assert torch.equal(found[name][0], weight), name
            for moment, converted in zip(moments, found[name][1:], strict=True):
                small = 2.0**-16 * moment.abs().max() * (kinds[1] == "int8")
                assert ((converted - moment).abs() <= near * moment.abs() + small).all(), name
                assert near == 0.0 or not torch.equal(converted, moment), name


def test_a_checkpoint_with_other_moments_is_refused_as_the_kind_it_had(tmp_path: Path) -> None:
    train([str(tmp_path / "old")], "bfloat16", "float32", str(tmp_path / "trained"))
    model = make_parts(**MODEL).sequential()
    with StoredModel(model, [tmp_path / "old"]) as stored:
        copy_for_ranks(model, stored, [tmp_path / "new"], 1, moments="int8")
    with pytest.raises(
        gs.ConfigError, match=r"the checkpoint has them in 'int8'.*greedysnake reshard --moments float32"
    ):
        open_engine([str(tmp_path / "new")], resume=True)


def never(name: str, parameter: torch.Tensor) -> bool:
    return False


def train_unlike(directory: str) -> None:
    """Ranks with chunks of different sizes, and a rule of decay that lays parameters out in another order."""
    with open_engine([directory], chunk_params=4096 * (1 + dist.get_rank()), decays=never) as engine:
        engine.step(make_batches(2, 0))
        engine.save()
        torch.save(values_of(engine), f"{directory}-{dist.get_rank()}")


def test_chunks_of_each_rank_and_another_rule_of_decay_are_read_as_they_are(tmp_path: Path) -> None:
    together.call(2, "runtime.test_stored", "train_unlike", str(tmp_path / "old"))
    model, wanted = make_parts(**MODEL).sequential(), torch.load(tmp_path / "old-0")
    with StoredModel(model, [tmp_path / "old"], decays=never) as stored:
        copy_for_ranks(model, stored, [tmp_path / "new"], 1)
    with open_engine([str(tmp_path / "new")], resume=True, decays=never) as engine:
        require_equal(values_of(engine), wanted)


def test_a_parameter_is_read_as_it_is_after_others_went_through_the_same_memory(tmp_path: Path) -> None:
    with open_engine([str(tmp_path)]) as engine:
        engine.step(make_batches(2, 0))
        engine.save()
    name, count = "layers.3.up.weight", 128

    def read(stored: StoredModel) -> list[torch.Tensor]:
        vectors = stored.precision.vectors(trainable=True)
        targets = {each.name: torch.zeros(each.size(count), dtype=torch.uint8) for each in vectors}
        stored.read_parameter(name, 0, targets, count)
        return list(targets.values())

    with StoredModel(make_parts(**MODEL).sequential(), [tmp_path]) as stored:
        before = read(stored)
        assert all(each.any() for each in before)
        list(stored.named_parameters())
        assert all(map(torch.equal, read(stored), before))


def test_a_store_in_use_is_not_read(tmp_path: Path) -> None:
    with open_engine([str(tmp_path)]) as engine:
        engine.save()
        with pytest.raises(gs.StorageError, match="in use by process"):
            StoredModel(make_parts(**MODEL).sequential(), [tmp_path])


def test_without_a_checkpoint_there_is_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(gs.StorageError, match="holds no checkpoint"):
        StoredModel(make_parts(**MODEL).sequential(), [tmp_path])
