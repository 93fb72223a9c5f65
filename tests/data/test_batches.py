"""Properties of micro-batches: every token once, documents apart, order by seed, any position restorable."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import hf_tokenizer, make_batches, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from greedysnake.data.batches import Batches
from greedysnake.errors import ConfigError

texts = st.lists(st.text("abcdefgh ij\né", min_size=1, max_size=90).filter(str.strip), min_size=1, max_size=25)
lengths = st.integers(2, 40)
sizes = st.integers(1, 4)
# Every example syncs a few files; on a busy drive that takes longer than all the rest.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
few = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def batches_of(folder: str, documents: list[str], **changes: Any) -> Batches:
    path = write_rows(Path(folder, "data.jsonl"), *({"text": text} for text in documents))
    return make_batches(Path(folder, "cache"), path, **changes)


def pieces_of(documents: list[str], sequence_length: int) -> Counter[tuple[int, ...]]:
    """The reference: every document with its end token, cut at multiples of the sequence length."""
    found: Counter[tuple[int, ...]] = Counter()
    for document in documents:
        tokens = [*document.encode(), 257]
        pieces = [tuple(tokens[at : at + sequence_length]) for at in range(0, len(tokens), sequence_length)]
        found.update(piece for piece in pieces if len(piece) > 1)
    return found


def packed_pieces(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, labels and positions of what lies between two restarts of the positions."""
    found = []
    for row in range(len(batch["input_ids"])):
        positions = batch["position_ids"][row].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            columns = [batch[name][row, start:end].tolist() for name in ("input_ids", "labels", "position_ids")]
            found.append((columns[0], columns[1], columns[2]))
    return found


@few
@given(documents=texts, sequence_length=lengths, size=sizes, epoch=st.integers(0, 3))
def test_every_token_of_every_document_appears_once_per_epoch(
    documents: list[str], sequence_length: int, size: int, epoch: int
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        batches = batches_of(folder, documents, sequence_length=sequence_length, micro_batch_size=size)
        number = batches.num_micro_batches_per_epoch
        found: Counter[tuple[int, ...]] = Counter()
        for batch in batches.micro_batches(epoch * number, number):
            assert set(batch) == {"input_ids", "labels", "position_ids"}
            assert all(tuple(tensor.shape) == (size, sequence_length) for tensor in batch.values())
            for tokens, labels, positions in packed_pieces(batch):
                # Documents apart: positions restart, and nothing predicts the first token of the next document.
                assert positions == list(range(len(tokens)))
                assert labels[0] == -100
                if labels[1:] != [-100] * (len(tokens) - 1):
                    assert labels[1:] == tokens[1:]
                    found[tuple(tokens)] += 1
                else:
                    assert set(tokens) == {256}  # filler
        expected = pieces_of(documents, sequence_length)
        assert found == expected
        assert batches.num_tokens == sum(len(piece) * times for piece, times in expected.items())
        assert batches.num_targets == batches.num_tokens - expected.total()


@few
@given(documents=texts, sequence_length=lengths, size=sizes, pad_to=st.sampled_from(["longest", "sequence_length"]))
def test_padding_is_on_the_right_and_carries_neither_attention_nor_loss(
    documents: list[str], sequence_length: int, size: int, pad_to: str
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        shape = {"sequence_length": sequence_length, "micro_batch_size": size}
        batches = batches_of(folder, documents, packing=False, pad_to=pad_to, **shape)
        found: Counter[tuple[int, ...]] = Counter()
        for batch in batches.micro_batches(0, batches.num_micro_batches_per_epoch):
            assert set(batch) == {"input_ids", "labels", "attention_mask"}
            longest = int(batch["attention_mask"].sum(1).max())
            padded = min(sequence_length, -(-longest // 8) * 8) if pad_to == "longest" else sequence_length
            assert tuple(batch["input_ids"].shape) == (size, padded)
            rows = zip(*(batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")), strict=True)
            for tokens, labels, mask in rows:
                used = sum(mask)
                assert mask == [1] * used + [0] * (padded - used)
                assert tokens[used:] == [256] * (padded - used)
                assert labels == [-100, *tokens[1:used], *[-100] * (padded - used)]
                found[tuple(tokens[:used])] += 1
        fillers = batches.num_micro_batches_per_epoch * size - batches.num_sequences
        assert found.pop((256,), 0) == fillers < size
        assert found == pieces_of(documents, sequence_length)


@few
@given(documents=texts, size=sizes, position=st.integers(0, 30), seed=st.integers(0, 2**40))
def test_a_position_alone_restores_the_continuation(documents: list[str], size: int, position: int, seed: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        first = batches_of(folder, documents, micro_batch_size=size, seed=seed)
        whole = first.micro_batches(0, position + 5)
        first.micro_batches(7, 3)  # what was asked before changes nothing
        second = batches_of(folder, documents, micro_batch_size=size, seed=seed)
        assert second.fingerprint == first.fingerprint
        for one, other in zip(whole[position:], second.micro_batches(position, 5), strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_order_follows_seed_and_epoch(tmp_path: Path) -> None:
    documents = [f"{number:04d}" * 5 for number in range(200)]

    def order(seed: int, epoch: int) -> list[int]:
        batches = batches_of(str(tmp_path), documents, micro_batch_size=4, seed=seed)
        number = batches.num_micro_batches_per_epoch
        rows = torch.cat([batch["input_ids"] for batch in batches.micro_batches(epoch * number, number)])
        return [int(bytes(row[:4]).decode()) for row in rows.tolist()]

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(one) == list(range(200)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4
    assert order(1, 1) == orders[3]
    # In a random order 36 of 200 numbers are within 20 places of their own, give or take 5.4; 27 are five deviations.
    assert all(sum(abs(number - place) < 20 for place, number in enumerate(one)) < 63 for one in orders)


def test_another_seed_size_or_row_has_another_fingerprint(tmp_path: Path) -> None:
    documents = ["one", "two"]
    batches = [
        batches_of(str(tmp_path), documents),
        batches_of(str(tmp_path), documents, seed=1),
        batches_of(str(tmp_path), documents, micro_batch_size=3),
        batches_of(str(tmp_path), documents, sequence_length=16),
        batches_of(str(tmp_path), documents, packing=False),
        batches_of(str(tmp_path), ["one", "two!"]),
    ]
    assert len({one.fingerprint for one in batches}) == len(batches)


def test_evaluation_has_every_sequence_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(7)]
    batches = batches_of(str(tmp_path), documents, packing=False)
    rows = [row for batch in batches.iter_all() for row in batch["input_ids"].tolist()]
    assert [bytes(token for token in row if token < 256).decode() for row in rows] == [*documents, ""]


@pytest.mark.parametrize(
    ("how", "expected"), [("truncate", {32: 1, 11: 1}), ("skip", {11: 1}), ("split", {32: 2, 7: 1, 11: 1})]
)
def test_long_documents_are_split_cut_off_or_left_out(tmp_path: Path, how: str, expected: dict[int, int]) -> None:
    batches = batches_of(str(tmp_path), ["x" * 70, "y" * 10], packing=False, long_documents=how)
    lengths = [int(length) for batch in batches.iter_all() for length in batch["attention_mask"].sum(1) if length > 1]
    assert Counter(lengths) == expected
    assert batches.report.num_long_documents == 1 and batches.report.num_documents == 2


def test_a_transformer_of_hugging_face_keeps_packed_documents_apart(tmp_path: Path) -> None:
    """The loss of packed documents is the loss of the same documents one by one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=262, num_key_value_heads=2, **shape)).double()
    documents = ["what", "a small", "set of documents", "that fit", "into few", "rows"]
    losses = []
    for packing in (True, False):
        batches = batches_of(str(tmp_path), documents, packing=packing)
        total = 0.0
        for batch in batches.iter_all():
            num_targets = int((batch["labels"] != -100).sum())
            with torch.no_grad():
                total += float(model(**batch, use_cache=False).loss) * num_targets
        losses.append(total / batches.num_targets)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # the loss is computed in float32


def test_held_out_documents_are_not_trained_on_and_copies_stay_together(tmp_path: Path) -> None:
    documents = [f"document number {number % 60}" for number in range(120)]
    split: dict[str, Counter[tuple[int, ...]]] = {}
    for name in ("train", "validation"):
        batches = batches_of(str(tmp_path), documents, validation_share=0.3, split=name)
        found = Counter(tuple(t) for batch in batches.iter_all() for t, _, _ in packed_pieces(batch) if 256 not in t)
        split[name] = found
    assert not split["train"].keys() & split["validation"].keys()
    assert split["train"] + split["validation"] == pieces_of(documents, 32)
    assert 8 <= len(split["validation"]) <= 28  # 18 of 60 expected, deviation 3.5


def test_validation_files_are_read_apart(tmp_path: Path) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", {"text": "held out"})
    changes = {"validation_paths": (str(held_out),)}
    assert batches_of(str(tmp_path), ["a text"], **changes).report.num_documents == 1
    validation = batches_of(str(tmp_path), ["a text"], split="validation", **changes)
    assert bytes(next(validation.iter_all())["input_ids"][0, :8].tolist()) == b"held out"


def test_a_share_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.validation_share is 1e-09 and leaves no document for validation"):
        batches_of(str(tmp_path), ["one"], validation_share=1e-9, split="validation")
    with pytest.raises(ConfigError, match=r"nothing to evaluate on: give data.validation_share"):
        batches_of(str(tmp_path), ["one"], split="validation")


def test_the_largest_token_is_known(tmp_path: Path) -> None:
    assert batches_of(str(tmp_path), ["one"]).max_token_id == 257


def test_a_padding_token_beyond_the_vocabulary_is_not_used(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(None)
    tokenizer.add_special_tokens({"pad_token": "<|added|>"})
    path = write_rows(tmp_path / "data.jsonl", {"text": "one"})
    batches = make_batches(tmp_path / "cache", path, tokenizer)
    assert tokenizer.pad_token_id == 262 and batches.max_token_id < 262
    assert int(next(batches.iter_all())["input_ids"].max()) == batches.max_token_id


def test_a_sequence_of_one_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="they must be at least 2 and 1"):
        batches_of(str(tmp_path), ["one"], sequence_length=1)
