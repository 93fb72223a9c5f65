"""What a machine can do: drives under the mix of a step, PCIe both ways, a layer's compute. For benchmarks/step.py."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from step_systems import io_options, llama_config


def run_bounds(options: argparse.Namespace) -> dict[str, Any]:
    """What the machine can do: the drives under the mix of a step, PCIe both ways at once, one layer's compute."""
    found: dict[str, Any] = {}
    if options.storage:
        found["ssd_bytes_per_s"] = mixed_bandwidth(options)
    if options.device == "cuda":
        found.update(device_bounds(options))
    return found


def mixed_bandwidth(options: argparse.Namespace, *, again: bool = False, seconds: float = 6.0) -> float:
    """Bytes/s of reads and writes together, 14 : 12 as in a step, one chunk per request, on all directories. The
    memory is of the kind that the engine uses. `again` uses the files that the engine has left, from end to end: a
    drive may be faster in a small file."""
    from greedysnake.runtime.arena import Arena
    from greedysnake.runtime.io import IoEngine

    chunk_bytes = options.chunk_params * 12
    num_chunks, num_buffers, depth = 24, 8, 6
    for directory in options.storage:
        Path(directory).mkdir(parents=True, exist_ok=True)
    name = "greedysnake.extents" if again else f"bounds-{os.getpid()}"
    paths = [Path(directory) / name for directory in options.storage]
    if again:
        num_chunks = min(path.stat().st_size for path in paths) // chunk_bytes
    with IoEngine(**vars(io_options(options))) as io, Arena(num_buffers * chunk_bytes) as arena:
        buffers = [arena.allocate(chunk_bytes, "bounds").random_(0, 255) for _ in range(num_buffers)]
        addresses = [buffer.data_ptr() for buffer in buffers]
        files = [io.open(path, create=not again) for path in paths]
        try:
            for file in [] if again else files:
                os.posix_fallocate(file.fd, 0, chunk_bytes * num_chunks)
                for index in range(num_chunks):
                    io.wait(io.submit("write", file, index * chunk_bytes, addresses[index % num_buffers], chunk_bytes))
            tickets: list[Any] = []
            number = num_writes = 0
            start_s = time.perf_counter()
            while time.perf_counter() - start_s < seconds:
                is_write = num_writes * 26 < number * 12
                num_writes += is_write
                where = (number * 7 % num_chunks) * chunk_bytes  # a prime: all of the file, not in its order
                kind: Any = "write" if is_write else "read"
                file = files[number % len(files)]
                tickets.append(io.submit(kind, file, where, addresses[number % num_buffers], chunk_bytes))
                number += 1
                if len(tickets) >= depth:
                    io.wait(tickets.pop(0))
            for ticket in tickets:
                io.wait(ticket)
            return float(number * chunk_bytes) / (time.perf_counter() - start_s)
        finally:
            for file, path in zip(files, paths, strict=True):
                file.close()
                if not again:
                    path.unlink(missing_ok=True)


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


def layer_bounds(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one compiled layer on one micro-batch: its forward, and its recompute and backward."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = llama_config(options)
    with torch.device("cuda"):
        layer = LlamaDecoderLayer(config, 0).to(torch.bfloat16)
        rotary = LlamaRotaryEmbedding(config)
        shape = (options.micro_batch, options.sequence, options.hidden)
        hidden = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(shape, dtype=torch.bfloat16)
        angles = rotary(hidden, torch.arange(options.sequence)[None])
    run = torch.compile(lambda x: layer(x, attention_mask=None, position_embeddings=angles, use_cache=False))
    inputs = [hidden, *layer.parameters()]

    def forward() -> None:
        with torch.no_grad():
            run(hidden)

    return {
        "layer_forward_s": seconds_of(forward, 10),
        "layer_backward_s": seconds_of(lambda: torch.autograd.grad(run(hidden), inputs, gradient), 10),
    }


def seconds_of(call: Any, repeat: int) -> float:
    import torch

    call()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(repeat):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / repeat
