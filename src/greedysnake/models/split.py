"""Where a Hugging Face model is cut, and the modules of its blocks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError
from greedysnake.models.capture import Embed, Frame, Head, Layer, RoutedLayer
from greedysnake.models.loading import own_modules
from greedysnake.models.router import Balance, Router


@dataclass(frozen=True)
class Split:
    """Where a model is cut."""

    layers: str
    """Name of its list of layers."""
    embed: tuple[str, ...]
    """Parameters that are used before the first layer, and those that are used nowhere."""
    head: tuple[str, ...]
    """Parameters that are used after the last layer; tied ones are in both."""
    adjusts_logits: bool
    """Whether something is done to the logits before the loss."""
    packs: bool
    """Whether packed documents can be kept apart."""
    masks_documents: bool
    """Whether that takes a mask of our own."""


@dataclass(frozen=True)
class Blocks:
    """The modules of a model's blocks."""

    embed: nn.Module
    layers: list[nn.Module]
    head: nn.Module


def build_skeleton(config: Any, attn_implementation: str) -> nn.Module:
    """The whole model without values."""
    with torch.device("meta"):
        return build_model(config, attn_implementation)


def build_model(config: Any, attn_implementation: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=attn_implementation, dtype=torch.float32
    )
    assert isinstance(model, nn.Module)
    return model


def make_blocks(frame: Frame, split: Split, *, balance: Balance | None, chunk_tokens: int) -> Blocks:
    model = frame.model
    embed_parts = own_modules(model, split.embed)
    for name, module in model.named_modules():
        if name not in embed_parts and list(module.buffers(recurse=False)):
            embed_parts[name] = module
    head = Head(
        frame,
        own_modules(model, split.head),
        chunk_tokens=chunk_tokens,
        adjusts_logits=split.adjusts_logits,
        balance=balance,
    )
    layers = [_make_layer(frame, index, balance) for index in range(len(frame.layers))]
    return Blocks(Embed(frame, embed_parts), layers, head)


def _make_layer(frame: Frame, index: int, balance: Balance | None) -> nn.Module:
    if balance is None:
        return Layer(frame, index)
    recorder = frame.model.can_record_outputs["router_logits"]  # type: ignore[index,operator]
    kind: Any = getattr(recorder, "target_class", recorder)
    output_index: int = getattr(recorder, "index", 0)
    routers = [module for module in frame.layers[index].modules() if isinstance(module, kind)]
    if not routers:
        return Layer(frame, index)
    return RoutedLayer(frame, index, Router(routers[0], output_index, balance))


def find_balance(model: nn.Module) -> Balance | None:
    """The balancing loss that the model's configuration asks for, and switches Hugging Face's own off."""
    config: Any = model.config
    if not getattr(config, "output_router_logits", False):
        return None
    config.output_router_logits = False
    wanted = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    records = getattr(model, "can_record_outputs", {})
    if any(not hasattr(model, name) for name in wanted) or "router_logits" not in records:
        raise ConfigError(
            f"the balancing loss of {config.model_type} is not supported: set output_router_logits to false"
        )
    return Balance(*(getattr(model, name) for name in wanted))


def find_layers(model: nn.Module, config: Any) -> str:
    """The name of the list of layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    stacks: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    outer = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if len(outer) != 1:
        raise ConfigError(
            f"{config.model_type} has {len(outer)} stacks of layers: only models with a single decoder are supported"
        )
    count = len(layer_list(model, outer[0]))
    if count != config.num_hidden_layers:
        raise ConfigError(f"{config.model_type} has {count} layers for num_hidden_layers={config.num_hidden_layers}")
    return outer[0]


def layer_list(model: nn.Module, name: str) -> nn.ModuleList:
    found = model.get_submodule(name)
    assert isinstance(found, nn.ModuleList)
    return found
