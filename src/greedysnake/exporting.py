"""A run's last checkpoint as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greedysnake.config import Config
from greedysnake.data.tokenizers import load_tokenizer
from greedysnake.errors import ConfigError, explained
from greedysnake.models.export import DTYPES, export_model, is_free
from greedysnake.run_model import make_model, model_configuration, require_same_model, values_of
from greedysnake.runs import load_saved_run
from greedysnake.runtime.stored import StoredModel

SPECIAL_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


@explained("use")
def export_run(run: Path, out: Path, *, dtype: str = "bfloat16") -> int:
    """Writes model and tokenizer of the run in folder `run` to the new folder `out`; returns the checkpoint's step."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}: use {', '.join(DTYPES)}")
    if not is_free(out):
        raise ConfigError(f"OUT is {str(out)!r}, which exists: name a new or empty folder")
    noted = load_saved_run(run)
    config = noted.config
    # What can be missing is read before anything is written.
    tokenizer: Any = load_tokenizer(config.tokenizer)
    template = None
    if config.data.chat_template:  # else the model would be asked in another form than it was trained in
        with explained("read", Path(config.data.chat_template)):
            template = Path(config.data.chat_template).read_bytes()
    model_config = model_configuration(config, is_new=False)
    model = make_model(config, model_config)
    tokens = _special_tokens(config, tokenizer, model.config.get_text_config().vocab_size)
    with StoredModel(model, config.storage, config.precision) as stored:
        noted.require_own(stored.metadata, config.storage[0])
        require_same_model(stored, values_of(model_config), str(run))
        # A tokenizer that came with the model's own folder goes out as it came.
        own = None if config.model.tokenizer is None else tokenizer
        export_model(
            stored, model, out, dtype=dtype, special_tokens=tokens, tokenizer=own, chat_template=template or None
        )
        return stored.num_steps


def _special_tokens(config: Config, tokenizer: Any, num_tokens: int) -> dict[str, int | None]:
    """The tokenizer's, but for those that model.config gives, and for those that the model has no room for."""
    tokens: dict[str, int | None] = {}
    for name in SPECIAL_TOKENS:
        if name not in (config.model.config or {}):
            token = getattr(tokenizer, name, None)
            tokens[name] = token if token is not None and token < num_tokens else None
    return tokens
