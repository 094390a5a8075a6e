"""Reads keys of one file and records the outcome of each, so that no key is passed over."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import Draft
from dslc.conversion.key_table import KeyTable, KeyVerdict, is_off
from dslc.dsl.diagnostics import Note
from dslc.dsl.json_value import Json
from dslc.dsl.language.suggest import did_you_mean

AUTO = "auto"


class KeyReader:
    """The keys of a file of one tool. `autos` gives the value that replaces `auto`, and its key in another file."""

    def __init__(
        self,
        tool: str,
        file: ConfigFile,
        draft: Draft,
        table: KeyTable,
        *,
        autos: Mapping[str, tuple[Json, str]] | None = None,
        auto_help: str = "",
        script: str = "",
        extension: str = "",
    ) -> None:
        """`script` is why an unknown key is no mistake: it may belong to the program that reads the file. `extension`
        is the code that adds keys to the tool's, which the file names.
        """
        self.tool, self.file, self.draft, self.table = tool, file, draft, table
        self._autos = autos or {}
        self._auto_help, self._script, self._extension = auto_help, script, extension
        self._outcomes: dict[str, KeyVerdict] = {}
        self._refused: set[str] = set()
        self.defaults: list[str] = []
        fields = (f"{section}.{key}".lstrip(".") for section, keys in table.sections.items() for key in keys)
        self._known: set[str] = {*table.implied, *table.named}
        self._fields = frozenset(fields)
        self._unknown: set[str] = set()

    # ------------------------------------------------------------------------------------------------ values

    def has(self, path: str) -> bool:
        """True if the file has the key with a value other than null."""
        return self.file.value(path) is not None

    def value(self, path: str) -> Json:
        """Returns the value of a key; None if it is absent, or `auto` that nothing resolves."""
        self._known.add(path)
        value = self.file.value(path)
        if not is_auto(value):
            return value
        if path in self._autos:
            return self._autos[path][0]
        if path not in self._outcomes:
            self._record(KeyVerdict(path, "named", f"`auto` is resolved elsewhere: {self._auto_help}"))
        return None

    def number(self, path: str, *, least: float = 0) -> float | int | None:
        """Returns a finite number of at least `least`; reports any other value."""
        value = self._numeric(path, f"a number of at least {least:g}")
        if value is not None and value < least:
            self._refuse(path, f"a number of at least {least:g}")
            return None
        return value

    def whole_number(self, path: str, *, least: int = 1) -> int | None:
        """Returns a whole number of at least `least`; reports any other value."""
        value = self._numeric(path, f"a whole number of at least {least}")
        if value is None:
            return None
        if value != int(value) or not least <= value < 10**15:
            self._refuse(path, f"a whole number of at least {least}")
            return None
        return int(value)

    def _numeric(self, path: str, wanted: str) -> float | int | None:
        """Returns a finite number, also one that YAML reads as text, such as `5e-5`."""
        value = self.value(path)
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[\d._]+(?:[eE][+-]?\d+)?\s*", value):
            with contextlib.suppress(ValueError):  # reported below
                value = float(value) if re.search(r"[.eE]", value) else int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            self._refuse(path, wanted)
            return None
        return value

    def flag(self, path: str) -> bool | None:
        """Returns true or false, also for the words that YAML files use for them."""
        value = self.value(path)
        if value is None or isinstance(value, bool):
            return value
        words = {
            "true": True,
            "yes": True,
            "on": True,
            "1": True,
            "false": False,
            "no": False,
            "off": False,
            "0": False,
        }
        if str(value).lower() in words:
            return words[str(value).lower()]
        self._refuse(path, "true or false")
        return None

    def text(self, path: str) -> str | None:
        """Returns a text; numbers and booleans are text in YAML that forgets its quotes."""
        value = self.value(path)
        if value is None:
            return None
        if isinstance(value, str | bool | int | float):
            return str(value)
        self._refuse(path, "text")
        return None

    # ------------------------------------------------------------------------------------------------ outcomes

    def carry(self, path: str, text: str) -> None:
        """Records that a setting of the job states the key, if the file has it."""
        value = self.file.value(path)
        if value is None or path in self._refused:
            return
        if is_auto(value):
            if path not in self._autos:
                return
            text = f"{text}, from {self._autos[path][1]}"
        self._record(KeyVerdict(path, "carried", text))

    def put(self, path: str, setting: str, text: str) -> None:
        """Sets a field of the job, and records that it states the key."""
        self.draft.set(setting, text, path)
        self.carry(path, f"{setting} = {text}")

    def put_number(self, path: str, setting: str, *, least: int = 1) -> None:
        """Sets a field of the job to a whole number, if the file states one."""
        number = self.whole_number(path, least=least)
        if number is not None:
            self.put(path, setting, str(number))

    def put_switch(self, path: str, setting: str, text: str, reason: str) -> None:
        """Sets a field of the job if the file says true. `reason` is why it needs no setting otherwise."""
        if self.flag(path):
            self.put(path, setting, text)
        else:
            self.imply(path, reason)

    def put_axis(self, path: str, axis: str, *, least: int = 1) -> None:
        """Sets the size of an axis of the job."""
        size = self.whole_number(path, least=least)
        if size and size > 1:
            self.draft.axes[axis] = size
            self.put(path, f"parallelism.{axis}", str(size))
        else:
            self.imply(path, f"`parallelism.{axis}` is 1 by default")

    def default(self, setting: str, text: str, name: str) -> None:
        """Sets a field of the job to a default of the tool, which the file does not state."""
        self.draft.set(setting, text, f"{name}, the default of {self.tool}")
        self.defaults.append(f"`{name}`")

    def imply(self, path: str, reason: str, *, auto: bool = False) -> None:
        """Records what does the key without a setting; with `auto`, also for an `auto` that no file resolves."""
        value = self.file.value(path)
        if value is None or path in self._refused or (is_auto(value) and path not in self._autos and not auto):
            return
        self._record(KeyVerdict(path, "implied", reason))

    def name(self, path: str, reason: str) -> None:
        """Records why no setting of a job states the key."""
        if self.file.value(path) is not None and path not in self._refused:
            self._record(KeyVerdict(path, "named", reason))

    def contradict(self, path: str, message: str, help: str, *, other: str = "") -> None:
        """Reports settings that contradict each other, at the first key and with the place of the other one."""
        place = self.file.place(other) if other else None
        notes = (Note(f"`{other}` is set here", place),) if place else ()
        self.draft.report.add("E1103", message, self.file.place(path), notes=notes, help=help)

    def warn_ignored(self, path: str, message: str, help: str) -> None:
        """Reports a key that the tool itself ignores."""
        self.draft.report.add("W1104", message, self.file.place(path), help=help)

    def note_default(self, path: str, message: str, help: str) -> None:
        """Reports a default of the tool that surprises, or that differs here."""
        self.draft.report.add("N1105", message, self.file.place(path), help=help)

    def warn_refused(self, path: str, wanted: str) -> None:
        """Reports a value that the tool refuses."""
        self.name(path, f"{self.tool} refuses this value")
        self.warn_ignored(path, f"`{path}`: {self.tool} refuses this value, and takes {wanted}", f"write {wanted}")

    def finish(self, *, refuses: Callable[[str], bool] = lambda _: False) -> None:
        """Records the outcome of the keys that no reader has taken. `refuses` tells which unknown keys the tool
        refuses; it ignores the rest.
        """
        if self.defaults:
            self.draft.report.add(
                "N1105",
                f"{self.file.name} leaves {', '.join(self.defaults)} to {self.tool}, whose defaults the job states",
                None,
                help="nothing has to be changed",
            )
        verdicts = []
        for key, value in self.file.values():
            verdict = self._outcomes.get(key) or self._above(key) or self.table.verdict(key, value)
            if value is not None and not self._extension:
                self._check_name(key)
            if verdict is None and (value is None or (isinstance(value, dict) and not value)):
                verdict = KeyVerdict(key, "implied", "it states nothing")
            verdicts.append(verdict or self._drop(key, refuses(key)))
        for section, reason in self.table.removed.items():
            if not is_off(self.file.value(section)):
                self.warn_ignored(
                    section,
                    f"{self.tool} refuses `{section}` in its newest versions: {reason}",
                    "remove it, or write what takes its place",
                )
        self.draft.verdicts.setdefault(self.file.name, []).extend(verdicts)

    def _check_name(self, key: str) -> None:
        """Reports a key that the sections of the tool do not have."""
        part = self.table.unknown_part(key)
        if not part or part in self._unknown:
            return
        self._unknown.add(part)
        tool = f"{self.tool} {self.table.version}"
        help = did_you_mean(part, self._fields) or "remove the key, or look up its name"
        self.warn_ignored(part, f"`{part}`: {tool} has no such key, and {self.table.unknown} it", help)

    def _above(self, key: str) -> KeyVerdict | None:
        """Returns the outcome of a section that was taken as a whole."""
        path = key.rpartition(".")[0]
        while path:
            if path in self._outcomes:
                return KeyVerdict(key, self._outcomes[path].outcome, self._outcomes[path].text)
            path = path.rpartition(".")[0]
        return None

    def _drop(self, key: str, refused: bool) -> KeyVerdict:
        """Reports a key that the tool does not use, and returns its outcome."""
        if key in self._known:
            return KeyVerdict(key, "named", "another key of the file decides it")
        if self._extension:
            return KeyVerdict(key, "named", f"it belongs to {self._extension}")
        if self.table.unknown_part(key):
            return KeyVerdict(key, "named", f"{self.tool} {self.table.version} has no such key")
        if any(key.partition(".")[0] in keys for keys in self.table.plugins.values()):
            return KeyVerdict(key, "named", f"it belongs to a plugin of {self.tool}")
        if key in self._fields:
            return KeyVerdict(key, "named", "a job has no setting that does the same")
        section, does = key, "refuses" if refused else "ignores"
        while section and section not in self.table.ignored:
            section = section.rpartition(".")[0]
        meant = did_you_mean(key, self._known)
        if self._script and not section and not meant:
            return KeyVerdict(key, "named", self._script)
        if section:
            reason, help = f"{self.tool} {does} it: {self.table.ignored[section]}", "remove the key"
        else:
            reason = f"{self.tool} has no such key, and {does} it"
            help = meant or "remove the key, or look up its name"
        self.warn_ignored(key, f"`{key}`: {reason}", help)
        return KeyVerdict(key, "named", reason)

    def _refuse(self, path: str, wanted: str) -> None:
        if path in self._refused:
            return
        self._refused.add(path)
        self._record(KeyVerdict(path, "named", f"its value is not {wanted}"))
        self.draft.report.add("E1103", f"`{path}` takes {wanted}", self.file.place(path), help=f"write {wanted}")

    def _record(self, verdict: KeyVerdict) -> None:
        self._outcomes[verdict.key] = verdict


def is_auto(value: Json) -> bool:
    return isinstance(value, str) and value.lower() == AUTO
