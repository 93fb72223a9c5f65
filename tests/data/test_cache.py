"""Tokenised once: reuse, invalidation, crashes in the middle, several processes, and memory."""

from __future__ import annotations

import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import make_batches, write_rows

import child
from greedysnake.data.files import WHOLE_FILE_BYTES, content_digest
from greedysnake.data.rows import PART_CHARACTERS
from greedysnake.data.tokenizers import ByteTokenizer
from greedysnake.errors import StorageError

DOCUMENTS = [{"text": f"document number {number}"} for number in range(50)]


class CountingTokenizer(ByteTokenizer):
    """Counts the texts that it is asked to tokenise."""

    def __init__(self) -> None:
        self.num_texts = 0

    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        self.num_texts += len(text)
        return super().__call__(text, add_special_tokens=add_special_tokens)


def num_tokenised(cache: Path, path: Path, **changes: Any) -> int:
    tokenizer = CountingTokenizer()
    make_batches(cache, path, tokenizer, **changes)
    return tokenizer.num_texts


def test_the_second_start_does_not_tokenise(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *DOCUMENTS)
    cache = tmp_path / "cache"
    assert num_tokenised(cache, path) == 50
    assert num_tokenised(cache, path) == 0
    os.utime(path, (1, 1))
    moved = path.rename(tmp_path / "moved.jsonl")
    assert num_tokenised(cache, moved) == 0
    # Length, packing and what is held out concern the sequences only.
    changes = {"sequence_length": 24, "packing": False, "validation_share": 0.2, "long_documents": "skip", "seed": 3}
    assert num_tokenised(cache, moved, **changes) == 0


def test_whatever_changes_the_tokens_tokenises_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *DOCUMENTS)
    cache = tmp_path / "cache"
    assert num_tokenised(cache, path) == 50
    assert num_tokenised(cache, path, add_eos=False) == 50
    assert num_tokenised(cache, path, format="text") == 50
    text = path.read_text()
    path.write_text(text.replace("number 7", "number 8"))
    assert num_tokenised(cache, path) == 50
    path.write_text(text)
    assert num_tokenised(cache, path) == 0
    tokenizer = CountingTokenizer()
    tokenizer.eos_token_id = 256
    make_batches(cache, path, tokenizer)
    assert tokenizer.num_texts == 50


def test_a_large_file_is_known_by_samples_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(WHOLE_FILE_BYTES + 1)
    digest = content_digest(path)
    assert content_digest(path) == digest
    os.utime(path, ns=(0, 1))
    touched = content_digest(path)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(0, 1))
    assert len({digest, touched, content_digest(path)}) == 3


@pytest.mark.parametrize("kind", ["tokens", "sequences"])
@pytest.mark.parametrize("damage", ["truncated", "file missing", "meta missing", "meta broken"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, kind: str, damage: str) -> None:
    path = write_rows(tmp_path / "data.jsonl", *DOCUMENTS)
    cache = tmp_path / "cache"
    before = make_batches(cache, path, CountingTokenizer()).micro_batches(0, 30)
    (folder,) = cache.glob(f"{kind}-*")
    if damage == "truncated":
        os.truncate(folder / "ends.bin", 8)
    elif damage == "meta broken":
        (folder / "meta.json").write_text("{")
    else:
        (folder / ("ends.bin" if damage == "file missing" else "meta.json")).unlink()
    assert num_tokenised(cache, path) == 50 * (kind == "tokens")
    after = make_batches(cache, path, CountingTokenizer()).micro_batches(0, 30)
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(before, after, strict=True))


def test_a_cache_left_half_written_is_recognised(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *({"text": f"document {number}"} for number in range(1000)))
    cache = tmp_path / "cache"
    with child.start("data.stopping", "tokenise_and_stop", str(cache), str(path)) as process:
        while not (cache / "reached").exists():
            assert process.poll() is None
            time.sleep(0.01)
        (partial,) = cache.glob("*.partial")
        assert (partial / "tokens.bin").exists()
        process.kill()
    assert num_tokenised(cache, path) == 1000
    assert not partial.exists() and num_tokenised(cache, path) == 0


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *DOCUMENTS)

    def fail(num_rows: int, num_tokens: int) -> None:
        raise KeyboardInterrupt

    write_rows(path, *DOCUMENTS * 20)
    with pytest.raises(KeyboardInterrupt):
        make_batches(tmp_path / "cache", path, progress=fail)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["lock"]


def test_those_who_start_together_tokenise_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *DOCUMENTS)
    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(lambda _: num_tokenised(tmp_path / "cache", path), range(4)))
    assert sorted(numbers) == [0, 0, 0, 50]


def test_a_cache_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", *DOCUMENTS)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"the data cache .*file.* cannot be made"):
        make_batches(tmp_path / "file" / "cache", path)


@pytest.mark.parametrize("kind", ["text", "messages", "file"])
def test_neither_tokenising_nor_reading_needs_memory_of_the_corpus_size(tmp_path: Path, kind: str) -> None:
    """16 MB of text: as many tokens, which as int64 would be 128 MB; 4 MB of text at a time are tokenised."""
    text = "All work and no play makes a dull boy. " * 1024
    rows = {"text": {"text": text}, "messages": {"messages": [{"role": "assistant", "content": text}]}}
    if kind in rows:
        path = write_rows(tmp_path / "data.jsonl", *[rows[kind]] * 400)
    else:
        path = tmp_path / "data.txt"
        path.write_text((text + "\n") * 400)
    num_bytes = path.stat().st_size
    assert num_bytes > 15e6 > 2 * PART_CHARACTERS
    tracemalloc.start()
    try:
        batches = make_batches(tmp_path / "cache", path, sequence_length=4096)
        batches.micro_batches(0, 4)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batches.num_tokens > num_bytes * 0.95
    assert peak < 64e6, peak
