"""A run's last checkpoint as a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from greedysnake.config import Config
from greedysnake.data.tokenizers import load_tokenizer
from greedysnake.errors import ConfigError, explained
from greedysnake.models.export import DTYPES, export_model
from greedysnake.preparation import make_model, model_configuration, open_engine, ram_budget
from greedysnake.runs import load_run, require_none_lost
from greedysnake.runtime.opening import holds_checkpoint

SPECIAL_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


@explained("use")
def export_run(run: Path, out: Path, *, dtype: str = "bfloat16") -> int:
    """Writes model and tokenizer of the run in folder `run` to the new folder `out`; returns the checkpoint's step."""
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}: use {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT is {str(out)!r}, which exists: name a new or empty folder")
    noted = load_run(run)
    config = noted.config
    if not holds_checkpoint(config.storage[0]):
        require_none_lost(noted, config.storage[0])
        raise ConfigError(f"RUN is {str(run)!r}, which has no checkpoint yet: train until the first one is saved")
    # What can be missing is read before anything is written.
    tokenizer: Any = load_tokenizer(config.tokenizer)
    with explained("read", Path(config.data.chat_template)):
        template = Path(config.data.chat_template).read_bytes() if config.data.chat_template else b""
    model = make_model(config, model_configuration(config, is_new=False))
    tokens = _special_tokens(config, tokenizer, model.config.get_text_config().vocab_size)
    with open_engine(config, model, device="cpu", ram=ram_budget(config), resume=True) as engine:
        noted.require_own(engine.metadata)
        export_model(engine, model, out, dtype=dtype, special_tokens=tokens)
        with explained("write", out):
            if config.model.tokenizer is not None:  # else it came with the model's own folder
                tokenizer.save_pretrained(out)
            if template:  # else the model would be asked in another form than it was trained in
                (out / "chat_template.jinja").write_bytes(template)
        return engine.num_steps


def _special_tokens(config: Config, tokenizer: Any, num_tokens: int) -> dict[str, int | None]:
    """The tokenizer's, but for those that model.config gives, and for those that the model has no room for."""
    tokens: dict[str, int | None] = {}
    for name in SPECIAL_TOKENS:
        if name not in (config.model.config or {}):
            token = getattr(tokenizer, name, None)
            tokens[name] = token if token is not None and token < num_tokens else None
    return tokens
