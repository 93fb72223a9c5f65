"""The configuration as a page of documentation and as a YAML file to start from, made from the fields themselves."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from greedysnake.config import Config
from greedysnake.settings import Plain, Setting, describe

EXAMPLES: dict[str, Plain] = {
    "output_dir": "runs/my-run",
    "model.path": "models/my-model",
    "data.paths": ["data/train.jsonl"],
}
"""What stands in a new file for keys whose default says nothing."""

INTRODUCTION = """\
# Configuration

<!-- Made by docs/write_configuration.py from the fields in src/greedysnake; a test keeps it equal. -->

    greedysnake init my.yaml        # a commented file to start from
    greedysnake train my.yaml training.max_steps=100

One YAML file describes a training. Every key may be changed on the command line as `section.key=value`. Names are those
of transformers where transformers has them. Unknown keys are refused, sizes are written as `32GiB` or `2GB`, and
everything that can be checked is checked before anything is loaded or written. Paths are relative to the folder in
which the command runs.
"""


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [INTRODUCTION.rstrip()]
    in_table = False
    for setting in _ordered():
        if setting.is_section:
            lines += ["", f"## {setting.key}", "", setting.documentation]
            in_table = False
            continue
        if not in_table:
            lines += ["", "| key | value | default | meaning |", "|---|---|---|---|"]
            in_table = True
        default = "required" if setting.is_required else f"`{_text(setting.default)}`"
        lines.append(f"| `{setting.key}` | {setting.wanted} | {default} | {setting.documentation} |")
    return "\n".join(lines) + "\n"


def commented_yaml() -> str:
    """Every key with its default, and above it what it means."""
    lines = ["# A training with GreedySnake: greedysnake train THIS_FILE. Keys that are left out have these values."]
    for setting in _ordered():
        *parents, name = setting.key.split(".")
        indent = "  " * len(parents)
        if not parents and setting.is_section:
            lines.append("")
        comment = setting.documentation if setting.is_section else f"{setting.documentation} ({setting.wanted})"
        lines += [f"{indent}# {line}" for line in textwrap.wrap(comment, 106 - len(indent))]
        value = EXAMPLES.get(setting.key, setting.default)
        lines.append(f"{indent}{name}:" + ("" if setting.is_section else f" {_text(value)}"))
    return "\n".join(lines) + "\n"


def _ordered() -> Iterator[Setting]:
    """Keys of the top level before the sections, so that each section is one stretch."""
    settings = list(describe(Config))
    yield from (setting for setting in settings if "." not in setting.key and not setting.is_section)
    sections = [setting for setting in settings if "." in setting.key or setting.is_section]
    for group in _tops(sections):
        yield from _keys_first(group)


def _tops(settings: list[Setting]) -> list[list[Setting]]:
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.key.split(".")[0], []).append(setting)
    return list(groups.values())


def _keys_first(group: list[Setting]) -> list[Setting]:
    """A section's own keys, then the sections in it."""
    inner = [setting.key for setting in group[1:] if setting.is_section]

    def is_inner(setting: Setting) -> bool:
        return any(setting.key == key or setting.key.startswith(f"{key}.") for key in inner)

    return [s for s in group if not is_inner(s)] + [s for s in group if is_inner(s)]


def _text(value: Plain) -> str:
    """A value as it stands in YAML."""
    if isinstance(value, str) and value.replace("-", "").replace("_", "").replace("/", "").isalnum():
        return value
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return json.dumps(value)
