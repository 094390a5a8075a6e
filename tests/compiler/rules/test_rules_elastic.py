"""An elastic job is, at each count of its nodes, what it is as a job of that count."""

from __future__ import annotations

from dataclasses import replace

from helpers.job_texts import job_text

from dslc.compiler.compile import compile_plan
from dslc.dsl.bounds import MISTAKES
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_text
from dslc.jobs.check_job import inspect, inspect_counts

JOB = job_text(
    model={"network": "[flatten(), linear(8), relu(), linear(10)]"},
    data={"source": "digits()", "batch": 24},
    devices={"nodes": "NODES", "cpus": 2},
    train={"steps": 50, "optimizer": "adam(lr = 0.01)", "scale_lr": "linear(base_batch = 12)"},
    checkpoint={"every": "10 steps"},
    log=None,
)


def job(nodes: object, more: str = "") -> str:
    return JOB.replace("NODES", str(nodes)) + more


def test_each_count_is_planned_as_a_job_of_its_own() -> None:
    report = Report()
    found = inspect_counts(load_text(job("1..6", "parallelism { zero = 1 }")), report)
    assert list(found) == [1, 2, 3, 4, 6] and not report.errors
    assert {each.layout.node_counts for each in found.values()} == {tuple(found)}
    for count, analysis in found.items():
        alone = inspect(load_text(job(count, "parallelism { zero = 1 }")), Report())
        assert alone is not None
        one, other = (compile_plan(each) for each in (analysis, alone))
        programs = [replace(each.program(), plan_hash="") for each in (one, other)]
        assert programs[0] == programs[1] and one.places() == other.places()
        assert (programs[0].data.batch, one.plan.training.lr) == (24, 0.02), "the same at every count"
        assert analysis.layout.sizes["data"] == 2 * count


def test_counts_that_do_not_fit_are_skipped_with_the_reason() -> None:
    report = Report()
    found = inspect_counts(load_text(job("1..8", "parallelism { zero = 1, replicas = 4 }")), report)
    assert list(found) == [2, 4, 6]
    (told,) = [each for each in report.found if each.code == "W0808"]
    assert told.notes[0].message.startswith("on 1 node: ") and "4" in told.notes[0].message
    assert [note.message.partition(":")[0] for note in told.notes[1:]] == [f"on {n} nodes" for n in (3, 5, 7, 8)]


def test_a_mistake_that_every_count_has_is_told_once() -> None:
    report = Report()
    assert not inspect_counts(load_text(job("1..4").replace("linear(8)", "conv2d(8, kernel = 3)")), report)
    assert report.errors and not any(each.code in ("E0813", "W0808") for each in report.found)
    assert len({each.code for each in report.errors}) == len(report.errors)


def test_more_mistakes_than_are_reported_at_every_count() -> None:
    """Each count ends its own search at the bound, and its mistakes are the job's."""
    patterns = ", ".join(f'"x{number}"' for number in range(MISTAKES.most + 10))
    report = Report()
    assert not inspect_counts(load_text(job("1..2", f"model {{ freeze = [{patterns}] }}")), report)
    codes = [each.code for each in report.errors]
    assert codes.count("E0710") == MISTAKES.most and codes[-1] == MISTAKES.code


def test_ssh_reaches_as_many_hosts_as_it_names() -> None:
    """More hosts than the range wait for a place; of a range that is longer, the rest is skipped."""
    launch = "launch {{ with = ssh(hosts = {}) }}"
    for hosts, counts in ((["a", "b"], [1, 2]), (["a", "b", "c"], [1, 2, 3]), (["a", "b", "c", "d"], [1, 2, 3])):
        report = Report()
        named = str(hosts).replace("'", '"')
        assert list(inspect_counts(load_text(job("1..3", launch.format(named))), report)) == counts
        told = [each.code for each in report.found if each.code != "W0608"]
        assert told == (["W0808"] if len(hosts) == 2 else [])
    report = Report()
    assert not inspect_counts(load_text(job("2..4", launch.format('["a"]'))), report)
    (error,) = report.errors
    assert error.code == "E0823" and error.message == "`ssh` reaches 1 host, and the job takes 2 at least"
