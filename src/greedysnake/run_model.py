"""The model of a run: what its configuration says of it, and whether that can be trained on such data.

Knows nothing of placement, drives and budgets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from greedysnake import settings
from greedysnake.config import Config
from greedysnake.data.batches import Batches
from greedysnake.errors import ConfigError, naming
from greedysnake.models.configuration import asked_for, make_configuration, read_configuration, require_sound
from greedysnake.models.huggingface import CausalLM, load_model
from greedysnake.models.loading import has_weights
from greedysnake.settings import Plain

if TYPE_CHECKING:
    from greedysnake.runtime.engine import Engine
    from greedysnake.runtime.stored import StoredModel


def model_configuration(config: Config, *, is_new: bool = True) -> Any:
    """transformers' configuration of the model; unknown keys are refused, which transformers itself does not do.

    Values are not judged again for a run that has begun: it may have an end token beyond its vocabulary, say.
    """
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError("training needs the package transformers: pip install transformers") from error
    if config.model.path is not None:
        with naming("model.path: "):
            return read_configuration(Path(config.model.path))
    values = dict(config.model.config or {})
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model.config.model_type is {kind!r}, which transformers does not know")
    default: Any = CONFIG_MAPPING[kind]()
    known = {"model_type", *default.to_dict(), *default.attribute_map, *asked_for(str(kind)), *_LEGACY_KEYS}
    for key in values:
        if key not in known:
            raise ConfigError(settings.unknown_key(str(key), sorted(known), "model.config"))
    if is_new:
        with naming("model.config."):
            require_sound(values)
    with naming("model.config: "):
        return make_configuration(values)


def values_of(model_config: Any) -> dict[str, Plain]:
    """What transformers' configuration says of a model, as JSON, without what does not change the training."""
    values: dict[str, Plain] = json.loads(json.dumps(model_config.to_dict(), default=str))
    return {key: value for key, value in values.items() if key not in _NOT_TRAINED}


def require_same_model(engine: Engine | StoredModel, values: Mapping[str, Plain], output_dir: str) -> None:
    """ConfigError unless `values_of` the model are those of the checkpoint: weights in a model that computes something
    else are not what was trained. Their shapes do not tell."""
    had = engine.metadata.get("model")
    if not isinstance(had, dict):  # saved before checkpoints had it
        return
    same_version = had.get(TRANSFORMERS) == values.get(TRANSFORMERS)
    for key in sorted({*had, *values} - {TRANSFORMERS}):
        if had.get(key) != values.get(key) and (same_version or (key in had and key in values)):
            raise ConfigError(
                f"model: {key} is {values.get(key)!r} and was {had.get(key)!r} at the checkpoint of step "
                f"{engine.num_steps} in {output_dir}: restore it (config.json of model.path), or start anew in another "
                "output_dir"
            )


def make_model(config: Config, model_config: Any) -> CausalLM:
    """The model as blocks, without its values yet; ConfigError when it cannot be trained, or not on such data."""
    with naming("model: "):
        model = load_model(
            config.model.path or model_config,
            seed=config.training.seed,
            layers_per_block=config.engine.layers_per_block or 1,
        )
    _require_untrained(config, model)
    if config.data.packing and not model.split.packs:
        raise ConfigError(
            f"data.packing is true, and {model_config.model_type} cannot keep packed documents apart: set it to false"
        )
    return model


def require_weights(config: Config) -> None:
    """A folder whose weights were not fetched would train from random ones, and nobody would know."""
    if config.model.path is None:
        return
    with naming("model.path: "):
        if not has_weights(Path(config.model.path)):
            raise ConfigError(
                f"{config.model.path} has a config.json and no safetensors: fetch the weights, or put what config.json "
                "says under model.config to start from random ones"
            )


def _require_untrained(config: Config, model: CausalLM) -> None:
    """A checkpoint has what is trained; the rest comes from the model's files each time."""
    if config.model.path is None or model.has_weights:
        return
    names = model.untrained_names(model.skeleton())
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigError(
            f"model.path: {config.model.path} has no safetensors any more, and {names[0]}{more} come from there: they "
            "are not trained, so no checkpoint has them: fetch the weights again"
        )


def require_positions(config: Config, model_config: Any) -> None:
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    wanted = config.training.sequence_length
    if isinstance(positions, int) and positions < 1:
        raise ConfigError(f"model: max_position_embeddings is {positions}: give 1 or more")
    if isinstance(positions, int) and wanted > positions:
        raise ConfigError(
            f"training.sequence_length is {wanted} and the model has {positions} positions "
            f"(max_position_embeddings): give {positions} or less"
        )


def require_vocabulary(config: Config, model_config: Any, batches: Batches) -> None:
    """Asks the data, not the tokenizer: there are models whose tokenizer knows tokens that they do not use."""
    vocabulary = int(model_config.get_text_config().vocab_size)
    if batches.max_token_id >= vocabulary:
        raise ConfigError(
            f"model.tokenizer {config.tokenizer!r} gives token {batches.max_token_id} and the model's vocab_size is "
            f"{vocabulary}: give the model's own tokenizer, or a model with a larger vocab_size"
        )


TRANSFORMERS = "transformers_version"
_NOT_TRAINED = ("_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id")
_LEGACY_KEYS = ("rope_theta", "rope_scaling", "torch_dtype", "architectures")
