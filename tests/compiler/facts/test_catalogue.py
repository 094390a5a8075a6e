"""A user's own catalogue of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import job_text

from dslc.compiler.facts.catalogue import read_catalogue
from dslc.compiler.facts.hardware import CATALOGUE, CUDA_CONTEXT, framework_bytes, workspace_bytes
from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load, load_text
from dslc.dsl.meaning.write import write

JOB = job_text(
    model={"network": "mlp(widths = [64])"},
    data={"source": "digits()", "batch": 64},
    devices={"gpus": 2, "kind": "lab_card", "catalogue": '"cards.toml"'},
    train={"steps": 10, "optimizer": "sgd()", "precision": "bf16"},
    log=None,
)
CARDS = """
[lab_card]
memory  = "10GB"
fp32    = "50TFLOPS"
bf16    = "200.5TFLOPS"
link    = "100 GBps"
network = "400Gbps"
"""


def read(folder: Path, text: str) -> tuple[Report, dict[str, object]]:
    (folder / "cards.toml").write_text(text)
    report = Report()
    return report, dict(report.collect(read_catalogue(str(folder / "cards.toml"), None)))


def test_a_job_is_planned_with_the_figures_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "cards.toml").write_text(CARDS)
    (tmp_path / "made.plt").write_text(JOB)
    loaded = load(str(tmp_path / "made.plt"), [])
    assert loaded.job is not None
    report = Report()
    analysis = report.collect(analyse(loaded.job, Facts()))
    assert analysis is not None and not report.found, report.found
    card = analysis.layout.hardware
    assert (card.memory, card.link, card.network) == (10**10, 100e9, 50e9)
    assert (card.flops("fp32"), card.flops("bf16"), card.flops("fp16")) == (50e12, 200.5e12, 50e12)
    assert analysis.estimate is not None and analysis.estimate.step_time is not None
    memory = analysis.costs[0].memory
    assert memory.framework - memory.workspace == framework_bytes("cuda", 2) > CUDA_CONTEXT
    assert memory.workspace == workspace_bytes("cuda", card) > workspace_bytes("cuda", CATALOGUE["a100_80g"]) > 0
    # The job that a run leaves behind is read from another folder.
    again = load_text(write(loaded.job), folder=str(tmp_path / "elsewhere"))
    assert again.job is not None and again.job.devices.catalogue == str(tmp_path / "cards.toml")


def test_a_kind_of_dslcs_own_keeps_what_is_left_out(tmp_path: Path) -> None:
    report, found = read(tmp_path, '[h100]\nmemory = "96GB"\n')
    assert not report.found
    assert found["h100"].memory == 96 * 10**9  # type: ignore[attr-defined]
    assert found["h100"].link == CATALOGUE["h100"].link  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "code", "line", "words"),
    [
        ("[a]\nmemory = 80\n", "E0422", 2, "`memory` of a device is bytes"),
        ('[a]\nmemory = "-1GB"\n', "E0422", 2, "`-1GB` is not"),
        ('[a]\nlink = "1GB"\n', "E0422", 2, "`link` of a device is bandwidth"),
        ('[b]\n\n[a]\nmemroy = "1GB"\n', "E0422", 4, "`memroy`"),
        ('kind = "1GB"\n', "E0422", 1, "outside of a table"),
        ('[gpu]\nmemory = "1GB"\n', "E0422", 1, "stands for any GPU"),
        ('[a]\ndevice = "tpu"\n', "E0422", 2, "a CPU or a GPU"),
        ('[h100]\ndevice = "cpu"\n', "E0422", 2, "`h100` is one"),
        ("[a\n", "E0421", 0, "is not TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, code: str, line: int, words: str) -> None:
    report, _ = read(tmp_path, text)
    (error,) = report.errors
    assert error.code == code and words in error.message
    assert (error.span.source.position(error.span.start)[0] if error.span else 0) == line


CPU_JOB = JOB.replace("  gpus      = 2\n  kind      = lab_card\n", "  cpus      = 2\n").replace("bf16", "fp32")


def analysed(folder: Path, job: str, cards: str, *settings: str) -> tuple[Analysis | None, Report]:
    (folder / "cards.toml").write_text(cards)
    (folder / "made.plt").write_text(job)
    loaded = load(str(folder / "made.plt"), list(settings))
    assert loaded.job is not None, loaded.report.found
    report = Report()
    return report.collect(analyse(loaded.job, Facts())), report


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        ('[cpu]\nfp32 = "0.2TFLOPS"\nlink = "2GBps"\n', ()),
        ('[cpu]\nfp32 = "0.2TFLOPS"\nlink = "2GBps"\n', ("devices.kind=cpu",)),
        ('[cpu]\ndevice = "cpu"\nfp32 = "0.2TFLOPS"\nlink = "2GBps"\n', ()),
        ('[epyc]\ndevice = "cpu"\nfp32 = "0.2TFLOPS"\nlink = "2GBps"\n', ("devices.kind=epyc",)),
    ],
)
def test_a_step_on_cpus_is_predicted_with_figures_of_the_users_own(
    tmp_path: Path, table: str, settings: tuple[str, ...]
) -> None:
    analysis, report = analysed(tmp_path, CPU_JOB, table, *settings, "expect.step_time<=1s")
    assert analysis is not None and not report.found, report.found
    assert analysis.model is not None and analysis.estimate is not None and analysis.layout.device == "cpu"
    flops = 32 * (analysis.model.forward_flops + analysis.model.backward_flops)
    assert analysis.estimate.arithmetic == pytest.approx(flops / 0.2e12)
    assert analysis.estimate.step_time is not None and analysis.estimate.step_time >= analysis.estimate.arithmetic


def test_what_is_said_of_cpus_leads_to_a_prediction(tmp_path: Path) -> None:
    """Follows each remedy in turn, from a job whose catalogue lacks its device to one whose step time is known."""
    _, report = analysed(tmp_path, CPU_JOB, CARDS, "expect.step_time<=1s")
    assert [(d.code, d.help) for d in report.found] == [
        ("W0423", "a table `[cpu]` in it, or the `kind` that it is about"),
        ("W0503", "`fp32` and `link` in the table `[cpu]` of the catalogue"),
    ]
    _, report = analysed(tmp_path, CPU_JOB, CARDS, "devices.kind=lab_card")
    (error,) = report.errors
    assert error.code == "E0408" and '`device = "cpu"` in its table' in error.help
    of_cpus = CARDS + 'device = "cpu"\n'
    analysis, report = analysed(tmp_path, CPU_JOB, of_cpus, "devices.kind=lab_card", "expect.step_time<=1s")
    assert analysis is not None and not report.found
    _, report = analysed(tmp_path, CPU_JOB, CARDS + '[cpu]\nfp32 = "1TFLOPS"\n', "expect.step_time<=1s")
    assert [(d.code, d.help) for d in report.found] == [("W0503", "`link` in the table `[cpu]` of the catalogue")]
    without = CPU_JOB.replace('  catalogue = "cards.toml"\n', "")
    _, report = analysed(tmp_path, without, CARDS, "expect.step_time<=1s")
    advice = "`dslc calibrate JOB` measures it, on the machine that trains"
    assert [(d.code, d.help) for d in report.found] == [("W0503", advice)]


def test_cpus_and_gpus_are_not_taken_for_one_another(tmp_path: Path) -> None:
    _, report = analysed(tmp_path, JOB, CARDS + 'device = "cpu"\n')
    (error,) = report.errors
    assert error.code == "E0408" and '`device = "gpu"` in its table' in error.help


def test_a_catalogue_without_the_kind_that_is_used_is_without_effect(tmp_path: Path) -> None:
    (tmp_path / "cards.toml").write_text(CARDS)
    (tmp_path / "made.plt").write_text(JOB.replace("kind      = lab_card", "kind      = h100"))
    loaded = load(str(tmp_path / "made.plt"), [])
    assert loaded.job is not None
    report = Report()
    report.collect(analyse(loaded.job, Facts()))
    assert [d.code for d in report.found] == ["W0423"]


@pytest.mark.parametrize(
    ("last", "train", "stages"),
    [
        ("linear(10)", "sgd()", [False, True]),
        ("conv2d(10, kernel = 1), flatten()", "sgd()", [False, False]),
        ("conv2d(10, kernel = 1), flatten()", 'python("parts:optimizer", lr = 0.1)', [True, True]),
    ],
)
def test_stages_of_convolutions_have_no_workspace_of_cublas(last: str, train: str, stages: list[bool]) -> None:
    before = "flatten(), " if last.startswith("linear") else ""
    layers = f"conv2d(8, padding = 1), relu(), conv2d(8, padding = 1), adaptive_avg_pool2d(1), {before}{last}"
    text = job_text(
        model={"network": f"[{layers}]"},
        data={"source": "digits()", "batch": 64},
        devices={"gpus": 2},
        parallelism={"pipeline": 2, "microbatches": 2},
        train={"steps": 10, "optimizer": train},
        log=None,
    )
    loaded = load_text(text)
    assert loaded.job is not None, loaded.report.found
    report = Report()
    analysis = report.collect(analyse(loaded.job, Facts()))
    assert analysis is not None, report.found
    assert [cost.memory.workspace > 0 for cost in analysis.costs] == stages
