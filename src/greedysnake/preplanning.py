"""Plans a run in a process of its own, so that the training after it finds device, memory and compilers unused."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import ModuleType

from greedysnake.config import Config
from greedysnake.errors import ConfigError, GreedySnakeError, PlanError

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PATIENCE_S, TRIES = 5.0, 4
"""What the process has for taking its files away. It is asked more than once: what a signal handler raises may be lost
where it comes up, in the callback of a weak reference, say."""
PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""


def require_one_process(num_ranks: int) -> None:
    if num_ranks > 1:
        raise ConfigError(
            f"--plan is for one process, and WORLD_SIZE is {num_ranks}: greedysnake plan --ranks {num_ranks} "
            "--out FILE first, then train FILE"
        )


def plan_apart(config: Config) -> Config:
    """The configuration as planned, with everything decided. Prints what `greedysnake plan` does, but for where
    everything lives, which training prints."""
    spawning = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    answers, answering = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_plan, args=(config, answering, os.getpid()), name="greedysnake plan")
    with answers:
        try:
            with _signals_held():
                _start(process)
            answering.close()
            answer = _received(answers)
            process.join()
        except BaseException:
            with _signals_held():
                _end(process)
            raise
    if isinstance(answer, Exception):
        raise answer
    if not isinstance(answer, Config):
        raise PlanError(f"planning {_fate(process.exitcode)}: train without --plan, or see why with greedysnake plan")
    return answer


def _received(answers: Connection) -> object:
    """None when the other end is closed without an answer."""
    try:
        return answers.recv()
    except EOFError:
        return None


@contextmanager
def _signals_held() -> Iterator[None]:
    """One that comes is answered afterwards. A mask would not do, since other threads would take it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    held = [number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in held}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _start(process: SpawnProcess) -> None:
    """With signals blocked in there, until it is ready for them. It runs nothing of the program that calls us, which
    may be a script that would train once more."""
    resource_tracker.ensure_running()  # else `start` does so, and then lets signals through
    before, main = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING), sys.modules["__main__"]
    try:
        sys.modules["__main__"] = ModuleType("__main__")  # the one that would be imported there
        process.start()
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(process: SpawnProcess) -> None:
    for _ in range(TRIES):
        if not process.is_alive():
            return
        process.terminate()
        process.join(PATIENCE_S)
    process.kill()
    process.join()


def _fate(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _plan(config: Config, answering: Connection, parent: int) -> None:
    """In the process of its own."""
    _obey(parent)
    from greedysnake import planner  # noqa: F401  # takes seconds, in which there is nothing to take away

    ending = _Ending()
    signal.signal(signal.SIGTERM, ending)
    try:
        answer = _answer(config)
        with answering, suppress(BrokenPipeError):  # nobody waits for it any more
            answering.send(answer)
    except BaseException:
        if ending.is_told:  # what it raised may have become another error on its way
            raise SystemExit(ending.code) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # there is nothing left to do but to end


def _answer(config: Config) -> Config | Exception:
    from rich.console import Console

    from greedysnake.planner import plan_run
    from greedysnake.report.plan_text import print_plan
    from greedysnake.report.progress import lost_terminal

    console = Console(soft_wrap=False)

    def say(text: str) -> None:
        with lost_terminal():
            console.print(f"{text} ...", highlight=False, soft_wrap=True)

    try:
        planned = plan_run(config, say)
    except (GreedySnakeError, OSError) as error:
        return error
    with lost_terminal():
        print_plan(console, planned, config, with_homes=False)
        console.print()
    return planned.chosen.config


def _obey(parent: int) -> None:
    """Ends when the parent says so, or ends itself, in whatever way. Ctrl-C and a terminal that closes reach both
    processes, and are the parent's to answer. What a handler raises may be swallowed by an import, so there is none
    yet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(_Ending.code)


class _Ending:
    """Ends this process, but does not disturb its cleaning up when it is told so twice."""

    code = 128 + signal.SIGTERM

    def __init__(self) -> None:
        self._told_s = float("-inf")

    @property
    def is_told(self) -> bool:
        return self._told_s > float("-inf")

    def __call__(self, number: int, _: object) -> None:
        if time.monotonic() - self._told_s >= 0.8 * PATIENCE_S:
            self._told_s = time.monotonic()
            raise SystemExit(self.code)
