"""Pairs of answers become the rows that TRL makes of them, and what is left out is counted and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.planning import compiled
from torch import Tensor

from dslc.commands.new import TEMPLATES
from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.check_job import check_one
from dslc.runtime.data.sources.chat_data import prepare
from dslc.runtime.data.sources.chat_rendering import ConversationError, load_tokenizer
from dslc.runtime.data.sources.chat_samples import ChatSamples, PairSamples
from dslc.runtime.data.sources.preference_pairs import read_pair

TOKENIZER = TEMPLATES / "chat" / "tokenizer"
PAIRS = TEMPLATES / "dpo" / "pairs.jsonl"
JOB = """
model {
  network = llama(layers = 1, width = 16, heads = 2, hidden = 24, context = 96, vocab = 384)
  loss    = LOSS
}
data {
  source = preferences("pairs.jsonl", tokenizer = "tokenizer"ARGUMENTS)
  batch  = 2
}
devices { cpus = 1 }
train { steps = 2, optimizer = sgd(lr = 0.1) }
"""
USER = [{"role": "user", "content": "Is it?"}]
YES, NO = ([{"role": "assistant", "content": text}] for text in ("Yes.", "No, it is not."))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_job(folder: Path, rows: list[dict[str, Any]], arguments: str = "", loss: str = "dpo()") -> Path:
    shutil.copytree(TOKENIZER, folder / "tokenizer", dirs_exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    job = folder / "job.plt"
    job.write_text(JOB.replace("ARGUMENTS", arguments).replace("LOSS", loss))
    return job


def pairs_of(folder: Path, rows: list[dict[str, Any]], length: int = 96) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets of all pairs."""
    file = folder / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    arguments = {"files": (str(file),), "tokenizer": str(TOKENIZER), "template": None, "train_on": "answers"}
    prepared = prepare(arguments | {"pack": None, "context": length, "conversations": str(file)})
    samples = PairSamples(ChatSamples(prepared.splits[0], length, prepared.filler, -100))
    inputs, targets = samples.batch(torch.arange(len(samples)))
    assert isinstance(inputs, Tensor) and isinstance(targets, Tensor)
    return inputs, targets


def test_messages_become_the_rows_of_both_answers(tmp_path: Path) -> None:
    inputs, targets = pairs_of(tmp_path, [{"prompt": USER, "chosen": YES, "rejected": NO}])
    tokenizer: Any = load_tokenizer(str(TOKENIZER))
    before = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=True)["input_ids"]
    for row, answer in enumerate((YES, NO)):
        tokens = tokenizer.apply_chat_template(USER + answer, return_dict=True)["input_ids"]
        assert inputs[row, : len(tokens)].tolist() == tokens and len(before) < len(tokens)
        expected = [-100] * (len(before) - 1) + tokens[len(before) :]
        assert targets[row, : len(tokens)].tolist() == [*expected, -100]
    assert (targets[:, 60:] == -100).all()


def test_a_prompt_within_the_answers_is_what_they_have_in_common(tmp_path: Path) -> None:
    explicit = pairs_of(tmp_path, [{"prompt": USER, "chosen": YES, "rejected": NO}])
    implicit = pairs_of(tmp_path, [{"prompt": "Is it?", "chosen": USER + YES, "rejected": USER + NO}])
    for one, other in zip(explicit, implicit, strict=True):
        assert torch.equal(one, other)
    of_axolotl = pairs_of(tmp_path, [{"messages": USER, "chosen": YES[0], "rejected": NO[0]}])
    assert torch.equal(explicit[1], of_axolotl[1])
    system = [{"role": "system", "content": "Be brief."}]
    for before in ([], system):
        pair = read_pair({"prompt": "Is it?", "chosen": before + YES, "rejected": before + NO}, "")
        assert ([*pair.prompt], [*pair.chosen], [*pair.rejected]) == (before + USER, YES, NO)
    pair = read_pair({"chosen": "The sky is blue.", "rejected": "The sky is green."}, "")
    assert (pair.prompt, pair.chosen, pair.rejected) == ("The sky is", " blue.", " green.")


def test_text_is_tokenized_as_it_is_and_ends_with_the_end_of_text(tmp_path: Path) -> None:
    inputs, targets = pairs_of(tmp_path, [{"prompt": "The sky is", "chosen": " blue.", "rejected": " a lie."}])
    tokenizer = load_tokenizer(str(TOKENIZER))
    start = len(tokenizer("The sky is")["input_ids"])
    tokens = tokenizer(f"The sky is blue.{tokenizer.eos_token or ''}")["input_ids"]
    assert inputs[0, : len(tokens)].tolist() == tokens
    assert targets[0][targets[0] != -100].tolist() == tokens[start:]


def test_what_is_left_out_and_cut_off_is_counted(tmp_path: Path) -> None:
    good = {"prompt": USER, "chosen": YES, "rejected": NO}
    rows = [
        good,
        good | {"rejected": [YES[0] | {"content": "no " * 60}]},
        good | {"chosen": []},
        good | {"prompt": [USER[0] | {"content": "a " * 90}]},
    ]
    job = make_job(tmp_path, rows, ", max_length = 64")
    text = "of 4 pairs, 1 cut off after 64 tokens, 1 without an answer left out, 1 without a target left out"
    report, analysis = check_one(str(job), [])
    assert [each.message for each in report if each.code == "N0353"] == [text]
    assert analysis is not None and analysis.source.samples == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a"}, "it has no `rejected`, but `chosen`"),
        ({"prompt": "a", "chosen": "b", "rejected": NO}, "one of the answers is a text, and the other a list"),
        ({"prompt": USER, "chosen": "b", "rejected": "c"}, "the prompt is a list of messages, and the answers are"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "`prompt` is a number, and neither a text nor a list"),
        ([1], "a list, and no pair of answers"),
    ],
)
def test_a_row_that_is_no_pair_is_named(row: object, message: str) -> None:
    with pytest.raises(ConversationError, match=r"pairs\.jsonl, line 3") as raised:
        read_pair(row, "pairs.jsonl, line 3")
    assert message in str(raised.value)


def test_a_fault_is_shown_at_the_pairs(tmp_path: Path) -> None:
    job = make_job(tmp_path, [{"prompt": USER, "chosen": YES, "rejected": NO}, {"chosen": 1}])
    report, _ = check_one(str(job), [])
    (error,) = report.errors
    assert "line 2: it has no `rejected`" in error.message and error.span is not None
    assert error.span.text() == '"pairs.jsonl"'


@pytest.mark.parametrize(
    ("loss", "settings", "code", "message"),
    [
        ("cross_entropy()", "", "E0357", "`cross_entropy` does not compare the two"),
        ("dpo(reference = adapter_off)", "", "E0359", "the network has none"),
        ("dpo()", "devices.cpus=2 parallelism.context=2", "", ""),
        ("dpo()", "evaluate.metrics=[accuracy]", "E0312", "`accuracy` does not compare the answers of a pair"),
        ("dpo()", "data.source=stdlib()", "E0357", "`stdlib` gives no pairs"),
        ("ipo(chunks = 3)", "", "", ""),
    ],
)
def test_what_a_loss_of_pairs_does_not_go_with(
    tmp_path: Path, loss: str, settings: str, code: str, message: str
) -> None:
    job = make_job(tmp_path, [{"prompt": USER, "chosen": YES, "rejected": NO}] * 4, loss=loss)
    loaded, report = load(str(job), settings.split()), Report()
    assert loaded.job is not None
    tokens = TensorFact(shape=(96,), dtype="int64")
    report.collect(analyse(loaded.job, Facts(source=SourceFacts(samples=4, input=tokens, target=tokens, vocab=384))))
    found = [(each.code, each.message) for each in report.errors]
    assert any(each == code and message in text for each, text in found) if code else not found, found


def test_a_pair_takes_the_memory_of_two_sequences(tmp_path: Path) -> None:
    job = make_job(tmp_path, [{"prompt": USER, "chosen": YES, "rejected": NO}] * 4)
    tokens = TensorFact(shape=(96,), dtype="int64")
    facts = Facts(source=SourceFacts(samples=4, input=tokens, target=tokens, vocab=384))
    chat = tmp_path / "chat.plt"
    text = job.read_text().replace("preferences(", "chat(").replace("dpo()", "cross_entropy()")
    chat.write_text(text.replace("batch  = 2", "batch  = 4"))
    pairs, sequences = (compiled(path, facts=facts).analysis for path in (job, chat))
    assert pairs.costs[0].flops == sequences.costs[0].flops
    assert abs(pairs.costs[0].memory.peak - sequences.costs[0].memory.peak) < 1000
