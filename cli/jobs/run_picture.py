"""The picture of a run's plan, `plan.svg` in its folder, drawn while it trains."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import stat
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslc.compiler.facts.untrusted_files import recreate_file
from dslc.compiler.ir.plan import PlanView
from dslc.dsl.plain import plain
from dslc.runtime.process.run_status import broke_off

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def draw_plan(plan: PlanView, folder: str) -> Iterator[None]:
    """Draws the plan of a run during the context, which ends when the picture is there; an error in it ends the run."""
    drawing = _start_drawing(plan, folder)
    try:
        yield
    except BaseException as error:
        broke_off(folder, f"{type(error).__name__}: {error}")
        raise
    finally:
        _finish_drawing(drawing, folder)


def _start_drawing(plan: PlanView, folder: str) -> BaseProcess:
    """Draws in a process of its own, because a thread of this one would disturb the fork that starts the ranks. It is
    forked too, from this process, which has loaded the plan and the modules.
    """
    picture = os.path.join(folder, "plan.svg")
    with contextlib.suppress(OSError):
        os.unlink(picture)  # it may be a link, or a pipe
    log = recreate_file(_log_of(folder))
    drawing = multiprocessing.get_context("fork").Process(target=_draw, args=(plan, picture, log))
    try:
        drawing.start()
    finally:
        os.close(log)
    return drawing


def _draw(plan: PlanView, picture: str, log: int) -> None:
    os.setpgid(0, 0)  # Ctrl-C is for the training; this ends by itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(19)  # the training comes first
    for number in (1, 2):
        os.dup2(log, number)
    _close_others()
    sys.stdout = sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)
    from dslc.compiler.show.draw import draw
    from dslc.compiler.show.picture import write

    write(draw(plan), picture)


def _close_others() -> None:
    """Closes what the launcher had open, so that the lock of the folder and its ports are free when it ends; but not
    files that have no name, in which wasmtime keeps what it has compiled for an earlier picture.
    """
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # the list itself was open
            found = os.fstat(number)
            if number > 2 and (not stat.S_ISREG(found.st_mode) or found.st_nlink):
                os.close(number)


def _finish_drawing(drawing: BaseProcess, folder: str) -> None:
    """Waits for the picture; if there is none, says where the reason is."""
    drawing.join()
    if drawing.exitcode != 0 and os.path.isdir(folder):
        print(plain(f"plan.svg could not be drawn: see {_log_of(folder)}"), file=sys.stderr)


def _log_of(folder: str) -> str:
    return os.path.join(folder, "logs", "draw.log")
