"""What a machine can do: drives under the mix of a step, PCIe both ways, a layer's compute. For benchmarks/step.py."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from step_drive import mixed_bandwidth
from step_options import on_cuda
from step_systems import llama_config

from greedysnake.sizes import parse_size


def run_bounds(options: argparse.Namespace) -> dict[str, Any]:
    """What the machine can do before anything ran: the drives under the mix of a step, PCIe, one layer's compute."""
    found: dict[str, Any] = {}
    if options.storage:
        found["ssd_bytes_per_s"] = new_file_bandwidth(options)
    if on_cuda(options):
        found.update(device_bounds(options))
    return found


def new_file_bandwidth(options: argparse.Namespace) -> float:
    """In new files. A drive may be slower in large ones: greedysnake measures again, in its own files. The folders are
    the caller's, who removes them whatever becomes of this process."""
    paths = [Path(directory) / "drive" for directory in options.storage]
    block = os.urandom(1 << 24)
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for _ in range(-(-parse_size(options.drive_bytes) // len(block))):
                file.write(block)
            os.fsync(file.fileno())
    return float(mixed_bandwidth(options, paths, options.drive_seconds))


def device_bounds(options: argparse.Namespace) -> dict[str, float]:
    import torch

    size = 1 << 28
    hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def both_ways() -> None:
        with torch.cuda.stream(streams[0]):
            devices[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(devices[1], non_blocking=True)

    pcie = 2 * size / seconds_of(both_ways, 10)
    return {"pcie_bytes_per_s": pcie, **layer_bounds(options)}


def layer_bounds(options: argparse.Namespace, device: str = "cuda") -> dict[str, float]:
    """Seconds of one compiled layer on one micro-batch: its forward, its recompute and backward, and these two without
    what only the layer's output needs, which greedysnake leaves out: its bound is not that of those who compute it."""
    import torch
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    from greedysnake.runtime.recompute import Recompute

    config = llama_config(options)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.layer(hidden, attention_mask=None, position_embeddings=angles, use_cache=False)  # type: ignore[no-any-return]

    with torch.device(device):
        layer = Layer()
        rotary = LlamaRotaryEmbedding(config)
        shape = (options.micro_batch, options.sequence, options.hidden)
        hidden = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(shape, dtype=torch.bfloat16)
        angles = rotary(hidden, torch.arange(options.sequence)[None])
    run, run_lean = torch.compile(layer), torch.compile(Recompute(layer))
    inputs = [hidden, *layer.parameters()]

    def forward() -> None:
        with torch.no_grad():
            run(hidden)

    return {
        "layer_forward_s": seconds_of(forward, 10),
        "layer_backward_s": seconds_of(lambda: torch.autograd.grad(run(hidden), inputs, gradient), 10),
        "layer_lean_backward_s": seconds_of(lambda: torch.autograd.grad(run_lean(hidden, gradient), inputs), 10),
    }


def seconds_of(call: Any, repeat: int) -> float:
    import torch

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    call()
    synchronize()
    start_s = time.perf_counter()
    for _ in range(repeat):
        call()
    synchronize()
    return (time.perf_counter() - start_s) / repeat
