"""`dslc evaluate --lm-eval`: the evaluation harness gets the exported model. CI does not install the harness."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from helpers.tiny_llama import save_llama

from dslc.commands.evaluate import tasks_and_options
from dslc.main import main
from dslc.terminal.exit_codes import CommandFailedError

JOB = """
model { network = transformers("./base", task = causal_lm), loss = cross_entropy(), weights = "./base" }
data { source = stdlib(context = 16), batch = 8 }
train { steps = 1, optimizer = sgd(lr = 0.1) }
"""
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/letters.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--limit 5", "the tasks come first"),
        ("'letters", "No closing quotation"),
        ("", "the tasks come first"),
    ],
)
def test_options_without_a_task_are_refused(text: str, said: str) -> None:
    with pytest.raises(CommandFailedError, match=said):
        tasks_and_options(text)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="the harness is installed")
def test_a_harness_that_is_not_installed_is_named() -> None:
    with pytest.raises(CommandFailedError, match="pip install 'dslc\\[lm-eval\\]'"):
        tasks_and_options("hellaswag")


def test_a_split_and_tasks_are_not_evaluated_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "job.plt", "--split", "test", "--lm-eval", "hellaswag"]) == 2
    assert "--lm-eval takes those of its tasks: give one" in capsys.readouterr().err


@pytest.mark.slow
def test_the_harness_evaluates_what_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "base")
    letters = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate("abc ?")}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="?", eos_token="?").save_pretrained("base")
    (tmp_path / "job.plt").write_text(JOB)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "letters.yaml").write_text(TASK)
    sample = {"question": "a b", "choices": [" c", " a"], "answer": 0}
    (tmp_path / "tasks" / "letters.jsonl").write_text(f"{json.dumps(sample)}\n" * 3)
    command = ["evaluate", "job.plt", "--checkpoint", "base/model.safetensors", "--json"]
    assert main([*command, "--lm-eval", "letters --include_path tasks"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["letters"]["acc,none"] in (0.0, 1.0) and shown["letters"]["sample_len"] == 3
    assert main([*command, "--lm-eval", "unknown --include_path tasks"]) == 3
    assert "the evaluation harness failed" in capfd.readouterr().err
