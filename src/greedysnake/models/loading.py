"""Fills the blocks of a Hugging Face model one at a time: from safetensors files, or by the model's own initialisation.

Never holds more than one block. Names on disk are turned into names in memory by Hugging Face's own rules.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError, explained

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INITIALIZED = "_is_hf_initialized"
"""Flag by which Hugging Face's initialisation knows what to leave alone."""

FULL = ("F64", "F32", "F16", "BF16")
"""What weights can be trained from, by the names that safetensors has; there is F8 as well."""

COMPARED_ROWS = 4096


class Files:
    """The tensors in the safetensors files of a folder. Maps nothing into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _tensor_files(folder)
        self._closing: ExitStack | None = None
        self._opened: dict[Path, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> torch.Size:
        from safetensors import safe_open

        with safe_open(self._file_of[name], framework="pt", backend="pread") as file:
            return torch.Size(file.get_slice(name).get_shape())

    def shapes_and_dtypes(self) -> dict[str, tuple[torch.Size, str]]:
        """Of all tensors, opening each file once; dtypes by the names that safetensors has, such as BF16."""
        from safetensors import safe_open

        names_in = defaultdict(list)
        for name, path in self._file_of.items():
            names_in[path].append(name)
        found = {}
        for path, names in names_in.items():
            with _whole(path), safe_open(path, framework="pt", backend="pread") as file:
                slices = {name: file.get_slice(name) for name in names}
                found.update({name: (torch.Size(one.get_shape()), one.get_dtype()) for name, one in slices.items()})
        return found

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """`read` opens each file once meanwhile: to open one is to read the names and places of all that is in it."""
        with ExitStack() as closing:
            self._closing = closing
            try:
                yield
            finally:
                self._closing, self._opened = None, {}

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor, or some of its rows."""
        from safetensors import safe_open

        if self._closing is None:
            with self.kept_open():
                return self.read(name, rows)
        path = self._file_of[name]
        if path not in self._opened:
            self._opened[path] = self._closing.enter_context(safe_open(path, framework="pt", backend="pread"))
        file = self._opened[path]
        tensor: torch.Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        return tensor


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights to load; ConfigError if they are in a format that is not read."""
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file() or list(folder.glob("*.safetensors")):
        return True
    others = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5")]
    if others:
        raise ConfigError(
            f"{folder} has weights in {others[0]}, which is not read: convert them to safetensors with "
            "from_pretrained and save_pretrained of transformers"
        )
    return False


def _tensor_files(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    # As in transformers: save_pretrained leaves the index of earlier shards beside the one file that replaces them.
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        try:
            with explained("read", folder / INDEX):
                table = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder / INDEX} is no index of safetensors files ({error}): fetch it again") from error
        missing = sorted({str(file) for file in table.values() if not (folder / str(file)).is_file()})
        if missing:
            raise ConfigError(f"{folder / INDEX} names {missing[0]}, which is not in the folder: fetch it again")
        return {name: folder / file for name, file in table.items()}
    single = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    found: dict[str, Path] = {}
    for path in single:
        with _whole(path), safe_open(path, framework="pt", backend="pread") as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """What safetensors says of a file that is not what it should be, as one sentence."""
    from safetensors import SafetensorError

    with explained("read", path), path.open("rb"):  # else what safetensors says is no matter of its content
        pass
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no safetensors file or is cut short ({error}): fetch it again") from error


class Weights:
    """Which tensors on disk make which parameters in memory."""

    def __init__(self, files: Files, skeleton: nn.Module, block_of: Callable[[str], str]) -> None:
        """`skeleton` is the model without values; `block_of` tells the block of a name in memory."""
        self._files = files
        self._skeleton = skeleton
        self._wanted = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
        self._parameters = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
        self._aliases = _aliases(skeleton)
        self._conversions: dict[str, dict[str, Any]] = defaultdict(dict)
        self.unused: list[str] = []
        """Tensors on disk that the model has no place for."""
        self._plan(block_of)

    def check(self) -> None:
        """ConfigError unless the files have every parameter, in the shape it should have."""
        stored = self._files.shapes_and_dtypes()
        covered: set[str] = set()
        for conversions in self._conversions.values():
            for name, conversion in conversions.items():
                targets = _targets(name, conversion)
                covered |= targets
                sources = [source for found in conversion.layer_targets.values() for source in found]
                for source in sources:
                    if name in self._parameters and stored[source][1] not in FULL:
                        raise ConfigError(
                            f"{source} in {self._files.folder} is {stored[source][1]}, so the model is quantized: give "
                            f"one with full weights ({', '.join(FULL)})"
                        )
                is_renaming = len(sources) == 1 and not hasattr(conversion, "operations")
                if is_renaming and stored[sources[0]][0] != self._wanted[name]:
                    raise ConfigError(
                        f"{sources[0]} in {self._files.folder} is {tuple(stored[sources[0]][0])}, the model's "
                        f"configuration asks for {tuple(self._wanted[name])}: the two do not belong together"
                    )
        missing = [name for name in self._wanted if not covered & self._aliases[name]]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"{self._files.folder} has no values for {missing[0]}{more}: the files are incomplete, or of "
                "another model than config.json"
            )
        self._check_tied(covered)

    def load(self, block: str, *, buffers_only: bool = False) -> dict[str, torch.Tensor]:
        """The values of one block by their names in memory, in the dtype of the files; those of parameters are not
        read if `buffers_only`."""
        with self._files.kept_open():
            return self._load(block, buffers_only)

    def _load(self, block: str, buffers_only: bool) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for name, planned in self._conversions[block].items():
            if buffers_only and name in self._parameters:
                continue
            # The table of all files, which is what tensors are read by, is not copied with every conversion.
            conversion = copy.deepcopy(planned, {id(self._files): self._files})
            converted = conversion.convert(name, model=self._skeleton, config=self._skeleton.config)
            for target, value in converted.items():
                values[target] = value[0] if isinstance(value, list) else value
                wanted = self._wanted[target]
                if values[target].shape != wanted:
                    raise ConfigError(
                        f"{target} in {self._files.folder} is {tuple(values[target].shape)}, the model's "
                        f"configuration asks for {tuple(wanted)}: the two do not belong together"
                    )
        for name in list(values):
            for alias in self._aliases[name]:
                values.setdefault(alias, values[name])
        return values

    def _plan(self, block_of: Callable[[str], str]) -> None:
        """Follows the loading of transformers: rename, then collect what a conversion needs."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        rules = get_model_conversion_mapping(self._skeleton)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, wanted = self._skeleton.base_model_prefix, self._wanted
        for source in sorted(self._files.names, key=dot_natural_key):
            name, pattern = rename_source_key(source, renamings, converters, prefix, wanted)
            if name not in wanted and source in wanted:
                name, pattern = rename_source_key(source, [], [], prefix, wanted)
            if name not in wanted:
                self.unused.append(source)
                continue
            conversions = self._conversions[block_of(name)]
            if name not in conversions:
                conversions[name] = copy.deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(source, name)
            conversions[name].add_tensor(name, source, pattern or source, partial(self._files.read, source))

    def _check_tied(self, covered: set[str]) -> None:
        for target, source in self._skeleton.all_tied_weights_keys.items():  # type: ignore[union-attr,operator]
            if not {target, source} <= covered or target not in self._files.names or source not in self._files.names:
                continue
            rows = self._wanted[source][0]
            for start in range(0, rows, COMPARED_ROWS):
                part = slice(start, min(start + COMPARED_ROWS, rows))
                if not torch.equal(self._files.read(target, part), self._files.read(source, part)):
                    raise ConfigError(
                        f"config.json says that {target} is {source}, in the files they differ: set "
                        "tie_word_embeddings to false in config.json"
                    )


def _targets(name: str, conversion: Any) -> set[str]:
    """Every parameter that a conversion makes; `name` is the first of them."""
    first = conversion.target_patterns[0]
    return {name, *(name.replace(first, other) for other in conversion.target_patterns[1:])}


def _aliases(model: nn.Module) -> dict[str, set[str]]:
    """All names of the tensor that has a name."""
    names: dict[int, set[str]] = defaultdict(set)
    tensors = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names[id(tensor)].add(name)
    return {name: names[id(tensor)] for name, tensor in tensors.items()}


class Materializer:
    """Gives the modules of a skeleton memory and values, some modules at a time."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._names.setdefault(id(tensor), name)
        self._made: dict[int, nn.Parameter] = {}
        """By what they stand for in the skeleton, so that tied parameters stay one."""
        self._persistent = set(model.state_dict())

    def fill(
        self, modules: Sequence[nn.Module], values: Mapping[str, torch.Tensor] | None, *, initialize: bool, index: int
    ) -> None:
        """Fills the parameters and buffers of `modules` (not of their children). What `values` does not have is
        initialised as by Hugging Face, from random numbers that depend on the seed and on `index`, unless
        `initialize` is off: then parameters are left as they are and only buffers are computed."""
        values = values or {}
        for module in self._model.modules():
            setattr(module, INITIALIZED, True)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            setattr(tensor, INITIALIZED, True)
        for module in modules:
            setattr(module, INITIALIZED, False)
            self._fill_parameters(module, values, initialize)
            self._fill_buffers(module, values)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed((self._seed * 1_000_003 + index) & 0x7FFF_FFFF_FFFF_FFFF)
            self._model.initialize_weights()  # type: ignore[operator]

    def _fill_parameters(self, module: nn.Module, values: Mapping[str, torch.Tensor], initialize: bool) -> None:
        for name, old in list(module.named_parameters(recurse=False)):
            new = self._made.get(id(old))
            if new is None:
                value = values.get(self._names[id(old)])
                is_set = value is not None or not initialize
                new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype) if value is None else value)
                setattr(new, INITIALIZED, is_set)
                self._made[id(old)] = self._made[id(new)] = new
            setattr(module, name, new)

    def _fill_buffers(self, module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
        for name, old in list(module.named_buffers(recurse=False)):
            if old.device.type != "meta":
                setattr(old, INITIALIZED, False)
                continue
            value = values.get(self._names.get(id(old), ""))
            new = torch.empty(old.shape, dtype=old.dtype) if value is None else value.to(old.dtype)
            setattr(new, INITIALIZED, value is not None)
            setattr(module, name, new)


def own_modules(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """The modules that directly hold the parameters of these names."""
    owners = {name.rpartition(".")[0] for name in names}
    return {owner: model.get_submodule(owner) for owner in sorted(owners)}
