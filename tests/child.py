"""Runs a function of a test module in a process of its own, where memory, files and signals can be looked at alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import {module}
result = {module}.{function}(*json.loads(sys.argv[1]))
print("RESULT", json.dumps(result), flush=True)
"""


def start(module: str, function: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts `module.function(*arguments)`; arguments and result pass as JSON."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), module=module, function=function)
    return subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def call(module: str, function: str, *arguments: object, timeout_s: float = 100) -> object:
    """Runs it to its end and returns what it returned."""
    with start(module, function, *arguments) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, errors
    return json.loads(output.rsplit("RESULT ", 1)[1])
