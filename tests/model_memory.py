"""What a process needs in memory to make, load, train and export a model; run in a child of its own."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path

import torch

import greedysnake as gs
from greedysnake.runtime.stored import StoredModel


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def reset_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps would hide as much
    Path("/proc/self/clear_refs").write_text("5")


def measure(folder: str, num_layers: int, hidden: int, ram: str) -> dict[str, int]:
    """Bytes above those at rest while a model is made and exported (`made`), and loaded, trained and exported."""
    root = Path(folder)
    sizes = {
        "vocab_size": 4 * hidden,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
    }
    config = {"model_type": "llama", **sizes}
    ids = torch.randint(0, 64, (1, 16))
    batch = {"input_ids": ids, "labels": ids}

    def run(source: object, name: str, num_steps: int) -> None:
        model = gs.load_model(source)
        options = {"storage": [root / f"{name} store"], "ram": ram, "chunk_params": 1 << 18}
        with gs.Engine(model, gs.AdamW(lr=1e-3), **options) as engine:  # type: ignore[arg-type]
            for _ in range(num_steps):
                engine.step([batch])
            gs.export_model(engine, model, root / name, max_shard_bytes="50MB")

    run({**config, "num_hidden_layers": 2}, "warm", 1)  # what the libraries keep for good
    reset_peak()
    rest = peak_bytes()
    run(config, "made", 0)
    made = peak_bytes() - rest
    reset_peak()
    run(root / "made", "loaded", 1)
    model_bytes = sum(path.stat().st_size for path in (root / "loaded").glob("*.safetensors"))
    return {"rest": rest, "made": made, "loaded": peak_bytes() - rest, "model": model_bytes}


def measure_group(folder: str, num_layers: int, hidden: int, ram: str) -> dict[str, int]:
    """Bytes above those at rest while a model whose layers are all one block is made, besides what the device holds,
    and while its checkpoint is exported."""
    root = Path(folder)
    sizes = {"vocab_size": 256, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": 4}

    def make(count: int, name: str) -> int:
        config = {"model_type": "llama", "num_hidden_layers": count, **sizes}
        model = gs.load_model(config, layers_per_block=count)
        slots = gs.Slots(weights=1, gradients=1)
        with gs.Engine(model, gs.AdamW(lr=1e-3), storage=[root / name], ram=ram, slots=slots) as engine:
            engine.save()
            device = engine._buffers.device
            return sum(tensor.nbytes for tensor in (*device.weights.values(), *device.gradients.values()))

    def export(count: int, name: str) -> None:
        config = {"model_type": "llama", "num_hidden_layers": count, **sizes}
        model = gs.load_model(config, layers_per_block=count)
        with StoredModel(model, [root / name]) as stored:
            gs.export_model(stored, model, root / f"{name} exported")

    make(2, "warm")
    export(2, "warm")
    reset_peak()
    rest = peak_bytes()
    on_device = make(num_layers, "made")
    made = peak_bytes() - rest - on_device
    reset_peak()
    rest = peak_bytes()
    export(num_layers, "made")
    return {"made": made, "exported": peak_bytes() - rest, "weights": 4 * num_layers * (4 + 3 * 3) * hidden * hidden}
