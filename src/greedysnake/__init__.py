"""GreedySnake: train large language models on hardware that cannot hold them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from greedysnake.config import Config, load_config
    from greedysnake.errors import ConfigError, GreedySnakeError, OpError, PlanError, StorageError
    from greedysnake.models.export import export_model
    from greedysnake.models.huggingface import load_model
    from greedysnake.models.sequential import Sequential
    from greedysnake.placement import Placement, Slots
    from greedysnake.runtime.arguments import IoOptions
    from greedysnake.runtime.engine import Engine
    from greedysnake.runtime.optimizer import AdamW
    from greedysnake.runtime.result import StepResult
    from greedysnake.trainer import Trainer

# Public names are imported when they are first used: the schedule and the command line need no torch.
_HOMES = {
    "AdamW": "runtime.optimizer",
    "Config": "config",
    "ConfigError": "errors",
    "Engine": "runtime.engine",
    "GreedySnakeError": "errors",
    "IoOptions": "runtime.arguments",
    "OpError": "errors",
    "Placement": "placement",
    "PlanError": "errors",
    "Sequential": "models.sequential",
    "Slots": "placement",
    "StepResult": "runtime.result",
    "StorageError": "errors",
    "Trainer": "trainer",
    "export_model": "models.export",
    "load_config": "config",
    "load_model": "models.huggingface",
}

__all__ = [
    "AdamW",
    "Config",
    "ConfigError",
    "Engine",
    "GreedySnakeError",
    "IoOptions",
    "OpError",
    "Placement",
    "PlanError",
    "Sequential",
    "Slots",
    "StepResult",
    "StorageError",
    "Trainer",
    "export_model",
    "load_config",
    "load_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'greedysnake' has no attribute {name!r}")
    return getattr(import_module(f"greedysnake.{_HOMES[name]}"), name)
