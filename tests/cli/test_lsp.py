"""`dslc lsp`, asked as an editor asks it: a real server process, JSON-RPC over its standard streams."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.lsp_client import LspClient
from helpers.paths import EXAMPLES

from dslc.commands import lsp
from dslc.terminal.exit_codes import CommandFailedError

JOB = """\
param rate = 0.1

model {
  network = [flatten(), linear(32), relu(), linear(10)]
  loss = cross_entropy()
}

data {
  source = digits()
  batch = 64
}

train {
  epochs = 2
  optimizer = sgd(lr = rate)
}

devices {
  cpus = 2
}
"""
WHOLE = {"start": {"line": 0, "character": 0}, "end": {"line": 999, "character": 0}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("lsp") / "jobs"))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[LspClient]:
    """A server that all tests of this file ask."""
    client = LspClient(folder, {"workspace": {"inlayHint": {"refreshSupport": True}}})
    yield client
    assert client.close() == 0


def test_mistakes_are_published_with_the_version_of_the_text(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "typed.plt", JOB)
    assert client.diagnostics(uri, 1) == []
    version = client.replace(uri, "batch = 64", "bach = 64")
    (first, *_) = client.diagnostics(uri, version)
    assert (first["code"], first["source"], first["severity"]) == ("E0107", "dslc", 1)
    assert first["range"] == client.range(uri, *place(client, uri, "bach"))
    assert "batch" in first["message"]


def test_a_half_written_file_has_its_mistakes_and_keeps_the_rest(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "half.plt", JOB.replace("sgd(lr = rate)\n}", "sgd(lr = ra"))
    codes = [d["code"] for d in client.diagnostics(uri, 1)]
    assert codes and all(code.startswith("E00") for code in codes), codes
    assert "Takes a whole number" in client.ask("hover", uri, "batc")["contents"]["value"]


def test_the_analysis_follows_and_stays_while_the_next_is_made(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "analysed.plt", JOB.replace("batch = 64", "batch = 63"))
    assert client.diagnostics(uri, 1) == []
    (found,) = client.diagnostics(uri, 1)
    assert found["code"] == "E0301"
    version = client.replace(uri, "epochs = 2", "epochs = 3")  # in another block
    assert [d["code"] for d in client.diagnostics(uri, version)] == ["E0301"]
    version = client.replace(uri, "batch = 63", "batch = 64")
    assert client.diagnostics(uri, version) == []
    assert client.diagnostics(uri, version) == []


def test_an_analysis_is_cancelled_by_the_next_change(client: LspClient, folder: Path) -> None:
    """The jobs take seconds to analyse. Only the last text has an analysis, and the worker lives on."""
    text = JOB + "sweep {\n  train.optimizer.lr = [0.1]\n  data.batch = [64]\n}\n"
    uri = client.open(folder / "swept.plt", text)
    values = [f"[{', '.join(str(0.1 + n * 0.001 + m) for n in range(200))}]" for m in range(3)]
    for before, after in zip(["[0.1]", *values], values, strict=False):
        version = client.replace(uri, before, after)
        client.diagnostics(uri, version)
    version = client.replace(uri, values[-1], "[0.1]")
    assert client.diagnostics(uri, version, analysed=True) == []


def test_completion_names_fields_calls_and_arguments(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "completed.plt", JOB)
    client.replace(uri, "epochs = 2", "epochs = 2\n  prec")
    items = {item["label"]: item for item in client.ask("completion", uri, "\n  prec")}
    assert "precision" in items and "epochs" not in items and "batch" not in items
    edit = items["precision"]["textEdit"]
    assert edit["newText"] == "precision = $0"
    assert edit["range"] == client.range(uri, *place(client, uri, "prec"))
    assert "`train.precision`" in items["precision"]["documentation"]["value"]
    assert [item["label"] for item in client.ask("completion", uri, "optimizer = sgd(lr = rate, ".rstrip(", "))]
    assert "rate" in [item["label"] for item in client.ask("completion", uri, "sgd(lr = ra")]


def test_hover_documents_a_field_and_gives_its_value(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "hovered.plt", JOB)
    text = client.ask("hover", uri, "epoch")["contents"]["value"]
    assert "`train.epochs`" in text and "Value: `2 epochs`, from hovered.plt:14." in text
    assert client.ask("hover", uri, "train ") is None


def test_hover_and_hints_show_the_cost_of_layers_and_ranks(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "costs.plt", JOB)
    client.diagnostics(uri, 1, analysed=True)
    client.wait_for("workspace/inlayHint/refresh")
    text = client.ask("hover", uri, "linear(32), relu(), lin")["contents"]["value"]
    assert "Shape: 32 → 10. Parameters: 330." in text and "FLOP forward" in text
    labels = [hint["label"] for hint in client.ask_all("inlayHint", uri, range=WHOLE)]
    assert labels[:4] == ["→ 64", "→ 32", "→ 32", "→ 10"]
    assert any(label.startswith("32 samples a rank") for label in labels)
    assert any(label.startswith("peak ") for label in labels)


def place(client: LspClient, uri: str, text: str) -> tuple[int, int]:
    start = client.texts[uri][1].index(text)
    return start, start + len(text)


def test_the_outline_has_blocks_and_entries_also_of_a_broken_text(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "outline.plt", JOB.replace("sgd(lr = rate)\n}", "sgd(lr = "))
    symbols = client.ask_all("documentSymbol", uri)
    assert [symbol["name"] for symbol in symbols] == ["rate", "model", "data", "train", "devices"]
    assert [(child["name"], child["detail"]) for child in symbols[2]["children"]] == [
        ("source", "digits()"),
        ("batch", "64"),
    ]
    assert symbols[2]["selectionRange"] == client.range(uri, *place(client, uri, "data"))


def test_blocks_and_lists_fold(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "digits.plt")
    ranges = [(fold["startLine"], fold["endLine"]) for fold in client.ask_all("foldingRange", uri)]
    lines = client.texts[uri][1].splitlines()
    assert (lines.index("  network = ["), lines.index("  ]") - 1) in ranges
    assert (lines.index("data {"), lines.index("data {") + 3) in ranges


def test_tokens_have_types_and_relative_positions(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "coloured.plt", "# 😀\nparam rate = 0.1 # µ\ntrain { optimizer = sgd(lr = rate")
    legend = client.capabilities["semanticTokensProvider"]["legend"]["tokenTypes"]
    data = client.ask_all("semanticTokens/full", uri)["data"]
    found, line, column = [], 0, 0
    for at in range(0, len(data), 5):
        down, across, length, kind, modifiers = data[at : at + 5]
        line, column = line + down, across + (0 if down else column)
        found.append((line, column, length, legend[kind], modifiers))
    assert found[:4] == [
        (0, 0, 4, "comment", 0),  # an emoji counts two
        (1, 0, 5, "keyword", 0),
        (1, 6, 4, "variable", 1),
        (1, 11, 1, "operator", 0),
    ]
    assert [kind for at, _, _, kind, _ in found if at == 2] == [
        "namespace", "property", "operator", "function", "parameter", "operator", "variable",
    ]  # fmt: skip


def test_formatting_is_that_of_fmt_and_spares_a_broken_text(client: LspClient, folder: Path) -> None:
    options = {"options": {"tabSize": 2, "insertSpaces": True}}
    uri = client.open(folder / "laid_out.plt", JOB)
    edits = client.ask_all("formatting", uri, **options)
    text = client.texts[uri][1]
    for edit in edits:
        text = apply_edit(text, edit)
    assert text == JOB.replace("loss = cross", "loss    = cross").replace("batch = 64", "batch  = 64").replace(
        "epochs = 2", "epochs    = 2"
    )
    uri = client.open(folder / "not_laid_out.plt", JOB.replace("sgd(", "sgd("[:-1]))
    assert client.ask_all("formatting", uri, **options) == []


def test_definition_finds_params_imports_and_functions_without_importing_them(client: LspClient, folder: Path) -> None:
    (folder / "base.plt").write_text("param rate = 0.3\n")
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (folder / "mine" / "losses.py").write_text("raise SystemExit('imported')\n\nclass Loss: ...\n\ndef µ(): ...\n")
    text = JOB.replace("param rate = 0.1", 'import "base.plt"').replace("cross_entropy()", 'python("mine.losses:Loss")')
    uri = client.open(folder / "pointed.plt", text)
    (place_of_param,) = client.ask("definition", uri, "lr = ra")
    assert place_of_param["uri"] == (folder / "base.plt").as_uri()
    assert place_of_param["range"]["start"] == {"line": 0, "character": 6}
    (place_of_import,) = client.ask("definition", uri, 'import "ba')
    assert place_of_import["uri"] == (folder / "base.plt").as_uri()
    (place_of_class,) = client.ask("definition", uri, "mine.los")
    assert place_of_class["uri"] == (folder / "mine" / "losses.py").as_uri()
    assert place_of_class["range"]["start"] == {"line": 2, "character": 6}
    assert client.ask("definition", uri, "epoch") == []


def test_rename_changes_the_file_its_imports_and_what_imports_it(client: LspClient, folder: Path) -> None:
    (folder / "shared.plt").write_text("param size = 64\ndata {\n  batch = size\n}\n")
    (folder / "first.plt").write_text('import "shared.plt"\ntrain {\n  steps = size\n}\n')
    (folder / "second.plt").write_text("param size = 2\ntrain {\n  steps = size\n}\n")
    uri = client.open(folder / "shared.plt")
    changes = client.ask("rename", uri, "param si", newName="batch_size")["changes"]
    counts = {Path(name).name: len(edits) for name, edits in changes.items()}
    assert counts == {"shared.plt": 2, "first.plt": 1}
    assert {edit["newText"] for edits in changes.values() for edit in edits} == {"batch_size"}
    importing = client.open(folder / "first.plt")
    changes = client.ask("rename", importing, "steps = si", newName="batch_size")["changes"]
    assert {Path(name).name: len(edits) for name, edits in changes.items()} == counts
    uses = client.ask("references", uri, "batch = si", context={"includeDeclaration": True})
    assert len(uses) == 3


@pytest.mark.parametrize(
    ("mark", "name", "reason"),
    (
        ("optimi", "momentum", "only params can be renamed"),
        ("param ra", "two words", "is no name of a param"),
        ("param ra", "none", "is no name of a param"),
    ),
)
def test_a_rename_that_cannot_be_says_why(client: LspClient, folder: Path, mark: str, name: str, reason: str) -> None:
    uri = client.open(folder / "kept.plt", JOB)
    offset = JOB.index(mark) + len(mark)
    params = {"textDocument": {"uri": uri}, "position": client.position(uri, offset), "newName": name}
    assert reason in client.exchange("textDocument/rename", params)["error"]["message"]


def test_a_mistake_of_an_imported_file_is_shown_at_the_import(client: LspClient, folder: Path) -> None:
    (folder / "faulty.plt").write_text("data {\n  bach = 64\n}\n")
    uri = client.open(folder / "importing.plt", 'import "faulty.plt"\n' + JOB)
    (found,) = client.diagnostics(uri, 1, analysed=True)
    assert found["range"]["start"] == {"line": 0, "character": 0}
    (related,) = found["relatedInformation"]
    assert related["location"]["uri"] == (folder / "faulty.plt").as_uri()
    assert related["location"]["range"]["start"] == {"line": 1, "character": 2}
    params = {"range": found["range"], "context": {"diagnostics": [found]}}
    (action,) = client.ask_all("codeAction", uri, **params)
    (edit,) = action["edit"]["changes"][(folder / "faulty.plt").as_uri()]
    assert apply_edit("data {\n  bach = 64\n}\n", edit) == "data {\n  batch = 64\n}\n"
    other = client.open(folder / "faulty.plt", "data {\n  bach = 32\n}\n")
    assert client.ask_all("codeAction", uri, **params) == [], "the editor has another text of the file"
    (folder / "faulty.plt").write_text("data {\n  workers = 0\n}\n")
    client.notify("textDocument/didSave", {"textDocument": {"uri": other}})
    assert client.diagnostics(uri, 1) == []


def test_a_help_is_a_quick_fix(client: LspClient, folder: Path) -> None:
    uri = client.open(folder / "fixed.plt", JOB.replace("batch = 64", "bach = 64").replace("epochs = 2", "epoch = 2"))
    (first, wrong) = client.diagnostics(uri, 1)
    actions = client.ask_all("codeAction", uri, range=first["range"], context={"diagnostics": [first]})
    assert [action["diagnostics"][0]["range"] for action in actions] == [first["range"]]
    params = {"range": wrong["range"], "context": {"diagnostics": [wrong]}}
    (action,) = client.ask_all("codeAction", uri, **params)
    assert action["kind"] == "quickfix" and action["diagnostics"][0]["code"] == wrong["code"]
    text = client.texts[uri][1]
    for edit in reversed(action["edit"]["changes"][uri]):
        text = apply_edit(text, edit)
    assert text == JOB.replace("batch = 64", "bach = 64"), "the mistake in another place stays"


def test_a_help_of_the_analysis_is_a_quick_fix(client: LspClient, folder: Path) -> None:
    text = JOB.replace("batch = 64", "batch = 63")
    uri = client.open(folder / "divided.plt", text)
    (wrong,) = client.diagnostics(uri, 1, analysed=True)
    actions = client.ask_all("codeAction", uri, range=wrong["range"], context={"diagnostics": [wrong]})
    assert [action["title"] for action in actions] == ["set `data.batch` to `62`", "set `data.batch` to `64`"]


def apply_edit(text: str, edit: dict[str, Any]) -> str:
    starts = [0, *(at + 1 for at, char in enumerate(text) if char == "\n")]
    start, end = (starts[edit["range"][key]["line"]] + edit["range"][key]["character"] for key in ("start", "end"))
    return text[:start] + edit["newText"] + text[end:]


def test_no_module_of_the_folder_runs(tmp_path: Path) -> None:
    """One with the name of a library was imported in its place."""
    (tmp_path / "lark.py").write_text(
        "import sys\n\nopen('imported', 'w').close()\nsys.path.pop(0)\ndel sys.modules['lark']\nimport lark\n"
    )
    client = LspClient(tmp_path)
    uri = client.open(tmp_path / "job.plt", JOB.replace("batch = 64", "batch = 63"))
    assert [found["code"] for found in client.diagnostics(uri, 1, analysed=True)] == ["E0301"]
    assert client.close() == 0 and not (tmp_path / "imported").exists()


def test_without_pygls_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygls", None)  # as if it were not installed
    with pytest.raises(CommandFailedError, match=r"pip install 'dslc\[lsp\]'"):
        lsp.main(argparse.Namespace(stdio=False))
