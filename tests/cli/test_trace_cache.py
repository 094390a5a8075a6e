"""What tracing found is kept, and taken only where everything that it rests on is the same."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.probe import trace_cache
from dslc.probe.child import in_child
from dslc.probe.dependency_recorder import DependencyRecorder, digest_of, digest_of_variable
from dslc.probe.trace_cache import TraceCache

FACTS = ModelFacts(
    parameters=(("weight", (2, 3), True),),
    buffers=(),
    layers=(),
    output=TensorFact(shape=(3,), dtype="float32"),
    batch_norm=False,
    noise=False,
    unused=(),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DSLC_TRACE_CACHE")
    return tmp_path


def keep(place: Path, what: str = "a", facts: ModelFacts = FACTS, **variables: str | None) -> Path | None:
    """Keeps facts that rest on the file `net.py`; returns the entry."""
    file = place / "net.py"
    file.write_text("width = 3")
    environment = {name: digest_of_variable(value) for name, value in variables.items()}
    dependencies = {"files": {str(file): digest_of(str(file))}, "environment": environment}
    TraceCache({"what": what}).store({"facts": to_json(facts), "dependencies": dependencies}, facts)
    found = list((place / "cache" / "dslc").glob("trace-*"))
    return max(found, key=lambda path: path.stat().st_mtime_ns) if found else None


def found(what: str = "a") -> ModelFacts | None:
    return TraceCache({"what": what}).load()


def test_facts_are_found_again_for_the_same_and_nothing_else(folder: Path) -> None:
    entry = keep(folder)
    assert found() == FACTS
    assert found("b") is None and TraceCache(None).load() is None
    assert entry is not None and entry.stat().st_mode & 0o777 == 0o600


def test_a_file_or_a_variable_that_has_changed_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDTH", "3")
    keep(folder, WIDTH="3", DEPTH=None)
    assert found() == FACTS
    (folder / "net.py").write_text("width = 4")
    assert found() is None
    (folder / "net.py").unlink()
    assert found() is None
    keep(folder, WIDTH="3", DEPTH=None)
    monkeypatch.setenv("DEPTH", "")
    assert found() is None
    monkeypatch.delenv("DEPTH")
    monkeypatch.setenv("WIDTH", "4")
    assert found() is None


def test_what_could_be_imported_and_the_settings_of_libraries_are_part_of_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(folder)
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert found() is None
    monkeypatch.delenv("TORCH_LOGS")
    monkeypatch.syspath_prepend(str(folder / "other"))
    assert found() == FACTS  # there is no such folder
    (folder / "other").mkdir()
    (folder / "other" / "torch.py").write_text("")
    assert found() is None


def test_a_version_that_is_installed_again_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = folder / "site-packages" / "nets-1.0.dist-info"
    distribution.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(distribution.parent))
    keep(folder)
    assert found() == FACTS
    os.utime(distribution, (1, 1))
    assert found() is None


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_entry_is_not_believed(folder: Path, data: st.DataObject) -> None:
    entry = keep(folder)
    assert entry is not None
    text = bytearray(entry.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = (text[at] + data.draw(st.integers(1, 255))) % 256
    entry.write_bytes(text[: data.draw(st.sampled_from((len(text), at, 0)))] or b"")
    assert found() is None


def test_an_entry_that_others_could_have_written_is_not_believed(folder: Path) -> None:
    entry = keep(folder)
    assert entry is not None
    entry.chmod(0o666)
    assert found() is None
    entry.chmod(0o600)
    assert found() == FACTS
    entry.rename(folder / "elsewhere")
    entry.symlink_to(folder / "elsewhere")
    assert found() is None
    (folder / "cache" / "dslc").chmod(0o777)
    keep(folder, "b")
    assert found("b") is None and len(list((folder / "cache" / "dslc").glob("trace-*"))) == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")
def test_an_entry_of_another_user_is_not_believed(folder: Path) -> None:
    entry = keep(folder)
    assert entry is not None
    os.chown(entry, 12345, -1)
    assert found() is None


def test_a_text_that_is_whole_but_no_entry_is_not_believed(folder: Path) -> None:
    entry = keep(folder)
    assert entry is not None
    for text in ("[]", "{}", '{"files": 3, "environment": {}, "facts": {}}', "[" * 100_000, "\ud800", "{"):
        body = text.encode(errors="surrogatepass")
        entry.write_bytes(hashlib.sha256(body).hexdigest().encode() + body)
        assert found() is None


def test_a_cache_that_cannot_be_used_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSLC_TRACE_CACHE", "off")
    assert keep(folder) is None and found() is None
    monkeypatch.delenv("DSLC_TRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    keep(folder)
    assert found() is None


def test_entries_take_a_bounded_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(to_json_text(keep(folder)))
    monkeypatch.setattr(trace_cache, "MOST_BYTES", 5 * size)
    for n in range(8):
        entry = keep(folder, str(n))
        assert entry is not None
        os.utime(entry, (n, n))
        assert n < 3 or found("0") == FACTS  # which is used, and so stays
    left = [n for n in range(8) if found(str(n)) is not None]
    assert 2 <= len(left) <= 5 and 0 in left and 7 in left


def to_json_text(entry: Path | None) -> bytes:
    assert entry is not None
    return entry.read_bytes()


def test_facts_of_numbers_that_were_looked_at_are_not_kept(folder: Path) -> None:
    assert keep(folder, facts=ModelFacts(**{**vars_of(FACTS), "looks": "`item`"})) is None


def vars_of(facts: ModelFacts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}


# --------------------------------------------------------------------------------------------- what is looked at


def told(work: Callable[[], object]) -> dict[str, Any] | None:
    """Returns what a child says that this looked at."""

    def watched() -> dict[str, Any] | None:
        looked = DependencyRecorder()
        work()
        return looked.dependencies()

    answer = in_child(watched)
    assert "made" in answer, answer
    made: dict[str, Any] | None = answer["made"]
    return made


def test_files_and_variables_that_are_read_are_told(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text("width: 3")

    def work() -> None:
        file.read_text()
        (tmp_path / "absent").exists()
        os.environ.get("NET_WIDTH")
        os.environ["MINE"] = "1"
        assert os.environ["MINE"] == "1"

    found = told(work)
    assert found is not None
    assert found["files"][str(file)] == digest_of(str(file))
    assert found["environment"] == {"NET_WIDTH": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        lambda: print("made"),
        lambda: print("made", file=sys.stderr),
        lambda: random.random(),
        lambda: __import__("numpy").random.rand(),
        lambda: subprocess.run(["true"], check=True),
        lambda: os.listdir("tests"),
        lambda: list(Path("tests").iterdir()),
        lambda: list(Path("tests").glob("*.plt")),
        lambda: open("build-of-a-test", "w").close(),
    ],
)
def test_what_may_come_out_otherwise_another_time_is_not_kept(
    work: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tests"))
    assert told(lambda: None) is not None
    assert told(work) is None


# ------------------------------------------------------------------------------------------------------ the command

JOB = """
model {
  network = python("net:make", blocks = 1)
  loss    = cross_entropy()
}

data {
  source = synthetic(vocab = 11, context = 4)
  batch  = 4
}

devices {
  cpus = 1
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}
"""
NET = """
import torch
import sizes
def make(blocks):
    width = sizes.WIDTH
    return torch.nn.Sequential(torch.nn.Embedding(11, width), *[torch.nn.Linear(width, width) for _ in range(blocks)],
                               torch.nn.Linear(width, 11))
"""


@pytest.mark.slow
def test_a_second_check_runs_nothing_and_a_changed_module_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # with it statements are recorded, and nothing is kept of a trace
    (folder / "job.plt").write_text(JOB)
    (folder / "net.py").write_text(NET)
    (folder / "sizes.py").write_text("WIDTH = 4")

    installed = dslc("check", "job.plt", "--trace", cwd=folder, fresh=True)  # the command as a user types it
    assert installed.returncode == 0
    entries = list((folder / "cache" / "dslc").glob("trace-*"))
    assert len(entries) == 2  # of the network, and of all trials
    for entry in entries:
        entry.unlink()

    def check(*arguments: str, forks: bool) -> str:
        code = "import os, sys; from dslc.main import main; " + ("" if forks else "del os.fork; ")
        torch = "" if forks else "assert 'torch' not in sys.modules; "
        command = [
            sys.executable,
            "-c",
            code + f"status = main(sys.argv[1:]); {torch}sys.exit(status)",
            "check",
            "job.plt",
            "--trace",
            *arguments,
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = check(forks=True)
    assert check(forks=False) == first
    assert check("--set", "train.steps=4", "--set", "data.batch=8", forks=False) != first  # which tracing ignores
    (folder / "sizes.py").write_text("WIDTH = 5")
    assert check(forks=True) != first


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_has_no_digest(tmp_path: Path, kind: str) -> None:
    """And nothing waits for who would write into it, as for a pipe in the place of a model's config.json."""
    path = tmp_path / "config.json"
    {"pipe": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    assert digest_of(str(path)) == ""
