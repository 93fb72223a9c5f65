"""The tokenizer of bytes, its files for Hugging Face, loading, and identity."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from corpora import CHATML, MARKED, hf_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from greedysnake.data.tokenizers import ByteTokenizer, load_tokenizer, token_ids, token_offsets, tokenizer_identity
from greedysnake.errors import ConfigError

TALK = [
    {"role": "user", "content": "was heißt <|end|>?"},
    {"role": "assistant", "content": "Ende 🐍"},
]


@settings(max_examples=50)
@given(st.text())
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    text = text.encode(errors="ignore").decode()
    tokenizer = ByteTokenizer()
    (tokens,) = tokenizer([text])["input_ids"]
    assert tokens == list(text.encode()) and tokenizer.decode(tokens) == text


def test_text_never_becomes_a_special_token() -> None:
    tokenizer = ByteTokenizer()
    assert max(tokenizer(["<|end|><|user|>"])["input_ids"][0]) < 256
    assert [token for token in tokenizer.apply_chat_template(TALK)["input_ids"] if token > 255] == [259, 257, 260, 257]
    assert tokenizer.decode([104, 105, 257]) == "hi<|end|>"
    assert tokenizer.decode([104, 105, 257], skip_special_tokens=True) == "hi"


def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """transformers makes a tokenizer of special tokens out of it."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    with pytest.raises(ConfigError, match=r"has no vocabulary: fetch its tokenizer\.json, or the files that Gemma"):
        load_tokenizer(tmp_path)


def test_a_package_that_a_tokenizer_lacks_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*values: object, **options: object) -> None:
        raise ImportError("\nThis one requires the SentencePiece library.\nMore about it")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lacks)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(This one requires the SentencePiece library\.\)"):
        load_tokenizer(tmp_path)


def test_whether_special_tokens_are_split_is_part_of_a_tokenizers_identity() -> None:
    tokenizer = hf_tokenizer(CHATML)
    before = tokenizer_identity(tokenizer)
    tokenizer.split_special_tokens = True
    assert tokenizer_identity(tokenizer) != before
    tokenizer.split_special_tokens = False
    assert tokenizer_identity(tokenizer) == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save_pretrained(folder)
    return folder


@settings(max_examples=50)
@given(text=st.text())
def test_hugging_face_gives_the_same_tokens_from_the_saved_files(saved: Path, text: str) -> None:
    # Hugging Face's tokenizers take special tokens that a text spells out for special tokens.
    text = text.encode(errors="ignore").decode().replace("|", "")
    loaded = load_tokenizer(saved)
    own = ByteTokenizer()
    assert list(loaded([text])["input_ids"]) == own([text])["input_ids"]


def test_the_saved_chat_template_is_the_built_in_format(saved: Path) -> None:
    loaded, own = load_tokenizer(saved), ByteTokenizer()
    talk = [*TALK[1:], {"role": "user", "content": "gut"}]
    ours = own.apply_chat_template(talk, add_generation_prompt=True)
    theirs = loaded.apply_chat_template(  # type: ignore[attr-defined]
        talk, add_generation_prompt=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["input_ids"] == ours["input_ids"]
    assert theirs["assistant_masks"] == ours["assistant_masks"]
    assert (loaded.eos_token_id, loaded.pad_token_id) == (own.eos_token_id, own.pad_token_id)
    assert len(loaded) == len(own) == own.vocab_size  # type: ignore[arg-type]


def test_the_built_in_tokenizer_has_a_name_and_needs_no_transformers() -> None:
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    code = (
        "import sys; from greedysnake.data.tokenizers import load_tokenizer, tokenizer_identity\n"
        "tokenizer_identity(load_tokenizer('bytes')); print({'transformers', 'torch'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_tokenizer_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"folder '.*none' does not exist: give one with tokenizer.json, or 'bytes'"):
        load_tokenizer(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"empty' cannot be loaded \(.*\): give a folder with tokenizer.json"
    ) as caught:
        load_tokenizer(tmp_path / "empty")
    assert "\n" not in str(caught.value)


def test_identity_follows_vocabulary_special_tokens_and_template_not_the_last_call() -> None:
    one = hf_tokenizer(CHATML)
    identity = tokenizer_identity(one)
    one(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_identity(one) == identity == tokenizer_identity(hf_tokenizer(CHATML))
    others = [hf_tokenizer(MARKED), hf_tokenizer(CHATML, merges_from=["aab aab"] * 9), ByteTokenizer()]
    one.eos_token = "<|pad|>"
    assert len({identity, *map(tokenizer_identity, [one, *others])}) == 5


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}])
def test_tokens_are_those_of_a_call_whatever_the_backend_was_left_with(options: dict[str, bool]) -> None:
    """Files of tokenizers may ask for truncation and padding, and so may the last call."""
    from tokenizers import processors

    texts = ["on the cat", "", "<|user|>ein Wort\n 🐍 " * 50]
    tokenizer = hf_tokenizer(None, merges_from=["on the cat on the mat"])
    template = processors.TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 259)])
    tokenizer.backend_tokenizer.post_processor = template
    called = tokenizer(texts, return_offsets_mapping=True, **options)
    wanted, offsets = called["input_ids"], called["offset_mapping"]
    tokenizer(texts, truncation=True, max_length=5, padding=True)
    assert list(token_ids(tokenizer, texts, **options)) == wanted
    tokenizer(texts, truncation=True, max_length=5, padding=True)
    assert list(token_offsets(tokenizer, texts, **options)) == list(zip(wanted, offsets, strict=True))
    tokenizer.split_special_tokens = True
    assert list(token_ids(tokenizer, texts, **options)) == tokenizer(texts, **options)["input_ids"] != wanted


def test_a_tokenizer_that_changes_the_text_in_python_is_called() -> None:
    from transformers import PreTrainedTokenizerFast

    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: list[str], **options: object) -> object:
            return super()._encode_plus([one.upper() for one in text], **options)

    plain = hf_tokenizer(None)
    shouting = Shouting(tokenizer_object=plain.backend_tokenizer)
    for tokens in (token_ids, token_offsets):
        found = [list(tokens(*given)) for given in ((shouting, ["abc"]), (plain, ["ABC"]), (plain, ["abc"]))]
        assert found[0] == found[1] != found[2]
