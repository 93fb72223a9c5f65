"""Processes that train one model together, one per device: what they tell each other. World size 1 is not special.

Weights and gradients pass between devices on two lanes, each with a group of its own, in the same order on every rank.
The threads of the host have theirs. Nobody waits for a rank that has failed: it says so in the place of its next
answer, and what it leaves open is closed, which ends the others' waiting.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from greedysnake.errors import ConfigError, GreedySnakeError, RankError
from greedysnake.ops import Lane
from greedysnake.shapes import Share

Value = TypeVar("Value")
# The first names are those of torch 2.13 on.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LANES = (Lane.GATHER, Lane.REDUCE, Lane.NORM)
"""Whose threads talk to other ranks."""
PATIENCE = timedelta(days=7)
"""A rank that is gone is noticed at once; one that takes its time is not gone."""


class Ranks:
    """This process among those that torch.distributed knows; alone where that was not set up."""

    def __init__(self, device: torch.device, lanes: Sequence[Lane] = LANES) -> None:
        """Every rank makes one at the same time, for these lanes; without any to exchange words only."""
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.count = dist.get_world_size() if together else 1
        self._host: Any = None
        self._of_lane: dict[Lane, Any] = {}
        if self.count > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            with _explained():
                self._host = dist.new_group(backend="gloo", timeout=PATIENCE)
                for lane in lanes:
                    name = "gloo" if lane is Lane.NORM else backend
                    self._of_lane[lane] = dist.new_group(backend=name, timeout=PATIENCE)
        hosts = self.exchange("Engine()", socket.gethostname())
        self.share = Share(self.rank, self.count, hosts.count(socket.gethostname()))
        if device.type == "cuda" and self.count > 1 and lanes:
            try:
                self._meet_on(device)
            except BaseException:
                self.close()
                raise

    def _meet_on(self, device: torch.device) -> None:
        """Connects the devices now, on one thread: the lanes would do it at once."""
        # By a name of its own: in each process the same GPU may have another number.
        devices = self.exchange("Engine()", str(torch.cuda.get_device_properties(device).uuid))
        taken = [name for name in devices if devices.count(name) > 1]
        if taken:
            ranks = ", ".join(str(rank) for rank, name in enumerate(devices) if name == taken[0])
            raise ConfigError(
                f"ranks {ranks} have the same GPU: give each its own, by torch.cuda.set_device(LOCAL_RANK) "
                "or device='cuda:N', and start no more than there are"
            )
        with _explained():
            for lane in (Lane.GATHER, Lane.REDUCE):
                dist.all_reduce(torch.zeros(1, device=device), group=self._of_lane[lane])
            torch.cuda.synchronize(device)

    # Words, on the thread that calls the engine

    def exchange(self, call: str, value: Value) -> list[Value]:
        """What every rank gives, in their order. RankError when one of them has failed instead, or is in another
        call."""
        answers = self._exchange(None, call, value)
        for rank, (_, other, _) in enumerate(answers):
            if other != call:
                raise RankError(
                    f"rank {self.rank} is in {call} and rank {rank} in {other}: all ranks make the same calls, in the "
                    "same order"
                )
        return [found for _, _, found in answers]

    def agree(self, call: str, values: Mapping[str, object]) -> None:
        """ConfigError unless every rank gives the same values under the same names."""
        everyone = self.exchange(call, dict(values))
        for name in values:
            for rank, other in enumerate(everyone):
                if other.get(name) != everyone[0].get(name):
                    raise ConfigError(
                        f"{name} is {everyone[0].get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}: give "
                        "all ranks the same"
                    )

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """What is refused or fails here is told to the others, who are waiting for an answer, or will be. Of anything
        else, such as a Ctrl-C, nobody knows what they wait for: they are left."""
        try:
            yield
        except RankError:
            raise  # the others know
        except GreedySnakeError as error:
            self._tell(call, f"{type(error).__name__}: {error}")
            raise
        except BaseException:
            self.close()
            raise

    def _tell(self, call: str, problem: str) -> None:
        try:
            self._exchange(problem, call, None)
        except (RankError, RuntimeError):
            pass  # they have failed too, or are gone: what is wrong here is said here

    def _exchange(self, problem: str | None, call: str, value: Any) -> list[tuple[str | None, str, Any]]:
        if self.count == 1:
            return [(problem, call, value)]
        answers: list[Any] = [None] * self.count
        given = pickle.dumps((problem, call, value))  # what cannot be told is an error here alone
        try:
            with _explained():
                dist.all_gather_object(answers, given, group=self._open(self._host))
        except BaseException:  # of a signal handler, too: the next answers would not belong together
            self.close()
            raise
        answers = [pickle.loads(answer) for answer in answers]
        for rank, (found, _, _) in enumerate(answers):
            if found is not None and rank != self.rank:
                raise RankError(f"rank {rank} failed: {found}")
        return answers

    # Values on the host

    def gather_parts(self, whole: torch.Tensor) -> None:
        """Completes a vector of which every rank has filled its own part. On the thread that calls the engine."""
        self._gather(whole, self._host)

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Element by element over all ranks, in fp64. On the lane that judges a step."""
        if self.count == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        with _explained():
            dist.all_reduce(total, group=self._open(self._of_lane.get(Lane.NORM)))
        return [float(number) for number in total]

    # Values on the device, on the lanes' threads and streams

    def gather(self, weights: torch.Tensor) -> None:
        """Completes a part of a block's flat vector, of which every rank has filled its own range."""
        self._gather(weights, self._of_lane.get(Lane.GATHER))

    def reduce(self, gradients: torch.Tensor, largest: torch.Tensor | None) -> None:
        """Adds up the gradients of all ranks; each gets the sum in its own range. `largest`, one number, is not finite
        afterwards where any rank's was not."""
        group = self._open(self._of_lane.get(Lane.REDUCE))
        with _explained():
            _reduce_scatter(self._own(gradients), gradients, group=group)
            if largest is not None:
                dist.all_reduce(largest, group=group)

    def _gather(self, whole: torch.Tensor, group: Any) -> None:
        if self.count > 1 and len(whole):
            with _explained():
                _all_gather(whole, self._own(whole), group=self._open(group))

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        each = len(whole) // self.count
        return whole[self.rank * each : (self.rank + 1) * each]

    # The end

    def leave(self, lane: Lane) -> None:
        """The thread of a lane ends: others that wait for it there are told so."""
        group = self._of_lane.pop(lane, None)
        if group is not None:
            _close(group)

    def close(self) -> None:
        """Leaves all groups; those who wait for an answer of this rank do so no longer."""
        for lane in list(self._of_lane):
            self.leave(lane)
        group, self._host = self._host, None
        if group is not None:
            _close(group)

    @staticmethod
    def _open(group: Any) -> Any:
        if group is None:
            raise RankError("this rank has left the others: its engine is closed")
        return group


def _close(group: Any) -> None:
    """A group of gloo closes its connections when nobody holds it any more, which others notice at once. One of NCCL is
    not ended in good order, which would wait for the other ranks."""
    if not dist.is_initialized():
        return
    with suppress(ValueError):  # torch.distributed was set up anew meanwhile
        if dist.get_backend(group) == "nccl":
            group.abort()
        dist.destroy_process_group(group)


@contextmanager
def _explained() -> Iterator[None]:
    """What torch says about a rank that is gone, in a sentence of ours."""
    try:
        yield
    except GreedySnakeError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"another rank ended or cannot be reached: look at what it said last ({_in_short(error)})", is_gone=True
        ) from error


def _in_short(error: RuntimeError) -> str:
    """Without the place in torch's source, and without its advice."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first.partition("] ")[2].partition(". ")[0] if first.startswith("[") else first
