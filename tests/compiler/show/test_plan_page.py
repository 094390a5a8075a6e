"""The page of a plan: what its boxes stand for, and what a reader does with it in a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from helpers import made_plans
from helpers.paths import ROOT

from dslc.compiler.show.draw import VIEWS
from dslc.compiler.show.plan_page import SubjectTable, plan_page

SVG = "{http://www.w3.org/2000/svg}"
CHROMIUM, TSC = shutil.which("chromium"), shutil.which("tsc")


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
    ids = [element.attrib["id"] for view in views for element in view.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids)) and all(name.partition("-")[0] in VIEWS for name in ids)


@pytest.mark.processes
def test_the_page_is_whole_and_holds_the_plan(page: str) -> None:
    plan = made_plans.sixteen()
    (data,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', page)
    assert json.loads(data) == json.loads(plan.text())
    addresses = set(re.findall(r'(?:src|href)="([^"]*)"|url\(|https?://[^" <]*', page.replace("http://www.w3.org", "")))
    assert addresses <= {""} and "import " not in page and len(page) < 1_000_000


def test_a_name_that_is_no_box_stands_for_nothing() -> None:
    table = SubjectTable(made_plans.sixteen())
    assert table.subject("placement", "summary") == {} == table.subject("placement", "memory peak 1")
    assert table.subject("graph", "exchange 1.2") == {"pipeline": 1, "exchange": 2}
    assert table.subject("schedule", "row 0.9999") == {"pipeline": 0} == table.subject("placement", "pipeline 0 data 1")


ACTIONS = """
(() => {
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
const shown = { seen, results, closer, reset: svg.getAttribute("viewBox").split(" ").map(Number), before };
document.body.replaceChildren(JSON.stringify(shown));
})();
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_reader_selects_searches_and_zooms_in_a_browser(tmp_path: Path, page: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>{ACTIONS}</script></body>"), encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    run = subprocess.run([*map(str, command), "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120)
    body = re.findall(r"<body[^>]*>(\{.*\})\s*</body>", run.stdout, re.DOTALL)
    assert body, run.stdout[-2000:] + run.stderr[-2000:]
    shown: dict[str, Any] = json.loads(html.unescape(body[0]))
    plan = made_plans.sixteen()
    click, enter, search, escape = shown["seen"]
    assert click[1] == "#rank=9&pipeline=1" and click[3] == ["rank 9, one of ranks 8 to 15 holds", "sends", "waits for"]
    assert enter[1] == "#pipeline=1&stage=1" and enter[3][:2] == ["stage 1", "ranks 8 to 15 hold"]
    assert (click[2], enter[2], search[2]) == (1, 8, 8)  # of the ranks one, or all that hold the stage
    layer = next(n for n, layer in enumerate(plan.layers) if layer.name == "blocks.1")
    assert search[1] == f"#layer={layer}" and search[3][:2] == ["blocks.1", "stage 0"]
    assert shown["results"][0] == f"blocks.1 ({plan.layers[layer].kind})"
    assert escape[1:] == ["", 0, []]
    assert shown["closer"] == pytest.approx(1 / 1.2) and shown["reset"] == [float(n) for n in shown["before"].split()]


@pytest.mark.slow
@pytest.mark.skipif(TSC is None, reason="the compiler of TypeScript is not installed: npm install --global typescript")
def test_the_types_of_the_script_hold() -> None:
    options = "--noEmit --allowJs --checkJs --strict --target es2022 --lib es2022,dom,dom.iterable"
    script = ROOT / "compiler" / "show" / "plan_page.js"
    run = subprocess.run([str(TSC), *options.split(), str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
