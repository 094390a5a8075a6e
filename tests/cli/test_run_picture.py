"""The picture of a run is drawn by a process of its own, which keeps nothing of the launcher open."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from helpers.made_plans import digits

from dslc.compiler.show import picture
from dslc.compiler.show.draw import draw
from dslc.jobs.run_picture import draw_plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_it_is_there_when_the_training_is_done(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with draw_plan(digits(), str(folder)):
        pass
    assert "rank 0" in (folder / "plan.svg").read_text()
    assert (folder / "logs" / "draw.log").read_text() == "" and capfd.readouterr() == ("", "")


def test_what_keeps_it_from_being_drawn_is_in_its_log(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "plan.svg").mkdir()
    with draw_plan(digits(), str(folder)):
        pass
    log = folder / "logs" / "draw.log"
    assert capfd.readouterr() == ("", f"plan.svg could not be drawn: see {log}\n")
    assert "IsADirectoryError" in log.read_text()


def test_it_is_drawn_after_another_picture(folder: Path) -> None:
    """As in a notebook, which shows plans: then the drawing has what the first has made."""
    picture.write(draw(digits()), str(folder / "first.svg"))
    with draw_plan(digits(), str(folder)):
        pass
    assert (folder / "plan.svg").read_text() == (folder / "first.svg").read_text()


def test_no_lock_or_port_of_the_launcher_stays_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(dot: str, path: str) -> None:
        opened = Path("/proc/self/fd")
        names = [os.readlink(opened / number) for number in os.listdir(opened) if os.path.lexists(opened / number)]
        Path(path).write_text("\n".join(names))

    monkeypatch.setattr(picture, "write", write)
    with (folder / "lock").open("w"), socket.socket(), draw_plan(digits(), str(folder)):
        pass
    names = (folder / "plan.svg").read_text().splitlines()
    assert str(folder / "logs" / "draw.log") in names
    assert not [name for name in names if name == str(folder / "lock") or name.startswith("socket:")]
