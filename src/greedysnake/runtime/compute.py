"""What the device computes: forward, backward and evaluation of one block for one micro-batch.

Runs on the thread that calls step(). The weights are where the op says; this points the block's parameters there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from greedysnake.errors import ConfigError
from greedysnake.models.sequential import LayerGroup
from greedysnake.ops import Op, Resource
from greedysnake.runtime.buffers import Buffers
from greedysnake.runtime.context import Outputs, StepContext
from greedysnake.runtime.flat import FlatBlock
from greedysnake.runtime.memory import slot_number
from greedysnake.runtime.randomness import Randomness
from greedysnake.runtime.recompute import Recompute


class Compute:
    """Runs the blocks' modules, and adds up their gradients and losses on the device."""

    def __init__(
        self,
        blocks: Sequence[FlatBlock],
        buffers: Buffers,
        *,
        device: torch.device,
        seed: int,
        vertical: bool,
        compile: bool,
        weigh_graphs: bool = False,
    ) -> None:
        self._blocks = blocks
        self._buffers = buffers
        self._vertical = vertical
        modules = [block.module for block in blocks if block.module is not None]
        last = len(modules) - 1
        # Layers of one structure share their compiled code; embedding and head run once per step and micro-batch.
        options = compiler_options(modules)
        self._forward = [
            torch.compile(module, options=options) if compile and 0 < number < last else module
            for number, module in enumerate(modules)
        ]
        self._recompute = {
            number: torch.compile(Recompute(module), options=options)
            for number, module in enumerate(modules)
            if compile and 0 < number < last
        }
        self._randomness = Randomness([block.module for block in blocks], device, seed)
        self._weigh = weigh_graphs and device.type == "cuda"
        self.graph_bytes: dict[int, int] = {}
        """Of blocks whose graph is kept: what the device held for the last micro-batch, if graphs are weighed."""
        self._bound: dict[int, int] = {}
        self._unwatched = set(range(len(modules)))
        """Blocks whose first forward in training is still to come."""
        self._in_eval = [part for module in modules for part in _parts_in_eval(module)]
        """Modules that the user has put into evaluation mode for good, within others that are trained."""
        self._versions = [{name: part._version for name, part in block.parameters.items()} for block in blocks]
        """Of the parameters: pointing them elsewhere does not change it, writing to them does."""

    def set_training(self, training: bool) -> None:
        for block in self._blocks:
            if block.module is not None and block.module.training != training:
                block.module.train(training)
        for part in self._in_eval:
            part.training = False

    def require_trainable(self) -> None:
        """Refuses a step after `requires_grad` of a parameter was changed: its state was laid out by what it was."""
        for block in self._blocks:
            for place in block.places:
                if block.parameters[place.name].requires_grad != place.trainable:
                    was, now = ("trained", "frozen") if place.trainable else ("frozen", "trained")
                    raise ConfigError(
                        f"{place.name} was {was} when the engine was made and is now to be {now}: set requires_grad "
                        "before, and make a new engine to change it"
                    )

    def require_untouched(self) -> None:
        """Refuses to go on after someone wrote to a parameter: it shows a device slot, whose values are those of a home
        elsewhere, and it depends on the plan which steps would see what was written."""
        for block, versions in zip(self._blocks, self._versions, strict=True):
            for name, version in versions.items():
                if block.parameters[name]._version != version:
                    raise ConfigError(
                        f"{name} was written to after the engine was made, which keeps its values elsewhere: change "
                        "modules before, and make a new engine, with resume=True to go on from the last checkpoint"
                    )

    def size_of_activation(self, batch: Mapping[str, torch.Tensor]) -> int:
        """Bytes of the embedding's output for a batch, found by running it on whatever is in its slot."""
        self._bind(0, [("weights", self._buffers.plan.blocks[0].pool, 0)])
        module = self._blocks[0].module
        assert module is not None
        versions = _versions(batch)
        with torch.no_grad():
            hidden = module(batch)
        changed = [name for name, version in _versions(batch).items() if version != versions.get(name)]
        if changed:
            raise ConfigError(
                f"embed changes {changed[0]} of its batch in place: it is called several times for a step, so make a "
                "new tensor instead"
            )
        if not isinstance(hidden, torch.Tensor):
            raise ConfigError(f"embed returned a {type(hidden).__name__}: a block must return one tensor")
        return int(hidden.nbytes)

    # Ops

    def forward(self, op: Op, context: StepContext) -> int:
        plan = self._buffers.plan
        self._bind(op.block, op.reads)
        source = self._input(op, context) if op.block else None
        if plan.keeps_graph(op.block) and context.training:
            assert source is not None
            before = torch.cuda.memory_allocated(source.device) if self._weigh else 0
            # A copy: the slot is used again before the backward.
            source = source.clone().requires_grad_(op.block > plan.lowest)
            with torch.enable_grad():
                hidden, side = self._call(op, context, source)
            context.graphs[op.block, op.index] = ((hidden, side), source)
            if self._weigh:
                self.graph_bytes[op.block] = torch.cuda.memory_allocated(source.device) - before
        else:
            with torch.no_grad():
                hidden, side = self._call(op, context, source)
        if side is not None:
            self._blocks[op.block].module.keep_side(context.batches[op.index], side.detach())  # type: ignore[union-attr,operator]
        self._output(op, context, hidden.detach())
        return 0

    def evaluate(self, op: Op, context: StepContext) -> int:
        self._bind(op.block, op.reads)
        with torch.no_grad():
            loss, _ = self._call(op, context, self._input(op, context) if op.block else None)
        self._add_loss(loss, context)
        return 0

    def backward(self, op: Op, context: StepContext) -> int:
        block, lowest = self._blocks[op.block], self._buffers.plan.lowest
        self._bind(op.block, op.reads)
        names = [name for name, parameter in block.parameters.items() if parameter.requires_grad]
        inputs = [block.parameters[name] for name in names]
        outputs, hidden = context.graphs.pop((op.block, op.index), (None, None))
        if hidden is None and op.block:
            hidden = self._input(op, context).requires_grad_(op.block > lowest)
        if op.block > lowest:
            assert hidden is not None
            inputs.append(hidden)  # type: ignore[arg-type]
        roots, seeds = self._roots(op, context, outputs, hidden)
        if op.block > lowest and not roots[0].requires_grad:
            raise ConfigError(f"{block.name} returned a tensor without a gradient: check the module")
        starts = [(root, seed) for root, seed in zip(roots, seeds, strict=True) if root.requires_grad]
        # None: of the lowest block only parameters have a gradient, and this micro-batch may use none of them.
        gradients: list[torch.Tensor | None] = [None] * len(inputs)
        if starts:
            roots, seeds = [root for root, _ in starts], [seed for _, seed in starts]
            gradients = list(torch.autograd.grad(roots, inputs, seeds, allow_unused=True))
        if op.block > lowest:
            below = gradients.pop()
            if below is None:
                raise ConfigError(f"{block.name} does not pass a gradient to its input: check the module")
            position = 1 if block.shape.num_trainable else 0
            self._buffers.view(op.writes[position], op.block, op.index, context).copy_(below)
        self._accumulate(op, block, dict(zip(names, gradients, strict=True)))
        return 0

    # Running a module

    def _roots(
        self, op: Op, context: StepContext, outputs: Outputs | None, hidden: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Where the backward of a block starts, and the gradients of the loss there. Runs the block unless its
        outputs were kept."""
        is_last = self._is_last(op)
        seed = None if is_last else self._buffers.view(op.reads[2 if op.block else 1], op.block + 1, op.index, context)
        with torch.enable_grad():
            if outputs is None and op.block in self._recompute:
                assert hidden is not None
                extra = self._extra_inputs(op, context)
                self._randomness.start(context.step, op.block, context.first_index + op.index)
                outputs, seed = self._pair(op, self._recompute[op.block](hidden, seed, *extra)), None
            elif outputs is None:
                outputs = self._call(op, context, hidden)
        output, side = outputs
        if is_last:
            self._add_loss(output, context)
            seed = torch.full_like(output, 1.0 / context.num_targets)
        if side is None or not side.requires_grad:
            return [output], [seed]
        of_side = self._blocks[op.block].module.side_gradient(context.batches[op.index])  # type: ignore[union-attr,operator]
        return [output, side], [seed, of_side / context.num_targets]

    def _call(self, op: Op, context: StepContext, hidden: torch.Tensor | None) -> Outputs:
        batch = context.batches[op.index]
        if op.block == 0:
            arguments: tuple[object, ...] = (batch,)
        elif self._is_last(op):
            arguments = (hidden, batch)
        else:
            arguments = (hidden, *self._extra_inputs(op, context))
        self._randomness.start(context.step, op.block, context.first_index + op.index)
        version = None if hidden is None else hidden._version
        with self._watched(op.block, context):
            output = self._forward[op.block](*arguments)
        if hidden is not None and hidden._version != version:
            raise ConfigError(
                f"{self._blocks[op.block].name} changes its input in place, which the backward needs as it was: let it "
                "work on a copy"
            )
        return self._pair(op, output)

    @contextmanager
    def _watched(self, number: int, context: StepContext) -> Iterator[None]:
        """Refuses a module that has state besides its parameters, or changes those itself. Looks once, and never within
        compiled code.

        Non-persistent buffers may be exchanged: rotary embeddings keep what they computed for the longest sequence.
        """
        if not context.training or number not in self._unwatched:
            yield
            return
        self._unwatched.remove(number)
        module, parameters = self._blocks[number].module, self._blocks[number].parameters
        assert module is not None
        before = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        versions = {name: parameter._version for name, parameter in parameters.items()}
        yield
        for name, parameter in parameters.items():
            if parameter._version != versions[name]:
                raise ConfigError(
                    f"{self._blocks[number].name} changes its parameter {name} in the forward, which its home does not "
                    "see: leave that to the optimizer, e.g. use nn.Embedding without max_norm"
                )
        for name, buffer in module.named_buffers():
            old, version = before.get(name, (buffer, buffer._version))
            if old._version != version or (buffer is not old and name in module.state_dict(keep_vars=True)):
                raise ConfigError(
                    f"{self._blocks[number].name} changes its buffer {name} in the forward, which the backward repeats "
                    "and no checkpoint holds: use a module without such state, e.g. LayerNorm instead of BatchNorm"
                )

    def _extra_inputs(self, op: Op, context: StepContext) -> tuple[object, ...]:
        """What a layer asks for besides the hidden state; before seeding, since it may draw random numbers."""
        ask = getattr(self._blocks[op.block].module, "extra_inputs", None)
        return () if ask is None else ask(context.batches[op.index])

    def _pair(self, op: Op, output: object) -> Outputs:
        block = self._blocks[op.block]
        side = None
        if isinstance(output, tuple) and len(output) == 2 and hasattr(block.module, "side_gradient"):
            output, side = output
        if not isinstance(output, torch.Tensor):
            raise ConfigError(f"{block.name} returned a {type(output).__name__}: a block must return one tensor")
        if self._is_last(op):
            if output.dim():
                raise ConfigError(
                    f"head returned a tensor of shape {tuple(output.shape)}: it must return the summed loss"
                )
            output = output.float() if output.dtype != torch.float64 else output
        return output, side

    def _is_last(self, op: Op) -> bool:
        return op.block == self._buffers.plan.num_compute - 1

    def _bind(self, block: int, reads: Sequence[Resource]) -> None:
        """Points a block's parameters at the device slot that holds their values."""
        slot, shared = slot_number(reads[0]), self._buffers.plan.shared
        if self._bound.get(block) != slot:
            self._bound[block] = slot
            self._point(self._blocks[block], self._buffers.weights(reads[0]))
        if shared is not None and shared not in self._bound:
            self._bound[shared] = 0
            self._point(self._blocks[shared], self._buffers.weights(("weights", "shared", 0)))

    @staticmethod
    def _point(block: FlatBlock, weights: torch.Tensor) -> None:
        for place in block.places:
            block.parameters[place.name].data = weights[place.offset : place.end].view(place.shape)

    # Input and output

    def _input(self, op: Op, context: StepContext) -> torch.Tensor:
        return self._buffers.view(op.reads[1], op.block, op.index, context).detach()

    def _output(self, op: Op, context: StepContext, hidden: torch.Tensor) -> None:
        name, dtype = self._blocks[op.block].name, self._buffers.dtype
        if hidden.dtype != dtype:
            raise ConfigError(f"{name} returned {hidden.dtype}, the engine computes in {dtype}: cast its output")
        nbytes, room = hidden.numel() * dtype.itemsize, self._buffers.step.activation_bytes
        if nbytes > room:
            if op.block == 0:
                raise ConfigError(
                    f"{name} returned {nbytes} bytes for a micro-batch, and {room} for one of the same shapes before: "
                    "the size of its output must follow from the shapes of the batch"
                )
            raise ConfigError(
                f"{name} returned {nbytes} bytes for one micro-batch, the embedding {room}: every block must keep the "
                "size of its input"
            )
        context.shapes[op.block + 1, op.index] = hidden.shape
        self._buffers.view(op.writes[0], op.block + 1, op.index, context).copy_(hidden)

    # Sums over micro-batches

    def _accumulate(self, op: Op, block: FlatBlock, gradients: dict[str, torch.Tensor | None]) -> None:
        """Adds in fp32 to the gradient slots; the first micro-batch of a step sets them."""
        plan, largest_of = self._buffers.plan, self._buffers.device.largest
        if block.shape.num_trainable:
            total = self._buffers.gradients(op.writes[0])
            if op.first:
                for start, end in block.gaps():
                    total[start:end].zero_()
            for place in block.places:
                if place.trainable:
                    view = total[place.offset : place.end].view(place.shape)
                    _add(view, gradients[place.name], fresh=op.first)
            if op.last and not plan.clipping:
                largest = torch.linalg.vector_norm(total[: block.shape.num_trainable], math.inf)
                if not self._vertical and op.index:
                    # The sum in RAM lags behind and may overflow. No element of it is larger than the sum of these.
                    largest = largest + largest_of[op.block]
                largest_of[op.block].copy_(largest)
        if plan.trains_shared and block.shared:
            self._accumulate_shared(op, block, gradients)

    def _accumulate_shared(self, op: Op, block: FlatBlock, gradients: dict[str, torch.Tensor | None]) -> None:
        plan, shared = self._buffers.plan, self._blocks[-1]
        total = self._buffers.gradients(("gradients", "shared", 0))[: shared.shape.num_trainable]
        if op.first_shared:
            total.zero_()
        places = {place.name: place for place in shared.places}
        for name, shared_name in block.shared.items():
            place = places[shared_name]
            if place.trainable:
                _add(total[place.offset : place.end].view(place.shape), gradients[name], fresh=False)
        # Horizontally too this is the sum over all micro-batches so far: what the last op finds is that of the step.
        if op.last and not plan.clipping:
            self._buffers.device.largest[plan.shared].copy_(torch.linalg.vector_norm(total, math.inf))

    def _add_loss(self, loss: torch.Tensor, context: StepContext) -> None:
        losses = self._buffers.device.losses
        if not context.loss_started:
            losses.zero_()
            context.loss_started = True
        losses.add_(loss.detach())


def compiler_options(modules: Sequence[nn.Module]) -> dict[str, str | int | bool | Callable[..., object]]:
    """Random numbers are drawn as in code that is not compiled, one after another. The compiler's own are others in the
    recompute where torch gives up compiling one of the two, after eight variants, and where the forward draws something
    that no gradient depends on. The first option changes nothing where nothing is drawn."""
    options: dict[str, str | int | bool | Callable[..., object]] = {"fallback_random": True}
    is_old = torch.torch_version.TorchVersion(torch.__version__) < "2.13"
    if is_old and any(_may_draw(part) for module in modules for part in module.modules()):
        # There draws may change places with the kernels around them; later versions keep their order.
        options |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    return options


def _may_draw(part: nn.Module) -> bool:
    """Whether a module may draw random numbers. Those of libraries have a number for it that is above 0; of anything
    else nobody knows."""
    if isinstance(part, _DropoutNd):
        return part.p > 0.0
    if type(part).__module__.split(".")[0] not in ("torch", "transformers", "greedysnake"):
        return True
    numbers = [(name, value) for name, value in vars(part).items() if isinstance(value, float) and value > 0.0]
    return any(word in name for name, _ in numbers for word in ("drop", "jitter", "noise"))


def _parts_in_eval(module: nn.Module) -> list[nn.Module]:
    """None of a layer that is in evaluation mode as a whole, as loaded ones are: it is given to be trained."""
    layers = module.layers if isinstance(module, LayerGroup) else [module]
    return [part for layer in layers if layer.training for part in layer.modules() if not part.training]


def _add(total: torch.Tensor, gradient: torch.Tensor | None, *, fresh: bool) -> None:
    if fresh:
        total.zero_() if gradient is None else total.copy_(gradient)
    elif gradient is not None:
        total.add_(gradient)


def _versions(batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Counts how often each tensor was written to; those of inference mode do not."""
    return {name: value._version for name, value in batch.items() if not value.is_inference()}
