"""`dslc check --fix`: what it changes in the file, what it says, and what it leaves alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.paths import TESTS

from dslc.main import main

JOB = """\
# A job with mistakes.
model {
  network = [flatten(), liner(10)]  # the layers
  loss    = cross_entropy()
}

data {
  source  = digits()
  bach    = 64
  workers = 1
}

train {
  epochs    = 1
  optimizer = sgd(lr = 0.1)
  batch_sz  = 3
  clip      = -1
}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.plt"
    path.write_text(JOB)
    return path


def test_fixes_are_written_and_the_rest_is_reported(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "job.plt", "--fix"]) == 1
    out = capsys.readouterr()
    assert out.err.startswith(
        "job.plt:3:25: replace `liner` by `linear` [E0130]\n"
        "job.plt:9:3: replace `bach` by `batch` [E0107]\n"
        "job.plt:17:15: replace `-1` by `1` [E0125]\n"
        "error[E0107]: `train` has no field `batch_sz`"
    )
    assert job.read_text() == JOB.replace("liner", "linear").replace("bach ", "batch").replace("-1", "1")
    assert sorted(os.listdir()) == ["job.plt"]


def test_values_that_the_job_states_are_changed_only_on_demand(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = (TESTS / "bad" / "base" / "digits.plt").read_text()
    job.write_text(good.replace("cpus = 2", "cpus = 3") + "\nparallelism {\n  data = 2\n}\n")
    before = job.read_text()
    assert main(["check", "job.plt", "--fix"]) == 1
    err = capsys.readouterr().err
    assert "1 error has a fix by another value: --unsafe-fixes sets it" in err and job.read_text() == before
    main(["check", "job.plt", "--unsafe-fixes"])
    assert "[E0401]" in capsys.readouterr().err and job.read_text() != before


def test_mistakes_of_syntax_are_fixed_too(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(
        JOB.replace("data {", "data: {").replace("flatten(), liner", "flatten() liner").replace("= 1\n", "1\n")
    )
    assert main(["check", "job.plt", "--fix"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("job.plt:")]
    fixed = {line[-7:] for line in lines}
    assert fixed >= {"[E0016]", "[E0019]", "[E0013]", "[E0130]", "[E0107]", "[E0125]"}, lines
    assert "data {\n" in job.read_text() and "[flatten(), linear(10)]" in job.read_text()


def test_a_good_job_stays_as_it_is(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_text(
        JOB.replace("liner", "linear").replace("bach ", "batch").replace("  batch_sz  = 3\n", "").replace("-1", "1")
    )
    before = job.stat()
    assert main(["check", "job.plt", "--fix"]) == 0
    assert capsys.readouterr().err == ""
    assert job.stat().st_mtime_ns == before.st_mtime_ns and job.stat().st_ino == before.st_ino


def test_line_ends_mode_and_links_stay(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job.write_bytes("\ufeff".encode() + JOB.replace("\n", "\r\n").encode())
    job.chmod(0o640)
    Path("link.plt").symlink_to("job.plt")
    main(["check", "link.plt", "--fix"])
    assert "link.plt:3:25: replace `liner` by `linear`" in capsys.readouterr().err
    text = job.read_bytes().decode()
    assert text.startswith("\ufeff# A job") and text.count("\r\n") == JOB.count("\n") and "linear(10)" in text
    assert job.stat().st_mode & 0o777 == 0o640 and Path("link.plt").is_symlink()


def test_what_nothing_uses_is_removed_and_other_warnings_stay(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = (TESTS / "bad" / "base" / "digits.plt").read_text()
    saved = "\ncheckpoint {\n  every = 90000 steps\n}\n"
    job.write_text(f"param unused = 3\n\n{good}\nparallelism {{\n  virtual_stages = 2\n}}\n{saved}")
    assert main(["check", "job.plt", "--fix"]) == 0
    err = capsys.readouterr().err
    assert "remove `unused` [W0101]" in err and "remove `virtual_stages` [W0103]" in err and "warning[W0603]" in err
    assert job.read_text() == good + saved


def test_a_mistake_in_an_imported_file_is_fixed_there(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = JOB.replace("bach ", "batch").replace("  batch_sz  = 3\n", "")
    job.write_bytes(good.replace("\n", "\r\n").encode())
    Path("runs").mkdir()
    main_text = 'import "../job.plt"\n\ntrain {\n  clip = 2\n  lrschedule = constant\n}\n'
    Path("runs/main.plt").write_text(main_text)
    assert main(["check", "runs/main.plt", "--fix"]) == 0
    err = capsys.readouterr().err
    assert "job.plt:3:25: replace `liner` by `linear` [E0130]\n" in err
    fixed = good.replace("liner", "linear")  # its clip is overridden
    assert job.read_bytes().decode() == fixed.replace("\n", "\r\n")
    assert Path("runs/main.plt").read_text() == main_text.replace("lrschedule", "lr_schedule")


def test_a_field_is_changed_in_the_file_that_decides_it(job: Path) -> None:
    good = (TESTS / "bad" / "base" / "digits.plt").read_text().replace("cpus = 2", "cpus = 3")
    job.write_text(good + "\nparallelism {\n  data = 2\n}\n")
    Path("main.plt").write_text('import "job.plt"\n')
    assert main(["check", "main.plt", "--unsafe-fixes"]) == 0
    assert "data = 3" in job.read_text() and Path("main.plt").read_text() == 'import "job.plt"\n'


def test_a_file_that_cannot_be_read_is_reported_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "none.plt", "--fix"]) == 1
    assert capsys.readouterr().err.count("E0101") == 1
