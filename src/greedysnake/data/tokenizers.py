"""Tokenizers: what is asked of one, the built-in one of bytes, loading one of Hugging Face, and its identity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from greedysnake.errors import ConfigError

BYTES = "bytes"
"""Name of the built-in tokenizer for `load_tokenizer`."""


CALLED = ("__call__", "_encode_plus")
"""Methods of transformers' tokenizers that a call goes through; a few classes have their own."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is always used; conversations need `apply_chat_template` as well."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a document."""

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Any:
        """A mapping with `input_ids`, one list of integers per text."""


class ByteTokenizer:
    """One token per byte of UTF-8, and a few special tokens. Needs no files.

    Text never turns into a special token, whatever it says; only `eos_token_id` and `apply_chat_template` give those.
    """

    special_tokens = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
    pad_token_id = 256
    eos_token_id = 257
    chat_template = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )

    def __len__(self) -> int:
        return 256 + len(self.special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return len(self)

    @property
    def identity(self) -> str:
        """What makes it give the tokens it gives, for the key of a cache."""
        return f"ByteTokenizer 1 {self.special_tokens}"

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        del add_special_tokens  # there is no token that begins a document
        return {"input_ids": [list(one.encode()) for one in text]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of the tokens; bytes that are not UTF-8 become the replacement character."""
        pieces = [
            bytes([token]) if token < 256 else b"" if skip_special_tokens else self.special_tokens[token - 256].encode()
            for token in token_ids
        ]
        return b"".join(pieces).decode(errors="replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        **unused: Any,
    ) -> dict[str, list[int]]:
        """Tokens of a conversation, and which of them the assistant says; what `chat_template` says, in tokens."""
        if unused.get("chat_template"):
            raise ConfigError("the tokenizer of bytes has a chat format of its own: leave data.chat_template empty")
        tokens: list[int] = []
        masks: list[int] = []
        for message in conversation:
            if not isinstance(message["content"], str):
                raise ValueError("content must be text")
            said = [*message["content"].encode(), self.eos_token_id]
            tokens += [self._role_token(message["role"]), *said]
            masks += [0, *[int(message["role"] == "assistant")] * len(said)]
        if add_generation_prompt:
            tokens.append(self._role_token("assistant"))
            masks.append(0)
        return {"input_ids": tokens, "assistant_masks": masks}

    def _role_token(self, role: object) -> int:
        token = f"<|{role}|>"
        if token not in self.special_tokens[2:]:
            raise ValueError(f"role {role!r} is not system, user, assistant or tool")
        return 256 + self.special_tokens.index(token)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write files from which `AutoTokenizer.from_pretrained` makes a tokenizer that gives the same tokens."""
        specials = [
            {"id": 256 + index, "content": token, "special": True, "normalized": False}
            | {"lstrip": False, "rstrip": False, "single_word": False}
            for index, token in enumerate(self.special_tokens)
        ]
        alphabet = _byte_level_alphabet()
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        model = {"type": "BPE", "vocab": {letter: byte for byte, letter in enumerate(alphabet)}, "merges": []}
        whole = {
            "version": "1.0",
            **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
            "added_tokens": specials,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": model,
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": list(self.special_tokens[2:]),
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False, indent=1), encoding="utf-8")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _byte_level_alphabet() -> str:
    """The printable character that stands for each byte in byte-level vocabularies since GPT-2."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (or of a name in the hub's cache), or the built-in one for "bytes"."""
    name = str(path)
    if name == BYTES:
        return ByteTokenizer()
    is_folder = Path(name).is_dir()
    if not is_folder and (Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1):
        raise ConfigError(f"tokenizer: folder {name!r} does not exist: give one with tokenizer.json, or {BYTES!r}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(f"tokenizer {name!r} needs the package transformers: pip install transformers") from None
    try:
        loaded: Tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"tokenizer {name!r} cannot be loaded ({reason}): give a folder with tokenizer.json"
        raise ConfigError(message) from None
    if is_folder and _lacks_vocabulary(loaded, Path(name)):
        raise ConfigError(
            f"tokenizer {name!r} has no vocabulary: fetch its tokenizer.json, or the files that "
            f"{type(loaded).__name__} reads"
        )
    return loaded


def _lacks_vocabulary(tokenizer: object, folder: Path) -> bool:
    """transformers makes one of special tokens alone where none of its files is there, as after half a download."""
    files = set(getattr(tokenizer, "vocab_files_names", {}).values())
    return bool(files) and not any((folder / file).is_file() for file in files | {"tokenizer.json", "tekken.json"})


def quietly(tokenizer: object) -> dict[str, Any]:
    """Arguments with which Hugging Face's do not warn of texts longer than the model's positions: they will be cut."""
    return {"verbose": False} if hasattr(tokenizer, "model_max_length") else {}


def token_ids(tokenizer: Any, texts: list[str], **options: Any) -> Iterator[list[int]]:
    """What a call of the tokenizer gives as `input_ids`, text by text; `options` are those of the call.

    Hugging Face's call also finds where each token stands in its text. The backend alone, which gives the same tokens,
    takes three quarters of the time for that, and half of it for long texts.
    """
    backend = _backend(tokenizer, options)
    if backend is None:
        return iter(tokenizer(texts, **options, **quietly(tokenizer))["input_ids"])
    return (encoding.ids for encoding in backend.encode_batch_fast(texts, **options))


def token_offsets(
    tokenizer: Any, texts: list[str], **options: Any
) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    """What `token_ids` gives, and of each token the first character in its text and the one after its last."""
    backend = _backend(tokenizer, options)
    if backend is None:
        called = tokenizer(texts, return_offsets_mapping=True, **options, **quietly(tokenizer))
        return zip(called["input_ids"], called["offset_mapping"], strict=True)
    return ((encoding.ids, encoding.offsets) for encoding in backend.encode_batch(texts, **options))


def _backend(tokenizer: Any, options: dict[str, Any]) -> Any:
    """Hugging Face's tokenizer in Rust; None if there is none, or if Python code has a part in what comes out.

    It is as a call with the same options leaves it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast

    general = [getattr(PreTrainedTokenizerFast, name, None) for name in CALLED]
    special = [getattr(type(tokenizer), name, None) for name in CALLED]
    if special != general or None in general:
        return None
    tokenizer([""], **options, **quietly(tokenizer))  # by which the backend learns of padding, truncation and the like
    return backend


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash of all that decides which tokens a text becomes: vocabulary, merges, special tokens, chat template."""
    parts: list[object] = [type(tokenizer).__name__, getattr(tokenizer, "identity", "")]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # The last call's padding and truncation are kept in there; every call of ours sets them anew.
        state = json.loads(backend.to_str())
        parts += [{key: value for key, value in state.items() if key not in ("padding", "truncation")}]
    elif hasattr(tokenizer, "get_vocab"):
        parts += [sorted(tokenizer.get_vocab().items())]
    names = ("special_tokens_map", "chat_template", "eos_token_id", "pad_token_id", "add_bos_token", "add_eos_token")
    parts += [getattr(tokenizer, name, None) for name in names]
    # Only if it is on: keys that caches and checkpoints have stay what they are.
    parts += ["split_special_tokens"] if getattr(tokenizer, "split_special_tokens", False) else []
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
