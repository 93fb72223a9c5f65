"""Conversations to tokens, with loss on what the assistant says.

Which tokens those are comes from the template's generation marks if it has them. Otherwise it is rendered with and
without each turn of the assistant, and what the turn adds is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from greedysnake.data.rows import RowError
from greedysnake.data.tokenizers import quietly
from greedysnake.errors import ConfigError

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat:
    """Renders conversations with a tokenizer's chat template, or with the one given."""

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._quietly = quietly(tokenizer)

    def encode(
        self, messages: list[dict[str, Any]], row: Mapping[str, Any], *, where: str, num_prompt: int | None
    ) -> tuple[list[int], list[bool]]:
        """Tokens of a conversation, and for each whether it carries no loss.

        The first `num_prompt` messages carry none at all. The columns `tools` and `chat_template_kwargs` of the row go
        to the template.
        """
        extra = _template_arguments(row)
        if self._has_marks(bool(extra.get("tools"))):
            tokens, ignored = self._by_marks(messages, extra)
        else:
            tokens, ignored = self._by_difference(messages, extra, where)
        if num_prompt is not None:
            before = self._tokens(messages[:num_prompt], extra)
            prompt_tokens = common_prefix(before, tokens)
            ignored[:prompt_tokens] = [True] * prompt_tokens
        return tokens, ignored

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

    def _by_marks(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> tuple[list[int], list[bool]]:
        rendered = self._apply(messages, {**extra, "return_assistant_tokens_mask": True})
        return list(rendered["input_ids"]), [not said for said in rendered["assistant_masks"]]

    def _tokens(self, messages: list[dict[str, Any]], extra: dict[str, Any]) -> list[int]:
        return list(self._apply(messages, extra)["input_ids"])

    def _by_difference(
        self, messages: list[dict[str, Any]], extra: dict[str, Any], where: str
    ) -> tuple[list[int], list[bool]]:
        as_text = {**extra, "tokenize": False, "return_dict": False}
        whole = self._apply(messages, as_text)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        beginnings: list[str] = []
        for turn in turns:
            before = self._apply(messages[:turn], {**as_text, "add_generation_prompt": True}) if turn else ""
            beginnings += [before, self._apply(messages[: turn + 1], as_text)]
            if not all(whole.startswith(beginning) for beginning in beginnings[-2:]):
                raise ConfigError(
                    f"{where}: the chat template has no generation marks, and renders the conversation up to message "
                    f"{turn + 1} otherwise when more follows, so the tokens of the assistant cannot be told apart: "
                    "give data.chat_template, a file with a template that has {% generation %} marks, or rows with "
                    "prompt and completion"
                )
        # The template writes all special tokens itself.
        tokens, *prefixes = self._tokenizer([whole, *beginnings], add_special_tokens=False, **self._quietly)[
            "input_ids"
        ]
        ends = [common_prefix(prefix, tokens) for prefix in prefixes]
        ignored = [True] * len(tokens)
        for start, end in zip(ends[::2], ends[1::2], strict=True):
            ignored[start:end] = [False] * (end - start)
        return list(tokens), ignored

    def _apply(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> Any:
        from jinja2 import TemplateError  # comes with torch

        template = {} if self._template is None else {"chat_template": self._template}
        fixed = {"return_dict": True, "tokenizer_kwargs": self._quietly, **template}
        try:
            return self._tokenizer.apply_chat_template(messages, **{**fixed, **arguments})
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise RowError(f"the chat template does not take these messages ({error})") from None


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
