"""A model folder larger than the RAM it gets: loaded, trained for a step and exported. What does the process need?

    python benchmarks/memory.py DIR --layers 20 --ram 1GiB

Makes a Llama with random weights in DIR, as safetensors; then a second process loads it, trains a step and exports it.
Needs about 27 bytes of disk per parameter, and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def write_model(folder: Path, options: argparse.Namespace) -> None:
    """Random weights in bfloat16, one file for each layer and one for the rest."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    values = config_of(options)
    (folder / "config.json").write_text(json.dumps(values))
    make_config: Any = AutoConfig.for_model
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(**values))
    files: dict[str, list[str]] = {}
    for name in dict(model.named_parameters()):
        place = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{place}.safetensors", []).append(name)
    parameters = dict(model.named_parameters())
    for file, names in files.items():
        tensors = {name: (0.02 * torch.randn(parameters[name].shape)).bfloat16() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def resident_bytes() -> dict[str, int]:
    """What the process holds now: all of it, and without the pages of files that the kernel may drop."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "Rss"))}
    return {"all": values["VmRSS"], "own": values["RssAnon"] + values["RssShmem"]}


class Watch:
    """The peaks since the last look, by looking often."""

    def __init__(self) -> None:
        self.peaks = resident_bytes()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            now = resident_bytes()
            self.peaks = {name: max(count, now[name]) for name, count in self.peaks.items()}
            time.sleep(0.01)

    def take(self) -> dict[str, int]:
        peaks, self.peaks = self.peaks, resident_bytes()
        return peaks


def work(folder: Path, options: argparse.Namespace) -> None:
    import greedysnake as gs

    watch = Watch()
    model = gs.load_model(folder / "model")
    rows = {"imports, check of a small copy": watch.take()}
    start_s = time.perf_counter()
    engine = gs.Engine(model, gs.AdamW(lr=1e-4), storage=[folder / "store"], ram=options.ram, max_grad_norm=1.0)
    with engine:
        rows["loaded"] = watch.take()
        ids = torch.randint(0, 32000, (1, options.tokens))
        result = engine.step([{"input_ids": ids, "labels": ids}])
        rows["trained for a step"] = watch.take()
        gs.export_model(engine, model, folder / "out")
        rows["exported"] = watch.take()
        arena = engine.arena.peak_bytes
    print(f"{'peak while':<34}{'RSS':>10}{'without pages of files':>26}")
    for name, peaks in rows.items():
        print(f"{name:<34}{peaks['all'] / 1e9:>7.2f} GB{peaks['own'] / 1e9:>23.2f} GB")
    print(f"arena {arena / 1e9:.2f} GB of a budget of {options.ram}; loss {result.loss:.3f}")
    print(f"{time.perf_counter() - start_s:.0f} s; {sizes_of(folder / 'out') / 1e9:.2f} GB of safetensors came out")


def sizes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ram", default="1GiB")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    folder = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        write_model(folder / "model", options)
        print(f"a model of {sizes_of(folder / 'model') / 1e9:.2f} GB in safetensors", flush=True)
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--worker", str(folder)], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
