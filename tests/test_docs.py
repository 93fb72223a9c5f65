"""Commands, code and links in README and docs are true."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer

from greedysnake import cli, errors

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def code_in(path: Path) -> list[str]:
    """Lines of fenced and indented blocks, and what stands between backquotes."""
    text = path.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    \S.*$", rest, re.MULTILINE)
    return [
        line.strip() for block in [*fenced, *indented, *re.findall(r"`([^`\n]+)`", rest)] for line in block.splitlines()
    ]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@cache
def options_of_commands() -> dict[str, set[str]]:
    group = typer.main.get_command(cli.app)
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


@page
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code_in(page):
        for target in re.findall(r"^make ([\w-]+)", line):
            assert target in targets, f"make {target}"


@page
def test_every_greedysnake_command_and_option_exists(page: Path) -> None:
    for line in code_in(page):
        found = re.match(r"(?:\S*/)?(?:python -m )?greedysnake ([a-z]+)(.*)", line)
        if found is None:
            continue
        command, rest = found.groups()
        assert command in options_of_commands(), line
        for option in re.findall(r"--[\w-]+", rest.split("#")[0]):
            assert option in options_of_commands()[command], line


@page
def test_every_script_and_its_options_exist(page: Path) -> None:
    for line in code_in(page):
        found = re.match(r"(?:\S*/)?python ((?:benchmarks|examples|docs)/\S+\.py)(.*)", line)
        if found is None:
            continue
        script = ROOT / found[1]
        assert script.is_file(), line
        own, _, behind = found[2].split("#")[0].partition(" -- ")  # what is behind goes to the runs of step.py
        for options, reader in ((own, script), (behind, ROOT / "benchmarks" / "step.py")):
            for option in re.findall(r"--[\w-]+", options):
                assert f'"{option}"' in reader.read_text(), line


@page
def test_every_python_block_compiles(page: Path) -> None:
    for block in python_blocks(page):
        compile(block, str(page), "exec")


@page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors_of(linked), target


def anchors_of(path: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_quickstart_of_the_readme_runs_and_learns(tmp_path: Path) -> None:
    (block,) = python_blocks(ROOT / "README.md")
    assert block == (ROOT / "examples" / "quickstart.py").read_text()
    losses = losses_of(block, tmp_path)
    assert len(losses) == 20 and losses[-1] < 0.7 * losses[0]


def test_the_example_with_modules_runs_and_learns(tmp_path: Path) -> None:
    losses = losses_of((ROOT / "examples" / "modules.py").read_text(), tmp_path)
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]


def losses_of(script: str, folder: Path) -> list[float]:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # more of them fight for busy cores with tensors this small
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, env=one_thread, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["runs"]
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


def test_every_message_of_an_error_is_in_troubleshooting() -> None:
    """By a phrase between backquotes; dots stand for values."""
    phrases = [phrase for phrase in code_in(ROOT / "docs" / "troubleshooting.md") if len(phrase) > 5]
    patterns = [re.compile(".*".join(map(re.escape, filter(None, phrase.split("..."))))) for phrase in phrases]
    patterns = [pattern for pattern in patterns if len(pattern.pattern) > 5]
    missing = [
        f"{path.name}: {message}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for message in messages_in(path)
        if len(message.replace(".", "").strip()) > 12 and not any(pattern.search(message) for pattern in patterns)
    ]
    assert not missing


def messages_in(path: Path) -> list[str]:
    """What errors are raised with, dots for the values."""
    kinds = {"ConfigError", "PlanError", "StorageError", "OpError", "RankError", "GreedySnakeError", "RowError"}
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    return [text_of(call.args[0]) for call in calls if isinstance(call.func, ast.Name) and call.func.id in kinds]


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    return "..."


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    script = tmp_path / "draw_order.py"
    script.write_text((ROOT / "docs" / "draw_order.py").read_text())
    subprocess.run([sys.executable, script], check=True)
    assert (tmp_path / "order.svg").read_text() == (ROOT / "docs" / "order.svg").read_text()


def test_every_error_class_is_in_troubleshooting() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    classes = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert classes
    for name in classes:
        assert name in text, name


def test_messages_in_troubleshooting_are_those_of_the_code() -> None:
    """What stands between backquotes in the first column occurs in a message, but for the values left out."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    # Messages go over several string literals and have values in them.
    source = re.sub(r"\"\s*\n\s*f?\"", "", source)
    rows = re.findall(r"^\| (?!message|---)(.*?) \|", text.split("## ConfigError")[1], re.MULTILINE)
    assert len(rows) > 20
    for quoted in [words for row in rows for words in re.findall(r"`([^`]+)`", row)]:
        for part in re.split(r"\.\.\.,?", quoted):
            assert part.strip(" ,") in source, quoted
