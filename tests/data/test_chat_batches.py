"""Conversations are tokenised many at a time: each becomes what it becomes alone, and what plain code makes of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from corpora import CHATML, FORGETFUL, MARKED, hf_tokenizer

from greedysnake.data.documents import Document
from greedysnake.data.encode import BadRow, Encoder
from greedysnake.data.options import DataOptions
from greedysnake.data.rows import Row

Plain = list[tuple[list[int], list[bool]]] | str
"""Tokens of each document and whether they carry no loss, or what is wrong with the row."""

WORDS = ["what", "is", "it?", "it", "is", "a", "cat.", "", "and", "that?\n", "mät", "🐈", "<|user|>", "the", "hat"]
TOOL = {"name": "look", "parameters": {"at": "it"}}


def rich(template: str, thought_if: str = "message.thought") -> str:
    """Knows tools, tool calls and thoughts, and refuses a conversation that begins with a tool."""
    refusing = "{% if messages[0].role == 'tool' %}{{ raise_exception('tool first') }}{% endif %}"
    tools = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    thought = "{% if " + thought_if + " %}<think>{{ message.thought }}</think>{% endif %}"
    calls = "{% if message.tool_calls and not mute %}{{ message.tool_calls | tojson }}{% endif %}"
    content = "{{ message['content'] }}"
    return refusing + tools + template.replace(content, thought + content + calls)


LAST = "message.thought and loop.last"
TEMPLATES = {
    "marks": rich(MARKED),
    "marks, dropping thoughts": rich(MARKED, LAST),
    "marks without the end": rich(MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")),
    "marks on what is answered": rich(MARKED.replace("'assistant'", "'assistant' and not loop.last")),
    "no marks": rich(CHATML),
    "no marks, dropping thoughts": rich(CHATML, LAST),  # some conversations by difference, some turn by turn
    "forgetful": rich(FORGETFUL),
}


def tokenizer_of(template: str, kind: type | None = None) -> Any:
    """With a token that begins every text but those of a chat template, and offsets without spaces."""
    from tokenizers import processors

    tokenizer = hf_tokenizer(template, merges_from=[" ".join(WORDS)] * 20)
    begins = processors.TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", 2)])
    trims = processors.ByteLevel(trim_offsets=True)
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([trims, begins])
    if kind is None:
        return tokenizer
    specials = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": template}
    return kind(tokenizer_object=tokenizer.backend_tokenizer, **specials)


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    def said() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randrange(1, 12)))

    messages: list[dict[str, Any]] = [{"role": "system", "content": said()}] if rng.random() < 0.4 else []
    for turn in range(rng.randrange(1, 5)):
        messages += [{"role": "user", "content": said()}] if turn or rng.random() < 0.9 else []
        if rng.random() < 0.2:
            messages.append({"role": "assistant", "content": "", "tool_calls": [TOOL]})
            messages.append({"role": "tool", "content": said()})
        messages.append({"role": "assistant", "content": said()})
        if rng.random() < 0.4:
            messages[-1]["thought"] = said()
    return messages + ([{"role": "user", "content": said()}] if rng.random() < 0.2 else [])


BAD = {
    "not valid JSON": "not valid JSON",
    "half of a surrogate pair in what the chat template gives": {
        "messages": [{"role": "us\ud800er", "content": "a"}, {"role": "assistant", "content": "b"}]
    },
    "the chat template does not take these messages (tool first)": {"messages": [{"role": "tool", "content": "a"}]},
    "the chat template leaves out tool_calls": {
        "messages": [{"role": "assistant", "content": "a", "tool_calls": [TOOL]}],
        "chat_template_kwargs": {"mute": True},
    },
    "no messages in column 'completion'": {"prompt": [{"role": "user", "content": "a"}], "completion": []},
    "no text in column 'text'": {"text": " "},
}


def rows_of(rng: random.Random, count: int) -> list[Row]:
    rows = []
    for number in range(count):
        messages = conversation(rng)
        kind = rng.choice(["messages"] * 4 + ["prompt"] * 3 + ["text", "prompt text"])
        values: Any = {"messages": messages}
        if kind == "prompt" and len(messages) > 1:
            end = rng.randrange(1, len(messages))
            values = {"prompt": messages[:end], "completion": messages[end:]}
        elif kind == "text":
            values = {"text": str(messages)}
        elif kind == "prompt text":
            values = {"prompt": "what is th", "completion": "at?"}
        if kind in ("messages", "prompt") and rng.random() < 0.3:
            values["tools"] = [TOOL]
        if number % 10 == 9:
            values = list(BAD.values())[number // 10 % len(BAD)]
        where = f"row {number}"
        rows.append(Row(where, {}, values) if isinstance(values, str) else Row(where, values))
    return rows


def plain(result: list[Document] | BadRow) -> Plain:
    if isinstance(result, BadRow):
        return result.message
    documents = [(one.tokens.tolist(), one.ignored) for one in result]
    return [(tokens, [False] * len(tokens) if no is None else no.tolist()) for tokens, no in documents]


def by_hand(tokenizer: Any, row: Row) -> Plain:
    """One call of the tokenizer for one text, one token after the other."""
    before = row.values.get("prompt", [])
    messages = row.values.get("messages") or before + row.values["completion"]
    tools = row.values.get("tools")
    marked = "{% generation %}" in tokenizer.chat_template
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]

    def text(until: int, answer: bool = False) -> str:
        if not until:
            return ""
        return tokenizer.apply_chat_template(
            messages[:until], tools=tools, add_generation_prompt=answer, tokenize=False
        )

    def tokens(of: str) -> list[int]:
        return tokenizer(of, add_special_tokens=False)["input_ids"]

    def same(one: list[int], other: list[int]) -> int:
        return next(
            (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )

    def difference(until: int, turns: list[int]) -> tuple[list[int], list[bool]]:
        whole = tokens(text(until))
        ignored = [True] * len(whole)
        for turn in turns:
            for at in range(same(tokens(text(turn, True)), whole), same(tokens(text(turn + 1)), whole)):
                ignored[at] = False
        return whole, ignored

    if marked:
        whole, ignored = marked_by_hand(tokenizer, messages, tools, len(before))
    elif all(
        text(len(messages)).startswith((text(turn, True), text(turn + 1))[part]) for turn in turns for part in (0, 1)
    ):
        whole, ignored = difference(len(messages), turns)
    else:
        return [difference(turn + 1, [turn]) for turn in turns if turn >= len(before)]
    for at in range(same(tokens(text(len(before))), whole) if before else 0):
        ignored[at] = True
    return [(whole, ignored)]


def marked_by_hand(tokenizer: Any, messages: Any, tools: Any, num_prompt: int) -> tuple[list[int], list[bool]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(part: Any) -> Any:
        template = {"chat_template": tokenizer.chat_template, "return_assistant_tokens_mask": True}
        texts, turns = render_jinja_template(
            conversations=[part], tools=tools, **template, **tokenizer.special_tokens_map
        )
        return texts[0], turns[0]

    text, turns = rendered(messages)
    turns = turns[len(rendered(messages[:num_prompt])[1]) if num_prompt else 0 :]
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ignored, last = [], 0
    for start, end in found["offset_mapping"]:
        first = start if start < end else min(last, start)
        ignored.append(not any(first < turn_end and end > turn_start for turn_start, turn_end in turns))
        last = end
    return found["input_ids"], ignored


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("num_characters", [2**22, 3000])
def test_rows_tokenised_together_become_what_they_become_alone_and_by_hand(
    template: str, num_characters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greedysnake.data.encode.BATCH_CHARACTERS", num_characters)
    tokenizer = tokenizer_of(TEMPLATES[template])
    rows = rows_of(random.Random(template), 300)
    encoder = Encoder(DataOptions(), tokenizer)
    together = [plain(result) for result in encoder.documents(rows)]
    assert together == [plain(result) for row in rows for result in encoder.documents([row])]
    bad = {number: result for number, result in enumerate(together) if isinstance(result, str)}
    assert list(bad) == list(range(9, 300, 10))
    for (number, result), told in zip(bad.items(), list(BAD) * 5, strict=True):
        assert result.startswith(f"row {number}: {told}")
    talks = {
        number: result
        for number, result in enumerate(together)
        if number not in bad
        and ("messages" in rows[number].values or isinstance(rows[number].values.get("prompt"), list))
    }
    assert len(talks) > 150
    assert talks == {number: by_hand(tokenizer, rows[number]) for number in talks}
    are_several = {len(result) > 1 for result in talks.values()}
    assert are_several == ({False, True} if template in ("no marks, dropping thoughts", "forgetful") else {False})


def counting(general: type, called: list[list[str]]) -> tuple[type, type]:
    """Two classes of tokenizers that note the texts of every call: one of the backend's, one of their own."""

    class Backend:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            called.append(texts)
            return self._inner.encode_batch(texts, **options)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            called.append(texts)
            return self._inner.encode_batch_fast(texts, **options)

    class OfBackend(general):  # type: ignore[misc]
        @property
        def backend_tokenizer(self) -> Any:
            return Backend(self._tokenizer)

    class OfItsOwn(general):  # type: ignore[misc]
        def _encode_plus(self, text: list[str], **options: Any) -> Any:
            called.append(text)
            return super()._encode_plus(text, **options)

    return OfBackend, OfItsOwn


TALK = [
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "a cat."},
    {"role": "user", "content": "and that?"},
    {"role": "assistant", "content": "a mat."},
]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("template", "num_texts"), [("marks", 1), ("no marks", 4), ("forgetful", 4)])
def test_the_conversations_of_a_batch_are_one_call_of_the_tokenizer(template: str, num_texts: int, own: bool) -> None:
    """Without marks what a conversation begins with is tokenised too, but no text of it twice."""
    from transformers import PreTrainedTokenizerFast

    called: list[list[str]] = []
    tokenizer = tokenizer_of(TEMPLATES[template], counting(PreTrainedTokenizerFast, called)[own])
    encoder = Encoder(DataOptions(), tokenizer)
    results = list(encoder.documents([Row(f"row {number}", {"messages": TALK}) for number in range(100)]))
    assert len(results) == 100 and [len(texts) for texts in called] == [100 * num_texts]
    called.clear()
    list(encoder.documents([Row("row", {"prompt": TALK[:3], "completion": TALK[3:]})] * 100))
    assert len(called) == 1
    called.clear()
    list(encoder.documents([Row("row", {"messages": TALK}), Row("row", {"text": "a cat"})] * 50))
    assert sorted(len(texts) for texts in called) == sorted([50 * num_texts, 50])


def test_a_batch_is_limited_by_what_is_tokenised_not_by_what_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginnings of a conversation of many turns are many times its words."""
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr("greedysnake.data.encode.BATCH_CHARACTERS", 5000)
    called: list[list[str]] = []
    tokenizer = tokenizer_of(TEMPLATES["no marks"], counting(PreTrainedTokenizerFast, called)[0])
    talks = [TALK * 8] * 9
    list(Encoder(DataOptions(), tokenizer).documents([Row("row", {"messages": talk}) for talk in talks]))
    assert sum(len(message["content"]) for talk in talks for message in talk) < 5000
    assert len(called) == 9
