"""Loads a job from a path and the `--set`s of the command line, and reports all its mistakes.

    loaded = load("job.plt", ["train.optimizer.lr=0.1"])
    loaded.report, loaded.job

Reads the file and its imports and nothing else; imports none of the user's modules and starts nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import islice

from dslc.dsl.bounds import BYTES, IMPORT_DEPTH, IMPORTS, SETTING_BYTES, SETTINGS, WORDS
from dslc.dsl.diagnostics import Note, Report, TooManyErrors
from dslc.dsl.files import TooLarge, read_bytes
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import BLOCKS, CALLS, AnyValue, CallOf, Kind, ListOf, Name, Path, Str, fields
from dslc.dsl.language.suggest import did_you_mean
from dslc.dsl.meaning.forms import accepts, words_in
from dslc.dsl.meaning.layering import Merged, Setting, block_meant, merge, names_in, put
from dslc.dsl.meaning.resolve import Combination, resolve
from dslc.dsl.record import Record, record
from dslc.dsl.source import Source, Span
from dslc.dsl.syntax import tree
from dslc.dsl.syntax.parser import parse, parse_expression, parse_setting

_SUGGESTIONS = 10  # missing files for which similar names are looked for
_COMPARED = r"\s*expect\s*\.\s*([A-Za-z_]\w*)\s*(<=|>=|==|<|>)"


@record
class LoadResult(Record):
    """The result of loading a job file.

    `job` is None if one cannot be built, because something required is missing or wrong. With errors in the report it
    may still exist, for checks that find more. These should ignore values that depend on a path in `broken`
    (`devices.gpus`): there the job has the default.

    `origins` maps every field (`data.batch`), every written argument (`train.optimizer.lr`) and every param to its
    origin: `digits.plt:14`, `<--set 1>` or `default`. `combinations` are the sweep's, each as settings (path, text) to
    be laid over the job with `--set`; the job itself is the first of them. `files` are the files that were read,
    absolute, the main one last; `texts` are the same by their paths from the job's folder, and `settings` the settings
    laid over them, with paths relative to the folder `beside`. `looks` is the number of jobs of its kind that are
    analysed together: the combinations of its sweep.
    """

    report: Report
    job: JobSpec | None = None
    document: tree.Document | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    combinations: tuple[Combination, ...] = ()
    broken: frozenset[str] = frozenset()
    files: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    beside: str = ""
    looks: int = 1


def load(path: str, settings: Sequence[str] = ()) -> LoadResult:
    """Loads the job in the file at `path`, with `settings` laid over it. Never raises for a mistake in a job."""
    return _apply_settings(_file(path), settings)


def load_each(
    path: str, settings: Sequence[str] = (), text: str | None = None, imported: Mapping[str, str] | None = None
) -> tuple[LoadResult, list[LoadResult]]:
    """Returns the job, and one job for each combination of its `sweep` (the job itself if there is none). A `text`
    replaces the text of the file, as an editor has it, and `imported` the texts of imported files, by their real paths.
    """
    read = _file(path, text, imported)
    loaded = _apply_settings(read, settings)
    if loaded.job is None or loaded.report.errors or not loaded.combinations:
        return loaded, [loaded]
    chosen = [_apply_settings(read, [*settings, *(f"{name}={text}" for name, text in c)]) for c in loaded.combinations]
    return loaded, [replace(each, looks=len(chosen)) for each in chosen]


def load_text(text: str, name: str = "job.plt", folder: str = "", settings: Sequence[str] = ()) -> LoadResult:
    """Loads a text. `name` is its name in messages; relative paths start in `folder`, or the current one."""
    full = os.path.join(os.path.abspath(folder), os.path.basename(name))
    return _apply_settings(_read_sources(Source(name, text), full, Report()), settings)


def load_kept(texts: Mapping[str, str], path: str, settings: Sequence[str], folder: str, shown: str = "") -> LoadResult:
    """Loads a job from the `texts` of a `LoadResult`, as if its file were at `path`; nothing is read from the disk.

    Paths in `settings` are relative to `folder`. Messages name the file `shown`, or by its path.
    """
    full = os.path.abspath(path)
    kept = dict(texts)
    source = Source(shown or path, kept.pop(os.path.basename(path)))
    return _apply_settings(_read_sources(source, full, Report(), kept), settings, folder)


@record
class _SourceFiles(Record):
    """A job file and its imports, read once; `merged` is None if they cannot be used."""

    report: Report
    full: str = ""
    document: tree.Document | None = None
    merged: Merged | None = None
    files: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def _file(path: str, text: str | None = None, imported: Mapping[str, str] | None = None) -> _SourceFiles:
    full = os.path.abspath(os.path.expanduser(path))
    report = Report()
    source = Source(path, text) if text is not None else read_source(full, path, path, None, report)
    return _SourceFiles(report=report) if source is None else _read_sources(source, full, report, None, imported)


def _read_sources(
    source: Source,
    full: str,
    report: Report,
    kept: Mapping[str, str] | None = None,
    imported: Mapping[str, str] | None = None,
) -> _SourceFiles:
    reader = _FileReader(report, kept, imported)
    document: tree.Document | None = None
    merged: Merged | None = None
    try:
        document = reader.take(source, full, os.path.basename(full), [])
        if document is not None:
            merged = merge(reader.documents, document, reader.folders, report)
            merged.complete = reader.complete
    except TooManyErrors:
        merged = None
    files = tuple(reader.files)
    return _SourceFiles(report=report, full=full, document=document, merged=merged, files=files, texts=reader.texts)


def _apply_settings(read: _SourceFiles, settings: Sequence[str], folder: str = "") -> LoadResult:
    """Lays `settings` over the files that were read; their paths are relative to `folder`, or the current one."""
    report = Report()
    nothing = LoadResult(
        report=report,
        document=read.document,
        files=read.files,
        texts=read.texts,
        settings=tuple(settings),
        beside=folder or os.getcwd(),
    )
    try:
        report.extend(read.report.found)
        if read.merged is None or not _few(settings, report):
            return nothing
        merged = read.merged.copy()
        for number, text in enumerate(settings, 1):
            source = Source(f"<--set {number}>", text)
            if folder:
                merged.folders[id(source)] = folder
            _set(merged, source, report)
        name = os.path.basename(read.full).removesuffix(".plt")
        found = resolve(merged, report, name, os.path.dirname(read.full))
    except TooManyErrors:
        return nothing
    return replace(
        nothing, job=found.job, origins=found.origins, combinations=found.combinations, broken=found.broken
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- files


class _FileReader:
    """Reads files and their imports, each once, in order of increasing precedence."""

    def __init__(
        self, report: Report, kept: Mapping[str, str] | None = None, imported: Mapping[str, str] | None = None
    ) -> None:
        """`kept` are the texts of all imports, by their names from the main file's folder; None: they are on disk, but
        for those in `imported`, by their real paths.
        """
        self.report = report
        self.kept, self.imported = kept, imported or {}
        self.texts: dict[str, str] = {}  # by the same names, the main file last
        self.documents: list[tree.Document] = []
        self.folders: dict[int, str] = {}
        self.files: list[str] = []
        self.read: set[str] = set()
        self.bytes = self.words = 0  # of all files so far
        self.complete = True  # false if something could not be read, and so may only seem to be missing

    def take(self, source: Source, full: str, key: str, chain: list[tuple[str, Span]]) -> tree.Document | None:
        """Parses a text and all it imports. `key` is its name from the main file's folder; `chain` holds the files that
        led here, each with its import.
        """
        self.read.add(self.real(full))
        self.folders[id(source)] = os.path.dirname(full)
        self.bytes += len(source.text)
        document = parse(source, self.report, WORDS.most - self.words)
        if document is None:
            self.complete = False
            return None
        self.words += document.words
        self.complete = self.complete and document.complete
        early = True
        for statement in document.statements:
            if isinstance(statement, tree.Import):
                if not early:
                    self.report.add("E0103", "imports come first", statement.span,
                                    help="move it to the beginning of the file")  # fmt: skip
                self.follow(statement, source, full, key, chain)
            elif isinstance(statement, tree.Language):
                _language(statement, self.report)
            else:
                early = False
        _languages(document, self.report)
        self.documents.append(document)
        self.files.append(full)
        self.texts[key] = source.text
        return document

    def real(self, full: str) -> str:
        """Returns the name by which a file is known, whatever links lead to it."""
        return os.path.realpath(full) if self.kept is None else full

    def follow(
        self, statement: tree.Import, source: Source, full: str, key: str, chain: list[tuple[str, Span]]
    ) -> None:
        given = os.path.expanduser(statement.path)
        target = os.path.normpath(os.path.join(os.path.dirname(full), given))
        named = statement.path if given != statement.path else os.path.join(os.path.dirname(key), given)
        key = os.path.normpath(named)
        real = self.real(target)
        here = [*chain, (full, statement.path_span)]
        names = [self.real(file) for file, _ in here]
        if real in names:
            start = names.index(real)
            notes = [
                Note(message=f"`{os.path.basename(file)}` imports this", span=span) for file, span in here[start:-1]
            ]
            shown = " -> ".join(f"`{os.path.basename(file)}`" for file in [*(f for f, _ in here[start:]), target])
            self.report.add("E0102", f"imports go in a circle: {shown}", statement.path_span, notes=notes)
            return
        if real in self.read or (self.kept is not None and key not in self.kept):  # it was read by another name
            return
        found: Source | None = None
        if self.may_follow(statement, here):
            shown = given if os.path.isabs(given) else os.path.join(os.path.dirname(source.name), given)
            name, left = os.path.normpath(shown), BYTES.most - self.bytes
            if self.kept is not None:
                found = Source(name, self.kept[key])
            elif real in self.imported:
                found = Source(name, self.imported[real])
            else:
                found = read_source(target, name, statement.path, statement.path_span, self.report, left)
        if found is None:
            self.complete = False
        else:
            self.take(found, target, key, here)

    def may_follow(self, statement: tree.Import, chain: list[tuple[str, Span]]) -> bool:
        """True if a job may import at this depth, and one more file."""
        message = ""
        if len(chain) > IMPORT_DEPTH.most:
            message = f"imports of imports go more than {IMPORT_DEPTH.most} deep"
        elif len(self.read) > IMPORTS.most:
            message = f"the job imports more than {IMPORTS.most} files"
        if message:
            first = chain[0][1] if len(chain) > 1 else None
            notes = [Note(message="the first of them is here", span=first)] if first else []
            self.report.add(IMPORTS.code, message, statement.path_span, notes=notes, help="merge some of them")
        return not message


def read_source(
    full: str, name: str, shown: str, span: Span | None, report: Report, most: int = BYTES.most
) -> Source | None:
    """Returns a file, without a byte-order mark and with plain line ends; reports why there is none.

    Messages call the file `shown` if `span` names it, and `name` if they point into it.
    """
    text = read_text(full, name, shown, span, report, most)
    if text is None:
        return None
    text = text.removeprefix("\ufeff")
    return Source(name, text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text)


def read_text(
    full: str, name: str, shown: str, span: Span | None, report: Report, most: int = BYTES.most
) -> str | None:
    """Returns the text of a file as it stands; None with the reason in the report."""
    help = ""
    try:
        return decoded(read_bytes(full, most, piped=span is None), name, shown, span, report)
    except TooLarge:
        _too_large(shown, span, report)
        return None
    except FileNotFoundError:
        reason = "there is no such file"
        folder = os.path.dirname(os.path.abspath(full))
        if sum(fault.code == "E0101" for fault in report) >= _SUGGESTIONS:
            help = ""  # finding a similar name takes milliseconds in a folder of many files
        elif os.path.isdir(folder):
            help = did_you_mean(os.path.basename(full), islice(_jobs_in(folder), 1000))
        else:
            help = f"there is no folder `{folder}`"
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or "it has no such name").lower()
    report.add("E0101", f"`{shown}` cannot be read: {reason}", span, help=help)
    return None


def decoded(found: bytes, name: str, shown: str, span: Span | None, report: Report) -> str | None:
    """Decodes the bytes; returns None with the reason in the report."""
    if len(found) > BYTES.most:
        _too_large(shown, span, report)
        return None
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError as error:
        _no_text(name, found, error, span, report)
        return None


def _too_large(shown: str, span: Span | None, report: Report) -> None:
    report.add(
        BYTES.code,
        f"`{shown}` is too large for a job: {BYTES.most:,} bytes are the most, with all that is imported",
        span,
        help="a job is written by hand; data and weights belong in files that it names",
    )


def _jobs_in(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        yield from (entry.name for entry in entries if entry.name.endswith(".plt"))


def _no_text(name: str, found: bytes, error: UnicodeDecodeError, span: Span | None, report: Report) -> None:
    """Points at the first byte that is not UTF-8, in the file itself."""
    source = Source(name, found.decode("utf-8", "replace"))
    at = len(found[: error.start].decode("utf-8"))
    report.add(
        "E0101",
        f"`{name}` cannot be read: it is not text in UTF-8",
        Span(source, at, at + 1),
        label=f"the byte 0x{found[error.start]:02x}",
        notes=[Note(message="it is imported here", span=span)] if span else [],
        help="save it in UTF-8",
    )


def _language(statement: tree.Language, report: Report) -> None:
    value = statement.value
    if isinstance(value, tree.UnreadValue):
        return
    if not isinstance(value, tree.Number) or value.value != 1 or isinstance(value.value, float):
        report.add("E0112", "this dslc reads version 1 of the language", value.span, help="write `language = 1`")


def _languages(document: tree.Document, report: Report) -> None:
    found = [s for s in document.statements if isinstance(s, tree.Language)]
    for again in found[1:]:
        report.add("E0104", "`language` is set twice in one file", again.span,
                   notes=[Note(message="first here", span=found[0].span)], help="keep one of the two")  # fmt: skip


# ------------------------------------------------------------------------------------------------------- settings


def _few(settings: Sequence[str], report: Report) -> bool:
    """True if the command line has no more settings than a user could mean."""
    if len(settings) <= SETTINGS.most and sum(map(len, settings)) <= SETTING_BYTES.most:
        return True
    report.add(
        BYTES.code,
        f"the command line sets {len(settings):,} values in {sum(map(len, settings)):,} characters",
        None,
        help=f"{SETTINGS.most:,} and {SETTING_BYTES.most:,} are the most; write a file that imports the job",
    )
    return False


def _set(merged: Merged, source: Source, report: Report) -> None:
    """Lays one `--set` over the job."""
    compared = re.match(_COMPARED, source.text)
    if compared:
        value = parse_expression(source, report, compared.end())
        if value is not None:
            name = Span(source, compared.start(1), compared.end(1))
            path_span = Span(source, len(source.text) - len(source.text.lstrip()), compared.end(1))
            comparison = tree.Comparison(
                span=path_span.to(value.span), name=compared[1], name_span=name, value=value,
                operator=compared[2],  # type: ignore[arg-type]
            )  # fmt: skip
            merged.promises[compared[1]] = [comparison]
        return
    given = parse_setting(source, report)
    if given is None:
        return
    path, value = given.path, given.value
    if len(path) > 1:
        path = (block_meant(path[0], given.path_span, report), *path[1:])
    if given.text and _is_text(merged, path, value, given.text):
        value = tree.Text(span=given.text_span, value=given.text)
    if value is None:
        report.extend(given.mistakes.found)
        return
    merged.spoken.update(name.name for name in names_in(value))
    merged.sweeps.pop(path, None)
    put(merged, path, Setting(name=given.path_span, value=value), report)


def _targets(merged: Merged, path: tuple[str, ...]) -> list[Kind]:
    """Returns the kinds that the target of a setting takes; [] if it is a param or does not exist."""
    if len(path) < 2 or path[0] not in BLOCKS:
        return []
    found = next((f for f in fields(BLOCKS[path[0]]) if f.word == path[1]), None)
    if found is None:
        return []
    if len(path) == 2:
        return [found.kind]
    call = _call_at(merged, path[0], path[1], found.default)
    declared = [
        f
        for calls in CALLS.values()
        for word, declaration in calls.items()
        if word == call
        for f in fields(declaration)
        if f.word == path[2]
    ]
    return [f.kind for f in declared] or ([AnyValue()] if call in ("python", "transformers", "datasets") else [])


def _call_at(merged: Merged, block: str, name: str, default: object) -> str:
    """Returns the word of the call in a field."""
    setting = merged.fields.get((block, name))
    expr: tree.Expr | None = setting.value if setting else None
    seen: set[str] = set()
    while isinstance(expr, tree.Name) and expr.name in merged.params and expr.name not in seen:
        seen.add(expr.name)
        inner = merged.params[expr.name].setting
        expr = inner.value if inner else None
    if isinstance(expr, tree.Name | tree.CallOf):
        return expr.name
    return getattr(default, "word", "")


# A path or a name of something else, rather than an expression with a mistake: `corpus/a-b.txt`, `org/name`.
_BARE = r"[^\s()\[\]\"=,]*[/.~:*\\-][^\s()\[\]\"=,]*"


def _is_text(merged: Merged, path: tuple[str, ...], value: tree.Expr | None, text: str) -> bool:
    """True if the text of a setting is taken literally: it is no expression, and its target takes a string, or a call,
    for which a message then says how to give it the text.
    """
    if isinstance(value, tree.Name):
        return value.name not in merged.params and not _is_word(merged, path, value) and _takes_text(merged, path)
    if value is not None and not (
        isinstance(value, tree.Binary | tree.Unary) and any(n.name not in merged.params for n in names_in(value))
    ):
        return False
    if _takes_text(merged, path) or (value is None and _names_nothing(merged, path)):
        return True
    return bool(re.fullmatch(_BARE, text)) and any(accepts(kind, CallOf, ListOf) for kind in _targets(merged, path))


def _names_nothing(merged: Merged, path: tuple[str, ...]) -> bool:
    """True if the target of a setting does not exist: that is then the mistake, not the text to the right of it."""
    return path[0] not in merged.params if len(path) == 1 else not _targets(merged, path) and path[0] != "sweep"


def _takes_text(merged: Merged, path: tuple[str, ...]) -> bool:
    """True if the target of a setting takes a string. A param does if its own value is one, or if it has none."""
    if len(path) == 1:
        param = merged.params.get(path[0])
        return param is not None and (param.default is None or isinstance(param.default, tree.Text))
    return any(accepts(kind, Str, Path, Name, AnyValue) for kind in _targets(merged, path))


def _is_word(merged: Merged, path: tuple[str, ...], name: tree.Name) -> bool:
    """True if a bare name means a word of the target, and not text."""
    kinds = _targets(merged, path)
    if len(path) == 1:
        # A param without a value may stand for a word as well as for text: `--set mode=bf16`.
        param = merged.params.get(path[0])
        if param is None or param.default is not None:
            return param is None
        return any(name.name in words_in(f.kind) for block in BLOCKS.values() for f in fields(block))
    return any(name.name in words_in(kind) or isinstance(kind, ListOf) for kind in kinds)
