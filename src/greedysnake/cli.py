"""The command line. The only place that reads environment variables; commands import what they need when they run."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import signal
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated

import typer

from greedysnake.errors import ConfigError, GreedySnakeError, explained

app = typer.Typer(
    name="greedysnake",
    help="Train large language models on hardware that cannot hold them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SPINS = "1000"
"""How long a thread of torch that waits for another one keeps its core: some microseconds. By default it is so long
that training on the CPU is many times slower where anything else wants a core."""

ConfigFile = Annotated[
    str | None,
    typer.Argument(metavar="CONFIG.yaml", help="The configuration; without one a small default.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="a.b=c", help="Changes, as in training.max_steps=100.", show_default=False),
]


def main() -> None:
    """Run the command that was asked for. Errors made for people are one sentence and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A letter that the terminal does not have is no reason to end a training.
        sys.stdout.reconfigure(errors="backslashreplace")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is loaded
    try:
        try:
            with explained("use"):  # a path that somebody gave: most are looked at without a thought of permissions
                app(prog_name="greedysnake")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where an error can still be told
    except (GreedySnakeError, OSError, UnicodeEncodeError, ModuleNotFoundError) as error:
        sentence = _sentence(error)
        if sentence is None or os.environ.get("GREEDYSNAKE_DEBUG") == "1":
            raise
        if isinstance(error, OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or what was not written yet would fail again at the end
        if not sentence:
            sys.exit(1)
        print(f"greedysnake: {_which_rank()}{sentence}", file=sys.stderr)
        sys.exit(2)


def _sentence(error: Exception) -> str | None:
    """What to tell a person of an error, if anything; None for those that are faults of the program."""
    if isinstance(error, GreedySnakeError):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return ""  # nobody reads what is printed
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # errors of other files come with a sentence
        return "what is printed finds no room on its drive: free space there, or send it elsewhere"
    if isinstance(error, UnicodeEncodeError) and error.encoding != "utf-8":
        letters = error.object[error.start : error.end]
        return f"{letters!r} in a path cannot be written in {error.encoding}: set LC_ALL=C.UTF-8"
    if isinstance(error, ModuleNotFoundError) and error.name == "greedysnake._native":
        return "the native module is not built: run make build, or pip install ."
    return None


def _which_rank() -> str:
    """What a sentence begins with where several processes print: which of them it is."""
    return f"rank {os.environ['RANK']}: " if "RANK" in os.environ and _is_one_of_several() else ""


def _is_one_of_several() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _launched() -> tuple[int, int, int]:
    """This process's rank, its rank on this host, and the number of ranks, as torchrun says."""
    if not _is_one_of_several():
        return 0, 0, 1
    numbers = []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        value = os.environ.get(name, "")
        if not value.isdecimal():
            what = f"{name} is {value!r}" if value else f"{name} is not"
            raise ConfigError(
                f"WORLD_SIZE is set in the environment and {what}: start several processes with torchrun, or unset it"
            )
        numbers.append(int(value))
    rank, local_rank, num_ranks = numbers
    return rank, local_rank, num_ranks


def _require_one_process(command: str) -> None:
    if _is_one_of_several():
        raise ConfigError(
            f"{command} is for one process, and WORLD_SIZE is {os.environ['WORLD_SIZE']}: run it without torchrun"
        )


def _clean_up_when_told_to_end() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup
            signal.signal(number, _end)


def _end(number: int, _: object) -> None:
    """As Ctrl-C does, so that what was begun is taken away."""
    raise SystemExit(128 + number)


def _file_and_overrides(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Without a file, the first word is an override already."""
    if config is not None and "=" in config and not os.path.exists(config):  # also if too long for a path
        return None, [config, *(overrides or [])]
    return config, overrides or []


@app.command()
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    plan_first: Annotated[
        bool, typer.Option("--plan", help="Before it begins or goes on, plan it, and train as planned.")
    ] = False,
) -> None:
    """Train a model; continue if its output_dir has a checkpoint. Ctrl-C finishes the step, saves and ends.

    On several GPUs: torchrun --nproc-per-node 2 -m greedysnake train CONFIG.yaml
    """
    from greedysnake.config import load_config

    settings = load_config(*_file_and_overrides(config, overrides))
    launched = _launched()
    if plan_first:
        from greedysnake.preplanning import require_one_process

        require_one_process(launched[-1])
        _clean_up_when_told_to_end()
    from rich.console import Console

    from greedysnake.launching import Launched, joined
    from greedysnake.trainer import Trainer

    with joined(Launched(*launched), settings.engine.device):
        Trainer(settings, console=Console(soft_wrap=False)).train(plan_first=plan_first)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("greedysnake.yaml"),
) -> None:
    """Write a YAML file with every key, its default and what it means."""
    from greedysnake.report.configuration_text import commented_yaml

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(commented_yaml())
    except FileExistsError:
        raise ConfigError(f"{path} exists: give another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another name") from error
    print(f"wrote {path}: set model.path and data.paths in it, then run greedysnake train {shlex.quote(str(path))}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a training.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.", show_default=False)],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Write the last checkpoint as a folder that transformers' from_pretrained loads."""
    _require_one_process("export")
    from greedysnake.exporting import export_run

    _clean_up_when_told_to_end()
    step = export_run(run, out, dtype=dtype)
    print(f"wrote {out}: the model of step {step} in {dtype}")


@app.command()
def reshard(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The output_dir of a training.", show_default=False)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the new run.", show_default=False)],
    ranks: Annotated[
        int | None, typer.Option(help="How many processes it is for, one per GPU.", show_default=False)
    ] = None,
    moments: Annotated[
        str | None, typer.Option(help="How it stores AdamW's: float32, bfloat16 or int8.", show_default=False)
    ] = None,
    layers_per_block: Annotated[
        int | None, typer.Option(help="How many layers stream together.", show_default=False)
    ] = None,
    storage: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Its directories, one per drive; else in OUT.", show_default=False),
    ] = None,
) -> None:
    """Copy a run so that it goes on with another number of GPUs, with moments in fewer bytes or in more, or with
    other blocks. The old one stays as it is."""
    _require_one_process("reshard")
    from greedysnake.resharding import reshard_run

    _clean_up_when_told_to_end()
    new, num_ranks = reshard_run(
        run, out, num_ranks=ranks, moments=moments, layers_per_block=layers_per_block, storage=storage or ()
    )
    print(f"wrote {out}: it goes on with {_train_command(Path(new.output_dir) / 'run.yaml', num_ranks)}")


def _train_command(file: Path, num_ranks: int) -> str:
    start = "greedysnake" if num_ranks == 1 else f"torchrun --nproc-per-node {num_ranks} -m greedysnake"
    return f"{start} train {shlex.quote(str(file))}"


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="A new file for the configuration as planned.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A new file for the timeline of a step as planned, for Perfetto.", show_default=False),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that would train together, one per GPU.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say how fast a training would be here, what would bound it, and how it would be fastest. Trains nothing.

    Measures the drives for two seconds each, and the rest by three steps of a few layers of the model.
    """
    _require_one_process("plan")
    from greedysnake.config import load_config

    settings = load_config(*_file_and_overrides(config, overrides), to_train=False)
    if out is not None and out == trace:
        raise ConfigError(f"{out} is given for the configuration and for the timeline: give two names")
    for file in (out, trace):
        if file is not None and file.exists():
            raise ConfigError(f"{file} exists: give another name, or remove it")
        if file is not None and not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
            where = f"{file.parent} is no folder, or not yours to write in"
            raise ConfigError(f"{file} cannot be written: {where}: make it, or give another name")
    from rich.console import Console

    from greedysnake.planner import plan_run
    from greedysnake.report.plan_text import as_json as in_json
    from greedysnake.report.plan_text import print_plan
    from greedysnake.trace import write_perfetto

    _clean_up_when_told_to_end()
    console = Console(stderr=as_json)
    planned = plan_run(settings, lambda text: console.print(f"{text} ...", highlight=False, soft_wrap=True), ranks)
    if out is not None:
        with explained("write", out):
            out.write_text(planned.chosen.config.as_yaml(), encoding="utf-8")
    if trace is not None:
        with explained("write", trace):
            write_perfetto(planned.chosen.forecast.records, trace)
    if as_json:
        print(json.dumps(in_json(planned), indent=2))
        return
    print_plan(console, planned, settings)
    if out is not None:
        console.print(f"next: {_train_command(out, ranks)}", highlight=False, soft_wrap=True)


@app.command()
def verify(
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Train a shrunken copy of your model here and in plain PyTorch, and compare. Exit code 1 on a mismatch."""
    _require_one_process("verify")
    from greedysnake.config import load_config

    settings = load_config(*_file_and_overrides(config, overrides), to_train=False)
    from rich.console import Console

    from greedysnake.agreement import compare

    raise typer.Exit(0 if compare(settings, Console()) else 1)


@app.command()
def doctor(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Directories that training would use, one per drive.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check machine and directories: what works, how fast, what to fix. Exit code 1 if training could not work.

    Each directory takes two seconds; the file used to measure it is gone afterwards.
    """
    from greedysnake.runtime.doctor import examine

    diagnosis = examine(directories or [])
    if as_json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        from rich.console import Console

        from greedysnake.report.doctor_text import doctor_text

        Console().print(doctor_text(diagnosis))
    raise typer.Exit(0 if diagnosis.ok else 1)


@app.command()
def selfcheck(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where to put temporary files.", show_default=False)
    ] = None,
) -> None:
    """Check native kernels, I/O and a short training against plain PyTorch. Exit code 1 if anything differs."""
    from rich.console import Console

    from greedysnake.selfcheck import run_checks

    raise typer.Exit(0 if run_checks(Console(), directory) else 1)


@app.command()
def schedule(
    blocks: Annotated[int, typer.Option(help="Blocks, embedding and head included.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 3,
    alpha: Annotated[float, typer.Option(help="Share of the updates that is done late, 0 to 1.")] = 0.25,
    clipping: Annotated[bool, typer.Option("--clipping", help="Clip the global norm of the gradient.")] = False,
    kind: Annotated[str, typer.Option(help="vertical or horizontal.")] = "vertical",
    chunks: Annotated[int, typer.Option(help="Chunks per block.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps to print.")] = 1,
    ranks: Annotated[int, typer.Option(help="Ranks that share the model, one per GPU.")] = 1,
) -> None:
    """Print a training step as the operations that the engine runs, block by block."""
    from greedysnake.report.schedule_text import schedule_text

    text = schedule_text(
        blocks=blocks,
        micro_batches=micro_batches,
        alpha=alpha,
        clipping=clipping,
        kind=kind,
        chunks=chunks,
        steps=steps,
        ranks=ranks,
    )
    print(text.rstrip("\n"))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"greedysnake {installed_version('greedysnake')}")
