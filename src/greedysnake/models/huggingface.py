"""A Hugging Face causal LM as blocks: found in a folder or made from a configuration, never in memory as a whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError
from greedysnake.models.capture import INPUTS, LABELS, Frame
from greedysnake.models.check import check_model
from greedysnake.models.configuration import make_configuration, read_configuration, require_sound
from greedysnake.models.loading import Files, Materializer, Weights, has_weights
from greedysnake.models.loss import CHUNK_TOKENS, IGNORED
from greedysnake.models.sequential import Batch, BlockSource, Built, Made, grouped, ignore, require_layers_per_block
from greedysnake.models.split import Split, build_skeleton, find_balance, make_blocks

EAGER = "eager"
SUPPORTS_SDPA = "_supports_sdpa"
"""Flag of a model class in transformers."""


def load_model(
    path_or_config: str | PathLike[str] | Mapping[str, Any] | Any,
    *,
    seed: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    attn_implementation: str = "sdpa",
    layers_per_block: int = 1,
) -> CausalLM:
    """What `Engine` takes, from a model folder of Hugging Face, or from a configuration: a folder with config.json
    alone, a dict with "model_type", or a PretrainedConfig.

    With weights in the folder, they are read block by block when the engine is made. Without, the model is initialised
    as Hugging Face does it, the same for the same `seed`. The loss is computed in chunks of `chunk_tokens`, so the
    logits never exist as a whole. `attn_implementation` is that of transformers; models that have no "sdpa" (Gemma 2,
    gpt-oss) use "eager" instead. `layers_per_block` layers stream as one block, as in `Sequential`.

    Before anything else, a small copy of the model is trained whole and in blocks; ConfigError if they differ.
    """
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens is {chunk_tokens}: give 1 or more")
    require_layers_per_block(layers_per_block)
    path, config = _find(path_or_config)
    attn_implementation = _attention(config, attn_implementation)
    split = check_model(config, attn_implementation)
    return CausalLM(
        config,
        path,
        split,
        seed=seed,
        chunk_tokens=chunk_tokens,
        attn_implementation=attn_implementation,
        layers_per_block=layers_per_block,
    )


class CausalLM:
    """A causal language model as blocks. Batches have `input_ids` and `labels` (batch, tokens), labels not shifted and
    -100 for no target; for padded rows `attention_mask`, for packed rows `position_ids` that start at 0 with each
    document, which then do not see each other."""

    def __init__(
        self,
        config: Any,
        path: Path | None,
        split: Split,
        *,
        seed: int,
        chunk_tokens: int,
        attn_implementation: str,
        layers_per_block: int,
    ) -> None:
        self.config = config
        """Hugging Face's configuration."""
        self.path = path
        """The folder that it came from, if any."""
        self.split = split
        self.attn_implementation = attn_implementation
        self.layers_per_block = layers_per_block
        self._seed = seed
        self._chunk_tokens = chunk_tokens
        self._files = Files(path) if path is not None and has_weights(path) else None
        if self._files is not None:
            weights = self._weights(self._files, self.skeleton())
            weights.check()
            if weights.unused:
                warnings.warn(
                    f"{path} has {len(weights.unused)} tensors that {config.model_type} has no place for, such as "
                    f"{weights.unused[0]}: they are left out",
                    RuntimeWarning,
                    stacklevel=4,
                )

    @property
    def has_weights(self) -> bool:
        """Whether values come from files."""
        return self._files is not None

    def skeleton(self) -> nn.Module:
        """The whole model of Hugging Face, without values."""
        return build_skeleton(self.config, self.attn_implementation)

    def sources(self) -> Iterator[BlockSource]:
        """The blocks in forward order; each call makes modules of its own."""
        skeleton = self.skeleton()
        balance = find_balance(skeleton)
        weights = None if self._files is None else self._weights(self._files, skeleton)
        materializer = Materializer(skeleton, self._seed)
        frame = Frame(skeleton, self.split.layers, masks_documents=self.split.masks_documents)
        blocks = make_blocks(frame, self.split, balance=balance, chunk_tokens=self._chunk_tokens)
        members: list[tuple[str, nn.Module]] = [("embed", blocks.embed)]
        members += [(f"layers.{index}", layer) for index, layer in enumerate(blocks.layers)]
        members.append(("head", blocks.head))
        sources = []
        for index, (name, module) in enumerate(members):
            fill = partial(_fill, materializer, frame, weights, name=name, index=index)
            sources.append(_Source(name, partial(self._build, frame, name, module, fill)))
        return grouped(sources, self.layers_per_block)

    @property
    def may_be_grouped(self) -> bool:
        """Whether a block can have several layers: not where layers have a part in the loss, as routers have that are
        balanced."""
        return find_balance(self.skeleton()) is None

    def in_blocks_of(self, layers_per_block: int) -> CausalLM:
        """The same model with so many layers in a block."""
        other = copy.copy(self)
        other.layers_per_block = layers_per_block
        return other

    def num_targets(self, batch: Batch) -> int:
        """Labels that are predicted: all but those that are -100, and but the first of a row."""
        self._check_batch(batch)
        return int((batch[LABELS][:, 1:] != IGNORED).sum())

    def name_in_model(self, name: str) -> str:
        """The name that Hugging Face has for a parameter of `Engine.named_parameters`."""
        block, _, rest = name.partition(".")
        return f"{self.split.layers}.{rest}" if block == "layers" else rest

    def block_of(self, name: str) -> str:
        """The block of a parameter or buffer by Hugging Face's name for it. Tied ones are the embedding's."""
        layers = f"{self.split.layers}."
        if name.startswith(layers):
            return f"layers.{name.removeprefix(layers).partition('.')[0]}"
        return "head" if name in self.split.head else "embed"

    def untrained_names(self, skeleton: nn.Module) -> list[str]:
        """What belongs to the model but is not trained, by Hugging Face's names: few models have any, such as the bias
        by which some choose their experts."""
        parameters = dict(skeleton.named_parameters(remove_duplicate=False))
        return [name for name in skeleton.state_dict() if name not in parameters]

    def persistent_buffers(self, skeleton: nn.Module) -> dict[str, torch.Tensor]:
        """The values of `untrained_names`."""
        names = self.untrained_names(skeleton)
        if not names:
            return {}
        own = self.skeleton()
        weights = None if self._files is None else self._weights(self._files, own)
        materializer = Materializer(own, self._seed)
        found = {}
        for name in names:
            owner, _, attribute = name.rpartition(".")
            values = None if weights is None else weights.load(self.block_of(name), buffers_only=True)
            module = own.get_submodule(owner)
            materializer.fill([module], values, initialize=False, index=0)
            found[name] = getattr(module, attribute)
        return found

    def _build(self, frame: Frame, name: str, module: nn.Module, fill: Callable[..., None], values: bool) -> Built:
        if torch.get_default_device().type != "meta":
            fill(module, values=values)
        if name == "embed":
            names = self.split.embed
        elif name == "head":
            names = self.split.head
        else:
            return module, {f"{name}.{key}": value for key, value in module.layer.named_parameters()}  # type: ignore[union-attr,operator]
        return module, {f"{name}.{key}": frame.model.get_parameter(key) for key in names}

    def _weights(self, files: Files, skeleton: nn.Module) -> Weights:
        return Weights(files, skeleton, self.block_of)

    def _check_batch(self, batch: Batch) -> None:
        missing = [name for name in ("input_ids", LABELS) if name not in batch]
        if missing:
            raise ConfigError(f"a batch has no {missing[0]}: give input_ids and labels, of shape (batch, tokens)")
        unknown = [name for name in batch if name not in (*INPUTS, LABELS)]
        if unknown:
            raise ConfigError(
                f"a batch has {unknown[0]}, which the model does not take: give {', '.join(INPUTS)}, labels"
            )
        shape = batch["input_ids"].shape
        for name, value in batch.items():
            if value.dim() != 2 or value.shape != shape:
                raise ConfigError(
                    f"{name} is of shape {tuple(value.shape)}, input_ids of {tuple(shape)}: all of a batch must be "
                    "(batch, tokens)"
                )
        if "position_ids" in batch and "attention_mask" in batch:
            raise ConfigError(
                "a batch has position_ids and attention_mask: give position_ids for packed rows, where padding at the "
                "end counts as a document of its own, or attention_mask for padded ones"
            )
        if "position_ids" in batch and not self.split.packs:
            raise ConfigError(
                f"{self.config.model_type} with {self.attn_implementation} attention cannot keep packed documents "
                "apart: use padded batches"
            )


@dataclass(frozen=True)
class _Source:
    name: str
    make: Callable[[bool], Built]

    def build(self, *, values: bool = True, made: Made = ignore) -> Built:
        module, parameters = self.make(values)
        made(parameters)
        return module, parameters


def _fill(
    materializer: Materializer,
    frame: Frame,
    weights: Weights | None,
    block: nn.Module,
    *,
    name: str,
    index: int,
    values: bool,
) -> None:
    """Gives one block its values. Without `values` its parameters get memory that nobody has touched yet: a checkpoint
    has their values, and not those of buffers."""
    loaded = None if weights is None else weights.load(name, buffers_only=not values)
    modules = [module for part in block.children() for module in part.modules()]
    with frame.whole():
        materializer.fill(modules, loaded, initialize=values, index=index)


def _find(source: Any) -> tuple[Path | None, Any]:
    """The folder, if there is one, and the configuration."""
    from transformers import PretrainedConfig

    if isinstance(source, PretrainedConfig):
        return None, copy.deepcopy(source)
    if isinstance(source, Mapping):
        require_sound(source)
        return None, make_configuration(source)
    if not isinstance(source, str | PathLike):
        raise ConfigError(
            f"a {type(source).__name__} was given: give the folder of a model, or a configuration; a model in memory "
            "is saved with save_pretrained first"
        )
    path = Path(source)
    if not path.is_dir():
        raise ConfigError(
            f"{path} is no folder: give a folder with config.json and safetensors files; a model of the Hugging Face "
            f"hub is fetched with `hf download {path} --local-dir DIRECTORY`"
        )
    return path, read_configuration(path)


def _attention(config: Any, wanted: str) -> str:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return EAGER if wanted == "sdpa" and kind is not None and not getattr(kind, SUPPORTS_SDPA, True) else wanted
