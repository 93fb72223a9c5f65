"""The configuration of a Hugging Face model: from a folder, or from the values that its config.json would hold.

transformers refuses wrong values with many kinds of error, some of which say little: here each becomes one sentence.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greedysnake.errors import ConfigError

MAX_MESSAGE = 300
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
"""What every model divides by or makes something of; 0 shows as an error far from its cause."""


def read_configuration(folder: Path) -> Any:
    """What config.json in a folder makes of transformers' classes."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json: give a folder as save_pretrained of transformers writes it")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _refusals() as error:
        reason = _reason(error, _values_in(folder / "config.json"))
        raise ConfigError(f"{folder / 'config.json'} cannot be used: {reason}") from error


def make_configuration(values: Mapping[str, Any]) -> Any:
    """The configuration that `values` describe, "model_type" among them."""
    from transformers import CONFIG_MAPPING

    given = copy.deepcopy(dict(values))  # transformers changes what it is given
    kind = given.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model_type is {kind!r}: give one that transformers has code for, such as 'llama'")
    try:
        return CONFIG_MAPPING[kind](**given)
    except _refusals() as error:
        raise ConfigError(f"the {kind} configuration cannot be used: {_reason(error, values)}") from error


def _refusals() -> tuple[type[Exception], ...]:
    """What transformers raises on values that it cannot use."""
    from huggingface_hub.errors import StrictDataclassError

    values = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, StrictDataclassError)
    return (*values, OSError)  # the last of what cannot be read


def _reason(error: Exception, values: Mapping[str, Any]) -> str:
    """One line, as short as it can be: Hugging Face's messages go on for paragraphs."""
    for name in SIZES:
        value = values.get(name)
        if isinstance(value, int) and value < 1:
            return f"{name} is {value}: give 1 or more"
    from huggingface_hub.errors import StrictDataclassError

    text = " ".join(str(error).split())
    if isinstance(error, StrictDataclassError):  # "Validation error for field 'a': TypeError: Field 'a' expected int"
        text = text.split("Error: ", 1)[-1]
    elif not isinstance(error, ValueError | OSError):  # it was not written to be read
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _values_in(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
