"""From what a system's process reported to a row, and from rows to a table. For benchmarks/step.py."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any, TextIO

from step_options import placement_values, rate_limits
from step_systems import count_params, flops_per_token, tokens_per_step

TOLERANCE = 1.02
"""A bound is measured too, so a share of it may pass 1 by a little."""
DETAILS = (
    "bound",
    "bound_fraction",
    "drive_bytes_per_s",
    "of_26_bytes_per_param",
    "layers_alone_s",
    "busy_s",
    "simulated_s",
    "build_s",
    "losses",
    "steps_s",
    "arena_peak_bytes",
    "grad_norm",
    "num_revoked",
)
SHARES = {
    "of_ssd_bound_before": "SSD bound measured before",
    "of_ssd_bound_after": "SSD bound measured after",
    "of_pcie_bound": "PCIe bound",
    "of_compute_bound": "compute bound",
}


def summarise(name: str, result: dict[str, Any], options: argparse.Namespace, bounds: dict[str, Any]) -> dict[str, Any]:
    """All figures of a row are those of one step; memory is the peak of the run."""
    spans = result["steps_s"]
    step = median_step(spans)
    step_s, tokens = spans[step], tokens_per_step(options)
    row = {
        "system": name,
        "step": step,
        "tokens_per_s": tokens / step_s,
        "tflops": flops_per_token(options) * tokens / step_s / 1e12,
        "step_s": step_s,
        **result,
        **(result["per_step"][step] if result.get("per_step") else {}),
    }
    add_ssd_shares(row, options, bounds)
    pcie_bytes = row.get("h2d_bytes", 0) + row.get("d2h_bytes", 0)
    if pcie_bytes and bounds.get("pcie_bytes_per_s"):
        row["of_pcie_bound"] = pcie_bytes / bounds["pcie_bytes_per_s"] / step_s
    if bounds.get("layer_forward_s"):
        row["layers_alone_s"] = layers_alone_s(name, options, bounds)
        row["of_compute_bound"] = row["layers_alone_s"] / step_s
    return row


def median_step(spans: Sequence[float]) -> int:
    """The index of the step in the middle by time, the slower of two; the first is not counted if there are more."""
    counted = sorted(range(1, len(spans)) or [0], key=lambda step: spans[step])
    return counted[len(counted) // 2]


def layers_alone_s(name: str, options: argparse.Namespace, bounds: dict[str, Any]) -> float:
    """Of layers that are recomputed, greedysnake computes the output of each block once, the others all twice."""
    num_recomputed = options.layers - num_kept_layers(name, options)
    num_lean = math.ceil(num_recomputed / options.layers_per_block) if name == "greedysnake" else 0
    forward_s = num_recomputed * bounds["layer_forward_s"]
    backward_s = (options.layers - num_lean) * bounds["layer_backward_s"] + num_lean * bounds["layer_lean_backward_s"]
    return float(options.micro_batches * (forward_s + backward_s))


def num_kept_layers(name: str, options: argparse.Namespace) -> int:
    """Layers whose graph is kept from forward to backward, so that nothing of them is computed twice: the time of a
    layer's backward has its recompute in it."""
    layers: int = options.layers
    if name == "pytorch-no-recompute":
        return layers
    share = placement_values(options).get("graphs_device", 0.0) if name == "greedysnake" else 0.0
    return round(layers * share)


def add_ssd_shares(row: dict[str, Any], options: argparse.Namespace, bounds: dict[str, Any]) -> None:
    """Against the drives before and after: before the run and after it, or with --alternate around the step itself.
    `of_ssd_bound` is against the mean of those around the step, else the one after, which is in the same files."""
    ssd_bytes = row.get("ssd_read_bytes", 0) + row.get("ssd_write_bytes", 0)
    rates, step = row.get("drive_bytes_per_s") or [], row["step"]
    if options.alternate and rates:
        before, after = rates[step - 1], rates[step]
        rate = (before + after) / 2
    else:
        before, after = bounds.get("ssd_bytes_per_s"), rates[0] if rates else None
        rate = after or before
    if not ssd_bytes or not rate:
        return
    row["of_ssd_bound"] = ssd_bytes / rate / row["step_s"]
    if row["system"] != "greedysnake" or all_on_ssd(options):
        row["of_26_bytes_per_param"] = 26 * count_params(options) / rate / row["step_s"]
    for when, bytes_per_s in (("before", before), ("after", after)):
        if bytes_per_s:
            row[f"of_ssd_bound_{when}"] = ssd_bytes / bytes_per_s / row["step_s"]


def all_on_ssd(options: argparse.Namespace) -> bool:
    """Weights and optimizer state, the moments in fp32: what is in RAM needs no bytes of the drive, and what is smaller
    needs fewer, so 26 per parameter are no bound."""
    shares = placement_values(options)
    return not shares.get("weights_ram") and not shares.get("optimizer_ram") and options.moments == "float32"


def warnings_of(row: dict[str, Any]) -> list[str]:
    """A share above 1 says that the bound was measured too low."""
    return [
        f"warning: {row['system']} reached {row[key]:.3f} of the {name}, which was measured too low: "
        + ("give a longer --drive-seconds, or --alternate" if "ssd" in key else "run it again on an idle machine")
        for key, name in SHARES.items()
        if row.get(key, 0.0) > TOLERANCE
    ]


# Text


def print_table(
    rows: list[dict[str, Any]], options: argparse.Namespace, bounds: dict[str, Any], file: TextIO | None = None
) -> None:
    print(
        f"\n{format_count(count_params(options))} parameters, {tokens_per_step(options)} tokens/step, "
        f"alpha {options.alpha}, clip {options.clip}, ram {options.ram}, {options.device}",
        file=file,
    )
    print(bounds_text(options, bounds), file=file)
    print(
        f"{'system':20} {'tokens/s':>9} {'TFLOP/s':>8} {'step s':>7} {'SSD r/w GB':>13} {'h2d/d2h GB':>13} "
        f"{'VRAM GB':>8} {'RSS GB':>7} {'of SSD before/after':>19} {'of PCIe':>7} {'of compute':>10}",
        file=file,
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['system']:20} failed: {row['failed']}", file=file)
            continue
        print(line_of(row), file=file)
        details = {key: row[key] for key in DETAILS if row.get(key)}
        print(f"    {json.dumps(details, default=str)}", file=file)
        for warning in warnings_of(row):
            print(f"    {warning}", file=file)


def line_of(row: dict[str, Any]) -> str:
    ssd = both(row, "ssd_read_bytes", "ssd_write_bytes")
    pcie = both(row, "h2d_bytes", "d2h_bytes")
    of_ssd = "/".join(share_of(row, f"of_ssd_bound_{when}") for when in ("before", "after"))
    of_ssd = of_ssd.replace("-/-", "-")
    return (
        f"{row['system']:20} {row['tokens_per_s']:9.0f} {short(row['tflops']):>8} {short(row['step_s']):>7} {ssd:>13} "
        f"{pcie:>13} {gigabytes(row, 'peak_vram_bytes'):>8} {gigabytes(row, 'peak_rss_bytes'):>7} "
        f"{of_ssd:>19} {share_of(row, 'of_pcie_bound'):>7} {share_of(row, 'of_compute_bound'):>10}"
    )


def bounds_text(options: argparse.Namespace, bounds: dict[str, Any]) -> str:
    if options.no_bounds:
        text = "bounds before: not measured"
    elif "failed" in bounds:
        text = f"bounds before: failed: {bounds['failed']}"
    else:
        rates = [f"{name} {value / 1e9:.2f}e9" for name, value in bounds.items() if "per_s" in name]
        layer = [f"{name} {value:.5f}" for name, value in bounds.items() if name.startswith("layer")]
        text = "bounds before: " + (", ".join(rates + layer) or "none without --storage and a GPU")
    limits = [f"{name}={value:g}" for name, value in rate_limits(options).items()]
    return text + (f"; the drives are limited by --io {' '.join(limits)}, their bound too" if limits else "")


def format_count(number: float) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3f} {unit}"
    return f"{number:g}"


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def gigabytes(row: dict[str, Any], key: str) -> str:
    return short(row[key] / 1e9) if row.get(key) else "-"


def both(row: dict[str, Any], one: str, other: str) -> str:
    return f"{short(row[one] / 1e9)}/{short(row[other] / 1e9)}" if row.get(one) or row.get(other) else "-"


def share_of(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:.3f}" if key in row else "-"


def without_nan(value: Any) -> Any:
    """JSON has no number for what is not finite."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
