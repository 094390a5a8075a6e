"""Checks yield diagnostics and return values; a report collects both, and ends a search that has found enough."""

import pytest

from dslc.dsl.bounds import MISTAKES
from dslc.dsl.diagnostics import Diagnostic, Findings, Report, TooManyErrors, has_errors, judge, passes


def check(*codes: str) -> Findings[int]:
    for code in codes:
        yield Diagnostic(code, f"a fault {code}", None)
    return len(codes)


def test_a_report_takes_the_diagnostics_of_a_check_and_returns_its_value() -> None:
    report = Report()
    assert report.collect(check("E0301", "W0433")) == 2
    assert [found.code for found in report.found] == ["E0301", "W0433"]


@pytest.mark.parametrize(
    ("codes", "sound"),
    [((), True), (("W0433", "N0640"), True), (("W0433", "E0301"), False), (("E0301", "W0433"), False)],
)
def test_only_an_error_says_that_a_check_has_failed(codes: tuple[str, ...], sound: bool) -> None:
    report = Report()
    assert report.collect(judge(check(*codes))) == (len(codes), sound)
    assert Report().collect(passes(check(*codes))) is sound
    assert Report().accepts(iter(report.found)) is sound
    assert has_errors(check(*codes)) is not sound
    assert [found.code for found in report.found] == list(codes)


def test_a_check_is_not_followed_beyond_the_mistakes_that_anyone_reads() -> None:
    asked: list[int] = []

    def endless() -> Findings[None]:
        while True:
            asked.append(len(asked))
            yield Diagnostic("E0301", f"fault {len(asked)}", None)

    report = Report()
    with pytest.raises(TooManyErrors):
        report.collect(judge(endless()))
    assert len(asked) == MISTAKES.most + 1 and report.found[-1].code == MISTAKES.code
