"""Models of the `transformers` library: planned by layer, trained on several ranks as on one, or refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.job_texts import model_job
from helpers.launcher import Launcher
from helpers.tiny_llama import write_llama
from helpers.trained import agree, train_job

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import prepare

GPT2 = (
    'transformers("gpt2", n_layer = 2, n_embd = 32, n_head = 2, vocab_size = 256, n_positions = 32, '
    "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0)"
)
LLAMA = 'transformers("tiny", num_hidden_layers = 3)'
JOB = model_job("NETWORK", source="SOURCE")
TOKENS = "stdlib(context = 16)"
CLASSED_IMAGES = "synthetic(shape = [3, 8, 8], classes = 5, samples = 64)"


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes a job with this network and source beside the folder `tiny` of a Llama."""
    write_llama(tmp_path / "tiny", architectures=["LlamaForCausalLM"], torch_dtype="bfloat16")

    def write(network: str, source: str = TOKENS) -> Path:
        path = tmp_path / "job.plt"
        path.write_text(JOB.replace("NETWORK", network).replace("SOURCE", source))
        return path

    return write


def prepared(path: Path, *settings: str) -> tuple[Any, Report]:
    report = Report()
    return prepare(load(str(path), list(settings)), report), report


@pytest.mark.parametrize(
    "network, plans",
    [
        (GPT2, ((), ("parallelism.zero=3", "memory.recompute=full"))),
        (LLAMA, (("parallelism.zero=2", "memory.recompute=selective", "parallelism.microbatches=2"),)),
    ],
    ids=["gpt2", "llama"],
)
def test_on_several_ranks_as_on_one(
    written: Any, launcher: Launcher, network: str, plans: tuple[tuple[str, ...], ...]
) -> None:
    path = written(network)
    one = train_job(launcher, path)
    assert one.losses()[-1] < one.losses()[0]
    for settings in plans:
        agree(one, train_job(launcher, path, "devices.cpus=2", *settings))


SEEN = """
import sys, torch

def data():
    with open("FILE", "a") as file:
        file.write(f"{'transformers.models.llama.modeling_llama' in sys.modules}\\n")
    tokens = torch.arange(64).reshape(8, 8)
    return [(row, row) for row in tokens]
"""


def test_ranks_are_born_with_the_library(written: Any, launcher: Launcher, tmp_path: Path) -> None:
    """Importing it takes seconds. Data is opened before the model is made."""
    path = written(LLAMA, 'python("seen:data")')
    (tmp_path / "seen.py").write_text(SEEN.replace("FILE", str(tmp_path / "seen.txt")))
    made, _ = prepared(path, "devices.cpus=2", "data.batch=4")
    (tmp_path / "seen.txt").unlink()
    outcome, shown = launcher.launch(made.program, made.places, tmp_path / "run")
    assert outcome.is_complete, shown
    assert (tmp_path / "seen.txt").read_text().split() == ["True", "True"]


def test_the_plan_knows_its_layers(written: Any) -> None:
    ready, _ = prepared(written(GPT2), "devices.cpus=2", "parallelism.zero=3", "memory.recompute=full")
    program = ready.program
    assert program.recompute.modules == ("transformer.h.0", "transformer.h.1")
    assert program.gradients.units == ("transformer.h.0", "transformer.h.1")
    assert program.model.ties == (("lm_head.weight", "transformer.wte.weight"),)


@pytest.mark.parametrize(
    "network, source, code, message, at",
    [
        ('transformers("gpt2", n_layers = 2)', TOKENS, "E0805", "no `n_layers`; did you mean `n_layer`?", "2"),
        ('transformers("gpt2", n_positions = 9)', TOKENS, "E0805", "positions for 9 tokens, and the data's", ""),
        ('transformers("gpt2", vocab_size = 99)', TOKENS, "E0208", "99 does not hold the data's 256 tokens", "99"),
        ('transformers("gpt2")', CLASSED_IMAGES, "E0805", "`gpt2` has no model that classifies images", ""),
    ],
)
def test_what_is_wrong_is_said(written: Any, network: str, source: str, code: str, message: str, at: str) -> None:
    ready, report = prepared(written(network, source))
    assert ready is None
    assert [d.code for d in report.errors] == [code]
    found = report.errors[0]
    assert message in found.message
    assert found.span is not None and (not at or found.span.text() == at)


def test_a_library_that_is_not_installed(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    ready, report = prepared(written(GPT2))
    assert ready is None
    assert [(d.code, d.help) for d in report.errors] == [("E0803", "`pip install 'dslc[transformers]'`")]


def test_without_trace_nothing_is_loaded(written: Any) -> None:
    """`dslc check` loads neither torch nor the library, and reports what it can."""
    code = "import sys; from dslc.main import main; s = main(['check', sys.argv[1]]); print(s, *sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(written(GPT2))], capture_output=True, text=True, check=True)
    status, *modules = run.stdout.splitlines()[-1].split()
    assert status == "0"
    assert not {"torch", "transformers", "networkx", "numpy"} & set(modules)
