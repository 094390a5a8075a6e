"""A plan file, `plan.json`: the plan graph, and what it rests on.

A file holds the graph, from which the programs of the ranks are emitted and a view is computed. It also holds the text
of the job with its imports and settings, and the facts that were found. `hash` is the identity of the plan, `checksum`
the checksum of the whole file. `folder` leads from the file to the job's folder, from which all relative paths start:
the file that `dslc plan --json` prints lies beside its job.

Contract: `read_plan(text).text() == text`. The graph that was read and the graph that was written emit the same
programs. A file with other contents than its checksum was made of, or in another format, is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.compiler.graph.plan_view import plan_view
from dslc.compiler.graph.stored import plan_hash, restore, store
from dslc.compiler.graph.verify import Unsound, verify
from dslc.compiler.ir import program as p
from dslc.compiler.ir.codec import DecodeError, from_json, parse, to_json
from dslc.compiler.ir.plan import PlanView
from dslc.compiler.plan_facts import PlanFacts
from dslc.dsl.record import Record, record

FORMAT = 6  # 1 had no graph, 2 also what was shown, 3 one class for all actions, 4 no times of stages, 5 other names
_LINES = {"graph": ("nodes", "edges"), "facts": ("files",), "source": ("files",)}  # written one item a line


class PlanFileError(Exception):
    """A plan file that cannot be used; `code` is the diagnostic's code, `help` the remedy."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code, self.help = code, help


@record
class JobText(Record):
    """The job: its texts by their paths from its folder, the main one last, and what `--set` laid over them, whose
    paths start in the folder `beside`.
    """

    files: tuple[tuple[str, str], ...]
    settings: tuple[str, ...] = ()
    beside: str = "."

    @property
    def name(self) -> str:
        return self.files[-1][0]


@record
class PlanFile(Record):
    """A plan, ready to be written, shown, or run."""

    graph: PlanGraph
    source: JobText
    facts: PlanFacts
    dslc: str  # the version that made it
    folder: str = "."

    @cached_property
    def plan(self) -> PlanView:
        """The plan as it is shown."""
        return plan_view(self.graph)

    @property
    def complete(self) -> bool:
        """True if all sizes are known that a run needs."""
        return self.graph.find(p.Training) is not None

    def text(self) -> str:
        """The bytes of the file."""
        data = {
            "format": FORMAT,
            "hash": plan_hash(self.graph),
            "dslc": self.dslc,
            "folder": self.folder,
            "source": to_json(self.source),
            "facts": to_json(self.facts),
            "graph": store(self.graph),
        }
        return _laid_out(data | {"checksum": _checksum(data)})


def read_plan(text: str) -> PlanFile:
    """Returns the plan of a file. Raises PlanFileError."""
    try:
        data = parse(text)
        if not isinstance(data, dict) or not isinstance(data.get("graph"), dict) or "hash" not in data:
            raise PlanFileError("E1001", "it is not a plan", "`dslc plan JOB --json` writes one")
        version = data.get("format", 1)
        if version != FORMAT:
            raise PlanFileError(
                "E1003",
                f"it is in format {version!r}, and this dslc reads format {FORMAT}",
                "make it anew with `dslc plan JOB --json`, or run it with the dslc that made it",
            )
        plan = _parse_plan_file(data)
    except DecodeError as error:
        raise PlanFileError("E1001", f"it is not a plan: {error}", "`dslc plan JOB --json` writes one") from None
    if data.get("checksum") != _checksum(data) or data["hash"] != plan_hash(plan.graph):
        raise PlanFileError(
            "E1002",
            f"its contents are not those of plan {data['hash']}: something in it was changed",
            "change the job, and make the plan anew with `dslc plan JOB --json`",
        )
    try:
        verify(plan.graph)
    except Unsound as error:
        raise PlanFileError(
            "E1002", f"its graph is not sound: {error}", "make it anew with `dslc plan JOB --json`"
        ) from None
    return plan


def _parse_plan_file(data: Mapping[str, Any]) -> PlanFile:
    texts = {name: data[name] for name in ("dslc", "folder") if isinstance(data.get(name), str)}
    if len(texts) < 2:
        raise DecodeError("`dslc` and `folder` are texts")
    source = from_json(JobText, data.get("source"))
    if not source.files:
        raise DecodeError("`source.files` is empty")
    return PlanFile(
        graph=restore(data.get("graph")), source=source, facts=from_json(PlanFacts, data.get("facts")), **texts
    )


def _checksum(data: Mapping[str, Any]) -> str:
    """Returns the SHA-256 over the contents but the checksum itself, however they are laid out."""
    contents = {name: value for name, value in data.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _laid_out(data: Mapping[str, Any]) -> str:
    """Returns JSON with sorted keys: what is shown is indented; of the rest, a node, an edge or a fact is a line."""
    parts = {name: json.dumps(value, sort_keys=True, indent=1).replace("\n", "\n ") for name, value in data.items()}
    for name, lists in _LINES.items():
        inner = {
            key: _lines(value) if key in lists and value else json.dumps(value, sort_keys=True)
            for key, value in data[name].items()
        }
        parts[name] = "{\n  " + ",\n  ".join(f'"{key}": {inner[key]}' for key in sorted(inner)) + "\n }"
    return "{\n " + ",\n ".join(f'"{name}": {parts[name]}' for name in sorted(parts)) + "\n}\n"


def _lines(items: Sequence[object]) -> str:
    return "[\n   " + ",\n   ".join(json.dumps(item, sort_keys=True) for item in items) + "\n  ]"
