"""The functions of the editor's room over a text and a position, without a protocol."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.paths import EXAMPLES

from dslc.dsl.editor.complete import complete
from dslc.dsl.editor.hover import hover
from dslc.dsl.editor.snapshot import Snapshot

JOB = """\
import "base.plt"
param width = 256

model {
  network = gpt(layers = 2, width = width, heads = 4, context = 64)
  loss = cross_entropy()
}

data {
  source = tokens("corpus.bin")
  batch = 64
}

train {
  steps = 10
  optimizer = adamw(lr = 1e-3)
  precision = bf16
}
"""


def snapshot_of(text: str) -> tuple[Snapshot, int]:
    """Returns the snapshot of a text without its `|`, and the offset of that."""
    offset = text.index("|")
    return Snapshot(text.replace("|", "", 1), "job.plt"), offset


def labels(text: str) -> list[str]:
    return [item.label for item in complete(*snapshot_of(text))]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.plt")), ids=lambda path: path.stem)
def test_statements_have_trees_of_their_own(path: Path) -> None:
    snapshot = Snapshot(path.read_text(), str(path))
    assert all(region.good_text == region.text for region in snapshot.regions)
    assert snapshot.repaired() == snapshot.text


def test_a_broken_block_keeps_its_last_tree_and_the_others_their_own() -> None:
    first = Snapshot(JOB, "job.plt")
    second = Snapshot(JOB.replace("lr = 1e-3)\n  precision = bf16\n}", "lr = "), "job.plt", first)
    assert [region.name for region in second.regions if region.good_text != region.text] == ["train"]
    assert second.regions[-1].document is first.regions[-1].document is not None
    assert second.regions[3].document is first.regions[3].document  # the same text is not parsed again
    assert second.repaired().rstrip() == JOB.rstrip()


def test_an_unclosed_block_ends_before_the_next() -> None:
    snapshot = Snapshot(JOB.replace("batch = 64\n}\n", "batch = "), "job.plt")
    assert [region.name for region in snapshot.regions][2:] == ["model", "data", "train"]


@pytest.mark.parametrize(
    ("text", "some", "others"),
    (
        ("|", {"model", "data", "param", "import", "parallelism = auto"}, {"epochs"}),
        ("model {}\nda|", {"data", "train"}, {"model"}),
        ("train {\n  steps = 1\n  |\n}", {"optimizer", "epochs"}, {"steps", "batch"}),
        ("train {\n  optimizer = |\n}", {"adamw", "sgd"}, {"steps", "gpt"}),
        ("train {\n  optimizer = sgd(lr = 1, |)\n}", {"momentum", "nesterov"}, {"lr", "betas"}),
        ("train {\n  optimizer = sgd(momentum = 0.9,\n    |\n  precision = bf16", {"lr"}, {"momentum", "epochs"}),
        ("train {\n  optimizer = sgd(lr = 1,\n  precision = |\n}", {"bf16"}, {"momentum"}),
        ("param w = 2\nmodel {\n  network = [linear(|)]\n}", {"w", "features", "bias"}, {"conv2d"}),
        ("model {\n  network = [linear(2), residual([c|])]\n}", {"conv2d", "relu"}, {"gpt"}),
        ("data {\n  shuffle = |\n}", {"true", "false", "none"}, set()),
        ("evaluate {\n  every = 10 |\n}", set(), {"steps"}),
        ("evaluate {\n  every = 10s|\n}", {"steps", "epochs"}, {"GiB"}),
        ("memory {\n  limit = 10|\n}", {"GiB", "MiB"}, {"steps"}),
        ("sweep {\n  |\n}", {"train", "data"}, {"expect"}),
        ("sweep {\n  train.|\n}", {"optimizer", "epochs"}, {"batch"}),
        ("sweep {\n  train.optimizer.|\n}", {"lr", "momentum"}, {"epochs"}),
        ("expect {\n  |\n}", {"peak_memory", "bubble"}, {"batch"}),
        ("train {\n  # |\n}", set(), {"steps"}),
        ("param |", set(), {"model"}),
    ),
)
def test_completion_offers_what_may_stand_there(text: str, some: set[str], others: set[str]) -> None:
    offered = set(labels(text))
    assert some <= offered, offered
    assert not others & offered


def test_completion_of_paths_reads_the_folder(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.bin").touch()
    (tmp_path / "base.plt").touch()

    def offered(text: str) -> list[tuple[str, str]]:
        snapshot = Snapshot(text.replace("|", "", 1), str(tmp_path / "job.plt"))
        return [(item.label, item.snippet) for item in complete(snapshot, text.index("|"))]

    assert offered('data {\n  source = tokens("|")\n}') == [("base.plt", "base.plt"), ("corpus", "corpus/")]
    assert offered('data {\n  source = tokens("corpus/a|\n}') == [("a.bin", "a.bin")]
    assert offered('import "|') == [("base.plt", "base.plt"), ("corpus", "corpus/")]
    assert offered('train {\n  optimizer = "|"\n}') == []


@pytest.mark.parametrize(
    ("text", "parts"),
    (
        ("tr|ain {\n}", ["Fields: ", "`optimizer`"]),
        ("train {\n  ste|ps = 1\n}", ["`train.steps`", "default"]),
        ("train {\n  optimizer = ad|amw()\n}", ["`adamw(lr = 0.001", "- `betas`"]),
        ("train {\n  optimizer = adamw(be|tas = [1, 2])\n}", ["`adamw.betas`"]),
        ("train {\n  precision = bf|16\n}", ["`bf16("]),
        ("memory {\n  limit = 7|6GiB\n}", ["`1 GiB` is 1,073,741,824 bytes"]),
        ("expect {\n  bub|ble < 1%\n}", ["`bubble`"]),
        ("param w = 2 * 8\nmodel { network = [linear(|w)] }", ["`param w = 2 * 8`"]),
        ("sweep {\n  train.st|eps = [1, 2]\n}", ["`train.steps`"]),
        ("par|am x = 1", ["`param width = 256`"]),
    ),
)
def test_hover_documents_words(text: str, parts: list[str]) -> None:
    found = hover(*snapshot_of(text))
    assert found is not None
    for part in parts:
        assert part in found.text


def test_hover_knows_nothing_of_signs_and_comments() -> None:
    assert hover(*snapshot_of("train {|\n}")) is None
    assert hover(*snapshot_of("# tra|in")) is None


def test_hover_gives_the_resolved_value_also_of_a_broken_text() -> None:
    text = JOB.replace('import "base.plt"\n', "").replace("batch = 64", "batch = width / 4")
    first = Snapshot(text, "job.plt")
    found = hover(first, text.index("batch") + 1)
    assert found is not None and "Value: `64`, from job.plt:10." in found.text
    broken = text.replace("cross_entropy()", "cross_")
    found = hover(Snapshot(broken, "job.plt", first), broken.index("batch") + 1)
    assert found is not None and "Value: `64`" in found.text
