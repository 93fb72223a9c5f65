"""What torch.compile needs of a machine, found before a run begins instead of in its first step."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from pathlib import Path

_COMPILERS = {"cuda": ("gcc", "clang", "cc"), "cpu": ("g++", "clang++", "c++")}


def missing_for_compiling(device: str) -> str | None:
    """What layers cannot be compiled without and is not there; None when nothing is missing."""
    compilers = _COMPILERS[device]
    if not any(map(shutil.which, compilers)):
        return f"a C compiler ({' or '.join(compilers)})"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "the headers of Python (Python.h)"
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        return "the package triton"
    return None
