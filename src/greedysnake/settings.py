"""What a person wrote (YAML, `a.b=c`) as frozen data classes, or one sentence that names the key and the fix.

Knows data classes and their documentation strings; nothing of what the fields mean. No torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from greedysnake.errors import ConfigError
from greedysnake.sizes import parse_size

Size = NewType("Size", int)
"""Bytes; people may write "32GiB"."""

Plain = object
"""What YAML gives: None, bool, int, float, str, list, dict."""

Made = TypeVar("Made")


def read_yaml(text: str, source: str) -> dict[str, Plain]:
    """The mapping in a YAML text; ConfigError naming `source` and line when it is none."""
    import yaml

    try:
        found = yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{where} is not valid YAML: {problem}") from error
    except (ValueError, KeyError) as error:  # of a value that is no number though it begins like one: 0x_, !!int x
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{source} holds a {_kind(found)}: give keys and values, as greedysnake init writes them")
    return found


def write_yaml(values: Mapping[str, Plain]) -> str:
    """The text from which `read_yaml` gives the same values, in the same order."""
    import yaml

    return str(yaml.dump(dict(values), Dumper=_dumper(), sort_keys=False, allow_unicode=True))


def override(values: dict[str, Plain], assignments: Sequence[str]) -> None:
    """Applies `a.b=c` to nested mappings in place; c is read as YAML."""
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(parts):
            raise ConfigError(
                f"{assignment!r} is not an override: write key=value, as in training.max_steps=100, without spaces"
            )
        value = read_yaml(f"value: {text}" if text.strip() else "value:", f"the override {assignment!r}")["value"]
        target = values
        for part in parts[:-1]:
            inner = target.get(part)
            if not isinstance(inner, dict):
                inner = target[part] = {}
            target = inner
        target[parts[-1]] = value


def build(made: type[Made], values: Plain, path: str = "") -> Made:
    """Makes a data class from nested mappings. `path` is the key under which they were found."""
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is {values!r}: give keys under it ({', '.join(_names(made)[:4])}, ...)")
    hints = get_type_hints(made)
    for key in values:
        if key not in hints or key not in _names(made):
            raise ConfigError(unknown_key(str(key), _names(made), path))
    arguments = {key: _convert(value, hints[key], _join(path, key)) for key, value in values.items()}
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        if field.name not in arguments and _is_required(field):
            raise ConfigError(f"{_join(path, field.name)} is missing: {_wanted(hints[field.name])}")
    try:
        return made(**arguments)
    except ConfigError as error:
        raise ConfigError(_with_path(str(error), path)) from error


def unknown_key(key: str, known: Sequence[str], path: str) -> str:
    """The sentence about a key that nothing reads, with the nearest one that something does."""
    near = _nearest(key, known) or f": the keys {'under ' + path if path else 'here'} are {', '.join(known)}"
    return f"unknown key {_join(path, key)}{near}"


def plain(settings: object) -> dict[str, Plain]:
    """The mapping from which `build` makes equal settings."""
    return {name: _plain_value(getattr(settings, name)) for name in _names(type(settings))}


def differences(had: Mapping[str, Plain], given: Mapping[str, Plain], path: str = "") -> Iterator[tuple[str, str]]:
    """(key, sentence) for every leaf that differs between two plain mappings."""
    for key in [*had, *(key for key in given if key not in had)]:
        old, new = had.get(key), given.get(key)
        name = _join(path, key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, name)
        elif old != new:
            yield name, f"{name} was {old!r} and is {new!r}"


@cache
def documentation(made: type) -> Mapping[str, str]:
    """The string under each field, as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(made))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[node.target.id] = " ".join(str(following.value.value).split())
    return found


@dataclasses.dataclass(frozen=True)
class Setting:
    """One key as documentation shows it."""

    key: str
    wanted: str
    default: Plain
    documentation: str
    is_section: bool
    is_required: bool


def describe(made: type, path: str = "") -> Iterator[Setting]:
    """All keys in order, each section before the keys in it."""
    hints = get_type_hints(made)
    for field in dataclasses.fields(made):
        key, hint = _join(path, field.name), hints[field.name]
        text = documentation(made).get(field.name, "")
        section = _section(hint)
        default = None if _is_required(field) or section else _plain_value(_default(field))
        yield Setting(key, "" if section else _kind_wanted(hint), default, text, bool(section), _is_required(field))
        if section:
            yield from describe(section, key)


def require_folder(key: str, path: str) -> None:
    """ConfigError unless `path` is a folder."""
    if not Path(path).is_dir():
        what = "is a file" if Path(path).exists() else "does not exist"
        raise ConfigError(f"{key} is {path!r}, which {what}: give a folder")


# Values to types


def _convert(value: Plain, hint: Any, path: str) -> Any:
    """`value` as the type `hint` asks for."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return _convert(value, inner, path)
    if dataclasses.is_dataclass(hint):
        return build(hint, {} if value is None else value, path)  # type: ignore[arg-type]
    if value is None:
        raise ConfigError(f"{path} is empty: {_wanted(hint)}")
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{path} is {value!r}: {_wanted(hint)}{_nearest(str(value), arguments)}")
    if origin in (tuple, list):
        items = list(value) if isinstance(value, list | tuple) else [value]
        return origin(_convert(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(items))
    if origin is dict:
        if isinstance(value, dict):
            return value
        raise ConfigError(f"{path} is {value!r}: {_wanted(hint)}")
    return _scalar(value, hint, path)


def _scalar(value: Plain, hint: Any, path: str) -> Any:
    if hint is Size:
        try:
            return parse_size(value)  # type: ignore[arg-type]
        except ConfigError:
            raise ConfigError(f"{path} is {value!r}: {_wanted(hint)}") from None
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if (
        hint is float
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= sys.float_info.max
    ):
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    if hint is str and isinstance(value, bool | int | float):
        # What was written is not known: 1_000 is 1000 by now, and yes is True.
        quotes = 'in quotes where it looks like something else ("...", in a shell \'"..."\')'
        raise ConfigError(f"{path} is {value!r}: give text, {quotes}")
    raise ConfigError(f"{path} is {value!r}: {_wanted(hint)}")


def _wanted(hint: Any) -> str:
    return f"give {_kind_wanted(hint)}"


def _kind_wanted(hint: Any) -> str:
    """What a person may write for a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        words = _kind_wanted(inner)
        return "true, false or null" if inner is bool else f"{words}, or null"
    if origin is Literal:
        return ", ".join(str(argument) for argument in arguments[:-1]) + f" or {arguments[-1]}"
    if origin in (tuple, list):
        inner = arguments[0]
        return f"a list of {_kind_wanted(inner) if get_origin(inner) is Literal else _PLURALS[inner]}"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "keys and values"
    return _WORDS[hint]


_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Size: "a size such as 32GiB",
}
_PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}


def _kind(value: Plain) -> str:
    return {list: "list", str: "text", int: "number", float: "number", bool: "true or false"}.get(type(value), "value")


# Names


def _names(made: type) -> list[str]:
    return [field.name for field in dataclasses.fields(made)]


def _nearest(word: str, choices: Sequence[object]) -> str:
    near = difflib.get_close_matches(word, [str(choice) for choice in choices], n=1, cutoff=0.6)
    return f": did you mean {near[0]}?" if near else ""


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _with_path(message: str, path: str) -> str:
    """Messages of data classes begin with the field, or with the class's own name for the section and the field."""
    parent, _, last = path.rpartition(".")
    return _join(parent if last and message.startswith(f"{last}.") else path, message)


# Data classes


def _section(hint: Any) -> type | None:
    """The data class whose keys stand under a field."""
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _plain_value(value: Any) -> Plain:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value


@cache
def _loader() -> Any:
    """YAML's safe loader, which also takes 1e-4 for a number, dates, 12:30 and 010 for text, and no key twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            written = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in written]  # type: ignore[no-untyped-call]
            for position, key in enumerate(keys):
                if key in keys[:position]:
                    raise yaml.MarkedYAMLError(problem=f"{key} stands there twice", problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    _take_powers_for_numbers(Loader)
    Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)
    for kind, construct in (("int", Loader.construct_yaml_int), ("float", Loader.construct_yaml_float)):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", _unless_old_notation(construct))
    return Loader


@cache
def _dumper() -> Any:
    """YAML's safe dumper, which puts text in quotes that `_loader` would take for a number or fold into a space."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def represent_text(self, text: str) -> Any:
            style = '"' if re.search("[\x85\u2028\u2029]", text) else None
            return self.represent_scalar("tag:yaml.org,2002:str", text, style)

    _take_powers_for_numbers(Dumper)
    Dumper.add_representer(str, Dumper.represent_text)
    return Dumper


def _unless_old_notation(construct: Any) -> Any:
    """The number a node holds, but text for 12:30, which YAML 1.1 takes for 750, and for 010, which it takes for 8."""
    old = re.compile(r"[-+]?0[0-9_]+|.*:.*")
    return lambda loader, node: node.value if old.fullmatch(node.value) else construct(loader, node)


def _take_powers_for_numbers(reader: Any) -> None:
    """1e-4, which YAML takes for text without a point in it."""
    number = re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
    reader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
