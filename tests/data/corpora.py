"""Small data sets, tokenizers and templates for the tests of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from greedysnake.data.batches import Batches
from greedysnake.data.options import DataOptions
from greedysnake.data.tokenizers import ByteTokenizer

CHATML = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Like templates that drop the thoughts of earlier turns: a turn reads otherwise when another follows.
FORGETFUL = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if loop.last and message['role'] == 'assistant' %}[thought]{% endif %}{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def write_rows(path: Path, *rows: object) -> Path:
    """Write rows as JSON lines; a string is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def make_batches(cache: Path, path: Path | list[Path], tokenizer: Any = None, **changes: Any) -> Batches:
    """Batches of files, by default packed into sequences of 32 bytes, two to a micro-batch."""
    shape = {"sequence_length": 32, "micro_batch_size": 2, "seed": 0, "split": "train"}
    shape |= {name: changes.pop(name) for name in [*shape, "progress"] if name in changes}
    paths = [str(one) for one in (path if isinstance(path, list) else [path])]
    options = DataOptions(paths=tuple(paths), **changes)
    return Batches(options, tokenizer or ByteTokenizer(), cache=cache, **shape)


def hf_tokenizer(template: str | None, *, merges_from: list[str] | None = None) -> Any:
    """A Hugging Face tokenizer of bytes, with merges learnt from texts if some are given."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = list(ByteTokenizer.special_tokens)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    num_merges = 200 if merges_from else 0
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(specials) + num_merges,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(merges_from or [], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    tokenizer.chat_template = template
    return tokenizer


def trained_text(tokenizer: Any, batches: Batches) -> list[str]:
    """What carries loss, one text per document in which something does, in the order of the file."""
    texts: list[str] = []
    for batch in batches.iter_all():
        rows = zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)
        texts += [tokenizer.decode([label for label in labels if label != -100]) for _, labels in rows]
    return [text for text in texts if text]
