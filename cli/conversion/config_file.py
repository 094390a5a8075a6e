"""Reads a configuration file, JSON, YAML or TOML, as plain data with the place of each key."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dslc.dsl.diagnostics import Report
from dslc.dsl.files import read_bytes
from dslc.dsl.json_value import Json
from dslc.dsl.source import Source, Span

_SPACE = re.compile(r"(?:\s+|//[^\n]*|#[^\n]*|/\*.*?\*/)*", re.DOTALL)
_DECODER = json.JSONDecoder()
_NO_TEXT = re.compile("[\0\ud800-\udfff]")


class JsonReader:
    """One pass over a text. Raises ValueError with the offset as its second argument, for text that is not JSON.

    `places` has the place of the name of each key, by its dotted path.
    """

    def __init__(self, source: Source) -> None:
        self._source, self._text, self._at = source, source.text, 0
        self.places: dict[str, Span] = {}

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
            self.places[".".join((*path, key))] = Span(self._source, start, self._at)
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


MAX_BYTES = 1 << 20
MAX_KEYS = 10_000
MAX_DEPTH = 50
SUFFIXES = (".json", ".yaml", ".yml", ".toml")


@dataclass(frozen=True)
class ConfigFile:
    """One file: its keys as dotted paths, such as `zero_optimization.stage`. Lists are values."""

    path: str
    source: Source
    root: Mapping[str, Json]
    places: Mapping[str, Span] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def values(self) -> Iterator[tuple[str, Json]]:
        """Yields each key that has no keys below it, with its value."""
        yield from _flatten(self.root, "")

    def value(self, path: str) -> Json:
        """Returns the value at a dotted path, None if the file has no such key."""
        value: Json = dict(self.root)
        for part in path.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return value

    def section(self, path: str) -> ConfigFile:
        """Returns the keys below a path as a file of their own, with their places in this one."""
        root = self.value(path)
        prefix = f"{path}."
        places = {key.removeprefix(prefix): span for key, span in self.places.items() if key.startswith(prefix)}
        return ConfigFile(f"{self.path}: {path}", self.source, root if isinstance(root, dict) else {}, places)

    def place(self, path: str) -> Span | None:
        """Returns the place of a key, or of the nearest section that holds it."""
        while path and path not in self.places:
            path = path.rpartition(".")[0]
        return self.places.get(path)


def read_config(path: str, report: Report) -> ConfigFile | None:
    """Reads the file; returns None if it cannot be read, with the reason in the report."""
    try:
        text = read_bytes(path, MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        report.add("E1101", f"{path} cannot be read: {error.strerror}", None, help="name a file that exists")
        return None
    except UnicodeDecodeError:
        report.add("E1101", f"{path} is not text in UTF-8", None, help=f"a configuration is {_kinds()}")
        return None
    return parse_config(path, text, report)


def parse_config(path: str, text: str, report: Report) -> ConfigFile | None:
    """Parses the text of a file by its suffix; a file without one is JSON if it begins with a brace, else YAML."""
    source = Source(path, text)
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in SUFFIXES:
        suffix = ".json" if text.lstrip().startswith("{") else ".yaml"
    try:
        if suffix == ".json":
            root, places = _parse_json(source)
        elif suffix == ".toml":
            root, places = _parse_toml(source)
        else:
            root, places = _parse_yaml(source)
        has_text = _has_text(root)
    except RecursionError:
        report.add("E1101", f"{path} is nested too deeply", None, help=f"at most {MAX_DEPTH} levels")
        return None
    except ValueError as error:
        message, offset = (*error.args, None)[:2]
        place = Span(source, offset, min(offset + 1, len(text))) if isinstance(offset, int) else None
        report.add(
            "E1101", f"{path} is not {suffix[1:].upper()}: {message}", place, help=f"a configuration is {_kinds()}"
        )
        return None
    if not has_text:
        message = f"{path} names a zero byte or half a surrogate pair by its code, which no text has"
        report.add("E1101", message, None, help="remove `\\u0000`, and `\\ud800` to `\\udfff` that stand alone")
        return None
    if not isinstance(root, dict):
        report.add("E1101", f"{path} has no keys", None, help=f"a configuration is {_kinds()} with keys and values")
        return None
    if sum(1 for _ in _flatten(root, "")) > MAX_KEYS:
        report.add("E1101", f"{path} has more than {MAX_KEYS:,} keys", None, help="name a configuration of a training")
        return None
    return ConfigFile(path, source, root, places)


def _has_text(value: Json) -> bool:
    """True if no text of a value has a character that no file of text has: escapes can write these."""
    if isinstance(value, dict):
        return all(_has_text(key) and _has_text(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_has_text, value))
    return not isinstance(value, str) or _NO_TEXT.search(value) is None


def _kinds() -> str:
    return "JSON, YAML or TOML"


def _flatten(value: Mapping[str, Json], prefix: str) -> Iterator[tuple[str, Json]]:
    for key, inner in value.items():
        path = f"{prefix}.{key}" if prefix else key
        if isinstance(inner, dict) and inner:
            yield from _flatten(inner, path)
        else:
            yield path, inner


def _parse_json(source: Source) -> tuple[Json, dict[str, Span]]:
    reader = JsonReader(source)
    return reader.parse(), reader.places


def _parse_toml(source: Source) -> tuple[Json, dict[str, Span]]:
    root = tomllib.loads(source.text)  # raises a ValueError that names the line
    places: dict[str, Span] = {}
    section, start = "", 0
    for line in source.text.splitlines(keepends=True):
        if header := re.match(r"\s*\[+\s*([^\]\n]+?)\s*\]+", line):
            section = header[1].replace('"', "")
            places.setdefault(section, Span(source, start + header.start(1), start + header.end(1)))
        elif entry := re.match(r"\s*([\w.\"-]+)\s*=", line):
            key = entry[1].replace('"', "")
            path = f"{section}.{key}" if section else key
            places.setdefault(path, Span(source, start + entry.start(1), start + entry.end(1)))
        start += len(line)
    return _plain(root), places


def _plain(value: object, depth: int = 0) -> Json:
    """Makes plain data of what TOML and YAML have beyond it: dates and keys that are numbers."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        return {str(key): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner, depth + 1) for inner in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _parse_yaml(source: Source) -> tuple[Json, dict[str, Span]]:
    import yaml

    try:
        loader = yaml.SafeLoader(source.text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        places: dict[str, Span] = {}
        _note_places(source, node, "", places, 0)
        return _plain(loader.construct_document(node)), places
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ValueError(
            error.problem or error.context or "it cannot be parsed", mark.index if mark else None
        ) from None
    except yaml.YAMLError as error:
        raise ValueError(str(error).splitlines()[0], None) from None
    except (TypeError, AttributeError, OverflowError) as error:  # keys that are lists, dates that do not exist
        raise ValueError(f"it holds what is no plain value: {error}", None) from None


def _note_places(
    source: Source, node: object, prefix: str, places: dict[str, Span], depth: int, visits: list[int] | None = None
) -> None:
    """Notes the place of each key; raises RecursionError or ValueError for a tree that aliases make too large."""
    import yaml

    visits = [0] if visits is None else visits
    visits[0] += 1
    if depth > MAX_DEPTH:
        raise RecursionError
    if visits[0] > 5 * MAX_KEYS:
        raise ValueError(f"it has more than {5 * MAX_KEYS:,} values", None)
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _note_places(source, item, f"{prefix}.{number}", places, depth + 1, visits)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = f"{prefix}.{key.value}" if prefix else str(key.value)
            places.setdefault(path, Span(source, key.start_mark.index, key.end_mark.index))
            _note_places(source, value, path, places, depth + 1, visits)
