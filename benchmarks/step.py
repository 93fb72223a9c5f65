"""One training step of a Llama on one GPU, system against system: the same model, tokens and machine.

    python benchmarks/step.py --systems greedysnake pytorch --storage DIR

Each system runs in a process of its own. The bounds (drive, PCIe, one block's compute) are measured in the same run.
TFLOP/s counts 6 N + attention per token and gives no credit for recompute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from step_bounds import run_bounds
from step_systems import (
    count_params,
    flops_per_token,
    run_deepspeed,
    run_greedysnake,
    run_pytorch,
    tokens_per_step,
)

SYSTEMS = ("greedysnake", "pytorch", "pytorch-no-recompute", "pytorch-eager", "zero-infinity", "zero-offload")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["greedysnake", "pytorch"], choices=SYSTEMS)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--mlp", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted")
    parser.add_argument("--peer-steps", type=int, default=None, help="steps of the other systems, if not as many")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--storage", nargs="*", default=[], help="directories for greedysnake and ZeRO-Infinity")
    parser.add_argument("--ram", default="24GiB", help="arena of greedysnake, and with --ram-cap a hard cap")
    parser.add_argument("--ram-cap", default=None, help="the process is ended when its RSS passes this")
    parser.add_argument("--vram-cap", default=None, help="torch may not allocate more than this")
    parser.add_argument("--alpha", type=float, default=0.25)
    parser.add_argument("--clip", type=float, default=None, help="max_grad_norm")
    parser.add_argument("--optimistic", action="store_true", help="with --clip: updates before the norm is known")
    parser.add_argument("--schedule", default="vertical")
    parser.add_argument("--placement", nargs="*", default=[], metavar="NAME=SHARE", help="fields of gs.Placement")
    parser.add_argument("--slots", nargs="*", default=[], metavar="NAME=COUNT", help="fields of gs.Slots")
    parser.add_argument("--io", nargs="*", default=[], metavar="NAME=VALUE", help="fields of gs.IoOptions")
    parser.add_argument("--chunk-params", type=int, default=4 << 20)
    parser.add_argument("--threads", type=int, default=None, help="optimizer threads")
    parser.add_argument("--single-slot", action="store_true")
    parser.add_argument("--no-checkpoints", action="store_true", help="no room on the drive for what lives in RAM")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-bounds", action="store_true", help="skip the measurement of the bounds")
    parser.add_argument("--drive-seconds", type=float, default=6.0, help="for each measurement of the drives")
    parser.add_argument(
        "--alternate",
        action="store_true",
        help="measure the drives in greedysnake's own files after every step, which then ends with a flush: for drives "
        "whose speed drifts from minute to minute",
    )
    parser.add_argument("--trace", default=None, help="write a Perfetto timeline of greedysnake's last step here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# One process for each


def peak_rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return 0


def watch_ram(cap_bytes: int) -> None:
    def watch() -> None:
        while True:
            if peak_rss_bytes() > cap_bytes:
                print(f"the process passed its RAM cap of {cap_bytes} bytes", file=sys.stderr, flush=True)
                os._exit(3)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()


def work(options: argparse.Namespace) -> None:
    from greedysnake.sizes import parse_size

    if options.ram_cap:
        watch_ram(parse_size(options.ram_cap))
    if options.device == "cuda":
        import torch

        torch.set_float32_matmul_precision("high")
        if options.vram_cap:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, parse_size(options.vram_cap) / total))
    runs: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "bounds": run_bounds,
        "greedysnake": run_greedysnake,
        "pytorch": run_pytorch,
        "pytorch-no-recompute": lambda o: run_pytorch(o, recompute=False),
        "pytorch-eager": lambda o: run_pytorch(o, compiled=False),
        "zero-infinity": lambda o: run_deepspeed(o, nvme=True),
        "zero-offload": lambda o: run_deepspeed(o, nvme=False),
    }
    if options.peer_steps and options.worker != "greedysnake":
        options.steps = options.peer_steps
    result = runs[options.worker](options)
    result["peak_rss_bytes"] = peak_rss_bytes()
    if options.device == "cuda":
        import torch

        result["peak_vram_bytes"] = torch.cuda.max_memory_allocated()
    print("RESULT " + json.dumps(result), flush=True)


def run_worker(name: str, arguments: list[str], folders: list[str]) -> dict[str, Any]:
    """Runs a system in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--worker", name]
    if folders:
        command += ["--storage", *folders]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT ") :])  # type: ignore[no-any-return]
    return {"failed": f"exit code {done.returncode}"}


def summarise(name: str, result: dict[str, Any], options: argparse.Namespace, bounds: dict[str, Any]) -> dict[str, Any]:
    spans = sorted(result["steps_s"][1:] or result["steps_s"])
    step_s = spans[len(spans) // 2]
    tokens = tokens_per_step(options)
    row = {
        "system": name,
        "tokens_per_s": tokens / step_s,
        "tflops": flops_per_token(options) * tokens / step_s / 1e12,
        "step_s": step_s,
        **{key: value for key, value in result.items() if key != "steps_s"},
        "steps_s": result["steps_s"],
    }
    ssd_bytes = result.get("ssd_read_bytes", 0) + result.get("ssd_write_bytes", 0)
    rates = result.get("drive_bytes_per_s") or [bounds.get("ssd_bytes_per_s", 0.0)]
    if ssd_bytes and all(rates):
        share = drive_share_per_byte(rates, result["steps_s"])
        row["of_ssd_bound"] = ssd_bytes * share
        row["of_26_bytes_per_param"] = 26 * count_params(options) * share
    if bounds.get("layer_forward_s"):
        layer_s = bounds["layer_forward_s"] + bounds["layer_backward_s"]
        row["layers_alone_s"] = layer_s * options.layers * options.micro_batches
    return row


def drive_share_per_byte(rates: list[float], spans: list[float]) -> float:
    """The share of a step that the drives need for one byte. With a rate after every step, that of each step is the
    mean of those before and after it, and the median step speaks."""
    if len(rates) < len(spans):
        steps = sorted(spans[1:] or spans)
        return len(rates) / sum(rates) / steps[len(steps) // 2]
    shares = sorted(2 / (rates[i - 1] + rates[i]) / spans[i] for i in range(1, len(spans)))
    return shares[len(shares) // 2]


DETAILS = (
    "bound",
    "bound_fraction",
    "drive_bytes_per_s",
    "of_26_bytes_per_param",
    "layers_alone_s",
    "busy_s",
    "build_s",
    "losses",
    "steps_s",
    "arena_peak_bytes",
    "grad_norm",
    "num_revoked",
)


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace, bounds: dict[str, Any]) -> None:
    print(
        f"\n{count_params(options) / 1e9:.3f} B parameters, {tokens_per_step(options)} tokens/step, "
        f"alpha {options.alpha}, clip {options.clip}, ram {options.ram}"
    )
    rates = [f"{name} {value / 1e9:.2f}e9" for name, value in bounds.items() if "per_s" in name]
    layer = [f"{name} {value:.5f}" for name, value in bounds.items() if name.startswith("layer")]
    print("bounds before: " + ", ".join(rates + layer))
    print(
        f"{'system':22} {'tokens/s':>9} {'TFLOP/s':>8} {'step s':>7} {'SSD r/w GB':>13} {'h2d/d2h GB':>12} "
        f"{'VRAM GB':>8} {'RSS GB':>7} {'of SSD bound':>12}"
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['system']:22} {row['failed']}")
            continue
        ssd = f"{row.get('ssd_read_bytes', 0) / 1e9:.1f}/{row.get('ssd_write_bytes', 0) / 1e9:.1f}"
        pcie = f"{row.get('h2d_bytes', 0) / 1e9:.1f}/{row.get('d2h_bytes', 0) / 1e9:.1f}"
        print(
            f"{row['system']:22} {row['tokens_per_s']:9.0f} {row['tflops']:8.1f} {row['step_s']:7.2f} {ssd:>13} "
            f"{pcie:>12} {row.get('peak_vram_bytes', 0) / 1e9:8.1f} {row['peak_rss_bytes'] / 1e9:7.1f} "
            f"{row.get('of_ssd_bound', 0):12.3f}"
        )
        details = {key: row[key] for key in DETAILS if row.get(key)}
        print(f"    {json.dumps(details, default=str)}")


def run_system(name: str, arguments: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """A system in a process of its own, with an empty folder on each drive that is removed afterwards."""
    folders = [str(Path(directory) / f"{name}-{os.getpid()}") for directory in options.storage]
    try:
        return run_worker(name, arguments, folders)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.worker:
        work(options)
        return
    bounds = {} if options.no_bounds else run_worker("bounds", arguments, options.storage)
    rows = []
    for name in options.systems:
        result = run_system(name, arguments, options)
        rows.append({"system": name, **result} if "failed" in result else summarise(name, result, options, bounds))
        print_table(rows[-1:], options, bounds)
    print_table(rows, options, bounds)
    if options.json:
        print(json.dumps({"bounds": bounds, "rows": rows}))


if __name__ == "__main__":
    main()
