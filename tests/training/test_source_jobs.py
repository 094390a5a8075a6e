"""Jobs on data as people have it: each trains to the same losses on one rank, on two, and with workers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import made_data
from helpers.commands import dslc
from helpers.launcher import Launcher
from helpers.paths import EXAMPLES, HELPERS
from helpers.trained import exchanges_as_planned

from dslc.dsl.diagnostics import Report
from dslc.dsl.language.registry import CALLS
from dslc.dsl.meaning.load import load_text
from dslc.jobs.check_job import inspect
from dslc.jobs.prepare_run import prepare
from dslc.runtime.data.sources.open_sources import open_source


def job(source: str, network: str, *, data: str = "", batch: int = 8, train: str = "steps = 12") -> str:
    loss = "dpo()" if source.startswith("preferences") else "cross_entropy()"
    return f"""
        model {{ network = {network}, loss = {loss} }}
        data {{ source = {source}, batch = {batch}{data} }}
        train {{ {train}, optimizer = sgd(lr = 0.05) }}
        log {{ every = 1 step, tensorboard = false }}
    """


def trained(launcher: Launcher, folder: Path, text: str, ranks: int, *settings: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    report = Report()
    loaded = load_text(text, folder=str(folder), settings=[f"devices.cpus={ranks}", *settings])
    ready = prepare(loaded, report)
    assert ready is not None, report.found
    out = folder / f"run-{ranks}"
    outcome, shown = launcher.launch(ready.program, ready.places, out)
    assert outcome.is_complete, (outcome, shown)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


CASES: dict[str, tuple[Callable[[Path], object], str, str, bool]] = {
    "tokens": (
        lambda folder: [
            made_data.llm_c(folder / f"{n}.bin", (np.arange(700) * (n + 3) % 50).astype("<u2"), 50) for n in range(3)
        ],
        'tokens("*.bin")',
        "gpt(layers = 1, width = 16, heads = 2, context = 16)",
        False,
    ),
    "images": (
        lambda folder: [made_data.pictures(folder / "all" / split) for split in ("train", "val")],
        'images("all", size = 8)',
        "[flatten(), linear(2)]",
        True,
    ),
    "mnist": (lambda folder: made_data.mnist(folder / "m"), 'mnist("m")', "[flatten(), linear(10)]", True),
    "cifar10": (lambda folder: made_data.cifar10(folder / "c"), 'cifar10("c")', "[flatten(), linear(10)]", True),
    "parquet": (lambda folder: made_data.parquet(folder), 'parquet("*.parquet")', "[linear(2)]", False),
    "pictures in parquet": (
        lambda folder: made_data.parquet(folder, x=made_data.encoded(), y=np.arange(40) % 2),
        'parquet("*.parquet", size = 5)',
        "[flatten(), linear(2)]",
        False,
    ),
    "datasets": (lambda folder: made_data.dataset(folder / "d"), 'datasets("./d")', "[linear(2)]", False),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", CASES)
def test_a_job_trains_to_the_same_losses_on_two_ranks(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    make, source, network, given = CASES[kind]
    make(tmp_path)
    text = job(source.format(folder=tmp_path), network, data="" if given else ", validation = 0.2")
    one = trained(launcher, tmp_path, text, 1)
    two = trained(launcher, tmp_path, text, 2, "data.workers=1")
    assert [(line["step"], line["split"]) for line in one] == [(line["step"], line["split"]) for line in two]
    assert {line["split"] for line in one} == {"train", "validation"}
    np.testing.assert_allclose([l["loss"] for l in one], [l["loss"] for l in two], rtol=0, atol=1e-5)  # noqa: E741
    losses = [line["loss"] for line in one if line["split"] == "train"]
    assert len(set(losses)) == len(losses) and np.mean(losses[-4:]) < np.mean(losses[:4]), "and it learns"


def _vectors(folder: Path) -> None:
    np.savez(folder / "a.npz", x=np.ones((40, 6), np.float32), y=np.arange(40) % 3)


MORE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "digits": (lambda _: None, "digits()", "[flatten(), linear(10)]"),
    "stdlib": (lambda _: None, "stdlib(context = 8)", "[embedding(256, 4), linear(256)]"),
    "text": (
        lambda folder: (folder / "a.txt").write_text("abc" * 200),
        'text("a.txt", context = 8)',
        "[embedding(256, 4), linear(256)]",
    ),
    "arrays": (_vectors, 'arrays("a.npz")', "[linear(3)]"),
    "synthetic": (lambda _: None, "synthetic(shape = [6], classes = 3)", "[linear(3)]"),
    "mixture": (
        _vectors,
        'mixture([arrays("a.npz"), synthetic(samples = 40, shape = [6], classes = 3)])',
        "[linear(3)]",
    ),
    "python": (
        lambda folder: shutil.copy(HELPERS / "own_networks.py", folder),
        'python("own_networks:data")',
        "[linear(3)]",
    ),
    "chat": (
        lambda folder: shutil.copytree(EXAMPLES / "chat", folder / "chat"),
        'chat("chat/conversations.jsonl", tokenizer = "chat/tokenizer", max_length = 64)',
        "[embedding(384, 4), linear(384)]",
    ),
    "preferences": (
        lambda folder: shutil.copytree(EXAMPLES / "dpo", folder / "dpo"),
        'preferences("dpo/pairs.jsonl", tokenizer = "dpo/tokenizer", max_length = 64)',
        "[embedding(384, 4), linear(384)]",
    ),
}
SOURCES = MORE | {kind: case[:3] for kind, case in CASES.items() if " " not in kind}


def test_no_source_is_left_out() -> None:
    assert SOURCES.keys() == CALLS["source"].keys()


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", SOURCES)
def test_a_step_exchanges_what_was_planned(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    """The source decides if ranks sum a count of targets."""
    make, source, network = SOURCES[kind]
    make(tmp_path)
    (tmp_path / "made.plt").write_text(job(source, network))
    exchanges_as_planned(launcher, tmp_path, tmp_path / "made.plt", "devices.cpus=2")


# How a job lies on its ranks, beside a data axis alone.
LAYOUTS: dict[str, tuple[str, ...]] = {
    **{f"zero {zero}": ("devices.cpus=2", f"parallelism.zero={zero}") for zero in (1, 2, 3)},
    "replicas": ("devices.cpus=4", "parallelism.zero=3", "parallelism.replicas=2"),
    "tensor": ("devices.cpus=2", "parallelism.tensor=2"),
    "context": ("devices.cpus=2", "parallelism.context=2"),
    "context and data": ("devices.cpus=4", "parallelism.context=2", "parallelism.zero=3"),
    "pipeline": ("devices.cpus=2", "parallelism.pipeline=2", "parallelism.microbatches=2"),
    "pipeline and data": ("devices.cpus=4", "parallelism.pipeline=2", "parallelism.microbatches=2"),
}
# Each source under one of them, and each of them under one source; the rest is for the long tests.
CHOSEN = {
    "mixture": "zero 3",
    "digits": "tensor",
    "stdlib": "context",
    "text": "context and data",
    "arrays": "replicas",
    "synthetic": "zero 2",
    "python": "zero 3",
    "tokens": "pipeline",
    "images": "zero 1",
    "mnist": "pipeline",
    "cifar10": "zero 3",
    "parquet": "pipeline and data",
    "datasets": "tensor",
    "chat": "context",
    "preferences": "pipeline",
}
SEQUENCES = {"stdlib": 256, "text": 256, "tokens": 50, "chat": 384, "preferences": 384}  # and their tokens
REST = [
    (kind, layout)
    for kind in SOURCES
    for layout in LAYOUTS
    if CHOSEN[kind] != layout and ((kind in SEQUENCES and kind != "preferences") or not layout.startswith("context"))
]


def test_no_layout_is_left_out() -> None:
    assert set(CHOSEN) == set(SOURCES) and set(CHOSEN.values()) == set(LAYOUTS)


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", CHOSEN)
def test_and_on_other_axes(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    exchanges_of(launcher, tmp_path, kind, CHOSEN[kind])


@pytest.mark.long
@pytest.mark.parametrize(("kind", "layout"), REST)
def test_and_on_every_axis_and_sharding(launcher: Launcher, tmp_path: Path, kind: str, layout: str) -> None:
    exchanges_of(launcher, tmp_path, kind, layout)


def exchanges_of(launcher: Launcher, folder: Path, kind: str, layout: str) -> None:
    """The source's network ends as it does above, with layers before that can be cut along any axis."""
    make, source, network = SOURCES[kind]
    make(folder)
    classes = network.removesuffix("]").split("linear(")[-1]
    first = "flatten(), " if network.startswith("[flatten()") else ""
    deep = f"[{first}linear(8), relu(), linear(8), relu(), linear({classes}]"
    if kind in SEQUENCES:
        vocab = SEQUENCES[kind]
        deep = f"[embedding({vocab}, 8), transformer_block(heads = 2), transformer_block(heads = 2), linear({vocab})]"
        source = source if "context" in source or "max_length" in source else source.replace(")", ", context = 16)")
    (folder / "made.plt").write_text(job(source, deep))
    exchanges_as_planned(launcher, folder, folder / "made.plt", *LAYOUTS[layout])


def test_a_vocabulary_that_the_network_does_not_hold_is_said_beforehand(tmp_path: Path) -> None:
    made_data.llm_c(tmp_path / "a.bin", np.arange(300, dtype="<u2"), 300)
    text = job('tokens("a.bin")', "gpt(layers = 1, width = 8, heads = 2, context = 16, vocab = 256)")
    assert any("a vocabulary of 256 does not hold the data's 300 tokens" in each[2] for each in found(tmp_path, text))


def test_a_number_that_the_network_does_not_know_is_named_with_its_file(launcher: Launcher, tmp_path: Path) -> None:
    for name, high in (("a", 30), ("b", 999)):
        tokens = np.arange(2000) % 30
        tokens[1000] = high - 1
        tokens.astype("<u2").tofile(tmp_path / f"{name}.bin")
    text = job(
        'tokens("*.bin")', "gpt(layers = 1, width = 16, heads = 2, context = 16, vocab = 30)", train="epochs = 1"
    )
    report = Report()
    ready = prepare(load_text(text, folder=str(tmp_path)), report)
    assert ready is not None
    outcome, _ = launcher.launch(ready.program, ready.places, tmp_path / "run")
    assert not outcome.is_complete
    assert f" of {tmp_path}/b.bin has the token 998, and the network has a vocabulary of 30" in str(outcome.failure)


# ------------------------------------------------------------------------------------------ what is said beforehand


def found(folder: Path, text: str, *, run: bool = False) -> list[tuple[str, str, str]]:
    """Returns (code, severity, message and help) of a job's diagnostics."""
    report = Report()
    inspect(load_text(text, folder=str(folder)), report, run=run)
    return [(d.code, d.severity, f"{d.message} | {d.help}") for d in report]


@pytest.mark.parametrize(
    ("source", "network", "words"),
    [
        ('tokens("*.bin")', "gpt(layers = 1, width = 8, heads = 2, context = 8, vocab = 9)", "`dslc tokens FILE… -o"),
        ('images("none")', "[flatten(), linear(2)]", "a folder for each class"),
        ('mnist("none")', "[flatten(), linear(10)]", "{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
        ('cifar10("none")', "[flatten(), linear(10)]", "curl https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"),
        ('parquet("*.parquet")', "[linear(2)]", "to_parquet"),
        ('datasets("nobody/nothing")', "[linear(2)]", "load_dataset('nobody/nothing')"),
        ('datasets("./none")', "[linear(2)]", "save_to_disk"),
    ],
)
def test_data_that_is_not_there_is_a_warning_with_the_command_that_makes_it(
    tmp_path: Path, source: str, network: str, words: str
) -> None:
    report = Report()
    inspect(load_text(job(source, network), folder=str(tmp_path)), report)
    (said,) = [d for d in report if d.code == "W0309"]
    assert said.for_run().code == "E0309"
    assert said.help and words in said.help, said


def broken_parquet(folder: Path) -> None:
    made_data.parquet(folder)
    whole = (folder / "part-1.parquet").read_bytes()
    (folder / "part-1.parquet").write_bytes(whole[:-40])


def dataset_of_pipes(folder: Path) -> None:
    made_data.dataset(folder / "d")
    (folder / "d" / "dataset_info.json").unlink()
    os.mkfifo(folder / "d" / "dataset_info.json")


def mixed_parquet(folder: Path) -> None:
    made_data.parquet(folder)
    made_data.parquet(folder / "other", files=1, y=np.zeros(40, np.int32))
    (folder / "other" / "part-0.parquet").rename(folder / "part-2.parquet")


@pytest.mark.parametrize(
    ("make", "source", "words"),
    [
        (broken_parquet, 'parquet("*.parquet")', "part-1.parquet is not a readable Parquet file"),
        (mixed_parquet, 'parquet("*.parquet")', "column `y` holds int32 in .*part-2.parquet, and int64 in"),
        (made_data.parquet, 'parquet("*.parquet", input = "z")', "has no column `z` .* `x`, `y`"),
        (lambda f: made_data.parquet(f, x=["a"] * 40), 'parquet("*.parquet")', "column `x` holds text .*dslc tokens"),
        (
            lambda f: made_data.parquet(f, x=[b"a"] * 40),
            'parquet("*.parquet")',
            "`x` holds bytes that are not a picture",
        ),
        (lambda f: made_data.parquet(f, x=[None, 1] * 20), 'parquet("*.parquet")', "`x` has no value in its first row"),
        (lambda f: made_data.dataset(f / "d"), 'datasets("./d", input = "q", target = "y")', "no column `q`"),
        (lambda f: made_data.dataset(f / "d"), 'datasets("./d", revision = "a")', "takes no `revision`"),
        (made_data.parquet, 'parquet("*.parquet", input = ["x", "y"])', "`x` holds more than a number"),
        (lambda f: made_data.dataset(f / "d"), 'datasets("./d", input = "x")', "which columns .* `x`, `y`"),
        (lambda f: os.mkfifo(f / "a.parquet"), 'parquet("*.parquet")', "a.parquet is a device or a pipe"),
        (lambda f: os.symlink("/dev/zero", f / "a"), 'parquet("a")', "a is a device or a pipe"),
        (lambda f: os.mkfifo(f / "a"), 'datasets("json", data_files = "./a", target = "y")', "a is a device or a pipe"),
        (
            lambda f: os.symlink("/dev/zero", f / "a"),
            'datasets("csv", data_files = ["./a"])',
            "a is a device or a pipe",
        ),
        (dataset_of_pipes, 'datasets("./d")', "dataset_info.json is a device or a pipe"),
    ],
)
def test_a_table_that_cannot_be_used_is_an_error(
    tmp_path: Path, make: Callable[[Path], object], source: str, words: str
) -> None:
    import re

    make(tmp_path)
    said = [each for each in found(tmp_path, job(source, "[linear(2)]")) if each[0] == "E0311"]
    assert len(said) == 1 and said[0][1] == "error" and re.search(words, said[0][2]), said


def test_several_columns_of_a_table_of_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,c\n" + "".join(f"{n}.5,{n},{n % 3}\n" for n in range(20)))
    source = 'datasets("csv", data_files = "./t.csv", input = ["a", "b"], target = "c", cache_dir = "CACHE")'
    text = job(source.replace("CACHE", str(tmp_path / "cache")), "[linear(3)]")
    ready = prepare(load_text(text, folder=str(tmp_path)), Report())
    assert ready is not None
    inputs, targets = open_source(ready.program.data).train.batch(torch.tensor([7, 2]))
    assert inputs.tolist() == [[7.5, 7], [2.5, 2]] and targets.tolist() == [1, 2]
    assert inputs.dtype == torch.float32 and targets.dtype == torch.int64


def test_a_test_set_of_its_own_leaves_nothing_for_validation(tmp_path: Path) -> None:
    made_data.dataset(tmp_path / "d", splits=True)
    text = job('datasets("./d")', "[linear(2)]", data=", validation = 0.2")
    assert [each[0] for each in found(tmp_path, text)] == ["E0306"]
    text = job('datasets("./d", split = "train")', "[linear(2)]", data=", validation = 0.2")
    assert not found(tmp_path, text)


def test_a_library_that_is_not_installed_is_named_with_the_command(tmp_path: Path) -> None:
    """A module of the same name that fails to load replaces one that is absent."""
    made_data.parquet(tmp_path)
    (tmp_path / "hidden").mkdir()
    for name in ("pyarrow", "datasets"):
        (tmp_path / "hidden" / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    for source, extra in (('parquet("*.parquet")', "parquet"), ('datasets("./d")', "datasets")):
        (tmp_path / "a.plt").write_text(job(source, "[linear(2)]"))
        run = dslc("check", "a.plt", cwd=tmp_path, env=dict(os.environ, PYTHONPATH=str(tmp_path / "hidden")))
        assert "warning[W0803]" in run.stderr and f"pip install 'dslc[{extra}]'" in run.stderr, run.stderr
