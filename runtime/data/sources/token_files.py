"""The format of token files, and how to make one from text.

Model: a header of 256 little-endian 32-bit numbers: magic, version, number of tokens, vocabulary, zeros. Then come the
tokens, little-endian, 16 bits each if the vocabulary allows, else 32. It is the format of llm.c
(https://github.com/karpathy/llm.c, `dev/data/data_common.py`), which leaves the fourth number zero. Files of bare
16-bit tokens, without a header, as nanoGPT writes them, are read too.

Contract: text is read, encoded and written piece by piece, so that memory does not grow with the file. A file appears
under its name when it is complete. A piece ends at the end of a line, after a letter or digit: tokenizers that split
text as GPT-2's, GPT-4's or Llama's do never merge across that place. So the pieces give the tokens of the whole text.

Limits: a file holds at most 2^31 - 1 tokens. Other tokenizers may give a token more or less at the end of a piece. This
module loads numpy and, only where a tokenizer is given, `tokenizers`; never torch.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dslc.compiler.facts.untrusted_files import atomic_write

MAGIC = {"uint16": (20240520, 1), "uint32": (20240801, 7)}  # magic and version, by the type of a token
HEADER = 256  # numbers
MOST = 2**31 - 1  # tokens of a file

PIECE = 1 << 16  # bytes of text encoded at once; a tokenizer takes `AT_ONCE` of these on all cores
AT_ONCE = 32
LONGEST = 1 << 22  # bytes after which a piece ends anywhere
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Ids = np.ndarray[Any, Any]
Seen = Callable[[int], None]  # called with the number of bytes read


class TokensError(Exception):
    """Why no token file can be made, in one line."""


@dataclass(frozen=True)
class TokenFile:
    """The file that was made."""

    file: str
    tokens: int
    vocab: int
    item: str  # uint16 or uint32
    end: str  # the token after each text; "" if there is none


def write_tokens(texts: Sequence[str], file: str, tokenizer: str | None, seen: Seen) -> TokenFile:
    """Makes `file` from the texts, one after another: their bytes, or their tokens by a `tokenizer.json`.

    Raises TokensError.
    """
    encode, vocab, end_id, end = _tokenizer(tokenizer) if tokenizer is not None else (_bytes_of, 256, None, "")
    item = "uint16" if vocab <= 1 << 16 else "uint32"
    stored = np.dtype(item).newbyteorder("<")
    held = 0
    try:
        with atomic_write(file) as part, open(part, "wb") as out:
            out.write(_header(item, 0, vocab))
            for text in texts:
                for ids in encode(text, seen):
                    out.write(ids.astype(stored).tobytes())
                    held += len(ids)
                if end_id is not None:
                    out.write(np.array([end_id], stored).tobytes())
                    held += 1
                if held > MOST:
                    raise TokensError(f"more than {MOST:,} tokens: make several files of fewer texts each")
            out.seek(0)
            out.write(_header(item, held, vocab))
    except OSError as error:
        raise TokensError(f"{error.filename or file}: {error.strerror or error}") from error
    return TokenFile(file, held, vocab, item, end)


def _header(item: str, held: int, vocab: int) -> bytes:
    numbers = np.zeros(HEADER, "<i4")
    numbers[:4] = (*MAGIC[item], min(held, MOST), vocab)
    return numbers.tobytes()


def _bytes_of(text: str, seen: Seen) -> Iterator[Ids]:
    with open(text, "rb") as stream:
        while piece := stream.read(PIECE * AT_ONCE):
            seen(len(piece))
            yield np.frombuffer(piece, np.uint8)


def load_tokenizer_file(file: str) -> tuple[Tokenizer, str]:
    """Returns the tokenizer of a `tokenizer.json`, and its word that ends a text, or "". Raises TokensError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TokensError(f"a tokenizer needs a library: {error}; `pip install 'dslc[tokens]'` installs it") from error
    if not os.path.isfile(file):
        raise TokensError(f"there is no {file}: a `tokenizer.json` of the library `tokenizers`")
    try:
        made = Tokenizer.from_file(file)
    except Exception as error:  # the library raises this class itself
        raise TokensError(f"{file} is not a tokenizer of the library `tokenizers`: {error}") from error
    known: dict[str, int] = made.get_vocab(with_added_tokens=True)
    return made, next((word for word in ENDS if word in known), "")


def _tokenizer(file: str) -> tuple[Callable[[str, Seen], Iterator[Ids]], int, int | None, str]:
    """Returns the function that encodes a text, the vocabulary, and the token that ends a text, if there is one."""
    made, end = load_tokenizer_file(file)
    known: dict[str, int] = made.get_vocab(with_added_tokens=True)

    def encode(text: str, seen: Seen) -> Iterator[Ids]:
        pieces: list[str] = []
        for piece in pieces_of(text, seen):
            pieces.append(piece)
            if len(pieces) == AT_ONCE:
                yield encode_batch(pieces)
                pieces = []
        if pieces:
            yield encode_batch(pieces)

    def encode_batch(pieces: list[str]) -> Ids:
        encoded = made.encode_batch_fast(pieces, add_special_tokens=False)
        return np.concatenate([np.array(each.ids, np.uint32) for each in encoded])

    return encode, max(known.values(), default=0) + 1, known.get(end), end


def pieces_of(text: str, seen: Seen) -> Iterator[str]:
    """Yields a UTF-8 text in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, rest = 0, ""
    with open(text, "rb") as stream:
        while True:
            piece = stream.read(PIECE)
            try:
                rest += decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as error:
                # The decoder's rest of the piece before stands in front of the text that the error counts in.
                at = read + len(piece) - len(error.object) + error.start
                raise TokensError(f"{text} is not UTF-8: byte {at} is 0x{error.object[error.start]:02x}") from error
            read += len(piece)
            seen(len(piece))
            if not piece:
                break
            cut = _cut(rest)
            if cut:
                yield rest[:cut]
                rest = rest[cut:]
    if rest:
        yield rest


def _cut(text: str) -> int:
    """Returns the end of the last line that ends after a letter or digit; 0 if there is none and more may be read."""
    at = text.rfind("\n")
    while at > 0 and not text[at - 1].isalnum():
        at = text.rfind("\n", 0, at)
    return at if at > 0 else len(text) if len(text) > LONGEST else 0
