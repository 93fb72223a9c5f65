"""Plans a run in a process of its own, so that the training after it finds device, memory and compilers unused."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from greedysnake.config import Config
from greedysnake.errors import GreedySnakeError, PlanError

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def plan_apart(config: Config) -> Config:
    """The configuration as planned, with everything decided. Prints what `greedysnake plan` does, but for where
    everything lives, which training prints."""
    spawning = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    answers, answering = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_plan, args=(config, answering), name="greedysnake plan")
    with answers:
        try:
            with _signals_held():
                process.start()
            answering.close()
            answer = answers.recv()
        except EOFError:
            answer = None  # it ended without one
        except BaseException:
            if process.pid is not None:
                process.terminate()  # it takes its files away
            raise
        finally:
            if process.pid is not None:
                process.join()
    if isinstance(answer, Exception):
        raise answer
    if not isinstance(answer, Config):
        raise PlanError(f"planning {_fate(process.exitcode)}: train without --plan, or see why with greedysnake plan")
    return answer


@contextmanager
def _signals_held() -> Iterator[None]:
    """Also of a process that is started: it lets them through when it is ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _fate(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _plan(config: Config, answering: Connection) -> None:
    """In the process of its own."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    from rich.console import Console

    from greedysnake.planner import plan_run
    from greedysnake.report.plan_text import print_plan

    console = Console(soft_wrap=False)
    with answering:
        try:
            planned = plan_run(config, lambda text: console.print(f"{text} ...", highlight=False, soft_wrap=True))
            print_plan(console, planned, config, with_homes=False)
            console.print()
        except (GreedySnakeError, OSError) as error:
            answering.send(error)
        else:
            answering.send(planned.chosen.config)


def _end(number: int, _: object) -> None:
    """Once: a terminal's Ctrl-C goes to both processes, and what follows it must not disturb the cleaning up."""
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)
