"""Notebooks: what displays itself, the cell magic, the progress of a training, and the notebook of the examples."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from IPython.core.interactiveshell import InteractiveShell

import dslc
from dslc.python_api.functions import LiveProgress, RunResult, Verification, notebook_output
from dslc.python_api.html_views import loss_curve
from dslc.python_api.ipython_extension import MagicUsageError, parse_line
from dslc.runtime.process.records import NOTES

JOB = """
model { network = [linear(8), relu(), linear(4)], loss = cross_entropy() }
data { source = synthetic(samples = 48, shape = [6], classes = 4), batch = 8, validation = 8/48 }
devices { cpus = 2 }
train { steps = 4, optimizer = sgd(lr = 0.1) }
"""
RECORDS = [
    {"step": 1, "split": "train", "loss": 2.0, "seconds": 0.1},
    {"step": 2, "split": "train", "loss": None, "seconds": 0.2},
    {"step": 3, "split": "train", "loss": 1.0, "seconds": 0.3},
    {"step": 3, "split": "<clean>", "loss": 1.5, "accuracy": 0.5, "seconds": 0.3},
]


@pytest.fixture
def shell() -> InteractiveShell:
    made = InteractiveShell()
    made.run_line_magic("load_ext", "dslc")
    return made


def test_a_plan_is_its_diagram_with_its_text(shell: InteractiveShell) -> None:
    compiled = shell.run_cell_magic("plt", "--set train.steps=6 --name kept", JOB)
    assert shell.user_ns["kept"] is compiled and compiled.analysis.job.train.steps == 6
    for shown in (compiled, compiled.plan):
        data, _ = shell.display_formatter.format(shown)
        assert data["text/html"].startswith("<div") and "</svg></div><details>" in data["text/html"]
        assert "Topology" in data["text/plain"] and "2 CPUs" in data["text/html"]


def test_mistakes_are_shown_with_their_lines(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = shell.run_cell_magic("plt", "check", JOB.replace("relu()", "relo()"))
    page = mistakes._repr_html_()
    assert isinstance(mistakes, tuple) and "relo()" in page and "<pre style=" in page and "did you mean" in page
    assert "no mistake" in dslc.check(JOB)._repr_html_()  # type: ignore[attr-defined]
    shell.run_cell("get_ipython().run_cell_magic('plt', '', 'model { network = [relo()] }')")
    said = capsys.readouterr().out
    assert "relo()" in said and "Traceback" not in said


def test_a_wrong_option_is_refused() -> None:
    assert vars(parse_line("")) == {"action": "plan", "settings": [], "out": None, "name": None}
    with pytest.raises(MagicUsageError, match=r"invalid choice: 'trains'.*\nusage: %%plt"):
        parse_line("trains")


def test_a_run_is_its_last_metrics_and_its_curve() -> None:
    page = RunResult(folder="runs/<a>", metrics=tuple(RECORDS), module=None, stopped_at=None)._repr_html_()  # type: ignore[arg-type]
    rows = ET.fromstring(f"<page>{page}</page>")
    cells = [[cell.text for cell in row] for row in rows.iterfind("table/tbody/tr")]
    assert cells == [["train", "3", "1", "–"], ["<clean>", "3", "1.5", "0.5"]]
    lines = [line.get("points") for line in rows.iter("{http://www.w3.org/2000/svg}polyline")]
    assert lines == ["44.0,24.0 476.0,176.0", "476.0,100.0"]
    assert loss_curve(RECORDS[:1]) == "" and rows.findtext("p/code") == "runs/<a>"


def test_the_comparison_of_a_verification_is_its_text(shell: InteractiveShell) -> None:
    data, _ = shell.display_formatter.format(Verification(holds=True, text="equal"))
    assert data["text/plain"] == "equal"


def test_progress_replaces_what_it_showed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    (tmp_path / "logs").mkdir()
    (tmp_path / NOTES).write_text("resumes after step 0\n")
    progress = LiveProgress(pages.append, 4, str(tmp_path))
    for record in RECORDS:
        progress.record(record)
    progress.close("done")
    assert 'value="1" max="4"' in pages[0] and 'value="3" max="4"' in pages[-1] and "done" in pages[-1]
    assert "resumes after step 0" in pages[-1] and "&lt;clean&gt;: loss 1.5" in pages[-1] and "<svg" in pages[-1]
    assert notebook_output() is None  # a shell without a kernel

    class Kernel:
        kernel = True

    monkeypatch.setattr("IPython.get_ipython", Kernel)
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda first, display_id: Handle(shown))
    update = notebook_output()
    assert update is not None
    update("<b>1</b>")
    assert shown[0].data == "<b>1</b>"


class Handle:
    """The handle that IPython's `display` returns for an output that can be replaced."""

    def __init__(self, shown: list[Any]) -> None:
        self._shown = shown

    def update(self, page: Any) -> None:
        self._shown.append(page)


@pytest.mark.slow
def test_the_notebook_of_the_examples_runs(tmp_path: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pages = [output.data.get("text/html", "") for output in outputs if output.output_type != "stream"]
    assert sum("</svg></div><details>" in page for page in pages) == 2 and any("E0301" in page for page in pages)
    (progress,) = [page for page in pages if "<progress" in page]
    assert 'value="20" max="20"' in progress and "done" in progress and "<polyline" in progress
    assert not any(output.output_type == "stream" for output in outputs)
