"""Counts the threads of this process, native ones included.

The kernel wakes who joins a thread before it takes the thread off its list, on a busy machine long before: a count
must wait for what is about to go.
"""

from __future__ import annotations

import os
import time

SECONDS = 30


def num_threads() -> int:
    """Threads once none of those that have just ended is listed any more, as far as that can be seen."""
    count = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        time.sleep(0.002)
        now = len(os.listdir("/proc/self/task"))
        if now >= count:
            break
        count = now
    return count


def require_threads(at_most: int) -> None:
    """Fails if more threads than that are still there after a long time."""
    deadline_s = time.monotonic() + SECONDS
    while (count := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < deadline_s:
        time.sleep(0.002)
    assert count <= at_most
