"""What `dslc export` has to know of a job's data, and what it says where a library fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_llama import write_llama

from dslc.commands.export import _companion_folders, _fault_of_folder, _needs_trace, _show_error
from dslc.compiler.ir.program import TransformersStep
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import inspect
from dslc.runtime.process.vision_library import VisionLibraryError

JOB = """
model { network = transformers("./llamaTASK), loss = own() }
data { source = python("gone:data"), batch = 4, collate = python("gone:collate") }
train { steps = 1, optimizer = sgd(lr = 0.1) }
"""


@pytest.mark.parametrize(
    ("task", "output", "traced", "said"),
    [
        ('", task = causal_lm', "folder", False, ""),
        ('", task = causal_lm', "file.pt", True, ""),
        ('"', "folder", True, "or name the head in the job: `transformers(…, task = causal_lm)`"),
    ],
)
def test_a_head_that_is_named_is_not_looked_for_in_the_data(
    tmp_path: Path, task: str, output: str, traced: bool, said: str
) -> None:
    write_llama(tmp_path / "llama")
    (tmp_path / "job.plt").write_text(JOB.replace("TASK", task))
    loaded, report = load(str(tmp_path / "job.plt"), []), Report()
    assert _needs_trace(loaded.job, output) == traced
    analysis = inspect(loaded, report)
    assert analysis is not None and not report.errors, [each.message for each in report.errors]
    found = _fault_of_folder(analysis, adapter=False)
    assert said in found and bool(said) == bool(found)


def test_a_tokenizer_is_of_the_weights_or_the_model_and_never_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "start.safetensors").touch()
    step = TransformersStep(name="model", folder=str(tmp_path))
    assert _companion_folders("", None) == ()
    assert _companion_folders("start.safetensors", step) == (str(tmp_path / "model"),)
    assert _companion_folders("model", TransformersStep(name="gpt2", folder=str(tmp_path))) == ("model",)


def test_a_torchvision_that_fails_is_named_behind_what_peft_says(capsys: pytest.CaptureFixture[str]) -> None:
    error = ImportError("cannot import name 'PreTrainedModel' from 'transformers'")
    error.__context__ = VisionLibraryError(RuntimeError("operator torchvision::nms does not exist"))
    _show_error(error)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("dslc: torchvision ") and "operator torchvision::nms" in first
    assert second == f"help: {VisionLibraryError.remedy}"
