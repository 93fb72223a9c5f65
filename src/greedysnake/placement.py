"""Where everything lives between uses: turns fractions that a person writes into a home for every chunk and tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from greedysnake.errors import ConfigError
from greedysnake.shapes import BlockShape, Precision, spread


class Home(Enum):
    DEVICE = "device"
    RAM = "ram"
    SSD = "ssd"


@dataclass(frozen=True)
class Placement:
    """Homes by fraction; what is neither on the device nor in RAM is on SSD."""

    weights_ram: float = 0.0
    """Share of the weights that stay in RAM."""
    optimizer_ram: float = 0.0
    """Share of the optimizer state (residual and moments) that stays in RAM."""
    activations_device: float = 0.0
    """Share of the activations that stay on the device from forward to backward."""
    activations_ram: float = 1.0
    """Share of the activations that wait in RAM; 1 is all that are not on the device."""
    gradients_device: float = 1.0
    """Share of the tensors between two blocks (activations going up, their gradients coming down) that stay
    on the device until the next block takes them."""
    gradients_ram: float = 1.0
    """Share of the gradients kept for late updates that wait in RAM; the rest is spilled to SSD. It is
    lowered when the RAM budget is too small."""
    graphs_device: float = 0.0
    """Share of the layers, from the last one down, whose whole autograd graph stays on the device from forward to
    backward: nothing of them is computed twice. Their weights stay there for good."""
    weights_device: float = 0.0
    """Share of the layers, from the last one down, whose weights stay on the device: each update renews them there, and
    writes them to their home, from where they are not fetched again until room is made for larger micro-batches."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"placement.{name} is {value}: give a fraction between 0 and 1")
        if self.activations_ram == 1.0:
            object.__setattr__(self, "activations_ram", 1.0 - self.activations_device)
        if self.activations_device + self.activations_ram > 1.0 + 1e-9:
            raise ConfigError(
                f"placement.activations_device + activations_ram is "
                f"{self.activations_device + self.activations_ram:g}: together they are at most 1"
            )


@dataclass(frozen=True)
class ChunkHome:
    """Where a chunk's parts live, and when it is updated."""

    weight: Home
    state: Home
    late: bool = False
    """Its update is done in the next step's forward."""
    gradient: Home = Home.RAM
    """Where its gradient waits when the update is late."""
    tentative: bool = False
    """With clipping: in a step that is not expected to be clipped, its update is done in the backward all the same, and
    revoked if it was."""


@dataclass(frozen=True)
class Slots:
    """How many buffers of each kind take turns; more of them let the lanes run further ahead."""

    weights: int = 3
    """Device buffers for the weights of layers."""
    gradients: int = 2
    """Device buffers for the gradients of layers."""
    staging: int = 6
    """Host buffers of one chunk's weights, between SSD and device."""
    updates: int = 6
    """Host buffers of one chunk with its gradient, for the optimizer."""
    transfers: int = 4
    """Host buffers of one activation, between SSD and device; and of one spilled gradient chunk."""

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if value < 1:
                raise ConfigError(f"slots.{name} is {value}: at least one buffer of each kind is needed")


def chunk_homes(
    blocks: Sequence[BlockShape],
    placement: Placement,
    *,
    alpha: float,
    clipping: bool,
    has_ssd: bool = True,
    tentative: bool = False,
) -> tuple[tuple[ChunkHome, ...], ...]:
    """Homes for every chunk of every block.

    RAM goes to the first blocks first (their state is needed right after the step boundary), then evenly over
    the rest, so that the SSD has a steady load; so do late updates. With clipping every update is late: the norm exists
    only when the backward has ended. With `tentative`, those that would not be late without clipping, and whose state
    lives on SSD, may be done in the backward all the same. A block that the device holds from its first to its last use
    (head, shared parameters) is otherwise never late: its update has the whole backward, or comes first in it.
    """
    if not has_ssd and (placement.weights_ram < 1 or placement.optimizer_ram < 1):
        raise ConfigError(
            "without a storage directory everything must live in RAM: "
            "set placement.weights_ram and placement.optimizer_ram to 1, or give a directory"
        )
    if not has_ssd and placement.activations_device + placement.activations_ram < 1.0 - 1e-9:
        raise ConfigError(
            "without a storage directory no activation can live there: raise placement.activations_ram to "
            f"{1.0 - placement.activations_device:g}, or give a directory"
        )
    weight_in_ram = _ram_flags(blocks, placement.weights_ram, least_wanted="kept")
    state_in_ram = _ram_flags(blocks, placement.optimizer_ram)
    trainable = [chunk.trainable for block in blocks for chunk in block.chunks]
    late_by_choice = _late_flags(blocks, alpha, weight_in_ram)
    late = trainable if clipping else late_by_choice
    spill_flags = iter(spread(sum(late), placement.gradients_ram if has_ssd else 1.0))
    homes: list[ChunkHome] = []
    for position, is_late in enumerate(late):
        gradient = Home.RAM if not is_late or next(spill_flags) else Home.SSD
        homes.append(
            _chunk_home(
                Home.RAM if weight_in_ram[position] else Home.SSD,
                Home.RAM if state_in_ram[position] else Home.SSD,
                is_late,
                gradient,
                tentative and is_late and not late_by_choice[position] and not state_in_ram[position],
            )
        )
    remaining = iter(homes)
    return tuple(tuple(next(remaining) for _ in block.chunks) for block in blocks)


_chunk_home = cache(ChunkHome)
"""There are few kinds, and a large model has ten thousands of chunks."""


def _late_flags(blocks: Sequence[BlockShape], alpha: float, weight_in_ram: Sequence[bool]) -> list[bool]:
    """One flag per chunk, in block order: late if nothing is clipped. Up to half of them are what the next forward
    needs first, if it lives on SSD: so it goes to the device as soon as it is updated. An early update of it would
    come last in the backward, be written behind all others, and be read back. The other half is spread evenly."""
    first: list[int] = []
    rest: list[int] = []
    position = 0
    for number, block in enumerate(blocks):
        may_be_late = not is_fetched_once(blocks, number)
        for chunk in block.chunks:
            if may_be_late and chunk.trainable:
                (first if number < FIRST_BLOCKS and not weight_in_ram[position] else rest).append(position)
            position += 1
    wanted = round((len(first) + len(rest)) * alpha)
    num_first = min(len(first), max(wanted // 2, wanted - len(rest)))
    return _flags(position, first[:num_first], rest, wanted)


def is_fetched_once(blocks: Sequence[BlockShape], index: int) -> bool:
    """The last block runs forward and backward in one go, and shared parameters stay for the whole step."""
    return index >= num_compute_blocks(blocks) - 1


def keep_on_device(blocks: Sequence[BlockShape], placement: Placement) -> tuple[BlockShape, ...]:
    """Moves the last layers to a pool in which each has a device slot of its own."""
    kept = last_layers(blocks, max(placement.weights_device, placement.graphs_device))
    return tuple(replace(block, pool="kept") if index in kept else block for index, block in enumerate(blocks))


def last_layers(blocks: Sequence[BlockShape], share: float) -> range:
    """A share of the blocks between the first and the last, from the last one down."""
    layers = range(1, num_compute_blocks(blocks) - 1)
    return layers[len(layers) - round(len(layers) * share) :]


def num_compute_blocks(blocks: Sequence[BlockShape]) -> int:
    """Blocks that run; the parameters that several of them share, if any, are one more block at the end."""
    return len(blocks) - (blocks[-1].pool == "shared")


def activation_homes(
    saved: Sequence[int], passing: Sequence[int], num_micro_batches: int, placement: Placement
) -> dict[tuple[int, int], Home]:
    """Home of the input of every block but the first, for every micro-batch. Inputs of `saved` blocks come back in
    the backward and are placed by fractions; those of `passing` blocks do not, and need RAM only in passing."""
    return {
        **_saved_homes([(block, index) for block in saved for index in range(num_micro_batches)], placement),
        **{(block, index): Home.RAM for block in passing for index in range(num_micro_batches)},
    }


def _saved_homes(places: Sequence[tuple[int, int]], placement: Placement) -> dict[tuple[int, int], Home]:
    if not places:
        return {}
    on_device = spread(len(places), placement.activations_device)
    num_rest = on_device.count(False)
    share = placement.activations_ram / (1 - placement.activations_device) if num_rest else 0.0
    in_ram = iter(spread(num_rest, min(1.0, share))) if num_rest else iter(())
    homes = {}
    for place, device in zip(places, on_device, strict=True):
        homes[place] = Home.DEVICE if device else Home.RAM if next(in_ram) else Home.SSD
    return homes


def ram_bytes(
    blocks: Sequence[BlockShape], homes: Sequence[Sequence[ChunkHome]], precision: Precision
) -> dict[str, int]:
    """Bytes that live in RAM for good: weights, optimizer state, gradients kept for late updates; and room for the new
    weights of tentative updates."""
    total = {"weights": 0, "optimizer state": 0, "gradients": 0, "tentative weights": 0}
    for block, block_homes in zip(blocks, homes, strict=True):
        for chunk, home in zip(block.chunks, block_homes, strict=True):
            if home.weight is Home.RAM:
                total["weights"] += chunk.num_params * precision.weight_bytes
                total["tentative weights"] += home.tentative * chunk.num_params * precision.weight_bytes
            if home.state is Home.RAM:
                total["optimizer state"] += precision.state_bytes(chunk.num_params, trainable=chunk.trainable)
            if home.late and home.gradient is Home.RAM:
                total["gradients"] += chunk.num_params * precision.gradient_bytes
    return total


FIRST_BLOCKS = 2
"""How many blocks get RAM before it is spread evenly: they are needed right after the step boundary."""


def _ram_flags(blocks: Sequence[BlockShape], share: float, *, least_wanted: str = "") -> list[bool]:
    """One flag per chunk, in block order: lives in RAM. Parameters that blocks share come first: they are updated last
    in a step, and the next one starts with them. Blocks of the pool that is `least_wanted` come after all others, and
    what is not trained in there last: its home is neither read nor written."""
    num_compute = num_compute_blocks(blocks)
    numbers = [number for number, block in enumerate(blocks) for _ in block.chunks]
    wanted = round(len(numbers) * share)
    trainable = [chunk.trainable for block in blocks for chunk in block.chunks]
    last = [i for i, number in enumerate(numbers) if blocks[number].pool == least_wanted]
    places = [i for i, number in enumerate(numbers) if blocks[number].pool != least_wanted]
    shared = [i for i in places if numbers[i] >= num_compute]
    first = shared + [i for i in places if numbers[i] < min(FIRST_BLOCKS, num_compute)]
    rest = [i for i in places if FIRST_BLOCKS <= numbers[i] < num_compute]
    for more in ([i for i in last if trainable[i]], [i for i in last if not trainable[i]]):
        if wanted > len(first) + len(rest):
            first, rest = first + rest, more
    return _flags(len(numbers), first[:wanted], rest, wanted)


def _flags(count: int, first: Sequence[int], rest: Sequence[int], wanted: int) -> list[bool]:
    """Marks `wanted` of `count` places: the first ones, and as many of the rest as are missing, evenly spread."""
    share = (wanted - len(first)) / len(rest) if rest else 0.0
    marked = {*first, *(place for place, mark in zip(rest, spread(len(rest), share), strict=True) if mark)}
    return [place in marked for place in range(count)]
