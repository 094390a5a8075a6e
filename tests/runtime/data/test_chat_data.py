"""Conversations become the tokens and masks of `apply_chat_template`, in sequences that train as each alone does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launcher import Launcher
from helpers.trained import agree, ready, train_job
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dslc.commands.new import TEMPLATES
from dslc.jobs.check_job import check_one
from dslc.main import main
from dslc.runtime.data.samples import SourceError
from dslc.runtime.data.sources.chat_data import pack
from dslc.runtime.data.sources.chat_rendering import ConversationError, ConversationRenderer, load_tokenizer
from dslc.runtime.data.sources.conversations import conversation
from dslc.runtime.data.sources.open_sources import open_source
from dslc.runtime.model import documents
from dslc.runtime.model.losses import count, loss_sum
from dslc.runtime.model.meta_model import build_model

TOKENIZER = TEMPLATES / "chat" / "tokenizer"
CONVERSATIONS = TEMPLATES / "chat" / "conversations.jsonl"
FILLER = 0
JOB = """
model {
  network = llama(layers = 2, width = 16, heads = 2, hidden = 24, context = 96, vocab = 384)
  loss    = cross_entropy()
}
data {
  source = chat("chats.jsonl", tokenizer = "tokenizer"ARGUMENTS)
  batch  = 4
}
devices { cpus = 1 }
train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
log { every = 1 step, tensorboard = false }
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()]


def make_job(folder: Path, arguments: str = "", lines: list[str] | None = None) -> Path:
    shutil.copytree(TOKENIZER, folder / "tokenizer", dirs_exist_ok=True)
    texts = CONVERSATIONS.read_text().splitlines()[:24] if lines is None else lines
    (folder / "chats.jsonl").write_text("".join(f"{line}\n" for line in texts))
    job = folder / "job.plt"
    job.write_text(JOB.replace("ARGUMENTS", arguments))
    return job


def encoded(row: dict[str, Any], **more: Any) -> tuple[list[int], list[int]]:
    """Returns tokens and assistant mask by `transformers`."""
    encoding: Any = load_tokenizer(str(TOKENIZER)).apply_chat_template(
        row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **more
    )
    return encoding["input_ids"], encoding["assistant_masks"]


# ------------------------------------------------------------------------------------------------------- rendering


def test_tokens_and_masks_are_those_of_transformers(tmp_path: Path) -> None:
    unmarked = tmp_path / "unmarked.jinja"
    unmarked.write_text(re.sub(r"{% (end)?generation %}", "", (TOKENIZER / "chat_template.jinja").read_text()))
    marked = ConversationRenderer(str(TOKENIZER))
    by_prefixes = ConversationRenderer(str(TOKENIZER), str(unmarked))
    everything = ConversationRenderer(str(TOKENIZER), train_on="all")
    newline = load_tokenizer(str(TOKENIZER)).encode("\n")[0]
    for row in rows()[:12]:
        tokens, mask = encoded(row)
        rendered = marked.render(row["messages"])
        assert rendered.tokens == tokens and rendered.counted == [bool(n) for n in mask] and any(mask)
        # Prefixes count all that the template writes for a turn: the line that ends it, too.
        prefixed = by_prefixes.render(row["messages"])
        ends = [n > 0 and bool(mask[n - 1]) and tokens[n] == newline for n in range(len(tokens))]
        assert prefixed.tokens == tokens
        assert prefixed.counted == [bool(a or b) for a, b in zip(mask, ends, strict=True)]
        assert all(everything.render(row["messages"]).counted)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "ua", "the chat template fails: roles must alternate"),
        ("{% for m in messages %}{{ messages|length }}{{ m.content }}{% endfor %}", "uaua", "before or in message 2"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "au", "begins with the assistant"),
        ("{% for m in messages", "ua", "the chat template cannot be read"),
    ],
)
def test_a_template_whose_turns_are_not_known_is_refused(
    tmp_path: Path, template: str, messages: str, message: str
) -> None:
    (tmp_path / "template.jinja").write_text(template)
    renderer = ConversationRenderer(str(TOKENIZER), str(tmp_path / "template.jinja"))
    roles = {"u": "user", "a": "assistant"}
    with pytest.raises(ConversationError, match=message) as error:
        renderer.render([{"role": roles[letter], "content": "a text"} for letter in messages])
    assert error.value.code == "E0350" and error.value.help


def test_whitespace_that_ends_a_turn_counts_even_if_the_tokenizer_trims_it(tmp_path: Path) -> None:
    """A token of spaces alone then has no characters of its own."""
    template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}>{% endif %}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    turns = ("  a ", "  b \n  ", " c ", "\n ")
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    rendered = []
    for trim in (True, False):
        folder = tmp_path / str(trim)
        shutil.copytree(TOKENIZER, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trim}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        rendered.append(ConversationRenderer(str(folder), str(tmp_path / "template.jinja")).render(messages))
    assert rendered[0] == rendered[1] and rendered[0].counted[-1]


def test_text_that_the_tokenizer_refuses_is_no_fault_of_the_template(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    renderer = ConversationRenderer(str(TOKENIZER), str(tmp_path / "template.jinja"))
    with pytest.raises(ConversationError, match="the tokenizer fails") as error:
        renderer.render([{"role": "user", "content": "\ud800"}])
    assert (error.value.code, error.value.argument) == ("E0311", "conversations")


def test_the_folder_of_a_whole_model_has_a_tokenizer(tmp_path: Path) -> None:
    """Its configuration makes `transformers` import torchvision, in a process that has loaded neither."""
    shutil.copytree(TOKENIZER, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    code = (
        "import sys; from dslc.runtime.data.sources.chat_rendering import load_tokenizer; load_tokenizer(sys.argv[1])"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_conversations_of_sharegpt_are_read_alike() -> None:
    shared = {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], "id": 7}
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    assert conversation(shared, "").messages == conversation({"messages": messages}, "").messages == tuple(messages)
    tools = [{"type": "function", "function": {"name": "add"}}]
    for value in (tools, json.dumps(tools)):  # TRL stores them as a text
        assert conversation({"messages": messages, "tools": value}, "").tools == tools
    assert conversation({"messages": messages, "tools": ""}, "").tools is None


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packing_fits_and_keeps_every_conversation(lengths: list[int]) -> None:
    sequences = pack(lengths, 20)
    assert sorted(n for row in sequences for n in row) == list(range(len(lengths)))
    assert all(sum(lengths[n] + 1 for n in row) <= 21 for row in sequences)
    assert [row[0] for row in sequences] == sorted(row[0] for row in sequences)


# -------------------------------------------------------------------------------------------------------- sequences


def test_a_sequence_has_the_tokens_of_its_conversation_and_its_targets(tmp_path: Path) -> None:
    program = ready(make_job(tmp_path, ", max_length = 64")).program
    inputs, targets = open_source(program.data).train.batch(torch.arange(24))
    assert program.loss.counts == "kept" and inputs.shape == targets.shape == (24, 64)
    for row, input, target in zip(rows(), inputs.tolist(), targets.tolist(), strict=False):
        tokens, mask = (values[:64] for values in encoded(row))
        fill = 64 - len(tokens)
        kept = [token if counts else -100 for token, counts in zip(tokens, mask, strict=True)][1:]
        assert input == tokens + [FILLER] * fill and target == kept + [-100] * (fill + 1)


def test_packed_conversations_train_as_each_alone(tmp_path: Path) -> None:
    packed = ready(make_job(tmp_path, ", pack = documents")).program
    alone = ready(make_job(tmp_path)).program
    model, total = build_model(packed.model, "cpu"), loss_sum(packed.loss)

    def trained(program: Any) -> tuple[float, int, list[Tensor]]:
        model.zero_grad()
        samples = open_source(program.data).train
        inputs, targets = samples.batch(torch.arange(len(samples)))
        loss = total(model(inputs), targets)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return loss.item(), int(count(program.loss, targets)), gradients

    assert alone.model.documents is None and packed.model.documents == FILLER
    assert packed.data.train_samples < alone.data.train_samples == 24
    alone_result = trained(alone)
    documents.apply(packed.model.documents, model)
    packed_result = trained(packed)
    assert packed_result[1] == alone_result[1]
    assert packed_result[0] == pytest.approx(alone_result[0], rel=1e-5)
    for one, other in zip(packed_result[2], alone_result[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_what_is_left_out_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = {"role": "user", "content": "Why?"}
    odd = [json.dumps({"messages": []}), json.dumps({"messages": [question]})]
    job = make_job(tmp_path, ", max_length = 40", [*CONVERSATIONS.read_text().splitlines()[:24], *odd])
    for _ in range(2):  # the second time from the cache
        report, analysis = check_one(str(job), [])
        assert analysis is not None and [d.code for d in report] == ["N0353"]
        lengths = [len(encoded(row)[0]) for row in rows()[:24]]
        lost = [not any(encoded(row)[1][:40]) for row in rows()[:24]]
        counts = analysis.source.found["counts"]
        assert (counts["conversations"], counts["empty"], counts["without_target"]) == (26, 1, 1 + sum(lost))
        cut = sum(length > 40 and not out for length, out in zip(lengths, lost, strict=True))
        assert counts["cut_off"] == cut > 0 and analysis.workload.train == 24 - sum(lost)
        assert f"{cut} cut off after 40 tokens, 1 without messages left out" in next(iter(report)).message
    assert main(["data", str(job)]) == 0
    said = capsys.readouterr().out
    assert f"conversations: {24 - sum(lost)} of 26 are trained on, with {counts['tokens']:,} tokens" in said
    assert f"1 without messages, {1 + sum(lost)} without a target; cut off: {cut}" in said


def test_data_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    step = ready(make_job(tmp_path)).program.data
    text = (tmp_path / "chats.jsonl").read_text()
    (tmp_path / "chats.jsonl").write_text(text.replace("is", "was", 1))
    with pytest.raises(SourceError, match="become other tokens than in the plan"):
        open_source(step)


def test_a_data_set_of_the_library_gives_the_same_sequences(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    of_files = ready(make_job(tmp_path)).program.data
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows()[:24]), validation=datasets.Dataset.from_list(rows()[24:30])
    )
    both.save_to_disk(str(tmp_path / "chats"))
    job = tmp_path / "job.plt"
    job.write_text(job.read_text().replace('"chats.jsonl"', 'datasets("./chats")'))
    step = ready(job).program.data
    assert (step.train_samples, step.validation_samples, step.split) == (24, 6, "given")
    for one, other in zip(*(open_source(each).train.batch(torch.arange(24)) for each in (of_files, step)), strict=True):
        assert torch.equal(one, other)


def test_a_mixture_of_conversations_knows_all_tokens(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "short.jsonl").write_text(GOOD + "\n")
    short = 'chat("short.jsonl", tokenizer = "tokenizer")'
    text = job.read_text().replace("source = chat(", f"source = mixture([{short}, chat(")
    job.write_text(text.replace('tokenizer")\n', 'tokenizer")])\n'))
    program = ready(job, "train.steps=2").program
    assert [part.train_samples for part in program.data.parts] == [1, 24]
    assert open_source(program.data).train.batch(torch.arange(25))[0].shape == (25, 96)


# --------------------------------------------------------------------------------------------------------- bad input

QUESTION = '{"messages": [{"role": "user", "content": "a"}]}'
GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("lines", "arguments", "code", "message", "place"),
    [
        ([GOOD, '{"messages": ['], "", "E0311", "chats.jsonl, line 2: not a line of JSON", '"chats.jsonl"'),
        (
            ['{"text": "a"}'],
            "",
            "E0311",
            "line 1: it has no `messages` or `conversations`, but `text`",
            '"chats.jsonl"',
        ),
        ([GOOD, GOOD.replace("user", "robot")], "", "E0311", "line 2, message 1 has the role 'robot'", '"chats.jsonl"'),
        ([GOOD.replace('"a"', "3")], "", "E0311", "message 1: the content is a number", '"chats.jsonl"'),
        ([GOOD.replace('"a"', r'"\ud800"')], "", "E0311", "message 1: the content has '\\ud800'", '"chats.jsonl"'),
        ([GOOD[:-1] + ', "tools": 5}'], "", "E0311", "line 1: `tools` is a number, and no list", '"chats.jsonl"'),
        ([GOOD[:-1] + ', "tools": "add"}'], "", "E0311", "line 1: `tools` is a text, and no JSON", '"chats.jsonl"'),
        ([GOOD[:-1] + ', "tools": [5]}'], "", "E0311", "line 1: tool 1 is a number, and no object", '"chats.jsonl"'),
        ([GOOD], ", max_length = 4", "E0351", "the first 4 tokens of each conversation hold nothing", "4"),
        ([QUESTION], "", "E0351", "none of the conversations (1) has a turn of the assistant", ""),
        ([], "", "E0311", "holds no conversations", '"chats.jsonl"'),
        ([GOOD], ', template = "bad.jinja"', "E0350", "line 1: the chat template fails: no", '"chats.jsonl"'),
        ([GOOD], ', template = "open.jinja"', "E0350", "the chat template cannot be read", '"open.jinja"'),
        ([GOOD], ', template = "absent.jinja"', "E0309", "absent.jinja: No such file", '"absent.jinja"'),
    ],
)
def test_bad_conversations_get_a_place_and_a_remedy(
    tmp_path: Path, lines: list[str], arguments: str, code: str, message: str, place: str
) -> None:
    (tmp_path / "bad.jinja").write_text("{{ raise_exception('no') }}")
    (tmp_path / "open.jinja").write_text("{% for m in messages")
    report, _ = check_one(str(make_job(tmp_path, arguments, lines)), [])
    fault = next(iter(report))
    assert [d.code.replace("W", "E") for d in report] == [code]
    assert message in fault.message and fault.help and fault.span is not None
    assert place in ("", fault.span.text())


def test_a_vocabulary_is_held_against_the_largest_token_alone(tmp_path: Path) -> None:
    """A pretrained model knows more tokens than a file has."""
    job = str(make_job(tmp_path))
    assert [fault.code for fault in check_one(job, ["model.network.vocab=32000"])[0]] == ["N0353"]
    assert "E0208" in [fault.code for fault in check_one(job, ["model.network.vocab=64"])[0]]


def test_a_tokenizer_without_a_template_is_refused_at_its_place(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    report, _ = check_one(str(job), [])
    (fault,) = report
    assert fault.code == "E0350" and "has no chat template" in fault.message
    assert fault.span is not None and fault.span.text() == '"tokenizer"' and "`template" in fault.help


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.parametrize("pack_word", ["none", "documents"])
def test_conversations_train_over_ranks_as_in_one_process(launcher: Launcher, tmp_path: Path, pack_word: str) -> None:
    job = make_job(tmp_path, f", pack = {pack_word}")
    kept = f"checkpoint.dir={tmp_path / 'kept'}"
    two = ("devices.cpus=2", "parallelism.zero=3")
    one = train_job(launcher, job, "checkpoint.every=2 steps", kept)
    agree(one, train_job(launcher, job, *two))
    shutil.rmtree(tmp_path / "kept" / "step-00000004")
    resumed = train_job(launcher, job, "checkpoint.resume=auto", kept, *two)
    assert [line["step"] for line in resumed.lines] == [3, 4]
    assert resumed.losses() == pytest.approx(one.losses()[2:], abs=1e-5)
