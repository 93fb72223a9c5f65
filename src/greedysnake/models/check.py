"""Whether a Hugging Face model can be trained block by block, shown on a small copy of it: whole and in blocks, the
loss and every gradient must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from greedysnake.errors import ConfigError, GreedySnakeError
from greedysnake.models.capture import INPUTS, Frame, document_masks
from greedysnake.models.rehearsal import require_fitting_sizes
from greedysnake.models.sequential import Batch, MicroBatch
from greedysnake.models.shrink import VOCABULARY, shrink
from greedysnake.models.split import (
    Blocks,
    Split,
    build_model,
    build_skeleton,
    find_balance,
    find_layers,
    layer_list,
    make_blocks,
)
from greedysnake.threads import torch_threads

TOLERANCE = 1e-4
"""Of the largest value. Sums in another order differ by about 1e-6 in fp32; a wrong mask or a lost term by 1e-2."""

OTHER_ROADS = "its layers pass gradients by other roads than the hidden state"
REFUSED = {
    "gemma3n": OTHER_ROADS,
    "gemma4": OTHER_ROADS,
    "zamba": OTHER_ROADS,
    "mllama": "it has layers that a text alone does not go through",
    "hrm": "it goes through its layers more than once",
}
"""Starts of the model types that are known not to work, and why."""

MAX_SMALL_PARAMS = 20_000_000
ROWS, TOKENS = 2, 12
DOCUMENTS = (5, 4, 3)
CHUNK_TOKENS = 7
"""No divisor of the number of tokens, so that chunks of both sizes are checked."""


def check_model(config: Any, attn_implementation: str = "sdpa") -> Split:
    """How the model is cut; ConfigError with the reason if it cannot be, or if blocks compute something else."""
    refuse_by_config(config)
    try:
        skeleton = build_skeleton(config, attn_implementation)
        layers = find_layers(skeleton, config)
        small = shrink(config, _covering_layers(skeleton, layers, config))
        with torch_threads(1), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            model = _build_small(small, attn_implementation)
            split = _Check(model, layers).run()
        require_fitting_sizes(config, skeleton, small, attn_implementation)
        return split
    except GreedySnakeError:
        raise
    except Exception as error:  # whatever a model's own code raises on a small copy of it
        raise ConfigError(
            f"{config.model_type} cannot be checked on a small copy of it, so it is not trained "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})"
        ) from error


def refuse_by_config(config: Any) -> None:
    """ConfigError for models that are known not to work, before anything is built."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    for start, reason in REFUSED.items():
        if kind.startswith(start):
            raise ConfigError(f"{kind} cannot be trained layer by layer: {reason}")
    if getattr(config, "quantization_config", None):
        raise ConfigError(
            f"the {kind} model is quantized, and full-parameter training needs its full weights: get the "
            "unquantized version, or dequantize it with transformers"
        )
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise ConfigError(f"{kind} has more than one stack of layers: only models with a single decoder are supported")
    if getattr(config, "num_hidden_layers", 1) < 1:
        raise ConfigError(f"num_hidden_layers is {config.num_hidden_layers}: give 1 or more")
    if getattr(config, "layerdrop", 0.0):
        raise ConfigError(f"layerdrop is {config.layerdrop}: layers cannot be left out at random, set it to 0")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{kind} is no causal language model that transformers has code for: it cannot be trained")


def _covering_layers(skeleton: nn.Module, layers: str, config: Any) -> int:
    """So many of the first layers that every kind of layer is among them, two at least."""
    lists = [value for value in vars(config).values() if isinstance(value, list)]
    per_layer = [values for values in lists if len(values) == config.num_hidden_layers]
    kinds = []
    for index, layer in enumerate(layer_list(skeleton, layers)):
        names = tuple(name for name, _ in layer.named_parameters())
        kinds.append((type(layer), names, tuple(str(values[index]) for values in per_layer)))
    return min(len(kinds), max(2, *(kinds.index(kind) + 1 for kind in set(kinds))))


def _build_small(small: Any, attn_implementation: str) -> nn.Module:
    num_params = sum(parameter.numel() for parameter in build_skeleton(small, attn_implementation).parameters())
    if num_params > MAX_SMALL_PARAMS:
        raise ConfigError(
            f"no small copy of {small.model_type} can be made to check it with (it still has {num_params} "
            "parameters): the model is not supported"
        )
    model = build_model(small, attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # norms of one and biases of zero hide mistakes
    return model.train()


def sample_batches(packs: bool) -> dict[str, Batch]:
    """Plain, padded and packed."""
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS))
    plain = {"input_ids": ids, "labels": ids.clone()}
    padded = {**plain, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    padded["labels"][0, -3:], padded["attention_mask"][0, -3:] = -100, 0
    batches: dict[str, Batch] = {"plain": plain, "padded": padded}
    if packs:
        positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).expand(ROWS, -1)
        batches["packed"] = {**plain, "position_ids": positions}
    return batches


class _Check:
    """Compares one small model whole and in blocks."""

    def __init__(self, model: nn.Module, layers: str) -> None:
        self.model = model
        self.kind = str(model.config.model_type)  # type: ignore[union-attr]
        self.layers = layers

    def run(self) -> Split:
        self._require_tensors()
        self._require_causality()
        packs, masks_documents = self._find_packing()
        balances = bool(getattr(self.model.config, "output_router_logits", False))
        # Hugging Face's balancing loss takes no other mask than one of padding.
        batches = sample_batches(packs and not (balances and masks_documents))
        whole = {
            name: self._whole(batch, masks_documents=masks_documents and name == "packed")
            for name, batch in batches.items()
        }
        balance = find_balance(self.model)
        named = dict(self.model.named_parameters())
        frame = Frame(self.model, self.layers, masks_documents=masks_documents)
        split = self._find_split(frame, batches["plain"])
        split = replace(split, packs=packs, masks_documents=masks_documents)
        blocks = make_blocks(frame, split, balance=balance, chunk_tokens=CHUNK_TOKENS)
        for name, batch in batches.items():
            self._compare(name, whole[name], self._in_blocks(blocks, named, MicroBatch(batch)))
        return split

    def _loss(self, batch: Batch, masks_documents: bool = False) -> torch.Tensor:
        loss = self.model(**self._inputs(batch, masks_documents), labels=batch["labels"], use_cache=False).loss
        return loss * (batch["labels"][:, 1:] != -100).sum()  # type: ignore[no-any-return]

    def _whole(self, batch: Batch, masks_documents: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        loss = self._loss(batch, masks_documents)
        named = dict(self.model.named_parameters())
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        return loss, dict(zip(named, gradients, strict=True))

    def _require_tensors(self) -> None:
        """Every layer returns one tensor."""
        found: list[str] = []
        hooks = [
            layer.register_forward_hook(lambda module, inputs, output: found.append(type(output).__name__))
            for layer in layer_list(self.model, self.layers)
        ]
        with torch.no_grad():
            self._logits(sample_batches(False)["plain"])
        for hook in hooks:
            hook.remove()
        if set(found) != {"Tensor"}:
            raise ConfigError(
                f"the layers of {self.kind} return a {(set(found) - {'Tensor'}).pop()}, not one tensor: the model is "
                "not supported"
            )

    def _require_causality(self) -> None:
        batch = sample_batches(False)["plain"]
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][:, -1] = 2
        if not _same(self._logits(batch)[:, :-1], self._logits(changed)[:, :-1]):
            raise ConfigError(
                f"{self.kind} is not causal, its tokens see later ones: set is_decoder to true if it has it"
            )

    def _find_packing(self) -> tuple[bool, bool]:
        """Whether documents in one row can be kept from seeing each other, and whether it takes masks of ours."""
        packed = sample_batches(True)["packed"]
        changed = {**packed, "input_ids": packed["input_ids"].clone()}
        before = sum(DOCUMENTS[:-1])
        changed["input_ids"][:, :before] = 2
        for masks_documents in (False, True):
            logits = [self._logits(batch, masks_documents)[:, before:] for batch in (packed, changed)]
            if _same(*logits):
                return True, masks_documents
        return False, False

    def _logits(self, batch: Batch, masks_documents: bool = False) -> torch.Tensor:
        with torch.no_grad():
            output = self.model(**self._inputs(batch, masks_documents), use_cache=False, **self._no_balancing())
        return output.logits  # type: ignore[no-any-return]

    def _no_balancing(self) -> dict[str, bool]:
        return {"output_router_logits": False} if getattr(self.model.config, "output_router_logits", False) else {}

    def _inputs(self, batch: Batch, masks_documents: bool) -> dict[str, Any]:
        inputs: dict[str, Any] = {name: batch[name] for name in INPUTS if name in batch}
        if masks_documents:
            inputs["attention_mask"] = document_masks(self.model, batch)
        return inputs

    def _find_split(self, frame: Frame, batch: Batch) -> Split:
        hidden, calls = frame.begin(batch)
        for call in calls:
            if any(tensor.requires_grad for tensor in _tensors((call.arguments, call.options))):
                raise ConfigError(f"{self.kind} cannot be trained layer by layer: {OTHER_ROADS}")
        named = dict(frame.model.named_parameters(remove_duplicate=False))
        before = torch.autograd.grad(hidden.sum(), list(named.values()), allow_unused=True)
        with torch.no_grad():
            last = torch.randn_like(hidden)
        logits = frame.output(frame.end(last, batch["input_ids"]))
        after = torch.autograd.grad(logits.sum(), list(named.values()), allow_unused=True)
        head = {name for name, gradient in zip(named, after, strict=True) if gradient is not None}
        embed = {name for name, gradient in zip(named, before, strict=True) if gradient is not None}
        # The same tensor under two names: each end keeps the name that its own modules have.
        count = Counter(id(parameter) for parameter in named.values())
        doubles = {name for name in embed & head if count[id(named[name])] > 1}
        output = next(name for name, module in frame.model.named_modules() if module is frame.output)
        embed -= {name for name in doubles if name.startswith(f"{output}.")}
        head -= {name for name in doubles if not name.startswith(f"{output}.")}
        embed |= named.keys() - embed - head
        adjusted = frame.adjust(logits := logits.detach())
        return Split(
            self.layers,
            tuple(sorted(embed)),
            tuple(sorted(head)),
            adjusts_logits=adjusted is not logits,
            packs=False,
            masks_documents=False,
        )

    def _in_blocks(
        self, blocks: Blocks, named: Mapping[str, nn.Parameter], batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
        """Block by block, as the engine does it."""
        inputs: list[torch.Tensor] = []
        hidden = blocks.embed(batch)
        outputs = [hidden]
        sides: list[torch.Tensor | None] = [None]
        for layer in blocks.layers:
            inputs.append(outputs[-1].detach().requires_grad_())
            output = layer(inputs[-1], *layer.extra_inputs(batch))  # type: ignore[operator]
            side = None
            if isinstance(output, tuple) and hasattr(layer, "keep_side"):
                output, side = output
                layer.keep_side(batch, side.detach())  # type: ignore[operator]
            outputs.append(output)
            sides.append(side)
        inputs.append(outputs[-1].detach().requires_grad_())
        loss = blocks.head(inputs[-1], batch)
        total: dict[str, torch.Tensor | None] = dict.fromkeys(named)
        roots: list[torch.Tensor] = [loss]
        seeds: list[torch.Tensor] = [torch.ones_like(loss)]
        for index in range(len(outputs), -1, -1):
            below = [inputs[index - 1]] if index else []
            found = torch.autograd.grad(roots, [*named.values(), *below], seeds, allow_unused=True)
            for name, gradient in zip(named, found, strict=False):
                known = total[name]
                total[name] = gradient if known is None else known if gradient is None else known + gradient
            if not index:
                break
            if found[-1] is None:
                raise ConfigError(f"layer {index - 1} of {self.kind} does not pass a gradient to its input")
            roots, seeds = [outputs[index - 1]], [found[-1]]
            side = sides[index - 1]
            if side is not None:
                roots.append(side)
                seeds.append(blocks.layers[index - 2].side_gradient(batch))  # type: ignore[operator]
        return loss, total

    def _compare(
        self,
        name: str,
        whole: tuple[torch.Tensor, dict[str, torch.Tensor | None]],
        blocks: tuple[torch.Tensor, dict[str, torch.Tensor | None]],
    ) -> None:
        pairs = {"the loss": (whole[0], blocks[0])}
        for parameter, gradient in whole[1].items():
            found = blocks[1][parameter]
            if gradient is None or found is None:
                gradient = torch.zeros(()) if gradient is None else gradient
                found = torch.zeros_like(gradient) if found is None else found
            pairs[f"the gradient of {parameter}"] = (gradient, found)
        scale = max(float(gradient.abs().max()) for gradient in whole[1].values() if gradient is not None)
        for what, (wanted, got) in pairs.items():
            difference = float((wanted - got).detach().abs().max())
            limit = TOLERANCE * (float(wanted.detach().abs().max()) + 0.01 * scale)
            if not difference <= limit:
                raise ConfigError(
                    f"{self.kind} cannot be trained layer by layer: in a small copy of it, {what} of a {name} batch "
                    f"differs by {difference:.2g} from that of the whole model"
                )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * one.abs().max())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
