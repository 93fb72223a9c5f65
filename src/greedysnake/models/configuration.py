"""The configuration of a Hugging Face model: from a folder, or from the values that its config.json would hold.

transformers refuses wrong values with many kinds of error, some of which say little: here each becomes one sentence.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from greedysnake.errors import ConfigError

MAX_MESSAGE = 300
SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
"""What every model divides by or makes something of; 0 shows as an error far from its cause."""
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act", "mamba_hidden_act")


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


def asked_for(kind: str) -> set[str]:
    """Keys that a model's code reads if they are there, though its configuration has none of that name: head_dim of a
    Qwen3-MoE, say, whose heads together are larger than its hidden size."""
    from transformers import CONFIG_MAPPING

    module = CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return set()
    source = Path(spec.origin).read_text(encoding="utf-8")
    return set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))


def require_sound(values: Mapping[str, Any]) -> None:
    """ConfigError, beginning with the key, for a value that no model can have; asks before transformers does."""
    problem = _problem(values)
    if problem is not None:
        raise ConfigError(problem)


def _problem(values: Mapping[str, Any]) -> str | None:
    from transformers import CONFIG_MAPPING
    from transformers.activations import ACT2FN

    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        return None
    own_names = CONFIG_MAPPING[kind].attribute_map  # GPT-2's hidden_size is n_embd
    sizes = {*SIZES, *(own_names[name] for name in SIZES if name in own_names)}
    for key, value in values.items():
        if value is None:
            continue
        if key in sizes and not isinstance(value, list) and not _is_size(value):  # a list has one for every layer
            return f"{key} is {value!r}: give a whole number of at least 1"
        if ("dropout" in key or key.endswith("pdrop")) and not _is_share(value):
            return f"{key} is {value!r}: give a number between 0 and 1"
        if key in ACTIVATIONS and value not in list(ACT2FN):
            return f"{key} is {value!r}: give one of {', '.join(sorted(ACT2FN))}"
    num_tokens = values.get("vocab_size", getattr(CONFIG_MAPPING[kind], "vocab_size", None))
    for key, value in values.items() if _is_size(num_tokens) else ():
        tokens = value if isinstance(value, list) else [value]
        if key.endswith("_token_id") and any(_is_beyond(token, num_tokens) for token in tokens):
            return f"{key} is {value!r}: the vocabulary has {num_tokens} tokens, give 0 to {num_tokens - 1}"
    return None


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_beyond(token: object, num_tokens: int) -> bool:
    return isinstance(token, int) and not -1 <= token < num_tokens  # -1 stands for none in some models


def _refusals() -> tuple[type[Exception], ...]:
    """What transformers raises on values that it cannot use."""
    from huggingface_hub.errors import StrictDataclassError

    values = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, StrictDataclassError)
    return (*values, OSError)  # the last of what cannot be read


def _reason(error: Exception, values: Mapping[str, Any]) -> str:
    """One line, as short as it can be: Hugging Face's messages go on for paragraphs."""
    problem = _problem(values)
    if problem is not None:
        return problem
    from huggingface_hub.errors import StrictDataclassError

    text = " ".join(str(error).split())
    if isinstance(error, StrictDataclassError):  # "Validation error for field 'a': TypeError: Field 'a' expected int"
        text = text.split("Error: ", 1)[-1]
    elif not isinstance(error, ValueError | OSError):  # it was not written to be read
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _values_in(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
