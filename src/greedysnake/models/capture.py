"""Cuts a Hugging Face causal LM into embedding, layers and head without knowing its architecture.

The model's own forward runs with a stub in the place of every layer: once to see what each layer is called with, and
once to go on from a given last hidden state. So masks, rotary embeddings, final norm and whatever is done to the logits
stay Hugging Face's own code. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError
from greedysnake.models.loss import chunked_cross_entropy
from greedysnake.models.router import Balance, Router
from greedysnake.models.sequential import Batch, MicroBatch

INPUTS = ("input_ids", "attention_mask", "position_ids")
LABELS = "labels"
CALLS = "calls of layers"


@dataclass(frozen=True)
class Call:
    """What a layer is called with besides the hidden state. Masks and the like are shared between layers."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Frame:
    """A model whose layers are replaced by stubs. Its forward runs in one thread at a time."""

    def __init__(self, model: nn.Module, layers: str, *, masks_documents: bool = False) -> None:
        """`layers` names the list of layers. With `masks_documents`, packed documents are kept apart by masks that are
        made here, for models that do not tell them by their positions."""
        self.model = model
        self.masks_documents = masks_documents
        members = model.get_submodule(layers)
        assert isinstance(members, nn.ModuleList)
        self.layers = list(members)
        self._members = members
        self._script = _Script()
        self._put_stubs()
        head = model.get_output_embeddings()  # type: ignore[operator]
        assert isinstance(head, nn.Linear)
        self.output = head

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The model has its layers in place."""
        for index, layer in enumerate(self.layers):
            self._members[index] = layer
        try:
            yield
        finally:
            self._put_stubs()

    def begin(self, batch: Batch) -> tuple[torch.Tensor, list[Call]]:
        """The hidden state that the first layer gets, and how every layer is called."""
        script = self._script
        script.calls, script.final = [], None
        try:
            self._run(**self.inputs(batch))
        except _ReachedError:
            return script.take_hidden(), script.calls
        finally:
            script.first, script.calls = None, []
        raise ConfigError(f"the forward of {type(self.model).__name__} does not go through all of its layers")

    def calls(self, batch: Batch) -> list[Call]:
        """The same without the hidden state; found once for a micro-batch that can hold notes."""
        if isinstance(batch, MicroBatch) and CALLS in batch.notes:
            return list(batch.notes[CALLS])
        with torch.no_grad():
            _, calls = self.begin(batch)
        note_calls(batch, calls)
        return calls

    def end(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """What the output matrix is applied to, given the output of the last layer."""
        found: list[torch.Tensor] = []

        def stop(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            found.append(arguments[0])
            raise _ReachedError

        hook = self.output.register_forward_pre_hook(stop)
        try:
            with self._going_on_from(hidden):
                self._run(input_ids=input_ids)
        except _ReachedError:
            return found[0]
        finally:
            hook.remove()
        raise ConfigError(f"the forward of {type(self.model).__name__} does not call its output embedding")

    def adjust(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of its logits: scaling, a soft cap, or nothing."""
        weight = self.output.weight
        token = torch.zeros(1, 1, dtype=torch.long, device=logits.device)
        hook = self.output.register_forward_hook(lambda module, arguments, output: logits)
        try:
            with self._going_on_from(torch.zeros(1, 1, self._hidden_size(), dtype=weight.dtype, device=logits.device)):
                adjusted = self._run(input_ids=token).logits
        finally:
            hook.remove()
        assert isinstance(adjusted, torch.Tensor)
        return adjusted

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """The arguments of the model for a batch."""
        found: dict[str, Any] = {name: batch[name] for name in INPUTS if name in batch}
        if self.masks_documents and "position_ids" in found:
            found["attention_mask"] = document_masks(self.model, batch)
        return found

    def _put_stubs(self) -> None:
        for index, layer in enumerate(self.layers):
            self._members[index] = _Stub(index, len(self.layers), layer, self._script)

    def _run(self, **inputs: Any) -> Any:
        return self.model(**inputs, use_cache=False)

    def _hidden_size(self) -> int:
        return int(self.model.config.hidden_size)  # type: ignore[union-attr,arg-type]

    @contextmanager
    def _going_on_from(self, hidden: torch.Tensor) -> Iterator[None]:
        self._script.final, self._script.calls = hidden, []
        try:
            yield
        finally:
            self._script.final, self._script.first, self._script.calls = None, None, []


class _ReachedError(Exception):
    """The forward got to where it is wanted no further."""


class _Script:
    """What the stubs of one frame do."""

    def __init__(self) -> None:
        self.first: torch.Tensor | None = None
        self.calls: list[Call] = []
        self.final: torch.Tensor | None = None
        """Set: the last stub returns it. None: the last stub ends the forward."""

    def take_hidden(self) -> torch.Tensor:
        assert self.first is not None
        return self.first


class _Stub(nn.Module):
    """Stands for a layer: notes how it is called and returns its input."""

    def __init__(self, index: int, count: int, layer: nn.Module, script: _Script) -> None:
        super().__init__()
        self.index = index
        self.count = count
        self.script = script
        self.stands_for = (layer,)  # in a tuple, so that it is no submodule

    def __getattr__(self, name: str) -> Any:
        """Models read attributes of their layers, such as the type of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["stands_for"][0], name)

    def forward(self, hidden: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        script = self.script
        if len(script.calls) != self.index:
            raise ConfigError(f"layer {self.index} is called out of order: layers must be called once each, in order")
        if self.index == 0:
            script.first = hidden
        elif hidden is not script.first:
            raise ConfigError(f"something happens between layers {self.index - 1} and {self.index}")
        script.calls.append(Call(arguments, options))
        if self.index < self.count - 1:
            return hidden
        if script.final is None:
            raise _ReachedError
        return script.final


def note_calls(batch: Batch, calls: list[Call]) -> None:
    if isinstance(batch, MicroBatch):
        batch.notes[CALLS] = calls


def document_masks(model: nn.Module, batch: Batch) -> Any:
    """Hugging Face's masks for packed documents: one, or one for each type of layer."""
    from transformers.masking_utils import create_masks_for_generate

    weight = next(model.parameters())
    embedded = torch.zeros(1, 1, 1, dtype=weight.dtype, device=weight.device).expand(*batch["input_ids"].shape, 1)
    return create_masks_for_generate(model.config, embedded, None, None, batch["position_ids"])


# The blocks


class Embed(nn.Module):
    """Batch to hidden state: everything that the model does before its first layer."""

    def __init__(self, frame: Frame, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts.values())
        self._frame = (frame,)

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden, calls = self._frame[0].begin(batch)
        note_calls(batch, calls)
        return hidden

    def train(self, mode: bool = True) -> Embed:
        super().train(mode)
        self._frame[0].model.train(mode)
        return self


class Layer(nn.Module):
    """A layer of the model, called as the model would call it."""

    def __init__(self, frame: Frame, index: int) -> None:
        super().__init__()
        self.layer = frame.layers[index]
        self.index = index
        self._frame = (frame,)

    def extra_inputs(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = self._frame[0].calls(batch)[self.index]
        return call.arguments, call.options

    def forward(self, hidden: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, *arguments, **options)
        return output


class RoutedLayer(Layer):
    """A layer with a router, whose statistics go into the loss that balances the experts."""

    def __init__(self, frame: Frame, index: int, router: Router) -> None:
        super().__init__(frame, index)
        self.router = router

    def extra_inputs(self, batch: Batch) -> tuple[Any, ...]:
        return *super().extra_inputs(batch), batch.get("attention_mask")

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        attention_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, logits = self.router.record(self.layer, hidden, arguments, options)
        return output, self.router.statistics(logits, attention_mask)

    def keep_side(self, batch: Batch, side: torch.Tensor) -> None:
        self.router.balance.keep(batch, self.index, side)

    def side_gradient(self, batch: Batch) -> torch.Tensor:
        return self.router.balance.gradient(batch) * num_targets(batch)


class Head(nn.Module):
    """Last hidden state to summed loss: final norm, output matrix and cross-entropy in chunks of tokens."""

    def __init__(
        self,
        frame: Frame,
        parts: Mapping[str, nn.Module],
        *,
        chunk_tokens: int,
        adjusts_logits: bool,
        balance: Balance | None = None,
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts.values())
        self.chunk_tokens = chunk_tokens
        self.adjust: Callable[[torch.Tensor], torch.Tensor] | None = frame.adjust if adjusts_logits else None
        self.balance = balance
        self._frame = (frame,)

    def forward(self, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        frame = self._frame[0]
        last = frame.end(hidden, batch["input_ids"])
        # The token at a place is predicted from the place before.
        loss = chunked_cross_entropy(
            last[:, :-1].flatten(0, 1),
            frame.output.weight,
            batch[LABELS][:, 1:].flatten(),
            bias=frame.output.bias,
            adjust=self.adjust,
            chunk_tokens=self.chunk_tokens,
        )
        if self.balance is None:
            return loss
        return loss + num_targets(batch) * self.balance.loss(batch)

    def train(self, mode: bool = True) -> Head:
        super().train(mode)
        self._frame[0].model.train(mode)
        return self


def num_targets(batch: Batch) -> torch.Tensor:
    return (batch[LABELS][:, 1:] != -100).sum()
