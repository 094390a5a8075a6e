"""Prompts become tokens as the data's tokenizer makes them, and tokens text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.paths import EXAMPLES
from transformers import AutoTokenizer

from dslc.compiler.ir.program import GenerateStep
from dslc.runtime.data.sources.text_codecs import ByteCodec, CodecError, open_codec

FOLDER = EXAMPLES / "chat" / "tokenizer"


def _step(tokenizer: Path | str, *, chat: bool = False) -> GenerateStep:
    return GenerateStep(
        every=0, prompts=("Hi",), max_tokens=4, temperature=0.0, context=8, tokenizer=str(tokenizer), chat=chat
    )


def test_bytes_are_tokens() -> None:
    codec = open_codec(_step(""))
    assert isinstance(codec, ByteCodec) and codec.encode("ä") == [195, 164]
    assert codec.decode([195, 164, 195]) == "ä\N{REPLACEMENT CHARACTER}"


def test_a_prompt_of_a_chat_is_a_message_of_the_user() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    codec = open_codec(_step(FOLDER, chat=True))
    messages = [{"role": "user", "content": "What color is snow?"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert codec.encode("What color is snow?") == expected
    assert codec.ends == (tokenizer.eos_token_id,) and codec.size == len(tokenizer)
    answer = tokenizer("Snow is white.", add_special_tokens=False)["input_ids"]
    assert codec.decode([*answer, tokenizer.eos_token_id]) == "Snow is white."


@pytest.mark.parametrize("path", [FOLDER, FOLDER / "tokenizer.json"])
def test_a_tokenizer_of_the_job_makes_tokens(path: Path) -> None:
    tokenizer, codec = AutoTokenizer.from_pretrained(FOLDER), open_codec(_step(path))
    tokens = tokenizer("Snow is white.", add_special_tokens=False)["input_ids"]
    assert codec.encode("Snow is white.") == tokens and codec.decode(tokens) == "Snow is white."
    assert codec.size == len(tokenizer)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="holds no tokenizer"):
        open_codec(_step(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CodecError, match="is not a tokenizer"):
        open_codec(_step(tmp_path / "tokenizer.json"))
