"""Whether a model's sizes fit together: its forward with all its sizes and without values, on torch's meta device.

What needs values, such as choosing experts in some models, cannot run there. So a failure counts only where a small
copy of the model, which is known to compute, gets through.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError
from greedysnake.models.split import build_skeleton

TOKENS = 12


def require_fitting_sizes(config: Any, skeleton: nn.Module, small: Any, attn_implementation: str) -> None:
    """ConfigError when the forward of `skeleton` fails in a module that does not fail in the `small` copy."""
    found = rehearse(skeleton)
    if found.error is None:
        return
    of_small = rehearse(build_skeleton(small, attn_implementation))
    if of_small.error is not None and found.inside[-1] not in of_small.done:
        return
    reason = " ".join(str(found.error).split())
    raise ConfigError(
        f"the sizes of the {config.model_type} model do not fit together ({type(found.error).__name__} in "
        f"{found.inside[-1] or 'its forward'}: {reason}): correct its configuration"
    ) from found.error


@dataclass
class Rehearsal:
    """How far a forward came."""

    inside: list[str] = field(default_factory=list)
    """Names of the modules that were begun and not ended, outermost first."""
    done: set[str] = field(default_factory=set)
    error: Exception | None = None

    def begin(self, name: str, *_: object) -> None:
        self.inside.append(name)

    def end(self, name: str, *_: object) -> None:
        self.inside.pop()
        self.done.add(name)


def rehearse(skeleton: nn.Module) -> Rehearsal:
    """Runs a forward; its hooks stay with the skeleton."""
    found = Rehearsal()
    for name, module in skeleton.named_modules():
        module.register_forward_pre_hook(partial(found.begin, name))
        module.register_forward_hook(partial(found.end, name))
    try:
        with torch.no_grad(), torch.device("meta"):
            # A mask of this form is taken as it is; to make one from another takes a look at values.
            mask = torch.zeros(1, 1, TOKENS, TOKENS)
            skeleton(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), attention_mask=mask, use_cache=False)
    except Exception as error:  # whatever a model's own code raises
        found.error = error
    return found
