"""Host memory under a hard budget: page-aligned, counted to the byte, registered with CUDA if there is one.

Knows nothing of blocks, chunks or files. Torch's pinned allocator is not used: it rounds up to powers of two.
"""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType

import torch

from greedysnake.errors import ConfigError, PlanError
from greedysnake.sizes import format_size

PAGE_BYTES = mmap.PAGESIZE
_LISTED_HOLDERS = 8


@dataclass(frozen=True)
class _Allocation:
    name: str
    num_bytes: int
    """Rounded up to pages: what the kernel can take for it."""
    memory: mmap.mmap
    registered: bool


class Arena:
    """Hands out page-aligned host memory until `budget_bytes` are in use. Safe from several threads."""

    def __init__(self, budget_bytes: int, *, device: torch.device | str = "cpu") -> None:
        if budget_bytes < 0:
            raise ConfigError(f"the memory budget cannot be negative: {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.device = torch.device(device)
        self._lock = threading.Lock()
        self._allocations: dict[int, _Allocation] = {}
        self._used_bytes = 0
        self._peak_bytes = 0

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def holders(self) -> dict[str, int]:
        """Bytes held under each name, largest first."""
        with self._lock:
            return self._holders()

    def allocate(self, nbytes: int, name: str) -> torch.Tensor:
        """A zeroed uint8 tensor of `nbytes`, page-aligned, in its own mapping; pages come at first touch.

        The budget is charged with `nbytes` rounded up to pages. Give it back with `free`.
        """
        if nbytes <= 0:
            raise ConfigError(f"cannot allocate {nbytes} bytes for {name!r}: ask for at least one")
        num_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            if self._used_bytes + num_bytes > self.budget_bytes:
                raise PlanError(self._over_budget(num_bytes, name))
            allocation = self._map(num_bytes, name)
            tensor = torch.frombuffer(allocation.memory, dtype=torch.uint8, count=nbytes)
            self._allocations[tensor.data_ptr()] = allocation
            self._used_bytes += num_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Give back what `allocate` returned. Nothing may still be copying to or from it.

        Views that outlive this stay valid to touch, but their contents are gone.
        """
        with self._lock:
            allocation = self._allocations.pop(tensor.data_ptr(), None)
            if allocation is None:
                raise ConfigError(
                    f"the tensor at {tensor.data_ptr():#x} does not start an allocation of this arena: "
                    "free what allocate() returned, once"
                )
            self._used_bytes -= allocation.num_bytes
            self._release(tensor.data_ptr(), allocation)

    def close(self) -> None:
        """Free everything that is still held. Calling it again does nothing."""
        with self._lock:
            for address, allocation in self._allocations.items():
                self._release(address, allocation)
            self._allocations.clear()
            self._used_bytes = 0

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _holders(self) -> dict[str, int]:
        held: Counter[str] = Counter()
        for allocation in self._allocations.values():
            held[allocation.name] += allocation.num_bytes
        return dict(held.most_common())

    def _over_budget(self, num_bytes: int, name: str) -> str:
        holders = list(self._holders().items())
        lines = [f"  {format_size(held):>10}  {holder}" for holder, held in holders[:_LISTED_HOLDERS]]
        rest = holders[_LISTED_HOLDERS:]
        if rest:
            lines.append(f"  {format_size(sum(held for _, held in rest)):>10}  {len(rest)} others")
        free = self.budget_bytes - self._used_bytes
        return "\n".join(
            [
                f"{name!r} needs {format_size(num_bytes)} ({num_bytes} bytes) of host memory; "
                f"{format_size(free)} ({free} bytes) of {format_size(self.budget_bytes)} are left: "
                f"raise the budget by {format_size(num_bytes - free)} ({num_bytes - free} bytes) "
                "or move something from RAM to SSD.",
                "Held now:" if lines else "Nothing is held now.",
                *lines,
            ]
        )

    def _map(self, num_bytes: int, name: str) -> _Allocation:
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise PlanError(
                f"the kernel refused {format_size(num_bytes)} of host memory for {name!r} "
                f"({error.strerror}): the budget is larger than this machine "
                "or its limits (ulimit -v, cgroup) allow; lower it"
            ) from error
        # A forked child (a data loader) would otherwise share these pages copy-on-write: the next touch here
        # would double the memory, and a transfer in flight could land in the child's copy.
        memory.madvise(mmap.MADV_DONTFORK)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without transparent huge pages: only speed is lost
        registered = self.device.type == "cuda"
        if registered:
            self._register(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), num_bytes, name)
        return _Allocation(name, num_bytes, memory, registered)

    def _register(self, address: int, num_bytes: int, name: str) -> None:
        with torch.cuda.device(self.device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(cudart.cudaHostRegister(address, num_bytes, 0))
        if code != 0:
            raise PlanError(
                f"CUDA could not register {format_size(num_bytes)} of host memory for {name!r} "
                f"(cudaError {code}): lower the budget, or raise the limit on locked memory (ulimit -l)"
            )

    def _release(self, address: int, allocation: _Allocation) -> None:
        if allocation.registered:
            with torch.cuda.device(self.device):
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                cudart.cudaHostUnregister(address)
        # The mapping itself goes when the last view does; its pages go now, so the budget stays true.
        allocation.memory.madvise(mmap.MADV_DONTNEED)
