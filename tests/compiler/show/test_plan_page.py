"""The page of a plan: what its boxes stand for, and what a reader does with it in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import made_plans
from helpers.browser import needs_chromium, run_in_page
from helpers.paths import EXAMPLES, ROOT

from dslc.compiler.compile import compile_plan
from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.show.draw import VIEWS
from dslc.compiler.show.page.memory_moments import memory_moments
from dslc.compiler.show.page.plan_page import SCRIPTS, SubjectTable, plan_page, timeline
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect

SVG = "{http://www.w3.org/2000/svg}"
TSC = shutil.which("tsc")


@pytest.fixture(scope="module")
def page() -> str:
    return plan_page(made_plans.sixteen(), "schedule")


@pytest.mark.processes
def test_boxes_say_what_they_stand_for(page: str) -> None:
    assert re.findall(r'<h2 id="title-(\w+)"', page) == ["schedule", "placement", "graph"]
    views = [ElementTree.fromstring(picture) for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    boxes = [box for view in views for box in view.iter(f"{SVG}g") if "data-pipeline" in box.attrib]
    labels = Counter(box.attrib["aria-label"] for box in boxes if "aria-label" in box.attrib)
    assert {f"rank {n}, pipeline {n // 8}" for n in range(16)} <= set(labels)
    assert {"forward, stage 0, pipeline 0", "backward, stage 1, pipeline 1"} <= set(labels)
    assert "forward of micro-batch 7, pipeline 1, stage 1" in labels
    ids = [element.attrib["id"] for view in views for element in view.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids)) and all(name.partition("-")[0] in VIEWS for name in ids)


@pytest.mark.processes
def test_the_page_is_whole_and_holds_the_plan(page: str) -> None:
    plan = made_plans.sixteen()
    (data,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', page)
    assert json.loads(data) == json.loads(plan.text())
    addresses = set(re.findall(r'(?:src|href)="([^"]*)"|url\(|https?://[^" <]*', page.replace("http://www.w3.org", "")))
    assert addresses <= {""} and "import " not in page and len(page) < 1_000_000


@pytest.mark.processes
def test_no_name_ends_the_data_or_the_scripts() -> None:
    plan = replace(made_plans.sixteen(), job="<!--<script></script>")
    page = plan_page(plan)
    data = re.findall(r'<script type="application/json" id="\w+">(.*?)</script>', page)
    assert "<" not in "".join(data) and json.loads(data[0])["job"] == plan.job
    assert page.count("<script") == page.count("</script>") == 3


def test_a_name_that_is_no_box_stands_for_nothing() -> None:
    table = SubjectTable(made_plans.sixteen())
    assert table.subject("placement", "summary") == {} == table.subject("placement", "memory peak 1")
    assert table.subject("graph", "exchange 1.2") == {"pipeline": 1, "exchange": 2}
    assert table.subject("schedule", "row 0.9999") == {"pipeline": 0} == table.subject("placement", "pipeline 0 data 1")


def test_a_moment_adds_the_kept_activations_to_the_state() -> None:
    plan = made_plans.sixteen()
    shown = timeline(plan)
    assert shown.timed and [(row.first, row.last) for row in shown.rows] == [(0, 7), (8, 15)]
    assert {(row.rest, row.peak) for row in shown.rows} == {(n.memory.rest, n.memory.peak) for n in plan.ranks}
    for row in shown.rows:
        first, kept = row.passes[0], plan.stages[row.pipeline].kept
        assert row.held[0][0] == first[3] and {size for _, _, pieces, size in row.held if pieces == 1} == {kept}
        assert max(size for _, _, pieces, size in row.held) == kept * max(pieces for _, _, pieces, _ in row.held)
    (left, right, start, end), *_ = shown.spans
    assert (left, start) == (0, 0) and right > 0 and end <= shown.total
    long = timeline(made_plans.many_thousand())
    assert [span[2:] for span in long.spans][1][1] == long.total and len(long.spans) == 2 < len(long.rows) == 10


@pytest.mark.processes
@pytest.mark.parametrize("nodes, limit", [(2, 1_000_000), (2048, 5_000_000)])
def test_a_page_of_many_devices_is_small(nodes: int, limit: int) -> None:
    settings = [f"devices.nodes={nodes}", f"parallelism.data={2 * nodes}", f"data.batch={256 * nodes}"]
    analysis = inspect(load(str(EXAMPLES / "cluster.plt"), [*settings, "expect.devices=none"]), Report())
    assert analysis is not None and analysis.layout.world_size == 8 * nodes
    page = plan_page(compile_plan(analysis).plan, "placement", memory_moments(analysis))
    assert 100_000 < len(page.encode()) < limit


ACTIONS = """
const seen = [];
const look = (what) => seen.push([what, location.hash, document.querySelectorAll(".chosen[data-rank][role]").length,
  [...document.querySelectorAll("#details h2")].map((each) => each.textContent)]);
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const rank = document.querySelector('[data-rank="9"][role]');
rank.dispatchEvent(new MouseEvent("click", { bubbles: true, clientX: 0, clientY: 0 }));
look("click");
press(document.querySelector('[data-stage="1"][role]'), "Enter");
look("enter");
const search = document.getElementById("search");
search.value = "blocks.1";
search.dispatchEvent(new Event("input"));
const results = [...document.querySelectorAll("#results button")].map((each) => each.textContent);
document.querySelector("#results button").click();
look("search");
press(document.body, "Escape");
look("escape");
const canvas = document.querySelector(".canvas"), svg = canvas.querySelector("svg");
const before = svg.getAttribute("viewBox");
press(canvas, "+");
const closer = svg.getAttribute("viewBox").split(" ").map(Number)[2] / before.split(" ").map(Number)[2];
press(canvas, "0");
const table = document.querySelector(".moment table"), slider = document.querySelector(".moment input");
const moment = () => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
const line = () => Number(document.querySelector("line.time").getAttribute("x1"));
slider.value = 0;
slider.dispatchEvent(new Event("input"));
const cursor = [[line(), moment(), slider.ariaValueText]];
press(slider, "ArrowRight");
press(slider, "ArrowRight");
cursor.push([line(), moment(), slider.ariaValueText]);
const drawn = document.querySelector('[data-row="1"]').getBoundingClientRect();
const schedule = document.querySelector('[data-view="schedule"] svg');
schedule.dispatchEvent(new PointerEvent("pointermove", { clientX: drawn.right - 1, clientY: drawn.top }));
cursor.push([line(), moment(), slider.ariaValueText]);
const box = document.querySelector('[data-view="schedule"] [role][tabindex="0"]');
box.focus();
press(box, "ArrowRight");
const reached = document.activeElement.ariaLabel;
const stops = document.querySelectorAll('svg [tabindex="0"]').length;
const reset = svg.getAttribute("viewBox").split(" ").map(Number);
return { seen, results, closer, cursor, reached, stops, reset, before };
"""


@pytest.mark.slow
@needs_chromium
def test_a_reader_selects_searches_and_zooms_in_a_browser(tmp_path: Path, page: str) -> None:
    shown = run_in_page(tmp_path, page, ACTIONS)
    plan = made_plans.sixteen()
    click, enter, search, escape = shown["seen"]
    assert click[1] == "#rank=9&pipeline=1" and click[3] == ["rank 9, one of ranks 8 to 15 holds", "sends", "waits for"]
    assert enter[1] == "#pipeline=1&stage=1" and enter[3][:2] == ["stage 1", "ranks 8 to 15 hold"]
    assert (click[2], enter[2], search[2]) == (1, 8, 8)  # of the ranks one, or all that hold the stage
    layer = next(n for n, layer in enumerate(plan.layers) if layer.name == "blocks.1")
    assert search[1] == "#layer=blocks.1" and search[3][:2] == ["blocks.1", "stage 0"]
    assert shown["results"][0] == f"blocks.1 ({plan.layers[layer].kind})"
    assert escape[1:] == ["", 0, []]
    row, other = timeline(plan).rows
    edges = sorted({time for each in (row, other) for _, _, _, *ends, _ in each.passes for time in ends})
    (x, begin, said), (x2, second, _), (x3, last, _) = shown["cursor"]
    assert begin[0][:2] == ["0–7", "forward of micro-batch 0, stage 0"] and begin[1][1] == "waits"
    assert begin[0][3] == f"{byte_text(plan.stages[0].kept)} of 1 micro-batch" and begin[1][3] == "none"
    assert said.startswith("0 us of ") and "; ranks 8 to 15: waits, " in said
    assert second[1][1] == "forward of micro-batch 0, stage 1" and edges[2] == other.passes[0][3]
    assert x < x2 < x3 and last[1][1] == "exchange of gradients" and last[0][3] == "none"
    assert (shown["reached"], shown["stops"]) == ("forward of micro-batch 0, pipeline 0, stage 0", len(VIEWS))
    assert shown["closer"] == pytest.approx(1 / 1.2) and shown["reset"] == [float(n) for n in shown["before"].split()]


@pytest.mark.slow
@pytest.mark.skipif(TSC is None, reason="the compiler of TypeScript is not installed: npm install --global typescript")
def test_the_types_of_the_scripts_hold() -> None:
    options = "--noEmit --allowJs --checkJs --strict --target es2023 --lib es2023,dom,dom.iterable"
    scripts = [ROOT / "compiler" / "show" / "page" / name for name in SCRIPTS]
    run = subprocess.run([str(TSC), *options.split(), *map(str, scripts)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
