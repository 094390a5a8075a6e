"""Parses JSON with the place of every key. Accepts comments and trailing commas, which DeepSpeed's reader accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from dslc.dsl.json_value import Json
from dslc.dsl.source import Source, Span

_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_DECODER = json.JSONDecoder()
OnKey = Callable[[tuple[str, ...], Span], None]


class JsonReader:
    """One pass over a text. Raises ValueError with the offset as its second argument, for text that is not JSON."""

    def __init__(self, source: Source, on_key: OnKey) -> None:
        """`on_key` receives the path of each key, with the place of its name."""
        self._source, self._text, self._on_key = source, source.text, on_key
        self._at = 0

    def parse(self) -> Json:
        value = self._parse_value(())
        if self._next():
            raise ValueError("text after the end of the value", self._at)
        return value

    def _next(self) -> str:
        """Skips blanks and comments; returns the next character, "" at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _parse_value(self, path: tuple[str, ...]) -> Json:
        first = self._next()
        if first == "{":
            return self._parse_object(path)
        if first == "[":
            return self._parse_list(path)
        try:
            value, self._at = _DECODER.raw_decode(self._text, self._at)
        except ValueError:
            raise ValueError("a value is missing", self._at) from None
        return value  # type: ignore[no-any-return]

    def _parse_object(self, path: tuple[str, ...]) -> Json:
        self._at += 1
        result: dict[str, Json] = {}
        while (char := self._next()) != "}":
            if char != '"':
                raise ValueError('a key in quotes, or "}", is missing', self._at)
            start = self._at
            try:
                key, self._at = _DECODER.raw_decode(self._text, start)
            except ValueError:
                raise ValueError("a text without its closing quote", start) from None
            if key in result:
                raise ValueError(f"the key {key!r} is given twice, which DeepSpeed refuses", start)
            self._on_key((*path, key), Span(self._source, start, self._at))
            if self._next() != ":":
                raise ValueError('a ":" after the key is missing', self._at)
            self._at += 1
            result[key] = self._parse_value((*path, key))
            self._expect_comma("}")
        self._at += 1
        return result

    def _parse_list(self, path: tuple[str, ...]) -> Json:
        self._at += 1
        result: list[Json] = []
        while self._next() != "]":
            result.append(self._parse_value((*path, str(len(result)))))
            self._expect_comma("]")
        self._at += 1
        return result

    def _expect_comma(self, end: str) -> None:
        char = self._next()
        if char == ",":
            self._at += 1
        elif char != end:
            raise ValueError(f'a "," or "{end}" is missing', self._at)
