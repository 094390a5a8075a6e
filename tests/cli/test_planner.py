"""The planner of a browser tab: its path is free of torch, and its answers are those of the command.

Pyodide runs under Node here, with the files that `make docs` puts beside the page, once for all jobs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
from helpers.browser import needs_chromium
from helpers.commands import dslc
from helpers.devtools import Browser
from helpers.paths import EXAMPLES, ROOT, TESTS

from docs.planner_site import FailedToolError, MissingToolError, install_pyodide, planner_files
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.editor.edits import with_fields
from dslc.jobs.check_job import check_one
from dslc.planner.answers import choose_table, edit, page, plan, summary

JOBS = sorted(path.name for path in EXAMPLES.glob("*.plt"))
CONVERSATIONS = {"chat.plt", "dpo.plt"}  # a tokenizer of transformers reads their data
TSC = shutil.which("tsc")
BAD = sorted(path.name for path in (TESTS / "bad").glob("*.plt"))[::3]  # test_bad_jobs.py has all

# Everything that a browser lacks.
WITHOUT_TORCH = """
import importlib.abc, json, sys

LACKING = {"torch", "numpy", "transformers", "safetensors", "PIL", "tensorboard", "cloudpickle", "google", "yaml",
           "resvg_py", "shtab", "fcntl", "resource", "multiprocessing"}

class Lacking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in LACKING or name.startswith("dslc.runtime"):
            raise ModuleNotFoundError(f"a browser lacks {name}")

sys.meta_path.insert(0, Lacking())
from dslc.planner import answers

jobs, choosing = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for name in jobs:
    with open(name) as file:
        text = file.read()
    edit = json.loads(answers.edit(text, name))
    assert edit["status"].startswith("good"), (name, edit["diagnostics"])
    assert json.loads(answers.plan(text, name)) and answers.summary(text, name), name
    assert answers.page(text, name=name).count("<svg") == 3, name
for name in choosing:
    with open(name) as file:
        assert json.loads(answers.choose_table(file.read(), name))["rows"], name
"""


def without_torch(jobs: list[str], choosing: list[str]) -> None:
    command = [sys.executable, "-P", "-c", WITHOUT_TORCH, json.dumps(jobs), json.dumps(choosing)]
    run = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_examples_are_planned_without_torch() -> None:
    without_torch([name for name in JOBS if name not in CONVERSATIONS], ["ddp2.plt"])


@pytest.mark.long
@pytest.mark.slow
def test_plans_of_examples_are_chosen_without_torch() -> None:
    without_torch([], [name for name in JOBS if name not in CONVERSATIONS | {"elastic.plt", "cluster.plt"}])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page."""
    folder = tmp_path_factory.mktemp("planner")
    shutil.copytree(ROOT / "docs" / "planner", folder, dirs_exist_ok=True)
    try:
        for name, content in planner_files(ROOT / "build"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    except MissingToolError as error:
        pytest.skip(str(error))
    return folder


def test_an_installation_that_fails_leaves_nothing_and_is_no_missing_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    cache, npm = tmp_path / "cache", tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    with pytest.raises(MissingToolError, match=r"needs `npm`, of Node\.js 18"):
        install_pyodide(cache)
    for code, kind in (("ETARGET", FailedToolError), ("EAI_AGAIN", MissingToolError)):
        npm.write_text(f'#!/bin/sh\nfor word; do test -d "$word" && : >"$word/part"; done\necho {code} >&2\nexit 1\n')
        npm.chmod(0o755)
        with pytest.raises(kind, match=code):
            install_pyodide(cache)
        assert not list(cache.iterdir())


def ask(site: Path, folder: Path, questions: list[list[str]]) -> list[str]:
    """Returns the planner's answers under Node, where paths begin in `folder`."""
    message = json.dumps({"site": str(site), "root": str(ROOT), "folder": str(folder), "questions": questions})
    command = ["node", str(TESTS / "helpers" / "planner_under_node.mjs")]
    run = subprocess.run(command, input=message, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    answers: list[str] = json.loads(run.stdout)
    return answers


def diagnostics_of(folder: Path, jobs: list[str]) -> list[dict[str, Any]]:
    diagnostics: list[dict[str, Any]] = json.loads(dslc("check", "--format", "json", *jobs, cwd=folder).stdout)
    return diagnostics


def diagnostics_of_edits(answers: list[str]) -> list[dict[str, Any]]:
    """Returns the diagnostics of several texts without what only an editor has, their offsets."""
    return [
        {key: value for key, value in each.items() if key not in ("start", "end")}
        for answer in answers
        for each in json.loads(answer)["diagnostics"]
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_json_is_that_of_the_command(site: Path) -> None:
    jobs = [name for name in JOBS if name not in CONVERSATIONS][::2]  # each takes a second under WebAssembly
    texts = [(EXAMPLES / name).read_text() for name in jobs]
    questions = [[verb, text, name] for verb in ("edit", "plan") for name, text in zip(jobs, texts, strict=True)]
    ddp2 = (EXAMPLES / "ddp2.plt").read_text()
    more = [[verb, ddp2, "ddp2.plt"] for verb in ("summary", "choose_table")] + [["page", ddp2, "schedule", "ddp2.plt"]]
    answers = ask(site, EXAMPLES, questions + more)
    edits, plans, (lines, table, pictures) = answers[: len(jobs)], answers[len(jobs) : -3], answers[-3:]
    assert diagnostics_of_edits(edits) == diagnostics_of(EXAMPLES, jobs)
    for name, planned in zip(jobs, plans, strict=True):
        assert planned == dslc("plan", "--json", name, cwd=EXAMPLES).stdout, name
    assert lines.strip() == dslc("plan", "ddp2.plt", cwd=EXAMPLES).stdout.strip()
    choice = json.loads(table)
    assert choice == json.loads(choose_table(ddp2, "ddp2.plt"))
    expected = json.loads(dslc("choose", "--json", "ddp2.plt", cwd=EXAMPLES).stdout)
    peaks = {byte_text(each["peak_memory"]) for each in expected["plans"] if "peak_memory" in each}
    assert choice["rows"] and all(peaks & set(row["cells"]) for row in choice["rows"])
    assert pictures.count("<svg") == 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_names_the_mistakes_of_bad_jobs_as_the_command_does(site: Path) -> None:
    folder = TESTS / "bad"
    answers = ask(site, folder, [["edit", (folder / name).read_text(), name] for name in BAD])
    assert diagnostics_of_edits(answers) == diagnostics_of(folder, BAD)


def messages(edit: str) -> list[str]:
    return [each["message"] for each in json.loads(edit)["diagnostics"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_says_what_only_a_machine_with_dslc_can_look_at(site: Path) -> None:
    names = [*sorted(CONVERSATIONS), "own/own.plt"]
    chat, dpo, own = ask(site, EXAMPLES, [["edit", (EXAMPLES / name).read_text(), name] for name in names])
    assert "a browser has no library that opens `chat(…)`" in messages(chat)
    assert "a browser has no library that opens `preferences(…)`" in messages(dpo)
    assert json.loads(own)["status"].endswith("its network needs torch, which no browser has")


def test_a_chosen_plan_is_written_into_the_job() -> None:
    text = (EXAMPLES / "ddp2.plt").read_text()
    table = json.loads(choose_table(text, "ddp2.plt"))
    assert "plans" in table["count"]
    for row in table["rows"][:4]:
        assert "# " in row["text"]  # comments stay
        analysis = check_one("ddp2.plt", [], text=row["text"])[1]
        assert analysis is not None
        assert byte_text(max(cost.memory.peak for cost in analysis.costs)) in row["cells"], row


def test_a_text_is_analysed_once_for_all_that_the_page_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed = list[str]()

    def count(job: Any, *values: Any, **more: Any) -> Any:
        analysed.append(job.source.name)
        return analyse(job, *values, **more)

    monkeypatch.setattr("dslc.jobs.check_job.analyse", count)
    text = (EXAMPLES / "ddp2.plt").read_text() + "# another text than those of other tests\n"
    assert json.loads(edit(text))["status"] and summary(text) and plan(text) and page(text)
    assert analysed == ["job.plt"]


def test_fields_are_written_where_a_block_was_left_to_the_compiler() -> None:
    text = "# a\nparallelism = auto\n\nmemory {\n  recompute = full  # b\n  limit     = 1GB\n}\n"
    values = {"parallelism.data": "2", "parallelism.zero": "3", "memory.recompute": None, "memory.offload": None}
    changed = with_fields(text, values)
    assert "parallelism {\n  data = 2\n  zero = 3\n}" in changed and "# a" in changed
    assert "auto" not in changed and "recompute" not in changed and "limit = 1GB" in changed


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    """The address of the page, served on loopback."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values, directory=str(site))

        def log_message(self, *values: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


# Points at the right end of a row of the schedule; returns how far the cursor is from there.
POINTED = """(() => {
  const page = document, row = page.querySelector('[data-row="0"]').getBoundingClientRect();
  const where = { clientX: row.right - 1, clientY: row.top + 1, bubbles: true };
  page.querySelector('[data-view="schedule"] svg').dispatchEvent(new PointerEvent('pointermove', where));
  return page.querySelector('line.time').getBoundingClientRect().x - row.right + 1;
})()"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_chromium
def test_a_reader_edits_plans_and_chooses_in_a_browser(address: str, tmp_path: Path) -> None:
    text = (EXAMPLES / "ddp2.plt").read_text()
    status = "document.getElementById('status').textContent"
    with Browser(tmp_path) as browser:
        browser.open(f"{address}#job={quote(text, safe='')}")
        browser.wait_for("!document.getElementById('file').hidden || document.querySelector('#status.bad')")
        assert browser.evaluate(status).startswith("good: 4 ranks")
        assert browser.evaluate("document.querySelector('#summary pre').textContent") == summary(text)
        plan_file = browser.evaluate("fetch(document.getElementById('file').href).then((response) => response.text())")
        assert plan_file == plan(text)
        browser.evaluate("document.getElementById('tab-pictures').click()")
        frame = "document.querySelector('#pictures iframe')"
        browser.wait_for(f"{frame}.src && !{frame}.matches('.stale')")
        is_drawn = "document.querySelector('.moment input')"
        heading = browser.evaluate_in_frame("document.querySelector('h1').textContent", is_drawn)
        assert heading == f"job: plan {summary(text).split()[2]}"
        assert browser.evaluate(f"{frame}.contentDocument") is None  # of another origin: it reaches nothing of the page
        assert browser.evaluate_in_frame(POINTED) == pytest.approx(0, abs=3)  # pixels
        assert "64" in browser.evaluate(
            "[...document.querySelectorAll('.hint')].map((hint) => hint.textContent).join()"
        )

        wrong = text.replace("epochs ", "epoch ")
        write = ("(words => { const text = document.getElementById('text'); text.value = words;"
                 "text.dispatchEvent(new Event('input')); })(")  # fmt: skip
        browser.evaluate(write + json.dumps(wrong) + ")")
        assert browser.evaluate("document.getElementById('file').hidden")  # that of the text before
        browser.wait_for("document.querySelector('#mistakes .place') && document.querySelector('#shown .error')")
        assert browser.evaluate("document.querySelector('#shown .error').textContent") == "epoch"
        assert "did you mean" in browser.evaluate("document.getElementById('mistakes').textContent")
        browser.evaluate("document.querySelector('#mistakes .place').click()")
        assert browser.evaluate("document.getElementById('text').selectionStart") == wrong.index("epoch ")
        assert unquote(browser.evaluate("location.hash")) == f"#job={wrong}"

        browser.evaluate("document.getElementById('examples').value = 'ddp2.plt';"
                         "document.getElementById('examples').dispatchEvent(new Event('change'))")  # fmt: skip
        browser.wait_for("document.getElementById('text').value !== " + json.dumps(wrong))
        browser.evaluate("history.back()")
        browser.wait_for("document.getElementById('text').value === " + json.dumps(wrong))
        browser.evaluate("history.forward()")
        browser.wait_for(
            f"document.getElementById('text').value !== {json.dumps(wrong)} && {status}.startsWith('good')"
        )
        browser.evaluate("document.getElementById('tab-choice').click(), document.getElementById('search').click()")
        browser.wait_for("document.querySelectorAll('#plans tbody tr').length > 1")
        rows = json.loads(choose_table(text))["rows"]
        shown = "[...document.querySelectorAll('#plans tbody td')].map((cell) => cell.textContent)"
        assert browser.evaluate(shown) == [cell for row in rows for cell in (*row["cells"], "write it")]
        browser.evaluate("document.querySelector('#plans tbody button').click()")
        assert browser.evaluate("document.getElementById('text').value") == rows[0]["text"]
        browser.evaluate(write + json.dumps(wrong) + ")")
        browser.evaluate("document.querySelector('#plans tbody button').click()")
        assert browser.evaluate("document.getElementById('text').value") == wrong  # which was not searched
        for width, scheme in ((1600, "light"), (1000, "dark"), (400, "light")):
            browser.resize(width, 800, scheme)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert browser.evaluate("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'") == (
                scheme == "light"
            )


@pytest.mark.slow
@pytest.mark.skipif(TSC is None, reason="the compiler of TypeScript is not installed: npm install --global typescript")
def test_the_types_of_the_scripts_hold() -> None:
    options = "--noEmit --allowJs --checkJs --strict --target es2022 --module es2022 --lib es2022,dom,dom.iterable"
    scripts = sorted(map(str, (ROOT / "docs" / "planner").glob("*.mjs")))
    run = subprocess.run([str(TSC), *options.split(), *scripts], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_pictures_of_several_jobs_are_drawn_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of Graphviz in WebAssembly does not last for these pictures, so that each has its own."""
    monkeypatch.setenv("PATH", "")  # no program `dot`
    for name in ("digits.plt", "chunks.plt", "digits.plt", "own/own.plt"):
        monkeypatch.chdir((EXAMPLES / name).parent)
        text = (EXAMPLES / name).read_text()
        assert page(text, name=Path(name).name).count("<svg") == 3
