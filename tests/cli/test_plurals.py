"""Counts of one: `1 CPU`, never `1 cpus`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.paths import ROOT

from dslc.dsl.show import render
from dslc.dsl.words import plural
from dslc.jobs.check_job import check_one

# A count of one before a plural; `1 is` and `1 has` go on with a verb, and `1 us` is a time.
ODD = re.compile(r"(?<![\w.,=^*/+-])(?<![\d=x/<>+] )1 (?!(?:is|was|has|does|unless|us)\b)[a-z-]+s\b")
SHOWN = sorted([*ROOT.glob("tests/**/*.txt"), *ROOT.glob("grammar/malformed/*.txt"), *ROOT.glob("docs/*.md")])
DIGITS = ("[flatten(), linear(10)]", "cross_entropy()", "digits()")
ONE = ("mse()", "synthetic(shape = [1], targets = [1])")
JOB = """
model { network = NETWORK, loss = LOSS }
data { source = SOURCE, batch = 1, validation = 0 }
devices { cpus = 1 }
train { steps = 1, optimizer = sgd() }
"""


@pytest.mark.parametrize(
    "count, noun, said",
    [(0, "rank", "0 ranks"), (1, "batch", "1 batch"), (2, "class", "2 classes"), (1797, "sample", "1,797 samples")],
)
def test_a_noun_is_counted(count: int, noun: str, said: str) -> None:
    assert plural(count, noun) == said


def test_the_expression_finds_what_it_should() -> None:
    assert ODD.search("there are 1 devices") and ODD.search("1 cpus are asked for")
    assert not ODD.search("63 = 2 x 31 + 1 samples") and not ODD.search("0.1 seconds, and rank 1 is last")


@pytest.mark.parametrize(
    "network, loss, source, settings, said",
    [
        (*DIGITS, ["parallelism.data=2"], "the job has 1 device"),
        (*DIGITS, ["parallelism.tensor=2"], "1 device cannot be shared"),
        (*DIGITS, ["parallelism.data=2"], "the job asks for 1 CPU here"),
        (*DIGITS, ["parallelism.microbatches=2"], "a share of 1 sample "),
        ("[flatten(), linear(1)]", "cross_entropy()", "digits()", [], "1 number comes out for 10 classes"),
        ("[flatten(), linear(11)]", "cross_entropy()", "digits()", [], "11 numbers come out for 10 classes: 1 more"),
        ("[linear(1)]", "mse()", "synthetic(samples = 1, shape = [1], targets = [1])", ["data.batch=2"],
         "an epoch of 1 sample "),
        ("[linear(1)]", "mse()", "synthetic(samples = 1, shape = [1], targets = [1])", ["data.validation=0.1"],
         "of 1 sample: "),
        ("[linear(1)]", *ONE,
         ["devices.cpus=2", "parallelism.pipeline=2", "data.batch=2"], "1 layer cannot fill 2 stages"),
        ("[linear(1)]", *ONE, ["parallelism.stages=[2]"], "and 1 layer"),
        ("[linear(1, bias = false)]", *ONE, ['model.freeze=["*"]'],
         "leaves none of 1 parameter to train"),
        ("[linear(1)]", *ONE, ["checkpoint.every=2 steps"],
         "ends after 1 step, "),
        ("[conv2d(2, kernel = 1, groups = 2), flatten(), linear(10)]", "cross_entropy()", "digits()", [],
         "1 channel at the input, which 2 groups"),
    ],
)  # fmt: skip
def test_messages_with_a_count_of_one(
    tmp_path: Path, network: str, loss: str, source: str, settings: list[str], said: str
) -> None:
    job = tmp_path / "job.plt"
    job.write_text(JOB.replace("NETWORK", network).replace("LOSS", loss).replace("SOURCE", source))
    text = render(check_one(str(job), settings)[0], color=False)
    assert said in text
    assert not ODD.findall(text)


def test_no_text_that_is_kept_counts_one_in_the_plural() -> None:
    found = {path.name: ODD.findall(path.read_text(encoding="utf-8")) for path in SHOWN}
    assert len(found) > 200 and not {name: odd for name, odd in found.items() if odd}


def test_no_text_that_is_kept_counts_devices_by_the_name_of_their_kind() -> None:
    """`2 CPUs`; a kind that has a name of its own stays what it is, as `8 h100`."""
    shown = [*SHOWN, *ROOT.glob("tests/**/*.dot"), *ROOT.glob("docs/pictures/*.svg")]
    odd = re.compile(r"\d [cg]pus?\b(?! *=)")
    found = {path.name: odd.findall(path.read_text(encoding="utf-8")) for path in shown}
    assert len(found) > len(SHOWN) and not {name: said for name, said in found.items() if said}
