"""`dslc check` names the parts that it could not check, in text and in JSON; "good" alone means that everything was
checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.job_texts import job_text

from dslc.main import build_parser

JOB = job_text(
    model={"network": "NETWORK", "loss": "LOSS"},
    data={"source": "SOURCE", "batch": 8},
    train={"steps": 1, "optimizer": "sgd()"},
    log=None,
)
NET = """
from torch import nn
from torch.nn import functional as F

def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def misspelt():
    return nn.Linaer(64, 10)

def loss(output, target):
    return F.cross_entropy(output, target, reduction="none")

def data():
    import torch
    return [(torch.zeros(64), 1)] * 16
"""
OWN, OWN_LOSS, OWN_DATA = 'python("net:network")', 'python("net:loss")', 'python("net:data")'
LIBRARY, ABSENT = "[flatten(), linear(10)]", 'arrays("absent.npz")'
pytestmark = pytest.mark.usefixtures("loaded")


@pytest.mark.parametrize(
    ("network", "source", "loss", "trace", "said"),
    [
        (LIBRARY, "digits()", "cross_entropy()", False, ""),
        (
            OWN,
            "digits()",
            "cross_entropy()",
            False,
            "its network (`--trace` looks at it)",
        ),
        (OWN, "digits()", "cross_entropy()", True, ""),
        (LIBRARY, "digits()", OWN_LOSS, False, "its loss (`--trace` looks at it)"),
        (LIBRARY, "digits()", OWN_LOSS, True, ""),
        (OWN, OWN_DATA, OWN_LOSS, True, ""),
        (
            OWN,
            OWN_DATA,
            OWN_LOSS,
            False,
            "its data, its network and its loss (`--trace` looks at them)",
        ),
        (LIBRARY, ABSENT, "cross_entropy()", False, "its data and its network"),
        (LIBRARY, ABSENT, OWN_LOSS, True, "its data, its network and its loss"),
        (
            OWN,
            ABSENT,
            OWN_LOSS,
            False,
            "its data, its network and its loss (`--trace` looks at its loss)",
        ),
        (OWN, ABSENT, "cross_entropy()", True, "its data and its network"),
        (
            'transformers("gpt2")',
            ABSENT,
            "cross_entropy()",
            True,
            "its data and its network",
        ),
    ],
)
def test_what_was_not_looked_at_is_said(
    tmp_path: Path,
    network: str,
    source: str,
    loss: str,
    trace: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = checked(tmp_path, network, source, loss, trace, monkeypatch, capsys)
    assert status == 0, err
    so_far = said and f" as far as can be seen without {said}"
    assert out.startswith(f"job.plt is good{so_far}: 1 rank")
    own = network != LIBRARY
    assert ("warning[W0439]" in err) == (own and trace and source == ABSENT)


@pytest.mark.parametrize(
    ("network", "code", "words"),
    [
        ('transformers("gtp2")', "E0805", "did you mean `gpt2`?"),
        ('transformers("gpt2", n_lyer = 2)', "E0805", "did you mean `n_layer`?"),
        ('python("net:misspelt")', "E0802", "net.py, line 9"),
        ('python("net:loss")', "E0802", "loss() missing 2 required"),
    ],
)
def test_a_network_is_looked_at_as_far_as_it_can_be_while_data_is_missing(
    tmp_path: Path,
    network: str,
    code: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = checked(tmp_path, network, ABSENT, "cross_entropy()", True, monkeypatch, capsys)
    assert status == 1 and not out
    assert f"error[{code}]" in err and words in err and "W0439" not in err


def checked(
    folder: Path,
    network: str,
    source: str,
    loss: str,
    trace: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str, str]:
    """Returns exit status, standard output and standard error of `dslc check`."""
    from dslc.commands import check

    monkeypatch.chdir(folder)
    (folder / "net.py").write_text(NET)
    text = JOB.replace("NETWORK", network).replace("SOURCE", source).replace("LOSS", loss)
    (folder / "job.plt").write_text(text)
    arguments = ["check", "job.plt"] + (["--trace"] if trace else [])
    status = check.main(build_parser().parse_args(arguments))
    return status, *capsys.readouterr()
