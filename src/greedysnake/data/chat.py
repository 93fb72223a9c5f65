"""Conversations to tokens, with loss on what the assistant says.

Which tokens those are comes from the template's generation marks if it has them. Otherwise it is rendered with and
without each turn of the assistant, and what the turn adds is trained. Where a template renders earlier turns otherwise
when more follows, as those that drop earlier thoughts do, each turn is a document of its own, with what the template
shows the assistant at that point before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from greedysnake.data.rows import RowError, check_unicode
from greedysnake.data.tokenizers import ByteTokenizer, quietly, token_ids
from greedysnake.errors import ConfigError, GreedySnakeError

Encoded = tuple[list[int], list[bool]]
"""Tokens, and for each whether it carries no loss."""
TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")
"""Columns of a row that go to the template, besides its messages."""
RENDERED = "what the chat template gives"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat:
    """Renders conversations with a tokenizer's chat template, or with the one given."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._quietly = quietly(tokenizer)

    def encode(
        self, messages: list[dict[str, Any]], row: Mapping[str, Any], *, where: str, num_prompt: int | None
    ) -> list[Encoded]:
        """Tokens of a conversation, and for each whether it carries no loss: one document, or one for each turn.

        The first `num_prompt` messages carry none at all. The columns `tools` and `chat_template_kwargs` of the row go
        to the template.
        """
        extra = _template_arguments(row)
        self._require_tool_calls(messages, extra)
        self._require_text_of_parts(messages, extra)
        if self._has_marks(bool(extra.get("tools"))):
            tokens, ignored = self._by_marks(messages, extra, num_prompt or 0)
        else:
            turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            found = self._by_difference(messages, turns, extra)
            if found is None:
                return self._turn_by_turn(messages, [turn for turn in turns if turn >= (num_prompt or 0)], extra, where)
            tokens, ignored = found
        if num_prompt is not None:
            before = self._tokens(messages[:num_prompt], extra)
            prompt_tokens = common_prefix(before, tokens)
            ignored[:prompt_tokens] = [True] * prompt_tokens
        return [(tokens, ignored)]

    def _has_marks(self, has_tools: bool) -> bool:
        template = self._template or self._own_template(has_tools)
        # Marks are found by positions of characters, which slow tokenizers do not keep.
        return bool(GENERATION_MARK.search(template)) and getattr(self._tokenizer, "is_fast", True)

    def _own_template(self, has_tools: bool) -> str:
        own = getattr(self._tokenizer, "chat_template", None)
        if isinstance(own, dict):  # several, by name
            return str((has_tools and own.get("tool_use")) or own.get("default", ""))
        if not own:
            raise ConfigError(
                "the tokenizer has no chat template, which rows with messages need: give data.chat_template, a file "
                "with one, or rows with text or with prompt and completion"
            )
        return str(own)

    def _require_tool_calls(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """RowError if the template passes over tool calls: the assistant would learn to say nothing in their place."""
        if not any(message.get("tool_calls") for message in messages):
            return
        as_text = {**extra, "tokenize": False, "return_dict": False}
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        try:
            is_left_out = self._apply(messages, as_text) == self._apply(without, as_text)
        except RowError:  # for one of the two, so it looks at them; or for both, which is told later
            return
        if is_left_out:
            raise RowError("the chat template leaves out tool_calls (data.chat_template can name one that has them)")

    def _require_text_of_parts(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> None:
        """RowError if the template takes a list of parts for text: the brackets of Python would be trained on."""
        contents = enumerate(message.get("content") for message in messages)
        lists = {index: str(content) for index, content in contents if content and isinstance(content, list)}
        if not lists:
            return
        text = self._apply(messages, {**extra, "tokenize": False, "return_dict": False})
        for index, written in lists.items():
            if written in str(text):
                raise RowError(
                    f"the chat template writes the content of message {index + 1} as the list that it is, brackets "
                    "included: give its text instead"
                )

    def _by_marks(self, messages: list[dict[str, Any]], extra: dict[str, Any], num_prompt: int) -> Encoded:
        if isinstance(self._tokenizer, ByteTokenizer):
            rendered = self._apply(messages, extra)
            return list(rendered["input_ids"]), [not said for said in rendered["assistant_masks"]]
        # Not by apply_chat_template's own mask: it looks up the tokens of a turn's first and last character, which have
        # none where a tokenizer leaves spaces out of its offsets, and then loses turns or runs on to the end.
        text, turns = self._render(messages, extra)
        if num_prompt:  # by their number: a template may render them otherwise when more follows
            turns = turns[len(self._render(messages[:num_prompt], extra)[1]) :]
        check_unicode(text, RENDERED)
        encoded = self._tokenizer([text], add_special_tokens=False, return_offsets_mapping=True, **self._quietly)
        tokens, offsets = encoded["input_ids"][0], encoded["offset_mapping"][0]
        return list(tokens), _outside(offsets, turns)

    def _render(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and from which character to which the assistant speaks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            template = self._tokenizer.get_chat_template(self._template, extra.get("tools"))
            arguments = {**self._tokenizer.special_tokens_map, **extra}
            (text,), (turns,) = render_jinja_template(  # type: ignore[no-untyped-call]
                conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, **arguments
            )
        return text, turns

    def _tokens(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> list[int]:
        return list(self._apply(messages, extra)["input_ids"])

    def _turn_by_turn(
        self, messages: list[dict[str, Any]], turns: Sequence[int], extra: dict[str, Any], where: str
    ) -> list[Encoded]:
        documents = []
        for turn in turns:
            found = self._by_difference(messages[: turn + 1], [turn], extra)
            if found is None:
                raise ConfigError(
                    f"{where}: the chat template has no generation marks, and message {turn + 1} does not begin as the "
                    "template begins the assistant's answer, so its tokens cannot be told apart: give "
                    "data.chat_template, a file with a template that has {% generation %} marks, or rows with prompt "
                    "and completion"
                )
            documents.append(found)
        return documents

    def _by_difference(
        self, messages: list[dict[str, Any]], turns: Sequence[int], extra: dict[str, Any]
    ) -> Encoded | None:
        """None when what comes before a turn, or the turn itself, is not how the whole begins."""
        as_text = {**extra, "tokenize": False, "return_dict": False}
        whole = self._apply(messages, as_text)
        beginnings: list[str] = []
        for turn in turns:
            before = self._apply(messages[:turn], {**as_text, "add_generation_prompt": True}) if turn else ""
            beginnings += [before, self._apply(messages[: turn + 1], as_text)]
            if not all(whole.startswith(beginning) for beginning in beginnings[-2:]):
                return None
        for text in (whole, *beginnings):
            check_unicode(text, RENDERED)
        # The template writes all special tokens itself.
        tokens, *prefixes = token_ids(self._tokenizer, [whole, *beginnings], add_special_tokens=False)
        ends = [common_prefix(prefix, tokens) for prefix in prefixes]
        ignored = [True] * len(tokens)
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            ignored[start:end] = [False] * (end - start)
        return list(tokens), ignored

    def _apply(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
        template = {} if self._template is None else {"chat_template": self._template}
        fixed = {"return_dict": True, "tokenizer_kwargs": self._quietly, **template}
        with _refusals():
            return self._tokenizer.apply_chat_template(messages, **{**fixed, **arguments})


@contextmanager
def _refusals() -> Iterator[None]:
    """What a template raises is about the row. It is a program, and may raise anything."""
    try:
        yield
    except (GreedySnakeError, RowError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RowError(f"the chat template does not take these messages ({reason})") from None


def _outside(offsets: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> list[bool]:
    """For each token, from its first and last character, whether it lies outside of all turns."""
    outside, before = [], 0
    for start, end in offsets:
        # Where spaces are left out of offsets, a token of spaces alone is empty: it is what follows the token before.
        first = start if start < end else min(before, start)
        outside.append(not any(first < turn_end and end > turn_start for turn_start, turn_end in turns))
        before = end
    return outside


def _template_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    arguments = row.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise RowError("column 'chat_template_kwargs' is not an object")
    tools = row.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
    except ValueError:
        raise RowError("column 'tools' is not valid JSON") from None
    return {**arguments, "tools": tools} if tools else dict(arguments)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with.

    What the last letters of a prompt become may depend on what follows them: a token that holds letters of both is not
    in the prefix of prompt and whole.
    """
    shorter = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:shorter]) != np.asarray(other[:shorter]))
    return int(differ[0]) if len(differ) else shorter
