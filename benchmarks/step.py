"""One training step of a Llama on one device, system against system: the same model, tokens and machine.

    python benchmarks/step.py --systems greedysnake pytorch --storage DIR

Each system runs in a process of its own. The bounds (drive, PCIe, one block's compute) are measured in the same run,
that of the drives with settings of its own, whatever --io says, but under its rate limits. The figures of a row are
those of one step, the one in the middle by time. TFLOP/s counts 6 N + attention per token (N with the embedding,
attention as if nothing were masked) and gives no credit for recompute. The compute bound is that of the layers alone,
as the system computes them: greedysnake leaves the output out of a recompute, the others do not.

What each system keeps: greedysnake bf16 weights with a residual that makes them fp32 in the optimizer, fp32 gradients
and moments; the pytorch ones weights, gradients and moments in bf16 without an fp32 copy; the zero ones (DeepSpeed)
bf16 weights with fp32 master weights and moments. On a GPU greedysnake and pytorch compile their layers.

The exit code is 1 if a system or the bounds failed, and 2 for an option that cannot work.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step_bounds import run_bounds
from step_options import (
    Parser,
    check,
    count,
    device,
    fraction,
    norm,
    on_cuda,
    positive,
    rate_limits,
    size,
)
from step_systems import count_params, run_deepspeed, run_greedysnake, run_pytorch
from step_table import print_table, summarise, without_nan

from greedysnake.errors import ConfigError, GreedySnakeError
from greedysnake.shapes import MOMENTS
from greedysnake.sizes import parse_size

SYSTEMS = ("greedysnake", "pytorch", "pytorch-no-recompute", "pytorch-eager", "zero-infinity", "zero-offload")

PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["greedysnake", "pytorch"], choices=SYSTEMS)
    parser.add_argument("--layers", type=count, default=24)
    parser.add_argument("--hidden", type=count, default=2048)
    parser.add_argument("--mlp", type=count, default=8192)
    parser.add_argument("--heads", type=count, default=16)
    parser.add_argument("--kv-heads", type=count, default=16)
    parser.add_argument("--vocab", type=count, default=32000)
    parser.add_argument("--sequence", type=count, default=2048)
    parser.add_argument("--micro-batch", type=count, default=4, help="sequences in a micro-batch")
    parser.add_argument("--micro-batches", type=count, default=16)
    parser.add_argument("--steps", type=count, default=4, help="the first is not counted")
    parser.add_argument("--peer-steps", type=count, default=None, help="steps of the other systems, if not as many")
    parser.add_argument("--device", type=device, default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--storage", nargs="*", default=[], help="directories for greedysnake and ZeRO-Infinity")
    parser.add_argument("--ram", type=size, default="24GiB", help="arena of greedysnake, and with --ram-cap a hard cap")
    parser.add_argument("--ram-cap", type=size, help="the process is ended when its RSS passes this")
    parser.add_argument("--vram-cap", type=size, help="torch may not allocate more than this")
    parser.add_argument("--alpha", type=fraction, default=0.25)
    parser.add_argument("--clip", type=norm, default=None, help="max_grad_norm")
    parser.add_argument("--optimistic", action="store_true", help="with --clip: updates before the norm is known")
    parser.add_argument("--moments", default="float32", choices=tuple(MOMENTS), help="how greedysnake stores them")
    parser.add_argument("--no-compress-moments", action="store_true", help="they cross the drives as they are")
    parser.add_argument("--schedule", default="vertical", choices=("vertical", "horizontal"))
    parser.add_argument("--placement", nargs="*", default=[], metavar="NAME=SHARE", help="fields of gs.Placement")
    parser.add_argument("--slots", nargs="*", default=[], metavar="NAME=COUNT", help="fields of gs.Slots")
    parser.add_argument("--io", nargs="*", default=[], metavar="NAME=VALUE", help="fields of gs.IoOptions")
    parser.add_argument(
        "--layers-per-block",
        type=count,
        default=1,
        help="layers of greedysnake that share an activation and stream together",
    )
    parser.add_argument("--chunk-params", type=count, default=4 << 20)
    parser.add_argument("--threads", type=count, default=None, help="optimizer threads")
    parser.add_argument("--single-slot", action="store_true")
    parser.add_argument("--no-checkpoints", action="store_true", help="no room on the drive for what lives in RAM")
    parser.add_argument("--no-compile", action="store_true", help="of greedysnake, which compiles on a GPU")
    parser.add_argument("--no-bounds", action="store_true", help="skip the measurement of the bounds")
    parser.add_argument("--drive-bytes", type=size, default="2GB", help="of the file that the drives are measured in")
    parser.add_argument("--drive-seconds", type=positive, default=6.0, help="for each measurement of the drives")
    parser.add_argument(
        "--alternate",
        action="store_true",
        help="measure the drives in greedysnake's own files after every step, which then ends with a flush: for drives "
        "whose speed drifts from minute to minute",
    )
    parser.add_argument("--trace", default=None, help="write a Perfetto timeline of greedysnake's last step here")
    parser.add_argument("--json", action="store_true", help="JSON on stdout; the tables go to stderr")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options: argparse.Namespace = parser.parse_args(arguments)
    try:
        check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


# The process of a system


def work(options: argparse.Namespace) -> None:
    """Says what was measured, or in one sentence why nothing was. Only a surprise has a traceback besides."""
    try:
        result = measure(options)
    except Exception as error:
        expected = isinstance(error, GreedySnakeError | ModuleNotFoundError | MemoryError | OSError)
        if not expected and type(error).__name__ != "OutOfMemoryError":  # of torch
            traceback.print_exc()
        result = {"failed": sentence_of(error)}
    report(result)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "bounds": run_bounds,
        "greedysnake": run_greedysnake,
        "pytorch": run_pytorch,
        "pytorch-no-recompute": lambda o: run_pytorch(o, recompute=False),
        "pytorch-eager": lambda o: run_pytorch(o, compiled=False),
        "zero-infinity": lambda o: run_deepspeed(o, nvme=True),
        "zero-offload": lambda o: run_deepspeed(o, nvme=False),
    }
    if options.ram_cap and options.worker != "bounds":
        watch_ram(parse_size(options.ram_cap))
    if on_cuda(options):
        prepare_cuda(options)
    if options.peer_steps and options.worker != "greedysnake":
        options.steps = options.peer_steps
    result = runs[options.worker](options)
    result["peak_rss_bytes"] = peak_rss_bytes()
    if on_cuda(options):
        import torch

        result["peak_vram_bytes"] = torch.cuda.max_memory_allocated()
    return result


def end_with_parent() -> None:
    """Also where it was killed and could not end us: nobody would read what we measure, and drives stay busy."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prepare_cuda(options: argparse.Namespace) -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"--device is {options.device} and torch finds no CUDA device: use --device cpu")
    index = torch.device(options.device).index
    if index is not None:
        torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("high")
    if options.vram_cap and options.worker != "bounds":
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_size(options.vram_cap) / total))


def sentence_of(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.split(".")[0]
        return f"{package} is not installed: pip install {package}"
    first = (str(error).strip().splitlines() or ["no message"])[0][:300]
    return first if isinstance(error, GreedySnakeError) else f"{type(error).__name__}: {first}"


def report(result: dict[str, Any]) -> None:
    """In one write: the watch over the RAM may come in between."""
    sys.stdout.flush()
    text = f"\nRESULT {json.dumps(without_nan(result))}\n".encode()
    while text:
        text = text[os.write(1, text) :]


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def watch_ram(cap_bytes: int) -> None:
    def watch() -> None:
        while True:
            if peak_rss_bytes() > cap_bytes:
                report({"failed": f"the process passed its RAM cap of {cap_bytes} bytes"})
                os._exit(3)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()


# The process that starts the others


def run_system(name: str, arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """A system in a process of its own, with an empty folder on each drive that is removed afterwards: by us, as that
    process may have ended in any way."""
    folders = [str(Path(directory) / f"{name}-{os.getpid()}") for directory in options.storage]
    try:
        return run_worker(name, arguments, folders)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def run_worker(name: str, arguments: list[str], folders: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--worker", name]
    if folders:
        command += ["--storage", *folders]
    # In a session of its own: Ctrl-C reaches us alone, and we end it with all that it has started.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT ") :])  # type: ignore[no-any-return]
    return {"failed": ending_of(process.returncode)}


def ending_of(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code} and reported nothing"
    hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
    return f"the process was ended by {signal.Signals(-code).name}{hint}"


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.worker:
        end_with_parent()
        work(options)
        return 0
    tables = sys.stderr if options.json else sys.stdout
    bounds = {} if options.no_bounds else run_system("bounds", arguments, options)
    rows = []
    for name in options.systems:
        result = run_system(name, arguments, options)
        rows.append({"system": name, **result} if "failed" in result else summarise(name, result, options, bounds))
        print_table(rows[-1:], options, bounds, tables)
    if len(rows) > 1:
        print_table(rows, options, bounds, tables)
    if options.json:
        given = {"options": vars(options), "num_params": count_params(options), "rate_limits": rate_limits(options)}
        print(json.dumps(without_nan({**given, "bounds": bounds, "rows": rows})))
    return int("failed" in bounds or any("failed" in row for row in rows))


def stop(number: int, _: object) -> None:
    """Ends like Ctrl-C does, so that what was begun is taken away."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:  # nohup
            signal.signal(ending, stop)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            code = main(sys.argv[1:])
            sys.stdout.flush()
            sys.exit(code)
        except BrokenPipeError:  # nobody reads on, as with `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)
    sys.exit(128 + signal.SIGINT)
