"""Writes a trained model as a folder that `from_pretrained` of transformers loads, one block in memory at a time."""

from __future__ import annotations

import copy
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from greedysnake.durable import sync
from greedysnake.errors import ConfigError, StorageError, explained
from greedysnake.locks import locked
from greedysnake.models.huggingface import CausalLM
from greedysnake.sizes import parse_size

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NAMES = {
    **{torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL"},
    **{torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"},
}
"""Of dtypes in the header of a safetensors file."""
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", CHAT_TEMPLATE, "chat_template.json", "tekken.json", "normalizer.json"),
    *(
        "spiece.model",
        "sentencepiece.model",
        "sentencepiece.bpe.model",
        "spm.model",
        "spm_char.model",
        "byte_maps.json",
    ),
    *("source.spm", "target.spm", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json"),
    *("emoji.json", "bpe.codes", "dict.txt", "prophetnet.tokenizer", "word_shape.json", "word_pronunciation.json"),
)
"""All that tokenizers of transformers have a name for (VOCAB_FILES_NAMES): one without its vocabulary may load all the
same, without a word."""
MORE_TEMPLATES = "additional_chat_templates"
CONFIG = "config.json"
PARTIAL = ".partial"
GENERATION_CONFIG = "generation_config.json"
END = "eos_token_id"


class Tokenizer(Protocol):
    """One of transformers, or ours."""

    def save_pretrained(self, folder: Path) -> object:
        """Writes its files to a folder that exists."""


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
    tokenizer: Tokenizer | None = None,
    chat_template: bytes | None = None,
) -> Path:
    """Writes safetensors files, configuration, generation configuration and the tokenizer: `tokenizer`, or the one
    that the model came with; `chat_template` takes the place of its own. `out` must not exist or be empty; what is
    written appears there when all of it is. Returns `out`.

    Parameters have `dtype`; what is not trained keeps the dtype that it is computed with.
    `special_tokens` are ids of the tokenizer by their names in config.json, such as "eos_token_id". A model that was
    made from a configuration gets them all. One from a folder keeps its own, and its generation ends at
    "eos_token_id" as well.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: use 'bfloat16' or 'float32'")
    target = Path(out)
    if not is_free(target):
        raise StorageError(f"{target} exists and is not empty: give another folder, or remove it", path=str(target))
    config, generation = _configurations(model, special_tokens or {})
    skeleton = model.skeleton()
    buffers = model.persistent_buffers(skeleton)
    blocks = _blocks(model, skeleton, buffers)
    shards = _plan(skeleton, blocks, dtype, parse_size(max_shard_bytes))
    move = "export to another drive" + ("" if dtype == "bfloat16" else ", or in bfloat16 (--dtype bfloat16)")
    with explained("write", target), _appearing(Path(os.path.realpath(target))) as partial:
        _require_space(partial, shards, move)
        with _Writer(partial, shards) as writer:
            _write_weights(
                engine, model, skeleton, {name: set(block) for name, block in blocks.items()}, buffers, writer
            )
        config.dtype = dtype
        config.architectures = [type(skeleton).__name__]
        config.save_pretrained(partial)
        (partial / GENERATION_CONFIG).write_text(generation, encoding="utf-8")
        _write_index(partial, shards)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        elif model.path is not None:
            _copy_tokenizer(model.path, partial)
        if chat_template is not None:
            (partial / CHAT_TEMPLATE).write_bytes(chat_template)
    return target


def is_free(target: Path) -> bool:
    """Whether nothing is there, or an empty folder; what an export left there that was killed does not count."""
    if not target.exists():
        return True
    return target.is_dir() and all(_is_partial(path, Path(os.path.realpath(target))) for path in target.iterdir())


def _is_partial(path: Path, target: Path) -> bool:
    return path.name.startswith(f".{target.name}.") and path.suffix == PARTIAL


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder on the drive of `target` whose content is there at the end, and that is removed if there is an error.
    At the end it is on the drive: a power cut takes nothing of it.

    A target that exists stays the folder that it is: it may be a mount point, a link or somebody's working directory.
    Nobody takes it for a model before config.json is in it, which comes last.
    """
    exists = target.is_dir()
    beside = target if exists else target.parent
    beside.mkdir(parents=True, exist_ok=True)
    for path in list(beside.iterdir()):
        if _is_partial(path, target):
            _remove_left_over(path, target)
    partial = beside / f".{target.name}.{uuid.uuid4().hex[:8]}{PARTIAL}"
    partial.mkdir()
    with locked(partial):
        try:
            yield partial
            for path in (*partial.rglob("*"), partial):
                sync(path)
            if exists:
                for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG):
                    path.rename(target / path.name)
                partial.rmdir()
            else:
                partial.rename(target)
            sync(target)
            sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _remove_left_over(partial: Path, target: Path) -> None:
    """What a process left that was killed: as large as a model, and under a name that nobody sees."""
    with locked(partial) as is_ours:
        if not is_ours:
            raise StorageError(
                f"{partial} is that of another export to {target}, which is under way: wait for it, or remove that "
                "folder",
                path=str(partial),
            )
        shutil.rmtree(partial)


@dataclass(frozen=True)
class _Place:
    """Of a tensor in the data of a file."""

    shape: torch.Size
    dtype: torch.dtype
    start: int


@dataclass
class _Shard:
    """One file: where each of its tensors goes."""

    places: dict[str, _Place] = field(default_factory=dict)
    num_bytes: int = 0
    name: str = ""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.places[name] = _Place(tensor.shape, tensor.dtype, self.num_bytes)
        self.num_bytes += tensor.nbytes

    def header(self) -> bytes:
        """As the format of safetensors has it: length, then JSON, padded so that the data are aligned."""
        table: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, place in self.places.items():
            offsets = [place.start, place.start + place.shape.numel() * place.dtype.itemsize]
            table[name] = {"dtype": NAMES[place.dtype], "shape": list(place.shape), "data_offsets": offsets}
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


Blocks = dict[str, dict[str, torch.Tensor]]


def _plan(skeleton: nn.Module, blocks: Blocks, dtype: str, max_bytes: int) -> list[_Shard]:
    """Which tensor goes where, and in which dtype, found by converting tensors without values."""
    shards = [_Shard()]
    for block in blocks.values():
        as_written = {
            name: tensor.to(DTYPES[dtype]) if isinstance(tensor, nn.Parameter) else tensor
            for name, tensor in block.items()
        }
        for name, tensor in to_disk(skeleton, as_written).items():
            if shards[-1].places and shards[-1].num_bytes + tensor.nbytes > max_bytes:
                shards.append(_Shard())
            shards[-1].add(name, tensor)
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
        del value  # or the memory of this block would be held while the next is read
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

    def __init__(self, folder: Path, shards: Sequence[_Shard]) -> None:
        self._stack = ExitStack()
        self._places: dict[str, tuple[int, int, _Place]] = {}
        """File, where its data begin, and the place in them."""
        self._files: list[int] = []
        for shard in shards:
            header = shard.header()
            file = os.open(folder / shard.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._stack.callback(os.close, file)
            self._files.append(file)
            _pwrite(file, header, 0)
            for name, place in shard.places.items():
                self._places[name] = (file, len(header), place)
        self._thread = self._stack.enter_context(ThreadPoolExecutor(1))  # ends before the files are closed
        self._under_way: Future[None] | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Begins to write a block, once the one before is written: so the next is read meanwhile."""
        self._wait()
        found: list[tuple[int, torch.Tensor, int]] = []
        for name, tensor in tensors.items():
            file, first, place = self._places.pop(name)
            if tensor.shape != place.shape:
                raise ConfigError(f"{name} is {tuple(tensor.shape)}, the model has {tuple(place.shape)}")
            found.append((file, tensor.to(place.dtype).contiguous(), first + place.start))
        self._under_way = self._thread.submit(_write, found)

    def finish(self) -> None:
        self._wait()
        assert not self._places, sorted(self._places)
        for file in self._files:
            os.fsync(file)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()


def _write(tensors: Sequence[tuple[int, torch.Tensor, int]]) -> None:
    """Puts each tensor into a file, at an offset."""
    for file, tensor, offset in tensors:
        _pwrite(file, tensor.view(-1).view(torch.uint8).numpy().data, offset)


def _pwrite(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _require_space(folder: Path, shards: Sequence[_Shard], move: str) -> None:
    needed, free = sum(shard.num_bytes for shard in shards), shutil.disk_usage(folder).free
    if needed > free:
        raise StorageError(
            f"the model takes {needed} bytes, {folder.parent} has {free} free: {move}",
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


def _write_index(folder: Path, shards: Sequence[_Shard]) -> None:
    """Which file a tensor is in."""
    if len(shards) > 1:
        table = {name: shard.name for shard in shards for name in shard.places}
        total = sum(shard.num_bytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(table.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / MORE_TEMPLATES).is_dir():
        shutil.copytree(source / MORE_TEMPLATES, folder / MORE_TEMPLATES)
