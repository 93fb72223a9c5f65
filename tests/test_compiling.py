"""Whether layers are compiled: where it pays and can be done, or as the configuration says."""

from __future__ import annotations

import importlib.util
import sysconfig
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from greedysnake.compiling import missing_for_compiling
from greedysnake.config import load_config
from greedysnake.errors import ConfigError
from greedysnake.preparation import prepare, why_not_compiled
from training import values_in


def executable(directory: Path, name: str) -> None:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that is needed, as far as one can see; the folder on its PATH, where the compilers are."""
    path, headers = tmp_path / "bin", tmp_path / "include"
    path.mkdir()
    headers.mkdir()
    (headers / "Python.h").touch()
    executable(path, "gcc")
    executable(path, "g++")
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(headers))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None))
    return path


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_missing_has_a_name(device: str, machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = "gcc" if device == "cuda" else "g++"
    assert missing_for_compiling(device) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing_for_compiling(device) == ("the package triton" if device == "cuda" else None)
    (machine.parent / "include" / "Python.h").unlink()
    assert missing_for_compiling(device) == "the headers of Python (Python.h)"
    (machine / compiler).unlink()
    assert str(missing_for_compiling(device)).startswith(f"a C compiler ({compiler} or ")


DECISIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str | None]] = {
    "by default": ("cuda", {}, {}, None),
    "on the CPU": ("cpu", {}, {}, "it pays on cuda alone"),
    "padded to the longest": ("cuda", {"packing": False}, {}, "sequences differ in length"),
    "padded to one length": ("cuda", {"packing": False, "pad_to": "sequence_length"}, {}, None),
    "switched off": ("cuda", {}, {"compile": False}, "engine.compile is false"),
    "switched on": ("cpu", {"packing": False}, {"compile": True}, None),
}


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.usefixtures("machine")
def test_layers_are_compiled_where_it_pays(name: str, tmp_path: Path) -> None:
    device, data, engine, reason = DECISIONS[name]
    values = values_in(tmp_path)
    values["data"] |= data
    values["engine"] |= engine
    given = why_not_compiled(load_config(values), device)
    assert given is None if reason is None else str(given).startswith(reason)


def test_without_a_compiler_they_are_not_unless_asked_for(tmp_path: Path, machine: Path) -> None:
    for name in ("gcc", "g++"):
        (machine / name).unlink()
    values = values_in(tmp_path)
    assert why_not_compiled(load_config(values), "cuda") == "this machine lacks a C compiler (gcc or clang or cc)"
    values["engine"]["compile"] = True
    with pytest.raises(ConfigError, match=r"^engine.compile is true, and this machine lacks a C compiler \(g\+\+ or"):
        prepare(load_config(values))
