"""The folder of a run and its storage: whose they are, and what happens when a part is missing or damaged."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import greedysnake as gs
from greedysnake import settings
from greedysnake.config import load_config
from greedysnake.runs import begin_run, one_at_a_time
from training import Run, everything_in, metrics_of, quiet, values_in, write_config


def test_another_run_in_the_output_dir_is_left_alone(trained: Path, run: Run) -> None:
    before = everything_in(trained)
    code, _, errors = run("train", trained / "train.yaml", "training.seed=7")
    assert code == 2 and "which holds another run: training.seed was 1 and is 7: give another folder" in errors
    assert everything_in(trained) == before


def test_a_run_whose_storage_is_not_there_does_not_begin_anew(trained: Path, tmp_path: Path, run: Run) -> None:
    before = everything_in(trained)
    code, _, errors = run("train", trained / "train.yaml", f"engine.storage={tmp_path / 'unmounted'}")
    assert code == 2 and f"engine.storage: {tmp_path / 'unmounted'} has nothing of the run in" in errors
    assert everything_in(trained) == before and not (tmp_path / "unmounted").exists()


def test_directories_in_another_order_are_refused_by_name(tmp_path: Path, run: Run) -> None:
    path = write_config(tmp_path, max_steps=1, warmup_steps=0)
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("train", path, f"engine.storage=[{one},{two}]")[0] == 0
    code, _, errors = run("train", path, f"engine.storage=[{two},{one}]", "training.max_steps=2")
    assert code == 2 and f"engine.storage: {one} was the first directory of the run in" in errors
    assert run("train", path, f"engine.storage=[{one},{two}]", "training.max_steps=2")[0] == 0


@pytest.mark.parametrize("command", ["train", "export"])
def test_a_drive_that_is_not_mounted_is_named_and_nothing_is_put_there(command: str, tmp_path: Path, run: Run) -> None:
    path = write_config(tmp_path, max_steps=1, warmup_steps=0)
    one, two = tmp_path / "one", tmp_path / "two"
    train = ["train", path, f"engine.storage=[{one},{two}]"]
    assert run(*train)[0] == 0
    two.rename(tmp_path / "elsewhere")
    code, _, errors = run(*train if command == "train" else ["export", tmp_path / "run", tmp_path / "out"])
    assert (code, len(errors.splitlines())) == (2, 1)
    assert re.search(f"{two} (has nothing of the run in .*: mount the|holds no checkpoint .* mount its) drive", errors)
    assert not two.exists() and not (tmp_path / "out").exists()


def test_a_run_that_was_carried_elsewhere_does_not_begin_anew_where_it_was(tmp_path: Path, run: Run) -> None:
    assert run("train", write_config(tmp_path, max_steps=1, warmup_steps=0))[0] == 0
    was, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copy(was / "run.yaml", tmp_path / "copy.yaml")
    assert "continued from the checkpoint of step 1" in run("train", tmp_path / "copy.yaml")[1]
    was.rename(moved)
    code, _, errors = run("train", moved / "run.yaml", "training.max_steps=2")
    assert (code, len(errors.splitlines())) == (2, 1) and not was.exists()
    assert f"output_dir is {str(was)!r}, where there is no run any more: give output_dir={moved} to go on" in errors
    code, printed, errors = run("train", moved / "run.yaml", "training.max_steps=2", f"output_dir={moved}")
    assert (code, errors) == (0, "") and "step 2/2" in printed and "step 1/2" not in printed
    assert "step 1/1" in run("train", moved / "run.yaml", f"output_dir={tmp_path / 'new'}", "training.max_steps=1")[1]


def test_nor_is_a_run_trained_that_has_taken_its_place(tmp_path: Path, run: Run) -> None:
    path, was, moved = write_config(tmp_path, max_steps=1, warmup_steps=0), tmp_path / "run", tmp_path / "moved"
    assert run("train", path)[0] == 0
    was.rename(moved)
    assert run("train", path)[0] == 0
    before = everything_in(was)
    (tmp_path / "link.yaml").symlink_to(moved / "run.yaml")
    for given in (moved / "run.yaml", tmp_path / "link.yaml"):
        code, _, errors = run("train", given, "training.max_steps=2")
        assert code == 2 and f"where there is another run now: give output_dir={moved} to go on with the one" in errors
    assert everything_in(was) == before


def test_a_copy_of_a_run_does_not_go_on_with_the_original(tmp_path: Path, run: Run) -> None:
    assert run("train", write_config(tmp_path, max_steps=1, warmup_steps=0))[0] == 0
    was, copied = tmp_path / "run", tmp_path / "a copy"
    shutil.copytree(was, copied)
    before = everything_in(was)
    code, _, errors = run("train", copied / "run.yaml", "training.max_steps=2")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"output_dir is {str(was)!r}, of which {copied} is a copy: give 'output_dir={copied}' to go on" in errors
    code, printed, errors = run("train", copied / "run.yaml", "training.max_steps=2", f"output_dir={copied}")
    assert (code, errors) == (0, "") and "step 2/2" in printed and "step 1/2" not in printed
    assert f"next: greedysnake export '{copied}' OUT" in printed
    assert everything_in(was) == before


def test_nor_does_one_whose_storage_was_not_copied(tmp_path: Path, run: Run) -> None:
    was, copied, storage = tmp_path / "run", tmp_path / "copy", tmp_path / "storage"
    path = write_config(tmp_path, max_steps=1, warmup_steps=0)
    assert run("train", path, f"engine.storage={storage}")[0] == 0
    shutil.copytree(was, copied)
    before = everything_in(storage)
    for given in (copied / "run.yaml", path):
        code, _, errors = run("train", given, f"output_dir={copied}", f"engine.storage={storage}")
        assert (code, len(errors.splitlines())) == (2, 1)
        assert f"{storage} holds the checkpoint of the run in {was}, of which {copied} is a copy: give that" in errors
    assert everything_in(storage) == before
    shutil.copytree(storage, tmp_path / "too")
    more = f"output_dir={copied}", f"engine.storage={tmp_path / 'too'}", "training.max_steps=2"
    assert "continued from the checkpoint of step 1" in run("train", copied / "run.yaml", *more)[1]
    assert everything_in(storage) == before
    shutil.rmtree(was)
    copied.rename(tmp_path / "moved")  # now the only one
    more = f"output_dir={tmp_path / 'moved'}", f"engine.storage={storage}", "training.max_steps=2"
    assert "continued from the checkpoint of step 1" in run("train", tmp_path / "moved" / "run.yaml", *more)[1]


def test_the_run_yaml_of_a_run_is_taken_wherever_its_folder_can_be_reached(tmp_path: Path, run: Run) -> None:
    was, moved, link = tmp_path / "run", tmp_path / "moved", tmp_path / "link"
    assert run("train", write_config(tmp_path, max_steps=1, warmup_steps=0))[0] == 0
    was.rename(moved)
    assert run("verify", moved / "run.yaml")[0] == 0 and not was.exists()  # which uses no output_dir
    assert load_config(settings.read_yaml((moved / "run.yaml").read_text(), "a mapping")).output_dir == str(was)
    was.symlink_to(moved)
    link.symlink_to(moved)
    for given in (was, moved, link):
        assert "continued from the checkpoint of step 1" in run("train", given / "run.yaml")[1]


def test_a_run_that_came_to_nothing_may_be_tried_with_other_settings(tmp_path: Path, run: Run) -> None:
    path = write_config(tmp_path, max_steps=1, warmup_steps=0, save_steps=0)
    killed = "import os, sys; from greedysnake import cli, trainer; trainer._Training._save = lambda self: os._exit(9)"
    command = [sys.executable, "-c", f"{killed}; sys.argv = ['', 'train', {str(path)!r}]; cli.main()"]
    assert subprocess.run(command, capture_output=True).returncode == 9
    assert len(metrics_of(tmp_path / "run")) == 1
    code, printed, errors = run("train", path, "training.seed=7", "engine.chunk_params=2048", "engine.dtype=bfloat16")
    assert (code, errors) == (0, "") and "1 of 1 steps done" in printed
    assert len(metrics_of(tmp_path / "run")) == 1


def test_a_checkpoint_of_another_run_in_the_storage_is_left_alone(trained: Path, tmp_path: Path, run: Run) -> None:
    before = everything_in(trained)
    overrides = [f"output_dir={tmp_path / 'other'}", f"engine.storage={trained / 'run' / 'store'}"]
    code, _, errors = run("train", trained / "train.yaml", *overrides)
    assert code == 2 and "store holds the checkpoint of another run: give other directories" in errors
    assert everything_in(trained) == before and not (tmp_path / "other").exists()


def take_over(trained: Path, tmp_path: Path, run: Run) -> Path:
    """A copy of the run whose storage another run was given."""
    shutil.copytree(trained, tmp_path / "copy")
    values = values_in(tmp_path / "copy", max_steps=1, warmup_steps=0, seed=7)
    values |= {"output_dir": str(tmp_path / "other"), "overwrite_output_dir": True}
    values["engine"]["storage"] = [str(tmp_path / "copy" / "run" / "store")]
    (tmp_path / "other.yaml").write_text(settings.write_yaml(values))
    assert run("train", tmp_path / "other.yaml")[0] == 0
    return tmp_path / "copy" / "run"


def test_a_run_notices_that_another_has_overwritten_its_checkpoint(trained: Path, tmp_path: Path, run: Run) -> None:
    taken = take_over(trained, tmp_path, run)
    sentence = f"store holds the checkpoint of another run, which has overwritten that of {taken}: give the output_dir"
    code, _, errors = run("export", taken, tmp_path / "out")
    assert (code, len(errors.splitlines())) == (2, 1) and sentence in errors
    before = everything_in(taken)
    code, _, errors = run("train", trained / "train.yaml", f"output_dir={taken}", f"engine.storage={taken / 'store'}")
    assert (code, len(errors.splitlines())) == (2, 1) and sentence in errors
    assert everything_in(taken) == before and not (tmp_path / "out").exists()
    assert run("export", tmp_path / "other", tmp_path / "out")[0] == 0


def test_the_storage_of_another_run_is_not_taken_for_an_overwritten_one(
    trained: Path, tmp_path: Path, run: Run
) -> None:
    config = write_config(tmp_path, max_steps=2)
    assert run("train", config)[0] == 0
    code, _, errors = run("train", config, f"engine.storage=[{trained / 'run' / 'store'}]", "training.max_steps=3")
    assert code == 2 and "holds the checkpoint of another run, that of" in errors and str(tmp_path) in errors
    assert f"was in {tmp_path / 'run' / 'store'}: give that directory" in errors.replace("\n", " ")


def test_a_run_under_way_keeps_others_out_of_its_folder(tmp_path: Path, run: Run) -> None:
    config = write_config(tmp_path, max_steps=2)
    trainer = gs.Trainer(str(config), console=quiet())
    other = [f"engine.storage=[{tmp_path / 'other'}]", "overwrite_output_dir=true"]
    with one_at_a_time(tmp_path / "run"):
        code, _, errors = run("train", config, *other)
        assert code == 2 and "in which a training is under way" in errors
        assert not (tmp_path / "other").exists()
    trainer.train()
    assert run("train", config, *other)[0] == 0


def test_a_run_without_an_id_continues_and_has_one_from_then_on(trained: Path, tmp_path: Path, run: Run) -> None:
    """As runs did before there were ids: nothing about it in the folder, nor in the checkpoint."""
    path = write_config(tmp_path, eval_steps=8)
    without = "from greedysnake import cli, trainer; save = trainer.Engine.save; trainer.Engine.save = "
    without += "lambda self, known: save(self, {key: known[key] for key in known if key != 'run_id'})"
    command = [sys.executable, "-c", f"import sys; {without}; sys.argv = ['', 'train', {str(path)!r}]; cli.main()"]
    subprocess.run(command, check=True, capture_output=True)
    noted = tmp_path / "run" / "run.yaml"
    noted.write_text(re.sub("(run_id|has_checkpoint): .*\n", "", noted.read_text()))
    assert run("export", tmp_path / "run", tmp_path / "out")[0] == 0
    for steps in (8, 9, 10):  # nothing to do, then a checkpoint with an id, then the run that both belong to
        code, printed, _ = run("train", path, f"training.max_steps={steps}")
        assert code == 0 and f"{steps} of {steps} steps done" in printed
        assert re.search("run_id: '?[0-9a-f]{32}'?\nhas_checkpoint: true\n$", noted.read_text())


def test_a_checkpoint_that_is_gone_is_no_reason_to_begin_anew(trained: Path, tmp_path: Path, run: Run) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    directory = tmp_path / "copy" / "run"
    (directory / "store" / "greedysnake.manifest").unlink()
    before = everything_in(directory)
    overrides = [f"output_dir={directory}", f"engine.storage={directory / 'store'}"]
    for command in (["train", trained / "train.yaml", *overrides], ["export", directory, tmp_path / "out"]):
        code, _, errors = run(*command)
        assert (code, len(errors.splitlines())) == (2, 1)
        assert f"engine.storage: the checkpoint of the run in {directory} is gone from {directory / 'store'}" in errors
    assert everything_in(directory) == before
    assert run("train", trained / "train.yaml", *overrides, "overwrite_output_dir=true")[0] == 0


def test_the_file_of_a_run_is_a_configuration(trained: Path, tmp_path: Path, run: Run) -> None:
    code, printed, _ = run("train", trained / "run" / "run.yaml", f"output_dir={tmp_path / 'run'}", "engine.storage=[]")
    assert code == 0 and "8 of 8 steps done" in printed


@pytest.mark.parametrize("command", ["train", "export"])
def test_a_file_of_a_run_that_may_not_be_read_is_named(
    command: str, trained: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text = Path.read_text

    def refuse(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "run.yaml":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    arguments = [trained / "train.yaml"] if command == "train" else [trained / "run", tmp_path / "out"]
    code, _, errors = run(command, *arguments)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert f"could not use {trained / 'run' / 'run.yaml'}: Permission denied (EACCES): change" in errors


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"model: [", b"- 1\n"])
def test_a_damaged_file_of_a_run_is_named_and_can_be_replaced(
    content: bytes, trained: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    noted = tmp_path / "copy" / "run" / "run.yaml"
    noted.write_bytes(content)
    storage = f"engine.storage={noted.parent / 'store'}"
    for command in (
        ["train", trained / "train.yaml", f"output_dir={noted.parent}", storage],
        ["export", noted.parent, tmp_path / "out"],
    ):
        code, _, errors = run(*command)
        assert (code, len(errors.splitlines())) == (2, 1)
        assert f"{noted} is not what a training wrote there (" in errors
        assert "copy the YAML file of that training there; the checkpoint" in errors
    noted.write_bytes((trained / "train.yaml").read_bytes())
    code, _, errors = run("export", noted.parent, tmp_path / "out")
    found = re.search(r"if run.yaml was written by hand, add the line (run_id: '[0-9a-f]{32}') to it", errors)
    assert (code, len(errors.splitlines())) == (2, 1) and found
    noted.write_text(f"{noted.read_text()}{found[1]}\n")
    assert run("export", noted.parent, tmp_path / "out")[0] == 0


def test_the_file_of_a_run_is_on_the_drive_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def note_replace(old: Path, new: Path) -> None:
        done.append(f"rename {old.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    begin_run(load_config(write_config(tmp_path)), None)
    assert done == ["sync run.yaml.new", "rename run.yaml.new", "sync run"]
