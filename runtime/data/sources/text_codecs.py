"""Makes prompts tokens, and tokens text again: bytes, the tokenizer of conversations, or a tokenizer of the job's own.

Contract: this module loads no library before a codec is made that needs it, and nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dslc.compiler.ir.program import GenerateStep
from dslc.runtime.data.sources.chat_rendering import ConversationError, ConversationRenderer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CodecError(RuntimeError):
    """Why prompts cannot become tokens."""


class TextCodec(Protocol):
    """`size` is the number of tokens, and `ends` are those that end a text."""

    @property
    def size(self) -> int: ...

    @property
    def ends(self) -> tuple[int, ...]: ...

    def encode(self, prompt: str) -> list[int]:
        """Returns the tokens of a prompt, as the network reads them."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens."""


@dataclass(frozen=True)
class ByteCodec:
    """A token is a byte of UTF-8."""

    size: int = 256
    ends: tuple[int, ...] = ()

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class FolderCodec:
    """The tokenizer of a folder, by the library `transformers`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, end = tokenizer, tokenizer.eos_token_id
        self.size, self.ends = len(tokenizer), () if end is None else (int(end),)

    def encode(self, prompt: str) -> list[int]:
        return list(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class ChatCodec(FolderCodec):
    """A prompt is a message of the user, rendered by a chat template; the text is the assistant's answer."""

    def __init__(self, folder: str, template: str | None) -> None:
        self._renderer = ConversationRenderer(folder, template, train_on="all")
        super().__init__(self._renderer.tokenizer)

    def encode(self, prompt: str) -> list[int]:
        return self._renderer.render_question(prompt)


class FileCodec:
    """A `tokenizer.json`, by the library `tokenizers`."""

    def __init__(self, file: str) -> None:
        from dslc.runtime.data.sources.token_files import TokensError, load_tokenizer_file

        try:
            self._tokenizer, end = load_tokenizer_file(file)
        except TokensError as error:
            raise CodecError(str(error)) from error
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size, self.ends = max(vocabulary.values(), default=0) + 1, (vocabulary[end],) if end else ()

    def encode(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


def open_codec(step: GenerateStep) -> TextCodec:
    """Returns the codec of a job's prompts. Raises CodecError."""
    if not step.tokenizer:
        return ByteCodec()
    try:
        if step.chat:
            return ChatCodec(step.tokenizer, step.template or None)
        is_folder = os.path.isdir(step.tokenizer)
        return FolderCodec(load_tokenizer(step.tokenizer)) if is_folder else FileCodec(step.tokenizer)
    except ConversationError as error:
        raise CodecError(f"{error}: {error.help}") from error
