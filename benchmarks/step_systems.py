"""The systems that benchmarks/step.py compares: each trains the same Llama on the same tokens, in its own way."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from step_drive import mixed_bandwidth
from step_options import io_values, on_cuda, placement_values, rate_limits, slot_values

from greedysnake.errors import ConfigError

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


def token_batches(options: argparse.Namespace) -> list[Any]:
    """The micro-batches of a step, in RAM: the same for every system and every step."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (options.micro_batch, options.sequence)
    return [torch.randint(0, options.vocab, shape, generator=generator) for _ in range(options.micro_batches)]


def synchronize(options: argparse.Namespace) -> None:
    import torch

    if on_cuda(options):
        torch.cuda.synchronize()


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
        layers_per_block=options.layers_per_block,
    )


def say_step(options: argparse.Namespace, spans: Sequence[float]) -> None:
    """As it ends: a run that is ended later has shown something."""
    print(f"{options.worker}: step {len(spans)} of {options.steps}, {spans[-1]:.2f} s", file=sys.stderr, flush=True)


def run_greedysnake(options: argparse.Namespace) -> dict[str, Any]:
    """bf16 weights whose residual makes them fp32 in the optimizer, fp32 gradients, and fp32 moments unless --moments
    says otherwise."""
    import greedysnake as gs
    from greedysnake.runtime.directory import EXTENTS
    from greedysnake.trace import totals, write_perfetto

    batches = [{"input_ids": ids} for ids in token_batches(options)]
    start_s = time.perf_counter()
    engine = gs.Engine(
        greedysnake_model(options),
        gs.AdamW(lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, moments=options.moments),
        storage=options.storage,
        ram=options.ram,
        device=options.device,
        alpha=options.alpha,
        max_grad_norm=options.clip,
        optimistic=options.optimistic,
        compress_moments=not options.no_compress_moments,
        schedule=options.schedule,
        placement=gs.Placement(**placement_values(options)),
        slots=gs.Slots(**slot_values(options)),
        chunk_params=options.chunk_params,
        single_slot=options.single_slot,
        checkpoints=not options.no_checkpoints,
        num_threads=options.threads,
        io=gs.IoOptions(**io_values(options)),
        overwrite=True,
        compile=not options.no_compile and on_cuda(options),
        trace=bool(options.trace),
    )
    build_s = time.perf_counter() - start_s
    per_step, spans, rates, records = [], [], [], []
    files = [Path(directory) / EXTENTS for directory in options.storage]
    with engine:
        start_s, before = time.perf_counter(), kernel_io()
        for step in range(options.steps):
            engine.records.clear()
            result = engine.step(batches)
            if options.alternate:
                engine.flush()
            # From end to end: drives and late updates go on between two calls, so that time counts too.
            end_s, after = time.perf_counter(), kernel_io()
            spans.append(end_s - start_s)
            say_step(options, spans)
            per_step.append(figures_of(result, before, after))
            start_s, before = end_s, after
            records.append(list(engine.records))
            if step == 0:  # a full collection of what torch has loaded takes long, and none of it will go
                gc.collect()
                gc.freeze()
            if options.alternate:
                rates.append(mixed_bandwidth(options, files, options.drive_seconds))
                start_s, before = time.perf_counter(), kernel_io()
        arena_peak = engine.arena.peak_bytes
        if files and not options.no_bounds and not options.alternate:
            engine.flush()
            rates.append(mixed_bandwidth(options, files, options.drive_seconds))
    if options.trace:
        write_perfetto(records[-1], options.trace)
        for figures, of_step in zip(per_step, records, strict=True):
            figures["busy_s"] = dict(totals(of_step).busy_s)
    simulates = options.trace and options.steps > 1 and not options.alternate
    return {
        "simulated_s": simulated_s(options, engine.plan, records[-1], rates) if simulates else None,
        "build_s": build_s,
        "steps_s": spans,
        "per_step": per_step,
        "drive_bytes_per_s": rates,
        "losses": [figures["loss"] for figures in per_step],
        "arena_peak_bytes": arena_peak,
        "num_revoked": engine.num_revoked,
    }


def simulated_s(options: argparse.Namespace, plan: Any, records: list[Any], rates: list[float]) -> float:
    """What the simulator expects of such a step, from the times of its own ops and the speed of the drives: those they
    were held at, or measured at after it, or had while they were busy in it. What a step takes beyond that is not in
    the schedule."""
    from dataclasses import replace

    from greedysnake.planning.costs import Costs
    from greedysnake.planning.observe import observe
    from greedysnake.planning.simulate import forecast

    seen = observe(records, plan)
    drive = rate_limits(options).get("total_bytes_per_s") or (rates or [seen.rates.ssd_bytes_per_s])[-1]
    activation_bytes = 2 * options.micro_batch * options.sequence * options.hidden
    costs = Costs(plan, replace(seen.rates, ssd_bytes_per_s=drive), seen.times, activation_bytes=activation_bytes)
    return forecast(plan, costs, options.micro_batches, kind=options.schedule).step_s


def figures_of(result: Any, before: tuple[int, int], after: tuple[int, int]) -> dict[str, Any]:
    """What a gs.StepResult says; the bytes of the drives are those that the kernel counted."""
    return {
        "loss": result.loss,
        "ssd_read_bytes": after[0] - before[0],
        "ssd_write_bytes": after[1] - before[1],
        "h2d_bytes": result.h2d_bytes,
        "d2h_bytes": result.d2h_bytes,
        "bound": result.bound,
        "bound_fraction": result.bound_fraction,
        "grad_norm": result.grad_norm,
    }


# Peers


def run_pytorch(options: argparse.Namespace, *, compiled: bool = True, recompute: bool = True) -> dict[str, Any]:
    """Everything on the device: weights, gradients and moments in bf16, without an fp32 copy; fused AdamW."""
    import torch
    from transformers import LlamaForCausalLM

    batches = [ids.to(options.device) for ids in token_batches(options)]
    torch.manual_seed(0)
    make: Any = LlamaForCausalLM
    with torch.device(options.device):
        model = make(llama_config(options)).to(torch.bfloat16)
    if compiled and on_cuda(options):
        for layer in model.model.layers:
            layer.compile()
    if recompute:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    spans, losses = [], []
    for _ in range(options.steps):
        synchronize(options)
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
        synchronize(options)
        spans.append(time.perf_counter() - start_s)
        say_step(options, spans)
        losses.append(float(total))
    return {"steps_s": spans, "losses": losses}


def run_deepspeed(options: argparse.Namespace, *, nvme: bool) -> dict[str, Any]:
    """DeepSpeed ZeRO-3 with parameters and optimizer offloaded to NVMe (ZeRO-Infinity) or to RAM: bf16 weights, fp32
    master weights and moments."""
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM

    batches = [ids.to(options.device) for ids in token_batches(options)]
    if not on_cuda(options):
        raise ConfigError(f"DeepSpeed's offloading needs a GPU and --device is {options.device}: use cuda")
    rank = str(torch.device(options.device).index or 0)  # the device that DeepSpeed takes
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    swap = Path(options.storage[0]) / "zero" if nvme else None
    config = deepspeed_config(options, swap)
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        make: Any = LlamaForCausalLM
        model = make(llama_config(options))
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    spans, losses, per_step = [], [], []
    for _ in range(options.steps):
        synchronize(options)
        start_s, before = time.perf_counter(), kernel_io()
        total = torch.zeros((), device=options.device)
        for index, ids in enumerate(batches):
            engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)  # which divides by the number of micro-batches
            engine.step()
            total += loss.detach() / len(batches)
        synchronize(options)
        spans.append(time.perf_counter() - start_s)
        say_step(options, spans)
        after = kernel_io()
        per_step.append({"ssd_read_bytes": after[0] - before[0], "ssd_write_bytes": after[1] - before[1]})
        losses.append(float(total))
    return {"steps_s": spans, "losses": losses, "per_step": per_step}


def deepspeed_config(options: argparse.Namespace, swap: Path | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    if swap:
        swap.mkdir(parents=True)
        place = {"device": "nvme", "nvme_path": str(swap), "pin_memory": True}
        largest = max(options.vocab, options.mlp) * options.hidden  # a parameter has to fit into a buffer
        parameters = {**place, "buffer_count": 5, "buffer_size": max(300_000_000, largest)}
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


def kernel_io() -> tuple[int, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]
