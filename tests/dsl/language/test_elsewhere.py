"""Names of other tools: each suggested name exists, and is suggested wherever the other name is written."""

from __future__ import annotations

import re

import pytest

from dslc.dsl.language.registry import BLOCKS, CALLS, fields
from dslc.dsl.language.suggest import RESERVED, aliases, categories, words_of
from dslc.dsl.meaning.forms import words_in
from dslc.dsl.meaning.load import load_text

PLACES = sorted({place for place, _ in aliases().fields.values()})
GOOD = """
model { network = [flatten(), linear(10)], loss = cross_entropy() }
data { source = digits(), batch = 64 }
train { steps = 5, optimizer = sgd() }
"""


def test_the_table_is_broad() -> None:
    assert len(aliases().fields) > 400 and len(aliases().absent) > 150 and len(aliases().values) > 150


@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_the_table_is_in_the_registry(place: str) -> None:
    path, _, value = place.partition(" = ")
    block, *rest = path.split(".")
    assert block in BLOCKS
    if not rest:
        return
    field = next(f for f in fields(BLOCKS[block]) if f.word == rest[0])
    if len(rest) == 2:
        calls = [call for category in categories(field.kind) for call in CALLS[category].values()]
        assert any(rest[1] in words_of(call) for call in calls)
    if value:
        loaded = load_text(GOOD, settings=[f"{path}={value}"])
        assert not loaded.report.errors and loaded.job is not None


def test_every_value_of_the_table_is_a_word_of_the_language() -> None:
    words = {word for calls in CALLS.values() for word in calls}
    words |= {word for block in BLOCKS.values() for f in fields(block) for word in words_in(f.kind)}
    assert {word for meant in aliases().values.values() for word in meant} <= words


def test_a_name_of_the_language_is_never_said_to_be_absent() -> None:
    own = {*BLOCKS, "expect", "sweep", *(word for block in BLOCKS.values() for word in words_of(block))}
    assert set(aliases().blocks.values()) <= set(BLOCKS) and not set(aliases().blocks) & own
    assert not own & set(aliases().absent)
    assert not RESERVED & {*aliases().absent, *aliases().fields}
    assert not set(aliases().absent) & set(aliases().fields)


@pytest.mark.parametrize("block", ["model", "data", "train", "devices"])
@pytest.mark.parametrize(
    "name",
    [
        "batch_size", "patience", "gradient_accumulation", "gradient_accumulation_steps", "bf16", "bfloat16",
        "callbacks", "early_stop", "early_stopping_patience", "hub_model_id", "push_to_hub",
    ],
)  # fmt: skip
def test_each_block_answers_names_of_others(block: str, name: str) -> None:
    """Suggests the place, or says that there is none; never lists all fields of the block."""
    (found,) = [d for d in load_text(GOOD, settings=[f"{block}.{name}=1"]).report.found if d.code == "E0107"]
    place = aliases().fields.get(name, ("", ""))[0].partition(" = ")[0]
    field = place.rpartition(".")[2]
    assert found.help == aliases().absent[name] if not place else f"{field}" in found.help
    assert "` has `" not in found.help


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("devices { accelerator = gpu }", "E0107", "did you mean `gpus`?"),
        ("early_stopping { patience = 3 }", "E0106", "`early_stopping`"),
        ("train { early_stopping = EarlyStopping(loss) }", "E0130", "did you mean `lowest`?"),
        ("model { layers = [relu()] }", "E0107", "a list of layers is written as `network`"),
        ("devices { rendezvous = 1 }", "E0107", "of a job on several nodes: `dslc run JOB --rendezvous HOST[:PORT]`"),
        ("train { patience = 3 }", "E0107", "`patience` is an argument of `early_stopping`"),
        ("train { model_ema = true }", "E0107", "did you mean `ema`?"),
        ("train { max_hours = 3 }", "E0107", "did you mean `max_time`? (`2h`, `30 min`)"),
        ("checkpoint { metric_for_best_model = loss }", "E0107", "did you mean `best`? (`lowest(loss)`"),
        ("trainer { clip = 1.0 }", "E0106", "that is the block `train` here"),
        ("train { precision = bfloat16 }", "E0130", "did you mean `bf16`?"),
        ('train { precision = "bf16-mixed" }', "E0121", "write `bf16`"),
        ("train { precision = 16 }", "E0121", "write `fp16`"),
        ("train { precision = bf16-mixed }", "E0121", "write `bf16`"),
        ("train { schedule = cosine() }", "E0107", "did you mean `lr_schedule`?"),
        ("train { lr_schedule = cosine }", "E0130", "did you mean `warmup_cosine`?"),
        ("train { optimizer = adamw(learning_rate = 1e-3) }", "E0131", "did you mean `lr`?"),
        ("train { optimizer = adamw(lr = 1e-3, betas = 0.9) }", "E0121", "write `[0.9, …]`"),
        ("train { optimizer = FusedAdam() }", "E0130", "did you mean `adam`?"),
        ("train { learning_rate = 0.1 }", "E0107", "`lr` is an argument of the optimizer: `optimizer = adamw(lr = …)`"),
        ("train { bf16 = true }", "E0107", "write `precision = bf16`"),
        ("data { bf16 = true }", "E0107", "that is `train { precision = bf16 }` here"),
        ("model { loss = CrossEntropyLoss() }", "E0130", "did you mean `cross_entropy`?"),
        ('model { loss = "nll" }', "E0121", "write `cross_entropy`"),
        ('model { network = "meta-llama/Llama-3-8B" }', "E0121", 'write `transformers("meta-llama/Llama-3-8B")`'),
        ('model { network = "nets:Net" }', "E0121", 'write `python("nets:Net")`'),
        ("model { network = qwen2(layers = 4) }", "E0130", "did you mean `transformers`?"),
        ('data { source = "squad" }', "E0121", 'write `datasets("squad")`'),
        ('data { source = "corpus.txt" }', "E0121", 'write `text("corpus.txt")`'),
        ('data { source = "x.csv" }', "E0121", 'write `datasets("csv", data_files = "./x.csv")`'),
        ("data { max_length = 512 }", "E0107", "`context` is an argument of the source: `source = text(context = …)`"),
        ("train { num_labels = 2 }", "E0107", "in `model`, `classes` is an argument of the network"),
        ("memory { recompute = true }", "E0121", "write `full`"),
        ("sweep { learning_rate = [1e-3] }", "E0142", "that is `train.optimizer.lr` here"),
        ("sweep { lr = [1e-3] }", "E0142", "did you mean `train.optimizer.lr`?"),
        ("sweep { train.max_epochs = [1, 2] }", "E0142", "did you mean `epochs`?"),
    ],
)
def test_what_is_written_elsewhere_is_answered(text: str, code: str, said: str) -> None:
    base = GOOD
    for field in ("network", "loss", "source", "optimizer"):
        if f"{field} =" in text:  # which takes the place of the good one
            base = re.sub(rf"{field} = (\[.*?\]|\w+\(\))(, )?", "", base)
    errors = load_text(f"{base}\n{text}\n").report.errors
    assert [(d.code, said in d.help) for d in errors] == [(code, True)], [d.help for d in errors]


def test_a_setting_of_an_arguments_name_alone_is_answered() -> None:
    (found,) = load_text(GOOD, settings=["lr=0.1"]).report.errors
    assert (found.code, found.help) == ("E0110", "did you mean `train.optimizer.lr`?")


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("batch = 64", "bacth = 64"),
        GOOD.replace("batch = 64", "batch_size = 64"),
        GOOD.replace("batch = 64", "").replace("steps = 5", "steps = 5, per_device_train_batch_size = 8"),
        GOOD.replace("model {", "modle {"),
        GOOD.replace("train {", "trainer {"),
        GOOD.replace("steps = 5", "max_epochs = 5"),
        GOOD.replace("optimizer = sgd()", "learning_rate = 0.1"),
        GOOD.replace("data {", "dataloader {"),
        GOOD + "devises { cpus = 4 }\nparallelism { data = 4 }",
        GOOD + "expct { devices == 1 }",
        GOOD + "sweeep { train.optimizer.lr = [1e-3, 1e-2] }",
    ],
)
def test_what_is_misspelt_is_not_missing_too(text: str) -> None:
    """One cause gives one error; the entries of a misspelt block are read."""
    assert len(load_text(text).report.errors) == 1


def test_what_stands_in_a_misspelt_block_is_read() -> None:
    found = load_text(GOOD + "devises { cpus = 0 }").report.errors
    assert [d.code for d in found] == ["E0106", "E0125"]
    loaded = load_text(GOOD, settings=["devises.cpus=3"])
    assert [d.code for d in loaded.report.errors] == ["E0106"]
    assert loaded.job is not None and loaded.job.devices.cpus == 3


@pytest.mark.parametrize(
    "text",
    [
        "corpus/a-b.txt",
        "/data/x-1/y.txt",
        "~/x.txt",
        "runs/a-b/1",
        "./a*b.txt",
        "a-b",
        "org/name-7b",
        "2*k",
        "a.b.c",
        "x:y",
    ],
)
def test_text_that_is_no_expression_is_taken_as_it_is(text: str) -> None:
    """If the target takes a string: a param that holds one or has no value, a path, an argument of a call."""
    good = GOOD.replace("source = digits()", "source = text(file)").replace("10)]", "1)], weights = was")
    job = 'param file = "a.txt"\nparam was\n' + good
    loaded = load_text(job, settings=[f"file={text}", f"was={text}"])
    assert not loaded.report.errors and loaded.job is not None
    name = text.rpartition("/")[2]
    assert getattr(loaded.job.data.source, "file", "").endswith(name)
    assert loaded.job.model.start is not None and loaded.job.model.start.path.endswith(name)
    loaded = load_text(job, settings=[f"data.source.file={text}", f"model.weights={text}"])
    assert [d.code for d in loaded.report.errors] == ["E0129"]  # `was` has no value
