"""The commands as a user types them: what they print, what they leave, and their exit status."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.paths import ROOT
from helpers.trained import OWN_JOB

from dslc.jobs.check_job import check_one
from dslc.main import build_parser, main

DIGITS = ROOT / "examples" / "digits.plt"
CLUSTER = ROOT / "examples" / "cluster.plt"
EXAMPLES = [*sorted((ROOT / "examples").glob("*.plt")), ROOT / "examples" / "own" / "own.plt"]


@pytest.mark.slow
@pytest.mark.parametrize("job", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_good_and_formatted_and_says_what_it_teaches(job: Path) -> None:
    assert job.read_text().startswith("# ")
    run = dslc("check", job)
    assert run.returncode == 0, run.stderr
    assert "is good" in run.stdout
    assert dslc("fmt", "--check", job).returncode == 0


def test_check_names_the_mistake_and_the_remedy() -> None:
    run = dslc("check", DIGITS, "--set", "data.batch=63")
    assert run.returncode == 1
    assert run.stdout == ""
    assert "error[E0301]: a global batch of 63 cannot be shared out over 2 data-parallel ranks" in run.stderr
    assert "--> <--set 1>:1:12" in run.stderr
    assert "help: use 62 or 64" in run.stderr
    assert "\x1b" not in run.stderr, "plain in a pipe"


def test_check_for_machines() -> None:
    run = dslc("check", DIGITS, CLUSTER, "--json", "--set", "data.batch=63")
    found = json.loads(run.stdout)
    assert run.returncode == 1
    assert {"E0301"} <= {d["code"] for d in found}
    keys = {"code", "severity", "message", "file", "line", "column", "end_line", "end_column", "notes", "help", "fixes"}
    assert all(set(d) == keys for d in found)


def test_a_file_that_is_not_there() -> None:
    run = dslc("check", "nowhere.plt")
    assert run.returncode == 1
    assert "error[E0101]" in run.stderr


def test_plan_for_people_and_for_machines() -> None:
    text = dslc("plan", CLUSTER)
    assert text.returncode == 0
    for part in ("Topology", "16 h100", "bubble 1.76%", "7.51 B parameters", "Memory of a rank"):
        assert part in text.stdout
    plan = json.loads(dslc("plan", CLUSTER, "--summary").stdout)
    assert plan["parameters"] == 7_511_613_440
    assert plan["hash"] == json.loads(dslc("plan", CLUSTER, "--json").stdout)["hash"]
    assert plan["hash"] in text.stdout
    assert "rank 9" in dslc("plan", CLUSTER, "--rank", 9).stdout.lower()
    assert dslc("plan", CLUSTER, "--rank", 16).returncode == 2
    origins = dslc("plan", DIGITS, "--origins", "--set", "rate=0.1").stdout
    assert "<--set 1>" in origins
    assert "digits.plt:15" in origins


def test_render_draws_into_every_kind_of_file(tmp_path: Path) -> None:
    for name, start in (("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.dot", b"digraph"), ("a.html", b"<!DOCTYPE")):
        assert dslc("render", DIGITS, "-o", tmp_path / name).returncode == 0
        assert (tmp_path / name).read_bytes().lstrip().startswith(start), name
    for view in ("placement", "graph", "schedule"):
        assert dslc("render", CLUSTER, "-o", tmp_path / f"{view}.svg", "--view", view).returncode == 0
    assert dslc("render", DIGITS, "-o", tmp_path / "a.gif").returncode == 2


def test_fmt_writes_one_layout(tmp_path: Path) -> None:
    job = tmp_path / "a.plt"
    job.write_text("data{batch=64,source=digits()} # mine\n")
    assert dslc("fmt", "--check", job).returncode == 1
    assert job.read_text().startswith("data{")
    assert dslc("fmt", job).returncode == 0
    assert job.read_text() == "data {\n  batch  = 64\n  source = digits()\n}  # mine\n"
    assert dslc("fmt", "-", input="a{b=1}").stdout == "a {\n  b = 1\n}\n"
    assert dslc("fmt", "-", input="a{b=").returncode == 1
    for text, status in (("a{b=1}", 1), ("a {\n  b = 1\n}\n", 0)):
        checked = dslc("fmt", "--check", "-", input=text)
        assert checked.returncode == status and not checked.stdout


def test_fmt_writes_to_what_a_link_leads_to_and_keeps_its_mode(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept" / "job.plt", tmp_path / "job.plt"
    kept.parent.mkdir()
    kept.write_text("a{x=1}\n")
    kept.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(kept, 12345, 23456)
    link.symlink_to(Path("kept") / "job.plt")
    before = kept.stat()
    assert dslc("fmt", link, cwd=tmp_path).returncode == 0
    after = kept.stat()
    assert link.is_symlink() and kept.read_text() == "a {\n  x = 1\n}\n"
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino, "it is replaced as a whole"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["job.plt", "job.plt", "kept"]


def test_explain() -> None:
    assert "does not divide" in dslc("explain", "e0301").stdout
    assert "E0301" in dslc("explain").stdout
    unknown = dslc("explain", "E9301")
    assert unknown.returncode == 2
    assert "E0301" in unknown.stderr


@pytest.mark.parametrize("template", ["digits", "gpt", "python", "finetune", "lora", "chat", "dpo"])
def test_a_new_job_is_good_as_it_is(tmp_path: Path, template: str) -> None:
    assert dslc("new", "mine", "--template", template, cwd=tmp_path).returncode == 0
    assert dslc("check", "mine.plt", "--trace", cwd=tmp_path).returncode == 0
    assert dslc("fmt", "--check", "mine.plt", cwd=tmp_path).returncode == 0
    assert dslc("new", "mine", cwd=tmp_path).returncode == 2, "nothing is written over"


def test_a_folder_holds_several_new_jobs_over_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        assert main(["new", name, "--template", "chat"]) == 0
    assert main(["new", "two", "--template", "chat"]) == 2
    assert "two.plt exists already: choose another name" in capsys.readouterr().err
    data = tmp_path / "chat" / "conversations.jsonl"
    data.write_text("{}\n")
    assert main(["new", "three", "--template", "chat"]) == 2
    assert "conversations.jsonl exists already, with other content: choose another folder" in capsys.readouterr().err
    assert data.read_text() == "{}\n" and not (tmp_path / "three.plt").exists()


def test_a_list_of_jobs_says_what_each_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The templates are those that `--template` takes, and each example of the checkout is listed."""
    assert main(["new", "--list"]) == 0
    lines = re.findall(r"^  (\S+) +([A-Z].*[.?])$", capsys.readouterr().out, re.M)
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    templates = commands.choices["new"]._option_string_actions["--template"].choices
    assert sorted(name for name, _ in lines) == sorted(
        [*templates, *(job.name for job in EXAMPLES if job.parent == DIGITS.parent)]
    )


def test_a_new_job_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new"]) == 2
    assert "dslc new --list" in capsys.readouterr().err


@pytest.mark.slow
def test_a_users_function_that_fails_is_named(tmp_path: Path) -> None:
    dslc("new", "mine", "--template", "python", cwd=tmp_path)
    net = tmp_path / "net.py"
    net.write_text(net.read_text().replace("nn.Linear(2, width)", "nn.Linear(2, widht)"))
    untraced = dslc("check", "mine.plt", cwd=tmp_path)
    assert untraced.returncode == 0, "nothing of the user's is run"
    assert "as far as can be seen without its data and its network (`--trace` looks at them)" in untraced.stdout
    run = dslc("check", "mine.plt", "--trace", cwd=tmp_path)
    assert run.returncode == 1
    assert "error[E0802]" in run.stderr
    assert "widht" in run.stderr
    assert "net.py, line " in run.stderr


HAS_TORCH = """
import sys, torch, dslc
from dslc.dsl.diagnostics import JobError
try:
    dslc.compile("mine.plt", trace=True)
except JobError as error:
    sys.exit(str(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["the command", "a program that has torch"])
def test_what_libraries_log_does_not_stand_before_the_message(tmp_path: Path, by: str) -> None:
    """Output of the user's own code is shown."""
    dslc("new", "mine", "--template", "python", cwd=tmp_path)
    net = tmp_path / "net.py"
    logs = """
import logging, warnings
logging.getLogger("torchao").warning("Failed to load a library")
logging.getLogger("torch.utils._pytree").warning("natively supported")
warnings.warn_explicit("of torch", UserWarning, "somewhere.py", 1, module="torch.nn")
logging.getLogger("mine").warning("of my own")
"""
    net.write_text(logs + net.read_text().replace("nn.Linear(2, width)", "nn.Linear(2, widht)"))
    if by == "the command":
        run = dslc("check", "mine.plt", "--trace", cwd=tmp_path)
    else:
        run = subprocess.run(
            [sys.executable, "-c", HAS_TORCH], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert run.returncode == 1, run.stderr
    before, found, _ = run.stderr.partition("error[E0802]")
    assert found and set(before.splitlines()) == {"of my own"}, run.stderr


@pytest.mark.slow
def test_a_loss_that_is_not_there_is_named_before_a_run(tmp_path: Path) -> None:
    run = dslc("run", DIGITS, "--set", 'model.loss=python("nowhere:loss")', "--out", tmp_path / "run")
    assert run.returncode == 1
    assert "error[E0802]" in run.stderr
    assert not (tmp_path / "run").exists()


def test_a_loss_that_fails_is_named_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def loss(output, target):\n    return output - target\n")
    job = tmp_path / "job.plt"
    job.write_text(DIGITS.read_text())
    run = dslc("check", job, "--trace", "--set", 'model.loss=python("own:loss")')
    assert run.returncode == 1
    assert "error[E0802]: `own:loss` cannot be used as a loss: RuntimeError: The size of tensor a (10)" in run.stderr
    assert "own.py, line 2" in run.stderr


@pytest.mark.slow
def test_a_loss_is_tried_out_as_a_rank_calls_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        """
import os
import torch.distributed as dist
from torch.distributed import _functional_collectives as fc
from torch.nn import functional as F

def loss(output, target):
    assert int(os.environ["RANK"]) == dist.get_rank() < dist.get_world_size() == 2
    assert len(fc.all_gather_tensor(output, 0, dist.group.WORLD)) == 2 * len(output)
    return F.cross_entropy(output, target, reduction="none")
"""
    )
    job = tmp_path / "job.plt"
    job.write_text(DIGITS.read_text())
    run = dslc("check", job, "--trace", "--set", 'model.loss=python("own:loss")', "--set", "devices.cpus=2")
    assert run.returncode == 0, run.stderr


def test_every_command_has_help_with_an_example() -> None:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        assert f"example:\n  dslc {name}" in command.format_help()
    assert dslc().returncode == 2
    assert dslc("nonsense").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    (
        ("new", "nowhere/mine"),
        ("render", "mine.plt", "-o", "nowhere/mine.svg"),
        ("run", "mine.plt", "--out", "mine.plt"),
        ("verify", "mine.plt", "--out", "mine.plt/x"),
    ),
)
def test_a_place_that_cannot_be_written_to_is_one_message(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert dslc("new", "mine", cwd=tmp_path).returncode == 0
    made = dslc(*arguments, cwd=tmp_path)
    said, *remedies = made.stderr.splitlines()
    assert made.returncode == 2 and said.startswith("dslc: ") and len(remedies) <= 1
    assert all(each.startswith("help: ") for each in remedies)
    assert ("nowhere/mine" if "nowhere" in arguments[-1] + arguments[1] else "mine.plt") in made.stderr


def test_a_plan_in_a_pipe_is_not_cut(tmp_path: Path) -> None:
    name = "a_name_of_a_network_that_is_far_longer_than_a_line_of_a_terminal_" * 3
    (tmp_path / f"{name}.plt").write_text(DIGITS.read_text())
    plan = dslc("plan", tmp_path / f"{name}.plt")
    assert plan.returncode == 0 and plan.stdout.splitlines()[0].startswith(f"{name}  plan ")
    assert not any(line.endswith("…") for line in plan.stdout.splitlines())


OWN_NET = """
from torch import nn

def network():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(16, 10))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(64, 32), nn.Linear(16, 10)

    def forward(self, x):
        x = self.into(x.flatten(1))
        return self.out(x)

def misspelt():
    return nn.Linaer(64, 10)

def nothing():
    return None
"""


@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "`net:network` cannot be used as a model: Odd"),
        ("return 'x' * 50_000_000", "(19,600 letters more)"),
    ],
)
def test_an_exception_whose_text_fails_or_is_huge_is_told(
    tmp_path: Path, text: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = f"class Odd(Exception):\n    def __str__(self):\n        {text}\n\ndef network():\n    raise Odd\n"
    (tmp_path / "net.py").write_text(odd)
    (tmp_path / "job.plt").write_text(OWN_JOB)
    (error,) = check_one("job.plt", [], trace=True)[0].errors
    assert error.code == "E0802" and error.message.endswith(message)


@pytest.mark.parametrize(
    ("function", "label", "help"),
    [
        (
            "net:Net",
            "net.py, line 14",
            "correct net.py, line 14, where it calls the module `out` (Linear): `dslc`",
        ),
        ("net:network", "", "correct the module `2` (Linear): `dslc`"),
        ("net:misspelt", "net.py, line 17", "correct net.py, line 17: `dslc` calls `net:misspelt` once"),
        ("net:nothing", "", "it is called once, without data, and returns a `torch.nn.Module`"),
        ("net:nowhere", "", "the folder of the job is searched first"),
        ("broken:network", "broken.py, line 3", "correct broken.py, line 3: `dslc`"),
    ],
)
def test_help_on_a_users_function_names_module_line_and_remedy(
    tmp_path: Path, function: str, label: str, help: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(OWN_NET)
    (tmp_path / "broken.py").write_text("import torch\n\ndef network(:\n")
    (tmp_path / "job.plt").write_text(OWN_JOB.replace("net:network", function))
    (error,) = check_one("job.plt", [], trace=True)[0].errors
    assert (error.code, error.label) == ("E0802", label)
    assert error.help.startswith(help) and "traceback" not in error.help
