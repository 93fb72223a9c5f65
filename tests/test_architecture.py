"""Rules about the code itself: who imports whom, where state may be, and that the README's tree is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "greedysnake"
MODULES = sorted(PACKAGE.rglob("*.py"))

NO_TORCH = {
    *(
        "cli",
        "errors",
        "hazards",
        "holdings",
        "contents",
        "ops",
        "ledger",
        "maker",
        "carrier",
        "passes",
        "placement",
        "schedule",
        "shapes",
        "sizes",
    ),
    *("trace", "verify", "report.schedule_text", "runtime.io"),
    *("planning.costs", "planning.simulate", "planning.observe", "planning.solve", "report.plan_text"),
    *(
        "config",
        "options",
        "settings",
        "learning_rate",
        "report.metrics",
        "report.progress",
        "report.configuration_text",
    ),
}
LONG_FILE, TOO_LONG_FILE = 450, 700
MUTATORS = {"append", "add", "update", "extend", "insert", "remove", "discard", "pop", "popitem", "clear", "setdefault"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path | None:
    base = SOURCE.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def imports_of(path: Path, *, at_import: bool) -> set[str]:
    """Modules that a file imports; with `at_import` only those that importing it imports."""
    return {module for node in statements(tree_of(path), at_import) for module in imported(node)}


def statements(node: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if at_import and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child, at_import)


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, "imports are absolute"
    module = node.module or ""
    inside = [f"{module}.{alias.name}" for alias in node.names]
    return [name if path_of(name) or name == "greedysnake._native" else module for name in inside]


@cache
def reached_by(module: str) -> frozenset[str]:
    """Everything that importing a module of ours imports in the end."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        path = path_of(waiting.pop())
        new = imports_of(path, at_import=True) - found if path else set()
        found |= new
        waiting += new
    return frozenset(found)


@pytest.mark.parametrize("module", sorted(NO_TORCH))
def test_modules_that_describe_a_step_import_no_torch(module: str) -> None:
    heavy = {name for name in reached_by(f"greedysnake.{module}") if name.split(".")[0] in ("torch", "numpy")}
    assert not heavy


def test_the_walk_over_imports_finds_torch_where_it_is() -> None:
    assert "torch" in reached_by("greedysnake.runtime.engine")
    assert "greedysnake.runtime.engine" in reached_by("greedysnake.selfcheck")
    assert "torch" in imports_of(PACKAGE / "runtime" / "host.py", at_import=False)
    assert "torch" not in imports_of(PACKAGE / "runtime" / "host.py", at_import=True)


def test_what_decides_and_what_does_know_nothing_of_each_other() -> None:
    for one, other in (("planning", "runtime"), ("runtime", "planning")):
        for path in (PACKAGE / one).glob("*.py"):
            found = imports_of(path, at_import=False)
            assert not [module for module in found if module.startswith(f"greedysnake.{other}")], path.name


def test_importing_the_schedule_does_not_import_torch() -> None:
    names = ", ".join(f"greedysnake.{module}" for module in sorted(NO_TORCH))
    code = f"import sys, {names}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_importing_everything_needs_torch_and_numpy_alone() -> None:
    """Heavier packages are imported where they are used; the command line has typer and rich."""
    standard = sys.stdlib_module_names | {"greedysnake", "torch", "numpy"}
    for path in MODULES:
        allowed = standard | ({"typer"} if path.name == "cli.py" else set())
        prints = path.name in ("selfcheck.py", "trainer.py", "agreement.py") or path.parent.name == "report"
        allowed |= {"rich"} if prints else set()
        found = {module.split(".")[0] for module in imports_of(path, at_import=True)}
        assert found <= allowed, f"{path.name} imports {found - allowed} when it is imported"


def test_native_code_knows_nothing_of_torch_or_the_environment() -> None:
    for path in (ROOT / "native").iterdir():
        text = path.read_text()
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10)/", text), path.name
        assert not re.search(r"\b(secure_)?getenv\b", text), path.name


def test_only_the_command_line_reads_environment_variables() -> None:
    for path in MODULES:
        names = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        names |= {
            alias.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        if path.name != "cli.py":
            assert not names & {"environ", "getenv", "putenv"}, path.name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_changes_its_own_state(path: Path) -> None:
    """A table of constants at module level is fine; changing one is not, nor is `global`."""
    tree = tree_of(path)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
    constants = {target.id for node in tree.body for target in targets_of(node) if isinstance(target, ast.Name)}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        own |= {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
        changed = {name for node in ast.walk(function) for name in changed_by(node)}
        assert not changed & (constants - own), f"{function.name} changes {changed & (constants - own)}"


def targets_of(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def changed_by(node: ast.AST) -> list[str]:
    """Names of containers that a node changes in place."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        return [node.value.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return [node.func.value.id] if isinstance(node.func.value, ast.Name) else []
    return []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_touches_the_underscore_of_another_object(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr):
            continue
        if node.attr == "_version":  # of a tensor: torch documents it, and has no other name for it
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ast.unparse(node.value)
        assert owner in ("self", "cls"), f"{path.name}:{node.lineno} touches {ast.unparse(node)}"


def test_no_bare_except() -> None:
    for path in MODULES:
        handlers = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler)]
        assert all(handler.type is not None for handler in handlers), path.name


def test_every_module_says_what_it_is_for() -> None:
    for path in MODULES:
        if path.read_text().strip():
            assert ast.get_docstring(tree_of(path)), f"{path.relative_to(ROOT)} has no docstring"


def test_files_stay_short_enough_to_read() -> None:
    files = [*MODULES, *(ROOT / "native").iterdir(), *(ROOT / "benchmarks").glob("*.py")]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    for path, length in lengths.items():
        assert length <= TOO_LONG_FILE, f"{path.relative_to(ROOT)} has {length} lines: split it"
        if length > LONG_FILE:
            warnings.warn(f"{path.relative_to(ROOT)} has {length} lines, more than {LONG_FILE}", stacklevel=1)


# The README's tree


def listed_paths() -> dict[Path, list[Path]]:
    """Directory -> its children, as the README lists them."""
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"## What is where\n+```text\n(.*?)```", readme, re.DOTALL)
    assert found, "the README has no tree"
    parents: dict[int, Path] = {0: Path()}
    children: dict[Path, list[Path]] = {}
    for line in found[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split(" ")
        for name in names:
            path = parents[depth] / name
            children.setdefault(parents[depth], []).append(path)
            parents[depth + 1] = path
    return children


def tracked_children(directory: Path) -> set[str]:
    done = subprocess.run(["git", "ls-files", "--", f"{directory}/"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git repository")
    names = {Path(line).relative_to(directory).parts[0] for line in done.stdout.splitlines()}
    silent = {"__init__.py", "py.typed", "_native.pyi"}
    return {name for name in names - silent if not name.startswith(".")}


def test_the_tree_in_the_readme_matches_the_repository() -> None:
    for directory, paths in listed_paths().items():
        for path in paths:
            assert (ROOT / path).exists(), f"the README lists {path}, which does not exist"
        listed = {path.relative_to(directory).parts[0] for path in paths}
        missing = tracked_children(directory) - listed
        assert not missing, f"the README's tree does not list {sorted(missing)} of {directory}"
