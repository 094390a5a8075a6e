"""`dslc render` of a run and of two plans: one page, with what was measured and what differs."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from helpers.browser import needs_chromium, run_in_page
from helpers.commands import dslc
from helpers.paths import EXAMPLES

from dslc.runs.run_figures import MOST_POINTS, curves, run_figures, thinned
from dslc.runtime.process.records import PHASES, Record

DIGITS = EXAMPLES / "digits.plt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a short run, which was measured."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    settings = ("train.epochs=none", "train.steps=8", "log.every=2 steps", "evaluate.every=4 steps")
    result = dslc("run", DIGITS, "--profile", "--out", folder, *(word for each in settings for word in ("--set", each)))
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def _page(tmp_path: Path, *arguments: object) -> str:
    result = dslc("render", *arguments, "-o", tmp_path / "page.html")
    assert result.returncode == 0, result.stderr
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def _cells(page: str) -> list[list[str]]:
    """Returns the rows of the tables that the page itself has."""
    return [re.findall(r"<t[dh][^>]*>([^<]*)", row) for row in re.findall(r"<tr>.*?</tr>", page)]


def _most_bytes(page: str) -> int | None:
    """Returns the most that a rank holds in a pass of the first plan of the page."""
    (data,) = re.findall(r'<script type="application/json" id="timeline">(.*?)</script>', page)
    passes = [one for row in json.loads(data)["rows"] for one in row["passes"]]
    return max((one[-1] for one in passes if one[-1] is not None), default=None)


def test_a_run_is_shown_as_measured_and_two_plans_as_they_differ(run: Path, tmp_path: Path) -> None:
    page = _page(tmp_path, run)
    rows, report = _cells(page), json.loads((run / "report.json").read_text())
    assert rows[0] == ["ranks", "figure", "predicted", "measured", "difference"]
    names = [row[1] for row in rows]
    assert names[1:3] == ["time of a step", "of it data, at the median"] and "memory: peak" in names
    count = str(report["ranks"][0]["collectives"][0]["measured"]["count"])
    assert ["0, 1", "all_reduce: count in a step", count, count, "none"] in rows
    assert "done after 8 steps" in page and "peak of the process: resident" in names
    (curves,) = re.findall(r'<script type="application/json" id="curves">(.*?)</script>', page)
    shown = {(curve["metric"], curve["split"]): curve["points"] for curve in json.loads(curves)}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for split in ("train", "validation"):
        assert shown["loss", split] == [[each["step"], each["loss"]] for each in records if each["split"] == split]
    assert ("seconds.passes", "train") in shown and ("seconds", "train") not in shown

    pair = _page(tmp_path, run, DIGITS, "--set", "data.batch=32", "--set", "evaluate.every=2 epochs")
    difference = dslc("diff", run, DIGITS, "--set", "data.batch=32", "--set", "evaluate.every=2 epochs")
    lines = [re.split(r"\s{2,}", line.strip()) for line in difference.stdout.splitlines() if line.startswith("  ")]
    tables = [[cell for cell in row if cell] for row in _cells(pair)]
    assert lines and all([line[0], line[1], *line[3:]] in tables for line in lines)
    assert re.findall(r'id="(plan|timeline|curves)(-2)?">', pair) == [
        *(("plan", ""), ("timeline", ""), ("curves", "")),
        *(("plan", "-2"), ("timeline", "-2")),
    ]

    plain = _page(tmp_path, run / "plan.json")
    assert _cells(plain) == []
    for each, has_account in ((page, True), (plain, True), (pair, False)):  # the job still has that plan
        assert (_most_bytes(each) is not None) is has_account
    assert _most_bytes(page) == report["ranks"][0]["memory"]["predicted"]["peak"]
    assert dslc("render", run, "-o", tmp_path / "run.dot").returncode == 0
    refused = dslc("render", run, DIGITS, "-o", tmp_path / "pair.svg")
    assert refused.returncode == 2 and "two plans are shown by a page, a .html file" in refused.stderr


def test_a_report_that_is_none_is_refused(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for text, reason in (('{"version": 1}', "is no report of a run"), ('{"version": 7}', "another version")):
        (folder / "report.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            run_figures(str(folder), "")
    (folder / "report.json").write_text("[")
    refused = dslc("render", folder, "-o", tmp_path / "page.html")
    assert refused.returncode == 2 and "report.json cannot be read" in refused.stderr
    assert not (tmp_path / "page.html").exists()
    (folder / "report.json").unlink()  # as of a run that trains
    figures = run_figures(str(folder), "")
    assert figures.curves and not figures.lines


def test_a_long_curve_keeps_its_ends_and_spikes() -> None:
    line = [(step, 1.0 + step % 7) for step in range(50_000)]
    line[12_345] = (12_345, 900.0)
    line[23_456] = (23_456, None)  # type: ignore[assignment]
    short = thinned(line)
    assert len(short) <= MOST_POINTS and {line[0], line[12_345], line[-1]} <= set(short)
    assert list(short) == sorted(short) and thinned(line[:MOST_POINTS]) == tuple(line[:MOST_POINTS])


def test_the_load_of_each_expert_has_no_curve() -> None:
    record: Record = {"step": 1, "split": "train", "loss": 1.0, "load_max": 2.0, "load.blocks.0.mlp.0": 2.0}
    assert [curve.metric for curve in curves([record])] == ["loss", "load_max"]


def test_the_phases_of_a_long_run_keep_the_same_steps_and_the_longest() -> None:
    """A chart stacks them: a step that one lacks would be drawn too low."""
    draw = random.Random(0).random
    records: list[Record] = [
        {"step": step, "split": "train", **{f"seconds.{phase}": draw() for phase in PHASES}} for step in range(5000)
    ]
    records[1234]["seconds.update"] = 100.0
    drawn = curves(records)
    steps = {tuple(step for step, _ in curve.points) for curve in drawn}
    assert len(drawn) == len(PHASES) and len(steps) == 1
    assert {0, 1234, 4999} <= set(*steps) and len(*steps) <= MOST_POINTS


ACTIONS = """
const press = (target, key) => target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const captions = () => [...document.querySelectorAll("figcaption")].map((each) => each.textContent);
const step = document.querySelector(".run input");
const last = captions(), label = document.querySelector("figure svg").getAttribute("aria-label");
for (let n = 0; n < 20; n++) press(step, "ArrowLeft");
const first = captions(), said = step.getAttribute("aria-valuetext");
const chart = document.querySelector("figure svg").getBoundingClientRect();
document.querySelector("figure svg").dispatchEvent(
  new PointerEvent("pointermove", { clientX: chart.right - 1, clientY: chart.top + 9 }));
const moved = step.value;

const chosen = () => [0, 1].map((n) => document.querySelectorAll(`[data-side="${n}"] .chosen[data-rank][role]`).length);
const shown = () => [...document.querySelectorAll("#details .name")].map((each) => each.textContent);
const select = (text) => {
  const search = document.getElementById("search");
  search.value = text;
  search.dispatchEvent(new Event("input"));
  document.querySelector("#results button").click();
  return [chosen(), shown()];
};
const tables = [...document.querySelectorAll(".moment table")]
  .map((table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent)));
const both = select("rank 1"), alone = select("rank 3");
document.querySelectorAll('[data-side="1"] [data-stage][role]')[0].dispatchEvent(
  new MouseEvent("click", { bubbles: true, clientX: 0, clientY: 0 }));
const stage = [chosen(), location.hash];
const [mine, other] = document.querySelectorAll(".moment input");
mine.value = mine.max / 2;
mine.dispatchEvent(new Event("input"));
const share = other.value / other.max;
const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
return { last, label, first, said, moved, tables, both, alone, stage, share, twice: ids.length - new Set(ids).size };
"""


@pytest.mark.slow
@needs_chromium
def test_a_reader_moves_over_steps_and_selects_in_two_plans(run: Path, tmp_path: Path) -> None:
    four = ("--set", "devices.cpus=4", "--set", "parallelism.data=4")
    shown = run_in_page(tmp_path, _page(tmp_path, run, DIGITS, *four), ACTIONS)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [[each["loss"] for each in records if each["split"] == "train"][n] for n in (0, -1)]
    for captions, loss in zip((shown["first"], shown["last"]), ends, strict=True):
        text = re.fullmatch(r"loss train A (\S+)validation A (\S+)", captions[0])
        assert text is not None and float(text[1]) == pytest.approx(loss, rel=1e-3)
        assert (text[2] == "–") is (loss == ends[0])  # not evaluated before the first step
    assert any(caption.startswith("phases of a step, in ms A data") for caption in shown["last"])
    assert shown["said"].startswith("step 1; loss: train A ") and shown["moved"] == "8"
    assert shown["label"].startswith("loss over steps 1 to 8: train A from ")

    of_run, of_job = shown["tables"]  # a plan file has no account of its moments; the cursor begins at the fullest one
    assert "on top" not in of_run[0] and of_job[0][3:] == ["activations", "on top", "together", "peak"]
    assert of_job[1][1].startswith("backward") and of_job[1][5] == of_job[1][6] != of_job[1][2]
    names = [f"A: {run}", f"B: {DIGITS} {' '.join(four)}"]
    assert shown["both"] == [[1, 1], names]
    assert shown["alone"] == [[0, 1], [f"{names[0]} has none", names[1]]]
    assert shown["stage"] == [[2, 4], "#pipeline=0&stage=0"]
    assert shown["share"] == pytest.approx(0.5) and shown["twice"] == 0
