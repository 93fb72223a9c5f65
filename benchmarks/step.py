"""One training step of a Llama on one GPU, system against system: the same model, tokens and machine.

    python benchmarks/step.py --systems greedysnake pytorch --storage DIR

Each system runs in a process of its own. The bounds (drive, PCIe, one block's compute) are measured in the same run.
TFLOP/s counts 6 N + attention per token and gives no credit for recompute.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    parser.add_argument("--trace", default=None, help="write a Perfetto timeline of greedysnake's last step here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# The model, for everyone


def llama_config(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig

    make: Any = LlamaConfig
    return make(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.mlp,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.sequence,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )


def count_params(options: argparse.Namespace) -> int:
    head_size = options.hidden // options.heads
    attention = options.hidden * head_size * (2 * options.heads + 2 * options.kv_heads)
    layer = attention + 3 * options.hidden * options.mlp + 2 * options.hidden
    return int(options.layers * layer + 2 * options.vocab * options.hidden + options.hidden)


def flops_per_token(options: argparse.Namespace) -> float:
    return 6.0 * count_params(options) + 12.0 * float(options.layers * options.hidden * options.sequence)


def tokens_per_step(options: argparse.Namespace) -> int:
    return int(options.micro_batches * options.micro_batch * options.sequence)


# GreedySnake


def greedysnake_model(options: argparse.Namespace) -> Any:
    import torch
    from torch import nn
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

    import greedysnake as gs
    from greedysnake.models.loss import chunked_cross_entropy

    config = llama_config(options)
    device = torch.device(options.device)
    with device:
        rotary = LlamaRotaryEmbedding(config)
        positions = torch.arange(options.sequence)[None]
        cos, sin = rotary(torch.zeros(1, dtype=torch.bfloat16), positions)

    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(options.vocab, options.hidden)
            nn.init.normal_(self.tokens.weight, std=0.02)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.tokens(batch["input_ids"])  # type: ignore[no-any-return]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LlamaDecoderLayer(config, 0)
            for parameter in self.layer.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            output = self.layer(hidden, attention_mask=None, position_embeddings=(cos, sin), use_cache=False)
            return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(options.hidden)
            self.weight = nn.Parameter(torch.empty(options.vocab, options.hidden))
            nn.init.normal_(self.weight, std=0.02)

        def forward(self, hidden: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            normed = self.norm(hidden)[:, :-1].reshape(-1, options.hidden)
            return chunked_cross_entropy(normed, self.weight, batch["input_ids"][:, 1:].reshape(-1))

    def made_on_device(kind: type[nn.Module]) -> Any:
        def make() -> nn.Module:
            if torch.get_default_device().type == "meta":  # asked for the shapes only
                return kind()
            with device:
                return kind()

        return make

    torch.manual_seed(0)
    return gs.Sequential(
        made_on_device(Embed),
        [made_on_device(Layer)] * options.layers,
        made_on_device(Head),
        num_targets=lambda batch: batch["input_ids"].shape[0] * (options.sequence - 1),
    )


def run_greedysnake(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    import greedysnake as gs
    from greedysnake.trace import totals, write_perfetto

    placement = gs.Placement(**{name: float(share) for name, share in pairs(options.placement)})
    slots = gs.Slots(**{name: int(count) for name, count in pairs(options.slots)})
    start_s = time.perf_counter()
    engine = gs.Engine(
        greedysnake_model(options),
        gs.AdamW(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1),
        storage=options.storage,
        ram=options.ram,
        device=options.device,
        alpha=options.alpha,
        max_grad_norm=options.clip,
        schedule=options.schedule,
        placement=placement,
        slots=slots,
        chunk_params=options.chunk_params,
        single_slot=options.single_slot,
        checkpoints=not options.no_checkpoints,
        num_threads=options.threads,
        io=io_options(options),
        overwrite=True,
        compile=not options.no_compile and options.device == "cuda",
        trace=bool(options.trace),
    )
    build_s = time.perf_counter() - start_s
    generator = torch.Generator().manual_seed(0)
    shape = (options.micro_batch, options.sequence)
    batches = [
        {"input_ids": torch.randint(0, options.vocab, shape, generator=generator)} for _ in range(options.micro_batches)
    ]
    results = []
    times = [time.perf_counter()]
    with engine:
        for step in range(options.steps):
            if step == options.steps - 1:
                engine.records.clear()
            results.append(engine.step(batches))
            if step == 0:  # a full collection of what torch has loaded takes long; none of it will go
                gc.collect()
                gc.freeze()
            times.append(time.perf_counter())
        arena_peak = engine.arena.peak_bytes
    last = results[-1]
    if options.trace:
        write_perfetto(engine.records, options.trace)
    spans = [later - earlier for earlier, later in pairwise(times)]
    return {
        "build_s": build_s,
        "steps_s": spans,
        "losses": [result.loss for result in results],
        "ssd_read_bytes": last.ssd_read_bytes,
        "ssd_write_bytes": last.ssd_write_bytes,
        "h2d_bytes": last.h2d_bytes,
        "d2h_bytes": last.d2h_bytes,
        "bound": last.bound,
        "bound_fraction": last.bound_fraction,
        "arena_peak_bytes": arena_peak,
        "grad_norm": last.grad_norm,
        "busy_s": dict(totals(engine.records).busy_s) if options.trace else None,
    }


def io_options(options: argparse.Namespace) -> Any:
    import greedysnake as gs

    values: dict[str, Any] = {name: value if name == "backend" else int(value) for name, value in pairs(options.io)}
    return gs.IoOptions(**values)


def pairs(texts: list[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in (text.split("=", 1) for text in texts)]


# Peers


def run_pytorch(options: argparse.Namespace, *, compiled: bool = True, recompute: bool = True) -> dict[str, Any]:
    """Everything in GPU memory: bf16 weights and moments, fused AdamW."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    make: Any = LlamaForCausalLM
    with torch.device(options.device):
        model = make(llama_config(options)).to(torch.bfloat16)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    if recompute:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = (options.micro_batch, options.sequence)
    batches = [torch.randint(0, options.vocab, shape, device=options.device) for _ in range(options.micro_batches)]
    spans, losses = [], []
    for _ in range(options.steps):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        total = torch.zeros((), device=options.device)
        for ids in batches:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - start_s)
        losses.append(float(total))
    return {"steps_s": spans, "losses": losses}


def run_deepspeed(options: argparse.Namespace, *, nvme: bool) -> dict[str, Any]:
    """DeepSpeed ZeRO-3 with parameters and optimizer offloaded to NVMe (ZeRO-Infinity) or to RAM."""
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    swap = Path(options.storage[0]) / "zero" if nvme else None
    config = deepspeed_config(options, swap)
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        make: Any = LlamaForCausalLM
        model = make(llama_config(options))
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.randint(0, options.vocab, (options.micro_batch, options.sequence), device=options.device)
    spans, losses = [], []
    before = kernel_io()
    for _ in range(options.steps):
        torch.cuda.synchronize()
        before = kernel_io()
        start_s = time.perf_counter()
        for index in range(options.micro_batches):
            engine.set_gradient_accumulation_boundary(index == options.micro_batches - 1)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)  # which divides by the number of micro-batches
            engine.step()
        torch.cuda.synchronize()
        spans.append(time.perf_counter() - start_s)
        losses.append(float(loss.detach()))
    after = kernel_io()
    return {
        "steps_s": spans,
        "losses": losses,
        "ssd_read_bytes": after[0] - before[0],
        "ssd_write_bytes": after[1] - before[1],
    }


def deepspeed_config(options: argparse.Namespace, swap: Path | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if swap:
        swap.mkdir(parents=True)
        place = {"device": "nvme", "nvme_path": str(swap), "pin_memory": True}
        parameters = {**place, "buffer_count": 5, "buffer_size": 300_000_000}
        optimizer = {**place, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True, "fast_init": False}
    return {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": options.clip or 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 100_000_000,
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 500_000_000,
            "stage3_max_reuse_distance": 0,
            "reduce_bucket_size": 200_000_000,
            "offload_param": parameters,
            "offload_optimizer": optimizer,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 16,
            "thread_count": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    }


# Bounds


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


# One process for each


def kernel_io() -> tuple[int, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


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
        "drive": lambda o: {"ssd_bytes_per_s": mixed_bandwidth(o, again=True)},
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
    if ssd_bytes and bounds.get("ssd_bytes_per_s"):
        row["ssd_bound_s"] = ssd_bytes / bounds["ssd_bytes_per_s"]
        row["of_ssd_bound"] = row["ssd_bound_s"] / step_s
        row["of_26_bytes_per_param"] = 26 * count_params(options) / bounds["ssd_bytes_per_s"] / step_s
    if bounds.get("layer_forward_s"):
        layer_s = bounds["layer_forward_s"] + bounds["layer_backward_s"]
        row["layers_alone_s"] = layer_s * options.layers * options.micro_batches
    return row


DETAILS = (
    "bound",
    "bound_fraction",
    "of_26_bytes_per_param",
    "layers_alone_s",
    "busy_s",
    "build_s",
    "losses",
    "steps_s",
    "arena_peak_bytes",
)


def print_table(rows: list[dict[str, Any]], options: argparse.Namespace, bounds: dict[str, Any]) -> None:
    print(
        f"\n{count_params(options) / 1e9:.3f} B parameters, {tokens_per_step(options)} tokens/step, "
        f"alpha {options.alpha}, clip {options.clip}, ram {options.ram}"
    )
    rates = [f"{name} {value / 1e9:.2f}e9" for name, value in bounds.items() if "per_s" in name]
    layer = [f"{name} {value:.5f}" for name, value in bounds.items() if name.startswith("layer")]
    print("bounds: " + ", ".join(rates + layer))
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


def run_system(
    name: str, arguments: list[str], options: argparse.Namespace, bounds: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A system in a process of its own, with an empty folder on each drive that is removed afterwards. Returns what it
    measured, and the bounds, with what the drives did right after it in its own files: their speed drifts."""
    folders = [str(Path(directory) / f"{name}-{os.getpid()}") for directory in options.storage]
    try:
        result = run_worker(name, arguments, folders)
        if name == "greedysnake" and result.get("ssd_read_bytes") and "ssd_bytes_per_s" in bounds:
            after = run_worker("drive", arguments, folders)["ssd_bytes_per_s"]
            before = bounds.get("ssd_before_bytes_per_s", bounds["ssd_bytes_per_s"])
            bounds = {**bounds, "ssd_bytes_per_s": after, "ssd_before_bytes_per_s": before}
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return result, bounds


def main() -> None:
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.worker:
        work(options)
        return
    bounds = {} if options.no_bounds else run_worker("bounds", arguments, options.storage)
    rows = []
    for name in options.systems:
        result, bounds = run_system(name, arguments, options, bounds)
        rows.append({"system": name, **result} if "failed" in result else summarise(name, result, options, bounds))
        print_table(rows[-1:], options, bounds)
    print_table(rows, options, bounds)
    if options.json:
        print(json.dumps({"bounds": bounds, "rows": rows}))


if __name__ == "__main__":
    main()
