"""Conversations to texts, and the tokens of those to documents, with loss on what the assistant says.

Which tokens those are comes from the template's generation marks if it has them. Otherwise it is rendered with and
without each turn of the assistant, and what the turn adds is trained. Where a template renders earlier turns otherwise
when more follows, as those that drop earlier thoughts do, each turn is a document of its own, with what the template
shows the assistant at that point before it. Knows one conversation; whoever tokenises takes the texts of many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from greedysnake.data.documents import Document, Texts, common_prefix
from greedysnake.data.rows import RowError, check_unicode
from greedysnake.data.tokenizers import ByteTokenizer, quietly, token_ids, token_offsets
from greedysnake.errors import ConfigError, GreedySnakeError

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

    def texts(
        self, messages: list[dict[str, Any]], row: Mapping[str, Any], *, where: str, num_prompt: int | None
    ) -> Texts | list[Document]:
        """What to tokenise for a conversation, which becomes one document or one for each turn; or those already.

        The first `num_prompt` messages carry no loss. The columns `tools` and `chat_template_kwargs` of the row go to
        the template.
        """
        extra = _template_arguments(row)
        self._require_tool_calls(messages, extra)
        self._require_text_of_parts(messages, extra)
        if isinstance(self._tokenizer, ByteTokenizer):
            return [self._document_of_bytes(messages, extra, num_prompt or 0)]
        if self._has_marks(bool(extra.get("tools"))):
            return self._by_marks(messages, extra, num_prompt or 0)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        texts = self._by_difference(messages, turns, extra)
        if texts is None:
            later = [turn for turn in turns if turn >= (num_prompt or 0)]
            return _texts_by_difference(self._turn_by_turn(messages, later, extra, where))
        prompts = [self._text(messages[:num_prompt], extra)] if num_prompt else []
        for prompt in prompts:
            check_unicode(prompt, RENDERED)
        return _texts_by_difference([texts], prompts)

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
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        try:
            is_left_out = self._text(messages, extra) == self._text(without, extra)
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
        text = self._text(messages, extra)
        for index, written in lists.items():
            if written in str(text):
                raise RowError(
                    f"the chat template writes the content of message {index + 1} as the list that it is, brackets "
                    "included: give its text instead"
                )

    def _document_of_bytes(self, messages: list[dict[str, Any]], extra: dict[str, Any], num_prompt: int) -> Document:
        whole, prompt = (self._apply(part, extra) for part in (messages, messages[:num_prompt]))
        tokens, ignored = np.array(whole["input_ids"], np.int64), ~np.array(whole["assistant_masks"], np.bool_)
        ignored[: common_prefix(np.array(prompt["input_ids"], np.int64), tokens)] = True
        return Document(tokens, ignored)

    def _by_marks(self, messages: list[dict[str, Any]], extra: dict[str, Any], num_prompt: int) -> Texts:
        # Not by apply_chat_template's own mask: it looks up the tokens of a turn's first and last character, which have
        # none where a tokenizer leaves spaces out of its offsets, and then loses turns or runs on to the end.
        text, turns = self._render(messages, extra)
        texts = [text]
        if num_prompt:  # by their number: a template may render them otherwise when more follows
            prompt, turns_of_prompt = self._render(messages[:num_prompt], extra)
            turns = turns[len(turns_of_prompt) :]
            texts.append(prompt)
        for text in texts:
            check_unicode(text, RENDERED)
        return Texts(texts, _tokens_and_offsets, partial(_documents_by_marks, turns))

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

    def _turn_by_turn(
        self, messages: list[dict[str, Any]], turns: Sequence[int], extra: dict[str, Any], where: str
    ) -> list[list[str]]:
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
    ) -> list[str] | None:
        """The whole, and what there is before each turn and with it; None when one is not how the whole begins."""
        whole = self._text(messages, extra)
        texts = [whole]
        for turn in turns:
            before = self._text(messages[:turn], {**extra, "add_generation_prompt": True}) if turn else ""
            is_last = turn + 1 == len(messages)
            texts += [before, whole if is_last else self._text(messages[: turn + 1], extra)]
            if not all(whole.startswith(beginning) for beginning in texts[-2:]):
                return None
        check_unicode(whole, RENDERED)
        return texts

    def _text(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> Any:
        """What the template gives: text, but of the tokenizer of bytes its tokens."""
        return self._apply(messages, {**extra, "tokenize": False, "return_dict": False})

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


def _tokens(tokenizer: Any, texts: list[str]) -> Iterator[list[int]]:
    """The template writes all special tokens itself."""
    return token_ids(tokenizer, texts, add_special_tokens=False)


def _tokens_and_offsets(tokenizer: Any, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
    return token_offsets(tokenizer, texts, add_special_tokens=False)


def _texts_by_difference(documents: Sequence[Sequence[str]], prompts: Sequence[str] = ()) -> Texts:
    """`documents` are the texts of each: the whole, and what there is before each turn and with it."""
    texts = list(dict.fromkeys(chain(*documents, prompts)))  # the last turn often ends where the whole does
    return Texts(texts, _tokens, partial(_documents_by_difference, texts, documents, prompts))


def _documents_by_difference(
    texts: Sequence[str], documents: Sequence[Sequence[str]], prompts: Sequence[str], found: list[list[int]]
) -> list[Document]:
    tokens_of = {text: np.array(tokens, np.int64) for text, tokens in zip(texts, found, strict=True)}
    made = []
    for whole, *beginnings in documents:
        tokens = tokens_of[whole]
        ends = [common_prefix(tokens_of[beginning], tokens) for beginning in beginnings]
        ignored = np.ones(len(tokens), np.bool_)
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            ignored[start:end] = False
        for prompt in prompts:
            ignored[: common_prefix(tokens_of[prompt], tokens)] = True
        made.append(Document(tokens, ignored))
    return made


def _documents_by_marks(
    turns: Sequence[tuple[int, int]], found: list[tuple[list[int], list[tuple[int, int]]]]
) -> list[Document]:
    """`found` for the whole, and for the prompt if there is one; `turns` are from character to character."""
    tokens, *prompts = (np.array(ids, np.int64) for ids, _ in found)
    ignored = _outside(found[0][1], turns)
    for prompt in prompts:
        ignored[: common_prefix(prompt, tokens)] = True
    return [Document(tokens, ignored)]


def _outside(offsets: Sequence[tuple[int, int]], turns: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """For each token, from its first and last character, whether it lies outside of all turns."""
    start, end = np.array(offsets, np.int64).reshape(-1, 2).T
    # Where spaces are left out of offsets, a token of spaces alone is empty: it is what follows the token before.
    before = np.append(0, end)[:-1]
    first = np.where(start < end, start, np.minimum(before, start))
    outside = np.ones(len(first), np.bool_)
    for turn_start, turn_end in turns:
        outside &= (first >= turn_end) | (end <= turn_start)
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
