"""Times of interactions with the pages in Chromium: `PYTHONPATH=tests python -m instruments.page_times`.

Each is the time of its handlers and of the layout that follows, in milliseconds: the median and the longest of `TIMES`.
The pages are the plan of examples/cluster.plt on 16 and on 16,384 devices, and `dslc ui` of runs that are made here: a
sweep of 60, of which eight curves are shown, and one run of 100,000 steps.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from helpers.devtools import Browser
from helpers.paths import EXAMPLES

from dslc.compiler.compile import compile_plan
from dslc.compiler.show.page.memory_moments import memory_moments
from dslc.compiler.show.page.plan_page import plan_page
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.dsl.meaning.write import anchored, write
from dslc.jobs.check_job import inspect
from dslc.runtime.process.records import PHASES, Records
from dslc.runtime.process.run_status import RunStatus, write_status
from dslc.ui.run_server import RunServer

TIMES = 15
LAYOUT = "document.body.getBoundingClientRect(); document.documentElement.scrollHeight;"
OF_A_PLAN = {
    "select a rank": "select({ rank: n })",
    "select a layer": "select({ layer: sides[0].plan.layers[n % sides[0].plan.layers.length].name })",
    "search": "const s = document.getElementById('search'); s.value = `rank ${n}`; s.dispatchEvent(new Event('input'))",
    "move the cursor": "const m = document.querySelector('.moment input'); m.value = m.max * n / 20; "
    "m.dispatchEvent(new Event('input'))",
    "zoom": "document.querySelectorAll('[data-zoom=in]')[n % 3].click()",
}
OF_RUNS = {
    "filter": "document.querySelector('#filters details:nth-of-type(2) input').click()",
    "sort": "document.querySelectorAll('#runs thead button')[n % 5].click()",
    "show or hide a run": "document.querySelectorAll('#runs tbody input')[0].click()",
    "another outcome": "outcomes.selectedIndex = n % outcomes.options.length; "
    "outcomes.dispatchEvent(new Event('change'))",
    "move the cursor": "const m = document.querySelector('#curves input'); m.value = m.max * n / 20; "
    "m.dispatchEvent(new Event('input'))",
    "draw all charts": "showCharts()",
}
OF_ONE_RUN = {name: OF_RUNS[name] for name in ("move the cursor", "draw all charts")}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Browser(folder / "profile") as browser:
            for nodes in (2, 2048):
                page = _plan_page(nodes)
                (folder / "page.html").write_text(page, encoding="utf-8")
                browser.open((folder / "page.html").as_uri())
                browser.wait_for("document.querySelector('.moment input')")
                _print(browser, f"{8 * nodes:,} devices, {len(page.encode()) / 1e6:.2f} MB", OF_A_PLAN)
            for count, steps, actions in ((60, 400, OF_RUNS), (1, 100_000, OF_ONE_RUN)):
                _make_runs(folder / str(count), count, steps)
                with RunServer(str(folder / str(count)), 0) as server:
                    threading.Thread(target=server.serve_forever, daemon=True).start()
                    browser.open(server.address)
                    drawn = f"document.querySelectorAll('#curves figure:first-child .curve').length === {min(8, count)}"
                    last = f"document.querySelector('#curves output').value === 'step {steps}'"
                    browser.wait_for(f"{drawn} && {last}")
                    _print(browser, f"{count} runs of {steps:,} steps", actions)
                    server.shutdown()


def _print(browser: Browser, title: str, actions: dict[str, str]) -> None:
    print(title)
    for name, action in actions.items():
        script = f"""(() => {{ const times = []; for (let n = 1; n <= {TIMES}; n++) {{
          const begin = performance.now(); {{ {action} }} {LAYOUT} times.push(performance.now() - begin); }}
          return times.sort((a, b) => a - b); }})()"""
        times = browser.evaluate(script)
        print(f"  {name:<20} {times[TIMES // 2]:6.1f} {times[-1]:6.1f}")


def _plan_page(nodes: int) -> str:
    settings = [f"devices.nodes={nodes}", f"parallelism.data={2 * nodes}", f"data.batch={256 * nodes}"]
    analysis = inspect(load(str(EXAMPLES / "cluster.plt"), [*settings, "expect.devices=none"]), Report())
    assert analysis is not None
    return plan_page(compile_plan(analysis).plan, "placement", memory_moments(analysis))


def _make_runs(runs: Path, count: int, steps: int) -> None:
    for n in range(count):
        folder = runs / f"run-{n:02}"
        folder.mkdir(parents=True)
        settings = [f"train.optimizer.lr={0.01 * (1 + n % 5)}", f"data.batch={16 * (1 + n % 4)}"]
        job = load(str(EXAMPLES / "digits.plt"), settings).job
        assert job is not None
        (folder / "job.plt").write_text(write(anchored(job)))
        records = Records(str(folder))
        for step in range(1, steps + 1):
            phases = {f"seconds.{phase}": 0.001 * (1 + step % 3) for phase in PHASES}
            loss = (1 + n) / step + (step % 7) / 100
            records.write(
                {"step": step, "split": "train", "loss": loss, "lr": 1 / step, "seconds": step / 100, **phases}
            )
            if step % 50 == 0:
                records.write({"step": step, "split": "validation", "loss": loss, "accuracy": 1 - 1 / step})
        records.close()
        write_status(str(folder), RunStatus(state="done", step=steps, steps=steps))


if __name__ == "__main__":
    main()
