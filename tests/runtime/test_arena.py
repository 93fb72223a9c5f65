from __future__ import annotations

import threading

import pytest
import torch

from greedysnake.errors import ConfigError, PlanError
from greedysnake.runtime.arena import PAGE_BYTES, Arena


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES


def mapping_flags(address: int) -> list[str]:
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            field = line.split()[0]
            if not field.endswith(":"):
                start, end = (int(bound, 16) for bound in field.split("-"))
                inside = start <= address < end
            elif inside and field == "VmFlags:":
                return line.split()[1:]
    raise LookupError(hex(address))


def test_budget_is_counted_to_the_byte() -> None:
    with Arena(3 * PAGE_BYTES) as arena:
        arena.allocate(2 * PAGE_BYTES, "weights")
        arena.allocate(1, "tail")
        assert arena.used_bytes == 3 * PAGE_BYTES
        with pytest.raises(PlanError):
            arena.allocate(1, "one more")
    with Arena(3 * PAGE_BYTES - 1) as arena:
        arena.allocate(2 * PAGE_BYTES, "weights")
        with pytest.raises(PlanError, match=r"needs 4 KiB \(4096 bytes\).*4095 bytes\).*by 1 B"):
            arena.allocate(1, "tail")
        assert arena.used_bytes == 2 * PAGE_BYTES, "a refused request must not be charged"


def test_error_lists_holders_largest_first_and_the_next_move() -> None:
    with Arena(1 << 20) as arena:
        arena.allocate(64 << 10, "gradients")
        arena.allocate(256 << 10, "chunk slots")
        arena.allocate(256 << 10, "chunk slots")
        with pytest.raises(PlanError) as error:
            arena.allocate(600 << 10, "activations")
        text = str(error.value)
        assert "'activations' needs 600 KiB" in text
        assert text.index("512 KiB  chunk slots") < text.index("64 KiB  gradients")
        assert "raise the budget by 152 KiB" in text and "move something from RAM to SSD" in text


def test_error_stays_short_with_many_holders() -> None:
    with Arena(100 * PAGE_BYTES) as arena:
        for index in range(100):
            arena.allocate(1, f"buffer {index}")
        with pytest.raises(PlanError, match="368 KiB  92 others"):
            arena.allocate(1, "last")


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 5 << 20])
def test_memory_is_page_aligned_zeroed_and_of_the_asked_length(nbytes: int) -> None:
    with Arena(8 << 20) as arena:
        tensor = arena.allocate(nbytes, "buffer")
        assert tensor.dtype == torch.uint8 and tensor.shape == (nbytes,)
        assert tensor.data_ptr() % PAGE_BYTES == 0
        assert not tensor.any()


def test_views_share_the_memory() -> None:
    with Arena(1 << 20) as arena:
        tensor = arena.allocate(4096, "buffer")
        as_float = tensor.view(torch.float32)
        as_float[3] = 1.0
        assert as_float.data_ptr() == tensor.data_ptr()
        assert tensor[12:16].tolist() == [0, 0, 0x80, 0x3F]


def test_free_gives_the_budget_back_and_peak_remembers() -> None:
    with Arena(2 * PAGE_BYTES) as arena:
        first = arena.allocate(PAGE_BYTES, "first")
        second = arena.allocate(PAGE_BYTES, "second")
        assert arena.holders() == {"first": PAGE_BYTES, "second": PAGE_BYTES}
        arena.free(first)
        assert (arena.used_bytes, arena.peak_bytes) == (PAGE_BYTES, 2 * PAGE_BYTES)
        arena.allocate(PAGE_BYTES, "third")
        with pytest.raises(ConfigError, match="does not start an allocation"):
            arena.free(second[1:])
        arena.free(second)
        with pytest.raises(ConfigError, match="once"):
            arena.free(second)
        assert arena.holders() == {"third": PAGE_BYTES}


def test_pages_are_taken_at_first_touch_and_given_back_by_free_even_with_a_view_left() -> None:
    size = 256 << 20
    with Arena(size) as arena:
        before = resident_bytes()
        tensor = arena.allocate(size, "big")
        assert resident_bytes() - before < size // 8
        tensor.fill_(1)
        view = tensor[size // 2 :]
        assert resident_bytes() - before > size * 7 // 8
        arena.free(tensor)
        assert resident_bytes() - before < size // 8
        assert int(view[0]) == 0, "a stale view reads zeros; it does not crash"


def test_close_frees_everything_and_may_be_repeated() -> None:
    arena = Arena(1 << 20)
    arena.allocate(1 << 20, "all of it")
    arena.close()
    arena.close()
    assert arena.used_bytes == 0 and arena.holders() == {} and arena.peak_bytes == 1 << 20


def test_threads_cannot_overdraw_the_budget() -> None:
    arena = Arena(64 * PAGE_BYTES)
    granted: list[torch.Tensor] = []

    def take() -> None:
        for _ in range(32):
            try:
                granted.append(arena.allocate(PAGE_BYTES, "page"))
            except PlanError:
                pass

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 64 and arena.used_bytes == arena.peak_bytes == arena.budget_bytes
    assert len({tensor.data_ptr() for tensor in granted}) == 64
    arena.close()


def test_memory_is_not_inherited_by_forked_children() -> None:
    with Arena(PAGE_BYTES) as arena:
        tensor = arena.allocate(PAGE_BYTES, "buffer")
        assert "dc" in mapping_flags(tensor.data_ptr()), "dc = not copied on fork: a copy would double the budget"


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_cannot_be_allocated(nbytes: int) -> None:
    with Arena(1 << 20) as arena, pytest.raises(ConfigError, match="at least one"):
        arena.allocate(nbytes, "empty")


@pytest.mark.gpu
def test_cuda_sees_the_memory_as_pinned_until_it_is_freed() -> None:
    with Arena(1 << 20, device="cuda") as arena:
        tensor = arena.allocate(12345, "staging")
        assert tensor.is_pinned()
        tensor.random_(0, 256)
        on_device = tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(on_device.cpu(), tensor)
        arena.free(tensor)
        assert not tensor.is_pinned()
