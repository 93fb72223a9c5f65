"""Writes a trained model as a folder that `from_pretrained` of transformers loads, one block in memory at a time."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from greedysnake.errors import ConfigError, StorageError, explained
from greedysnake.models.huggingface import CausalLM
from greedysnake.sizes import parse_size

DTYPES = {"bfloat16": (torch.bfloat16, "BF16"), "float32": (torch.float32, "F32")}
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "tekken.json"),
)
GENERATION_CONFIG = "generation_config.json"
END = "eos_token_id"


class HasParameters(Protocol):
    """What is exported: an engine."""

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) of every parameter, a block at a time in memory."""


def export_model(
    engine: HasParameters,
    model: CausalLM,
    out: str | PathLike[str],
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int | str = "5GB",
    special_tokens: Mapping[str, int | None] | None = None,
) -> Path:
    """Writes safetensors files, configuration, generation configuration and, if the model came with them, the
    tokenizer's files. `out` must not exist or be empty; it appears when everything is written. Returns it.

    `special_tokens` are ids of the tokenizer by their names in config.json, such as "eos_token_id". A model that was
    made from a configuration gets them all. One from a folder keeps its own, and its generation ends at
    "eos_token_id" as well.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: use 'bfloat16' or 'float32'")
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(f"{target} exists and is not empty: give another folder, or remove it", path=str(target))
    config, generation = _configurations(model, special_tokens or {})
    skeleton = model.skeleton()
    buffers = model.persistent_buffers(skeleton)
    blocks = _blocks(model, skeleton, buffers)
    shards = _plan(skeleton, blocks, dtype, parse_size(max_shard_bytes))
    with explained("write", target), _appearing(target) as partial:
        _require_space(partial, shards)
        with _Writer(partial, shards, dtype) as writer:
            _write_weights(
                engine, model, skeleton, {name: set(block) for name, block in blocks.items()}, buffers, writer
            )
        config.dtype = dtype
        config.architectures = [type(skeleton).__name__]
        config.save_pretrained(partial)
        (partial / GENERATION_CONFIG).write_text(generation, encoding="utf-8")
        _write_rest(model, partial, shards)
    return target


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder beside `target` that becomes it at the end, and is removed if there is an error."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial)
        raise


@dataclass
class _Shard:
    """One file: where each of its tensors goes."""

    places: dict[str, tuple[torch.Size, int, int]] = field(default_factory=dict)
    """Shape, and first and last byte of the data."""
    num_bytes: int = 0
    name: str = ""

    def add(self, name: str, shape: torch.Size, num_bytes: int) -> None:
        self.places[name] = (shape, self.num_bytes, self.num_bytes + num_bytes)
        self.num_bytes += num_bytes

    def header(self, dtype: str) -> bytes:
        """As the format of safetensors has it: length, then JSON, padded so that the data are aligned."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, (shape, start, end) in self.places.items():
            table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


Blocks = dict[str, dict[str, torch.Tensor]]


def _plan(skeleton: nn.Module, blocks: Blocks, dtype: str, max_bytes: int) -> list[_Shard]:
    """Which tensor goes where, found by converting tensors without values."""
    item_bytes = DTYPES[dtype][0].itemsize
    shards = [_Shard()]
    for block in blocks.values():
        for name, tensor in to_disk(skeleton, block).items():
            num_bytes = tensor.numel() * item_bytes
            if shards[-1].places and shards[-1].num_bytes + num_bytes > max_bytes:
                shards.append(_Shard())
            shards[-1].add(name, tensor.shape, num_bytes)
    for number, shard in enumerate(shards):
        shard.name = (
            "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
    return shards


def _blocks(model: CausalLM, skeleton: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Blocks:
    """What is exported, by block and by its names in memory, tied parameters once."""
    blocks: Blocks = {}
    for name, tensor in (*skeleton.named_parameters(), *buffers.items()):
        blocks.setdefault(model.block_of(name), {})[name] = tensor
    return blocks


def to_disk(skeleton: nn.Module, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values of a block under the names, and in the form, that files have."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(skeleton, dict(values))
    return converted


def _write_weights(
    engine: HasParameters,
    model: CausalLM,
    skeleton: nn.Module,
    wanted: Mapping[str, set[str]],
    buffers: Mapping[str, torch.Tensor],
    writer: _Writer,
) -> None:
    """Writes each block as soon as it is complete: what a conversion needs lies in one block."""
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in buffers.items():
        held.setdefault(model.block_of(name), {})[name] = value
    first_name = _first_names(skeleton)
    missing = set(first_name.values())
    for engine_name, value in engine.named_parameters():
        if model.name_in_model(engine_name) not in first_name:
            raise ConfigError(f"the engine has {engine_name}, the model has not: they do not belong together")
        name = first_name[model.name_in_model(engine_name)]
        block = model.block_of(name)
        held.setdefault(block, {})[name] = value
        missing.discard(name)
        if held[block].keys() == wanted[block]:
            writer.write(to_disk(skeleton, held.pop(block)))
    if missing:
        raise ConfigError(f"the model has {min(missing)}, the engine has not: they do not belong together")
    writer.finish()


def _first_names(skeleton: nn.Module) -> dict[str, str]:
    """The name that a parameter is exported under, for every name that it has."""
    first = {id(parameter): name for name, parameter in skeleton.named_parameters()}
    return {name: first[id(p)] for name, p in skeleton.named_parameters(remove_duplicate=False)}


class _Writer:
    """Puts tensors at their places in the files."""

    def __init__(self, folder: Path, shards: Sequence[_Shard], dtype: str) -> None:
        self._dtype = DTYPES[dtype][0]
        self._stack = ExitStack()
        self._places: dict[str, tuple[int, torch.Size, int]] = {}
        self._files: list[int] = []
        for shard in shards:
            header = shard.header(DTYPES[dtype][1])
            file = os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._stack.callback(os.close, file)
            self._files.append(file)
            _pwrite(file, header, 0)
            for name, (shape, start, _) in shard.places.items():
                self._places[name] = (file, shape, len(header) + start)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            file, shape, offset = self._places.pop(name)
            if tensor.shape != shape:
                raise ConfigError(f"{name} is {tuple(tensor.shape)}, the model has {tuple(shape)}")
            data = tensor.to(self._dtype).contiguous().view(-1).view(torch.uint8).numpy()
            _pwrite(file, data.data, offset)

    def finish(self) -> None:
        assert not self._places, sorted(self._places)
        for file in self._files:
            os.fsync(file)


def _pwrite(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _require_space(folder: Path, shards: Sequence[_Shard]) -> None:
    needed, free = sum(shard.num_bytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"the model takes {needed} bytes, {folder.parent} has {free} free: export to another drive, or with "
            "dtype='bfloat16'",
            path=str(folder.parent),
            wanted=needed,
            got=free,
        )


def _configurations(model: CausalLM, special_tokens: Mapping[str, int | None]) -> tuple[Any, str]:
    """Hugging Face's configuration, and the text of generation_config.json, which says where generation ends.

    The ids come in here and not when training starts, because many models with a pad_token_id never train the row of
    that token in their embedding.
    """
    from transformers import GenerationConfig

    config = copy.deepcopy(model.config)
    end = special_tokens.get(END)
    if model.path is None:
        for name, token in special_tokens.items():
            setattr(config, name, token)
    elif config.eos_token_id is None:
        config.eos_token_id = end
    path = None if model.path is None else model.path / GENERATION_CONFIG
    if path is None or not path.is_file():
        text = GenerationConfig.from_model_config(config).to_json_string()
    else:
        with explained("read", path):
            text = path.read_text(encoding="utf-8")
    return config, text if path is None or end is None else _ending_at(end, text, path)


def _ending_at(token: int, generation: str, path: Path) -> str:
    """The text of generation_config.json, with a token among those that end generation."""
    try:
        values = json.loads(generation)
        ends = values.get(END)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is no JSON object: correct or remove it") from error
    known = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if token in known:
        return generation
    values[END] = [*known, token] if known else token
    return json.dumps(values, indent=2) + "\n"


def _write_rest(model: CausalLM, folder: Path, shards: Sequence[_Shard]) -> None:
    """Where tensors are, and the tokenizer."""
    if len(shards) > 1:
        table = {name: shard.name for shard in shards for name in shard.places}
        total = sum(shard.num_bytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if model.path is not None and (model.path / name).is_file():
            shutil.copyfile(model.path / name, folder / name)
