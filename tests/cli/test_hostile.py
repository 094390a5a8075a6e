"""No text, file or setting makes the command slow, large or talkative, or ends it with a traceback.

`make long` has 5,000 drawn from seeds; here are the worst of each kind by name, and fifty of those drawn.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import dslc
from helpers.launcher import DSLC
from helpers.limited_process import LimitedProcess, faults_of
from hypothesis import given, settings
from hypothesis import strategies as st
from instruments.hostile import COMMANDS, NAMED, Attack, attack, drawn, gpt, lay, many, written

from dslc.compiler.facts.untrusted_files import LINE_LIMIT, read_lines
from dslc.dsl.bounds import ALL
from dslc.dsl.codes import explain
from dslc.dsl.meaning.load import load, load_text

SEEDS = 5_000


class Attacked:
    """The process that runs attacks, with the result of each."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._process = folder, LimitedProcess(folder)
        self.close = self._process.close

    def by(self, which: str | int) -> list[dict[str, Any]]:
        return self._process.run(lay(NAMED[which]() if isinstance(which, str) else drawn(which), self._folder))


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = Attacked(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@pytest.mark.cases(20)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_the_worst_of_each_kind(name: str, attacked: Attacked) -> None:
    assert not faults_of(attacked.by(name))


@pytest.mark.long
def test_what_is_drawn(attacked: Attacked) -> None:
    @given(st.integers(0, 2**32))
    @settings(max_examples=50)
    def holds(seed: int) -> None:
        assert not faults_of(attacked.by(seed))

    holds()


@pytest.mark.long
def test_five_thousand(attacked: Attacked) -> None:
    """Prints the results: `pytest -m long -s`."""
    found, ended = {}, {command: dict[int, int]() for command in COMMANDS}
    most = {command: [0.0, 0.0] for command in COMMANDS}
    for seed in range(SEEDS):
        told = attacked.by(seed)
        for each in told:
            counts, (seconds, size) = ended[each["command"]], most[each["command"]]
            counts[each["code"]] = counts.get(each["code"], 0) + 1
            most[each["command"]] = [max(seconds, each["seconds"]), max(size, each["megabytes"])]
        if faults_of(told):
            found[seed] = faults_of(told)
    for command in COMMANDS:
        print(command, dict(sorted(ended[command].items())), "at most {:.2f} s, {:.0f} MB".format(*most[command]))
    assert not found


# ------------------------------------------------------------------------------------------------- what is still good


@pytest.mark.slow
def test_what_is_large_and_meant_is_accepted(tmp_path: Path) -> None:
    large = gpt(400, "devices { nodes = 2048, gpus = 8, kind = h100 }", batch="16384")
    large = large.replace("synthetic(", "synthetic(samples = 1_000_000, ")
    searched = large.replace("devices {", "parallelism = auto\ndevices {")
    sweep = written("sweep { train.optimizer.lr = [" + many(250, "0.{:03}").replace("0.000", "0.5") + "] }")
    # 125 combinations of a large job on many ranks, of which the costs are those of five.
    many_ranks = "devices { nodes = 2, gpus = 8, kind = h100 }\nparallelism { pipeline = 2, tensor = 2, zero = 2 }\n"
    numbers = "[1, 2, 3, 4, 5]"
    swept = f"sweep {{ memory.recompute = [none, selective, full, every(2), every(3)], train.seed = {numbers}, "
    grid = gpt(32, f"{many_ranks}{swept}train.optimizer.lr = {numbers} }}")
    elastic = written("devices { nodes = 1..64, cpus = 1 }", batch=str(2**6 * 3**3 * 5**2 * 7 * 11 * 13))
    entries = "".join(f"  # what it is for\n  name_{n} = {n},\n" for n in range(4_000))
    long = written(network=f'python("net:make",\n{entries})')
    for name, text in {"large": large, "searched": searched, "sweep": sweep, "grid": grid, "long": long}.items():
        (tmp_path / f"{name}.plt").write_text(text)
        done = dslc("check", f"{name}.plt", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert ("of 680 splits into axes" in done.stdout) == (name == "searched")
    loaded = load_text(elastic)
    assert loaded.job is not None and not loaded.report.errors


# ------------------------------------------------------------------------------------------------------- the bounds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("E0032", "a = 1\n" * 20_000),
        ("E0033", 'import "0.plt"\n' + written()),
        ("E0034", NAMED["lists that treble"]().job.decode()),
        ("E0035", NAMED["unknown fields"]().job.decode()),
        ("E0036", written("devices { nodes = 10**9 }")),
        ("E0037", written("devices { nodes = 1..100_000 }")),
        ("E0037", written("devices { nodes = 1..100_000 }", network='python("net:make")')),
        ("E0037", NAMED["a sweep"]().job.decode()),
        ("W0614", NAMED["layers in a sweep"]().job.decode()),
        ("E0037", NAMED["a sweep of a long job"]().job.decode()),
        ("E0143", NAMED["a chain of params"]().job.decode()),
        ("E0221", gpt(10**18)),
        ("E0413", NAMED["1f1b of 100000"]().job.decode()),
        ("E0136", NAMED["patterns"]().job.decode()),
        ("E0135", NAMED["a pattern of brackets"]().job.decode()),
    ],
)
def test_each_bound_is_a_diagnostic_with_a_place(code: str, text: str, tmp_path: Path) -> None:
    for n in range(60):
        (tmp_path / f"{n}.plt").write_text(f'import "{n + 1}.plt"\n')
    (tmp_path / "job.plt").write_text(text)
    done = dslc("check", "job.plt", "--json", cwd=tmp_path)
    found = [each for each in json.loads(done.stdout) if each["code"] == code]
    assert found and done.returncode == (code[0] == "E"), done.stdout[-500:]
    assert code == "E0035" or all(each["file"] and each["line"] for each in found)
    assert code in {bound.code for bound in ALL} and explain(code)


CATALOGUE = attack(written('devices { catalogue = "c", kind = a }'), beside={"c": b"# a\n" * 300_000})
NESTED = attack("param a = " + "(" * 120 + "1" + ")" * 120 + "\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "made"),
    [
        ("E0028", NESTED),
        ("E0031", NAMED["a large import"]()),
        ("E0031", NAMED["--set: many"]()),
        ("E0031", NAMED["--set: everything"]()),
        ("E0033", NAMED["many imports"]()),
        ("W0712", NAMED["a header of many"]()),
        ("E0421", CATALOGUE),
    ],
)
def test_each_bound_on_files_and_settings_is_a_diagnostic(code: str, made: Attack, tmp_path: Path) -> None:
    check, *_ = lay(made, tmp_path)
    found = [each for each in json.loads(dslc(*check, "--json", cwd=tmp_path).stdout) if each["code"] == code]
    assert found and (made.settings or all(each["file"] and each["line"] for each in found))
    assert f"E{code[1:]}" in {bound.code for bound in ALL} and explain(code)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    """It does not fit into memory either."""
    for size in (50 * 10**6, 4 * 2**30):
        (tmp_path / "job.plt").touch()
        os.truncate(tmp_path / "job.plt", size)
        within = ["sh", "-c", 'ulimit -v 1500000; exec "$@"', "sh", str(DSLC), "check", "job.plt"]
        done = subprocess.run(within, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "error[E0031]" in done.stderr, done.stderr


def test_a_line_without_an_end_is_refused() -> None:
    long = b"x" * (LINE_LIMIT + 1)
    assert list(read_lines(io.BytesIO(b"one\n" + long[2:] + b"\nhalf"))) == [b"one\n", long[2:] + b"\n"]
    with pytest.raises(ValueError, match="a line has more than"):
        list(read_lines(io.BytesIO(b"one\n" + long + b"\n")))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "pipe"])
def test_devices_and_pipes_are_refused(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "job.plt").write_text(f'import "{path}"\n' + written())
    (found,) = load(str(tmp_path / "job.plt")).report
    assert found.code == "E0101" and found.message.endswith("it is a device or a pipe, not a file")
    assert str(found.span).endswith("job.plt:1:8")


def test_a_byte_that_is_no_text_has_a_place_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text('import "odd.plt"\n')
    (tmp_path / "odd.plt").write_bytes("# é\n  # caf".encode() + b"\xe9\n")
    found = next(d for d in load(str(tmp_path / "job.plt")).report if d.code == "E0101")
    assert str(found.span).endswith("odd.plt:2:8") and found.label == "the byte 0xe9"
    assert found.notes[0].span is not None and str(found.notes[0].span).endswith("job.plt:1:8")


def test_standard_input_may_be_a_job(tmp_path: Path) -> None:
    done = dslc("check", "/dev/stdin", input=written(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------- names that are no text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a\x1b[31mb.plt", "a\u202eb.plt", "a\x9b31mb.plt", "a\nb.plt"])
def test_the_name_of_a_file_does_not_steer_the_terminal(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(written())
    (tmp_path / f"bad{name}").write_text(written(batch="0"))
    ran = [
        dslc("check", name, cwd=tmp_path),
        dslc("check", f"bad{name}", cwd=tmp_path),
        dslc("plan", name, cwd=tmp_path),
        dslc("plan", "--origins", name, cwd=tmp_path),
        dslc("fmt", name, cwd=tmp_path),
        dslc("fmt", f"not{name}", cwd=tmp_path),
        dslc("render", name, "-o", f"{name}.svg", cwd=tmp_path),
    ]
    odd = {char for char in name if not char.isprintable()} - {"\n"}
    assert [done.returncode for done in ran] == [0, 1, 0, 0, 0, 1, 0], [done.stderr for done in ran]
    assert not any(odd & set(done.stdout + done.stderr) for done in ran)
    assert not odd & set((tmp_path / f"{name}.svg").read_text())


@pytest.mark.slow
def test_nor_does_it_where_a_job_is_trained_and_used(tmp_path: Path) -> None:
    """Names of folders and checkpoints, and the text of an exception, cannot control a terminal either."""
    name = "a\x1b[31mb"
    (tmp_path / f"{name}.plt").write_text(written(steps="2") + "checkpoint { every = 1 step }\n")
    kept = ("--set", "data.validation=10%")
    ran = [
        dslc("run", f"{name}.plt", *kept, cwd=tmp_path),
        dslc("evaluate", f"{name}.plt", *kept, cwd=tmp_path),
        dslc("export", f"{name}.plt", *kept, "-o", f"{name}.safetensors", cwd=tmp_path),
        dslc("new", f"{name}new", cwd=tmp_path),
        dslc("run", f"{name}.plt", "--out", f"runs/{name}/..", cwd=tmp_path),
        dslc("evaluate", f"{name}.plt", *kept, "--checkpoint", f"no{name}", cwd=tmp_path),
    ]
    assert [done.returncode for done in ran] == [0, 0, 0, 0, 2, 2], [done.stdout + done.stderr for done in ran]
    assert not any("\x1b" in done.stdout + done.stderr for done in ran)
    (tmp_path / "odd.py").write_text(ODD)
    (tmp_path / f"{name}.plt").write_text(written(network='python("odd:Net")', steps="2"))
    failed = dslc("run", f"{name}.plt", cwd=tmp_path)
    assert failed.returncode == 3 and "wrong \\x1b[31m" in failed.stderr and "\x1b" not in failed.stderr


# Fails in training alone.
ODD = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        if x.device.type == "cpu" and type(x) is torch.Tensor:
            raise ValueError("wrong \\x1b[31m")
        return super().forward(x.flatten(1))
"""


def test_a_mistake_in_a_long_line_is_shown_with_what_stands_around_it(tmp_path: Path) -> None:
    long = '"' + "x" * 5000 + '"'
    (tmp_path / "job.plt").write_text(f"model {{ network = python({long}, 7 = 3, a = {long}) }}")
    done = dslc("check", "job.plt", cwd=tmp_path)
    assert done.returncode == 1 and max(map(len, done.stderr.splitlines())) < 700
    shown = done.stderr.splitlines()
    line = next(n for n, text in enumerate(shown) if "7 = 3" in text)
    assert shown[line].count("…") == 2
    assert shown[line][shown[line + 1].index("^")] == "="
