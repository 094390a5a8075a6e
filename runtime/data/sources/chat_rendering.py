"""Renders conversations as tokens by the chat template of a tokenizer, with a mask of the tokens that the loss counts.

Model: `transformers` renders a conversation and tokenizes the text. With `train_on = "all"` every token counts. With
"assistant" the turns of the assistant count: what stands in `{% generation %}` blocks, if the template has some. Any
other template is rendered for the messages before a turn, with the header that asks for an answer, and for the messages
up to its end. The characters between the two ends are the turn. A token counts if it has one of these characters.
Tokenizers may trim whitespace from the characters of a token: one of whitespace alone has those since the token before.

Contract: tokens, and masks by `{% generation %}`, equal those of `apply_chat_template`. If the text of the messages
before a turn is not the beginning of the text with that turn, no mask is guessed: ConversationError.

Limits: the tokenizer must be a fast one, which knows the characters of each token. This module imports no torch, and
`transformers` only when a renderer is made; nothing is downloaded, and no code of the folder runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

from dslc.runtime.process.vision_library import let_torchvision_load

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

Message: TypeAlias = dict[str, Any]  # role, content, and what else the template reads
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ANSWER_BLOCKS = 'a template (`template = "file"`) with `{% generation %}` around the assistant\'s turns'


class ConversationError(Exception):
    """Why conversations cannot become tokens. `code` is the code of the diagnostic, and `argument` the argument of
    `chat(…)` at fault.
    """

    def __init__(self, message: str, help: str, code: str = "E0311", argument: str = "conversations") -> None:
        super().__init__(message)
        self.help, self.code, self.argument = help, code, argument

    def facts(self) -> dict[str, object]:
        """Returns the fields of SourceFacts."""
        return {"missing": str(self), "help": self.help, "code": self.code, "argument": self.argument}


@dataclass(frozen=True)
class RenderedConversation:
    """The tokens of a conversation, and for each of them whether the loss counts its prediction."""

    tokens: list[int]
    counted: list[bool]


class ConversationRenderer:
    """Renders conversations by the tokenizer in `folder` and its chat template, or by the one in the file `template`.

    Raises ConversationError.
    """

    def __init__(self, folder: str, template: str | None = None, train_on: str = "assistant") -> None:
        self.tokenizer = load_tokenizer(folder)
        self._argument = "tokenizer" if template is None else "template"
        self._template = _template_text(self.tokenizer, folder, template)
        self._train_on = train_on
        self._marks_answers = bool(_GENERATION.search(self._template))
        if train_on == "assistant" and not self.tokenizer.is_fast:
            raise ConversationError(
                f"the tokenizer in {folder} does not say which characters a token has, so that the assistant's tokens "
                "are not known",
                "a folder with a `tokenizer.json`, or `train_on = all`",
                "E0350",
                "tokenizer",
            )

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> RenderedConversation:
        """Returns the tokens of a conversation of at least one message. Raises ConversationError."""
        messages = list(messages)
        named: dict[str, object] = {"tools": list(tools)} if tools else {}
        if self._train_on == "assistant" and not self._marks_answers:
            return self._render_by_prefixes(messages, named)
        marked = self._train_on == "assistant"
        encoded = self._apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked, **named)
        tokens = list(encoded["input_ids"])
        counted = encoded["assistant_masks"] if marked else [True] * len(tokens)
        return RenderedConversation(tokens, [bool(flag) for flag in counted])

    def render_question(self, text: str) -> list[int]:
        """Returns the tokens of a message of the user, up to where the assistant answers. Raises ConversationError."""
        messages = [{"role": "user", "content": text}]
        return list(self._apply(messages, tokenize=True, return_dict=True, add_generation_prompt=True)["input_ids"])

    def render_answers(
        self, prompt: Sequence[Message], answers: Sequence[Sequence[Message]], tools: Sequence[object] | None = None
    ) -> list[RenderedConversation]:
        """Returns the tokens of a prompt with each of some answers; the answers' tokens count. Raises
        ConversationError.
        """
        named: dict[str, object] = {"tokenize": True, "return_dict": True} | ({"tools": list(tools)} if tools else {})
        before = self._apply(list(prompt), add_generation_prompt=True, **named)["input_ids"]
        return mark_answers(before, [self._apply([*prompt, *answer], **named)["input_ids"] for answer in answers])

    def _render_by_prefixes(self, messages: list[Message], named: dict[str, object]) -> RenderedConversation:
        text = self._apply(messages, tokenize=False, **named)
        turns = []
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if n == 0:
                what = "a conversation begins with the assistant, and no header before it is known"
                raise self._unmarked(what, "conversations")
            before = self._apply(messages[:n], tokenize=False, add_generation_prompt=True, **named)
            with_turn = self._apply(messages[: n + 1], tokenize=False, **named)
            if not with_turn.startswith(before) or not text.startswith(with_turn):
                what = f"the template changes the text before or in message {n + 1} when further messages follow"
                raise self._unmarked(f"{what}, so that the assistant's tokens are not known", self._argument)
            turns.append((len(before), len(with_turn)))
        encoded = self._tokenize(text)
        counted, previous_end = [], 0
        for start, end in encoded["offset_mapping"]:
            first = start if start < end else min(start, previous_end)
            counted.append(any(first < turn_end and end > turn_start for turn_start, turn_end in turns))
            previous_end = max(previous_end, end)
        return RenderedConversation(list(encoded["input_ids"]), counted)

    def _tokenize(self, text: str) -> BatchEncoding:
        try:
            encoding: BatchEncoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return encoding
        except Exception as error:  # of the tokenizer's library
            help = "text that the tokenizer takes, or another `tokenizer`"
            raise ConversationError(f"the tokenizer fails: {_reason(error)}", help) from error

    def _apply(self, messages: list[Message], **named: Any) -> Any:
        from jinja2 import TemplateSyntaxError  # comes with `transformers`

        try:
            return self.tokenizer.apply_chat_template(messages, chat_template=self._template, **named)
        except TemplateSyntaxError as error:
            help = "a template that Jinja can read"
            message = f"the chat template cannot be read: {_reason(error)}"
            raise ConversationError(message, help, "E0350", self._argument) from error
        except Exception as error:  # of Jinja, or whatever the template raises for this conversation
            help = "conversations as the template takes them, or another `template`"
            raise ConversationError(f"the chat template fails: {_reason(error)}", help, "E0350") from error

    def _unmarked(self, message: str, argument: str) -> ConversationError:
        return ConversationError(message, f"{_ANSWER_BLOCKS}, or `train_on = all`", "E0350", argument)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns how many items two sequences have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def mark_answers(prompt: Sequence[int], texts: Sequence[Sequence[int]]) -> list[RenderedConversation]:
    """Returns texts that begin with a prompt; their tokens count from where one of them leaves the prompt."""
    length = min(common_length(prompt, text) for text in texts)
    return [RenderedConversation(list(text), [n >= length for n in range(len(text))]) for text in texts]


class TextRenderer:
    """Renders prompts and answers that are plain text: an answer ends with the tokenizer's end of text."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = load_tokenizer(folder)

    def render_answers(self, prompt: str, answers: Sequence[str]) -> list[RenderedConversation]:
        """Returns the tokens of a prompt with each of some answers. Raises ConversationError."""
        end = self._tokenizer.eos_token or ""
        texts = [prompt + answer + ("" if answer.endswith(end) else end) for answer in answers]
        try:
            (before,) = self._encoded([prompt])
            return mark_answers(before, self._encoded(texts))
        except Exception as error:  # of the tokenizer's library
            help = "text that the tokenizer takes, or another `tokenizer`"
            raise ConversationError(f"the tokenizer fails: {_reason(error)}", help) from error

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(self._tokenizer(text)["input_ids"]) for text in texts]


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(": ") or type(error).__name__


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer in a folder. Raises ConversationError."""
    if not os.path.isdir(folder):
        raise ConversationError(
            f"there is no folder {folder}", "a folder that a tokenizer's `save_pretrained` wrote", "E0309", "tokenizer"
        )
    load = _tokenizer_loader()
    try:
        return load(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a dozen kinds, of three libraries
        raise ConversationError(
            f"{folder} holds no tokenizer that can be loaded: {_reason(error)}",
            "a folder that a tokenizer's `save_pretrained` wrote",
            argument="tokenizer",
        ) from error


def _tokenizer_loader() -> Callable[..., PreTrainedTokenizerBase]:
    let_torchvision_load()  # which a configuration beside the tokenizer imports
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConversationError(
            f"`chat` needs the library `transformers`: {error}",
            "`pip install 'dslc[transformers]'` installs it",
            "E0803",
            "tokenizer",
        ) from error
    load: Callable[..., PreTrainedTokenizerBase] = AutoTokenizer.from_pretrained
    return load


def _template_text(tokenizer: PreTrainedTokenizerBase, folder: str, template: str | None) -> str:
    if template is not None:
        try:
            with open(template, encoding="utf-8") as file:
                return file.read()
        except OSError as error:
            raise ConversationError(
                f"{template}: {error.strerror}", "a file with a chat template in Jinja", "E0309", "template"
            ) from error
        except UnicodeDecodeError as error:
            raise ConversationError(
                f"{template} is not UTF-8", "a file with a chat template in Jinja", argument="template"
            ) from error
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:
        raise ConversationError(
            f"the tokenizer in {folder} has no chat template",
            '`template = "file"` names a file with one in Jinja; a folder of an instruct model has its own',
            "E0350",
            "tokenizer",
        ) from error
