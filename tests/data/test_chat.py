"""Conversations: loss on what the assistant says, by the template's marks or by prefix difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpora import CHATML, FORGETFUL, MARKED, hf_tokenizer, make_batches, trained_text, write_rows

from greedysnake.data.tokenizers import ByteTokenizer
from greedysnake.errors import ConfigError

WORDS = ["what is it? it is a cat. and what is that? that is a mat."] * 20
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "a cat."},
    {"role": "user", "content": "and that?"},
    {"role": "assistant", "content": "a mat."},
]


def trained(tmp_path: Path, tokenizer: Any, *rows: dict[str, Any], **changes: Any) -> list[str]:
    path = write_rows(tmp_path / "data.jsonl", *rows)
    changes = {"packing": False, "sequence_length": 256, **changes}
    return trained_text(tokenizer, make_batches(tmp_path / "cache", path, tokenizer, **changes))


def test_marks_of_the_template_decide(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(MARKED, merges_from=WORDS)
    assert trained(tmp_path, tokenizer, {"messages": TALK}) == ["a cat.<|end|>a mat.<|end|>"]


def test_without_marks_what_a_turn_adds_carries_loss(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(CHATML, merges_from=WORDS)
    assert trained(tmp_path, tokenizer, {"messages": TALK}) == ["a cat.<|end|>\na mat.<|end|>\n"]


def test_the_inputs_are_what_the_template_renders(tmp_path: Path) -> None:
    for template in (MARKED, CHATML):
        tokenizer = hf_tokenizer(template, merges_from=WORDS)
        path = write_rows(tmp_path / "data.jsonl", {"messages": TALK})
        batches = make_batches(tmp_path / "cache", path, tokenizer, sequence_length=256)
        expected = tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
        assert next(batches.iter_all())["input_ids"][0, : len(expected)].tolist() == expected
        assert batches.num_tokens == len(expected)


def test_a_conversation_may_begin_with_the_assistant_and_end_with_the_user(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(MARKED)
    assert trained(tmp_path, tokenizer, {"messages": [*TALK[2:4]]}) == ["a cat.<|end|>"]


def test_a_template_that_rewrites_earlier_turns_gives_a_document_for_each_turn(tmp_path: Path) -> None:
    """With what the assistant sees at that point before it."""
    tokenizer = hf_tokenizer(FORGETFUL)
    assert trained(tmp_path, tokenizer, {"messages": TALK[3:]}) == ["[thought]a mat.<|end|>\n"]
    path = write_rows(tmp_path / "data.jsonl", {"messages": TALK})
    batches = make_batches(tmp_path / "cache", path, tokenizer, sequence_length=256, packing=False)
    assert batches.num_sequences == 2
    rows = [row for batch in batches.iter_all() for row in zip(batch["input_ids"], batch["labels"], strict=True)]
    turns = [index for index, message in enumerate(TALK) if message["role"] == "assistant"]
    found = {}
    for tokens, labels in rows:
        said = tokenizer.decode(tokens[labels != -100])
        before = tokenizer.decode(tokens[: int((labels != -100).nonzero()[0])])
        found[said] = before
    assert found == {
        f"[thought]{TALK[turn]['content']}<|end|>\n": tokenizer.apply_chat_template(
            TALK[:turn], tokenize=False, add_generation_prompt=True
        )
        for turn in turns
    }


def test_a_marked_turn_of_a_prompt_carries_no_loss_where_the_template_rewrites_it(tmp_path: Path) -> None:
    thought = "{% if loop.last %}[thought]{% endif %}"
    tokenizer = hf_tokenizer(MARKED.replace("{% generation %}", "{% generation %}" + thought))
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert trained(tmp_path, tokenizer, row) == ["[thought]a mat.<|end|>"]


def test_the_turns_of_a_conversation_are_held_out_together(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(FORGETFUL)
    talks = [[*TALK[:-1], {"role": "assistant", "content": f"a mat {number}."}] for number in range(60)]
    path = write_rows(tmp_path / "data.jsonl", *({"messages": talk} for talk in talks))
    options = {"sequence_length": 256, "packing": False, "validation_share": 0.3}
    counts = [
        make_batches(tmp_path / "cache", path, tokenizer, split=split, **options).num_sequences
        for split in ("train", "validation")
    ]
    assert sum(counts) == 120 and all(count % 2 == 0 and count for count in counts)


def test_a_turn_that_does_not_begin_as_the_template_begins_it_is_refused(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(FORGETFUL.replace("%}<|assistant|>", "%}<|bot|>"))
    with pytest.raises(
        ConfigError, match=r"data.jsonl line 1: the chat template has no generation marks.*message 3 does"
    ):
        trained(tmp_path, tokenizer, {"messages": TALK})


def test_a_template_of_the_users_own_replaces_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(MARKED)
    own = {"chat_template": str(tmp_path / "own.jinja")}
    for template in (FORGETFUL, None):
        found = trained(tmp_path, hf_tokenizer(template), {"messages": TALK}, **own)
        assert found == ["a cat.<|end|>a mat.<|end|>"]
    with pytest.raises(ConfigError, match=r"chat format of its own: leave data.chat_template empty"):
        trained(tmp_path, ByteTokenizer(), {"messages": TALK}, **own)


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_long_rows_give_no_warning_of_the_tokenizer(
    tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.utils import logging

    logging.enable_propagation()
    tokenizer = hf_tokenizer(template)
    tokenizer.model_max_length = 4
    trained(tmp_path, tokenizer, {"messages": TALK}, {"text": "longer than four"})
    assert not caplog.records


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer has no chat template.*give data.chat_template"):
        trained(tmp_path, hf_tokenizer(None), {"messages": TALK})


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_prompt_and_completion_may_be_messages(tmp_path: Path, template: str) -> None:
    tokenizer = hf_tokenizer(template)
    (found,) = trained(tmp_path, tokenizer, {"prompt": TALK[:4], "completion": TALK[4:]})
    assert found.strip() == "a mat.<|end|>"


def test_tools_and_other_columns_reach_the_template(tmp_path: Path) -> None:
    told = "{% for tool in tools or [] %}{{ tool['name'] }};{% endfor %}{{ mood }}" + MARKED
    tokenizer = hf_tokenizer(told.replace("{% generation %}", "{% generation %}{{ mood }}"))
    row = {"messages": TALK[1:3], "tools": '[{"name": "look"}]', "chat_template_kwargs": {"mood": "gay "}}
    assert trained(tmp_path, tokenizer, row) == ["gay a cat.<|end|>"]


def test_what_the_template_raises_is_a_bad_row(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + MARKED
    )
    with pytest.raises(ConfigError, match=r"line 2: the chat template does not take these messages \(user first\)"):
        trained(tmp_path, tokenizer, {"messages": TALK[1:]}, {"messages": TALK})


@pytest.mark.parametrize("code", ["{{ 1/0 }}", "{{ range(100000000) | list }}", "{{ messages[9].content.x }}"])
def test_so_is_what_goes_wrong_in_the_template_itself(tmp_path: Path, code: str) -> None:
    tokenizer = hf_tokenizer("{% if messages[0]['role'] == 'user' %}" + code + "{% endif %}" + MARKED)
    rows = [{"messages": TALK}, {"messages": TALK[1:]}]
    with pytest.raises(ConfigError, match=r"line 2: the chat template does not take these messages \("):
        trained(tmp_path, tokenizer, *rows)
    assert trained(tmp_path, tokenizer, *rows, max_bad_rows=1) == trained(tmp_path, tokenizer, rows[0])


def test_a_piece_of_a_long_conversation_without_the_assistant_is_left_out(tmp_path: Path) -> None:
    question = {"role": "user", "content": "x" * 100}
    path = write_rows(tmp_path / "data.jsonl", {"messages": [question, {"role": "assistant", "content": "yes"}]})
    batches = make_batches(tmp_path / "cache", path)
    report = batches.report
    assert (report.num_long_documents, report.num_pieces_without_targets, batches.num_sequences) == (1, 3, 1)
    assert trained_text(ByteTokenizer(), batches) == ["yes<|end|>"]


@pytest.mark.parametrize("template", [MARKED, CHATML])
@pytest.mark.parametrize("trims", [False, True])
def test_turns_that_begin_or_end_with_spaces_keep_their_loss_and_no_other_gets_it(
    tmp_path: Path, template: str, trims: bool
) -> None:
    from tokenizers import processors

    marked_content = "{% generation %}{{ message['content'] }}{% endgeneration %}<|end|>"
    template = template.replace("{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}", marked_content)
    tokenizer = hf_tokenizer(template, merges_from=WORDS)
    # Like that of GPT-2 and its descendants: offsets without the spaces of a token.
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    talk = [TALK[1], {"role": "assistant", "content": "  a cat. 🐈 "}, TALK[3], {"role": "assistant", "content": " ä"}]
    end = "" if template != CHATML else "<|end|>\n"
    assert trained(tmp_path, tokenizer, {"messages": talk}) == [f"  a cat. 🐈 {end} ä{end}"]


CALLS = [
    TALK[1],
    {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {"at": "it"}}]},
    {"role": "tool", "content": "a cat"},
    TALK[2],
]


@pytest.mark.parametrize("template", [MARKED, CHATML, None])
def test_tool_calls_that_the_template_leaves_out_are_a_bad_row(tmp_path: Path, template: str | None) -> None:
    tokenizer = hf_tokenizer(template) if template else ByteTokenizer()
    with pytest.raises(ConfigError, match=r"line 2: the chat template leaves out tool_calls \(data.chat_template can"):
        trained(tmp_path, tokenizer, {"messages": TALK}, {"messages": CALLS})


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_a_list_of_parts_that_the_template_takes_for_text_is_a_bad_row(tmp_path: Path, template: str) -> None:
    talk = [TALK[1], {"role": "assistant", "content": [{"type": "text", "text": "a cat."}]}]
    with pytest.raises(ConfigError, match="line 2: the chat template writes the content of message 2 as the list"):
        trained(tmp_path, hf_tokenizer(template), {"messages": TALK}, {"messages": talk})
    knowing = template.replace(
        "{{ message['content'] }}",
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}",
    )
    end = "" if template == MARKED else "\n"
    assert trained(tmp_path, hf_tokenizer(knowing), {"messages": talk}) == [f"a cat.<|end|>{end}"]


def test_keys_that_a_fixed_schema_adds_do_not_reach_the_template(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    calling = CHATML.replace(
        "{{ message['content'] }}",
        "{% if 'tool_calls' in message %}{{ message.tool_calls | tojson }}{% else %}{{ message.content }}{% endif %}",
    )
    tokenizer = hf_tokenizer(calling)
    other = [
        TALK[1],
        {"role": "assistant", "content": None, "tool_calls": [{"name": "sit", "arguments": {"on": "mat"}}]},
    ]
    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.table({"messages": [CALLS, other]}), path)
    batches = make_batches(tmp_path / "cache", path, tokenizer, packing=False, sequence_length=256)
    assert trained_text(tokenizer, batches) == [
        '[{"name": "look", "arguments": {"at": "it"}}]<|end|>\na cat.<|end|>\n',
        '[{"name": "sit", "arguments": {"on": "mat"}}]<|end|>\n',
    ]
    row = {"messages": [{**message, "tool_calls": None} for message in TALK]}
    assert trained(tmp_path, tokenizer, row) == ["a cat.<|end|>\na mat.<|end|>\n"]


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_half_of_a_character_anywhere_in_a_conversation_is_a_bad_row(tmp_path: Path, template: str) -> None:
    row = {"messages": [{"role": "us\ud800er", "content": "a"}, TALK[2]]}
    with pytest.raises(ConfigError, match="line 1: half of a surrogate pair in what the chat template gives"):
        trained(tmp_path, hf_tokenizer(template), row)
