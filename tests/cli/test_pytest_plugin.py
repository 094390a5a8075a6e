"""The plugin of pytest, in projects made for each test: what it collects, what a failure prints, and its options."""

from __future__ import annotations

import shutil

import pytest
from helpers.paths import TESTS

pytest_plugins = ["pytester"]

GOOD = (TESTS / "bad" / "base" / "digits.plt").read_text()
BAD = GOOD.replace("linear", "liner", 1)


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with jobs below `testpaths` and elsewhere."""
    pytester.makeini("[pytest]\ntestpaths = jobs\naddopts = -p no:cacheprovider\n")
    for folder in ("jobs", "jobs/deep", "others"):
        pytester.mkdir(folder)
    for path in ("jobs/good.plt", "jobs/deep/good.plt", "others/good.plt"):
        (pytester.path / path).write_text(GOOD)
    return pytester


def outcomes(result: pytest.RunResult) -> dict[str, int]:
    return {name: count for name, count in result.parseoutcomes().items() if name != "warnings"}


def test_jobs_below_testpaths_are_tests(project: pytest.Pytester) -> None:
    result = project.runpytest("-v")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(["jobs/deep/good.plt::check PASSED*", "jobs/good.plt::check PASSED*"])


def test_other_jobs_are_tests_if_they_are_named(project: pytest.Pytester) -> None:
    assert outcomes(project.runpytest("others/good.plt")) == {"passed": 1}
    assert project.runpytest("others").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert project.runpytest(".").parseoutcomes() == {"passed": 2}, "those below testpaths"
    project.makeini("[pytest]\n")
    assert project.runpytest().ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_the_plugin_can_be_switched_off(project: pytest.Pytester) -> None:
    assert project.runpytest("-p", "no:dslc").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_failure_prints_what_check_prints(project: pytest.Pytester) -> None:
    (project.path / "jobs" / "bad.plt").write_text(BAD)
    result = project.runpytest("-v")
    assert outcomes(result) == {"passed": 2, "failed": 1}
    result.stdout.fnmatch_lines(
        [
            "*_ jobs/bad.plt: check _*",
            "error?E0130?: there is no layer `liner`",
            " --> jobs/bad.plt:*",
            "help: did you mean `linear`?",
            "1 error",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")


def test_a_broken_promise_fails(project: pytest.Pytester) -> None:
    (project.path / "jobs" / "good.plt").write_text(GOOD + "\nexpect {\n  parameters < 10\n}\n")
    result = project.runpytest()
    assert outcomes(result) == {"passed": 1, "failed": 1}
    result.stdout.fnmatch_lines(["error?E0502?: `parameters` is *"])


def test_each_combination_of_a_sweep_is_a_test(project: pytest.Pytester) -> None:
    sweep = "\nsweep {\n  data.batch           = [32, 64]\n  train.optimizer.lr = [0.1, 0.2]\n}\n"
    (project.path / "jobs" / "good.plt").write_text(GOOD + sweep + "\nexpect {\n  parameters > 1\n}\n")
    result = project.runpytest("-v", "jobs/good.plt")
    assert outcomes(result) == {"passed": 4}
    result.stdout.fnmatch_lines(["jobs/good.plt::check?data.batch=32, train.optimizer.lr=0.2? PASSED*"])
    (project.path / "jobs" / "good.plt").write_text(GOOD + sweep.replace("64", "0"))
    result = project.runpytest("jobs/good.plt")
    assert outcomes(result) == {"failed": 1}, "a mistake of an alternative is one of the job"


def test_warnings_are_a_section_of_a_test_that_passes(project: pytest.Pytester) -> None:
    (project.path / "jobs" / "good.plt").write_text("param unused = 1\n\n" + GOOD)
    result = project.runpytest("-rP", "jobs/good.plt")
    assert outcomes(result) == {"passed": 1}
    result.stdout.fnmatch_lines(["*dslc check*", "warning?W0101?: param `unused` is never used"])


def test_locked_plans_are_compared(project: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    from dslc.main import main

    shutil.rmtree(project.path / "jobs" / "deep")
    result = project.runpytest("--dslc-locked")
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(["error?E1007?: `jobs/good.lock` cannot be read*"])
    assert main(["plan", str(project.path / "jobs" / "good.plt"), "--lock"]) == 0
    assert outcomes(project.runpytest("--dslc-locked")) == {"passed": 1}
    (project.path / "jobs" / "good.plt").write_text(GOOD + "\nparallelism {\n  microbatches = 2\n}\n")
    result = project.runpytest("--dslc-locked")
    assert outcomes(result) == {"failed": 1}
    result.stdout.fnmatch_lines(["error?E1008?: the plan of jobs/good.plt is *"])


@pytest.mark.slow
def test_verify_trains_some_steps(project: pytest.Pytester) -> None:
    shutil.rmtree(project.path / "jobs" / "deep")
    result = project.runpytest("--dslc-verify", "-v", "-rP")
    assert outcomes(result) == {"passed": 2}
    result.stdout.fnmatch_lines(["jobs/good.plt::verify PASSED*", "*dslc verify*"])


def test_the_plugin_loads_nothing_before_a_job_is_collected(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_loaded="""
        import sys

        def test_it():
            loaded = {name.partition(".")[0] for name in sys.modules}
            assert not loaded & {"torch", "networkx", "lark", "numpy", "hypothesis"}
            assert {name for name in sys.modules if name.startswith("dslc")} <= {
                "dslc", "dslc.terminal", "dslc.terminal.version", "dslc.pytest_plugin"}
        """
    )
    result = project.runpytest_subprocess("-p", "no:hypothesispytest", "test_loaded.py")
    assert outcomes(result) == {"passed": 1}, result.stdout.str()
