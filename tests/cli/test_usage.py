"""An unknown command or option: one line suggests what is meant."""

from __future__ import annotations

import argparse
import re

import pytest
from helpers.commands import dslc

from dslc.dsl.language.suggest import aliases
from dslc.main import _parse_arguments, build_parser
from dslc.terminal.usage import mistake

PARSER = build_parser()
(CHOICES,) = (action.choices for action in PARSER._actions if isinstance(action, argparse._SubParsersAction))
HERE = "that is `devices { gpus = 2 }` in the job, or `--set devices.gpus=2`"


@pytest.mark.parametrize(
    "line, said",
    [
        ("run --gpus 2 job.plt", f"`dslc run` has no option `--gpus`: {HERE}"),
        ("run --gpus=2 job.plt", f"`dslc run` has no option `--gpus`: {HERE}"),
        ("--gpus 2 run job.plt", f"`dslc` has no option `--gpus`: {HERE}"),
        ("render --gpus 2 job.plt", f"`dslc render` has no option `--gpus`: {HERE}"),
        ("run job.plt --nproc-per-node 2", f"`dslc run` has no option `--nproc-per-node`: {HERE}"),
        ("run --gpus job.plt", "`--set devices.gpus=…`"),
        ("run job.plt --lr 0.1", "an argument of `train.optimizer` in the job, or `--set train.optimizer.lr=0.1`"),
        ("run job.plt --bf16", "`train { precision = bf16 }` in the job, or `--set train.precision=bf16`"),
        ("run job.plt --train.epochs=3", "a setting is `--set train.epochs=3`"),
        ("run job.plt --batch-size 64", "`--set data.batch=64` (the global batch"),
        ("run job.plt --outt x", "did you mean `--out`?"),
        ("--verzion", "did you mean `--version`?"),
        (
            "run job.plt --json",
            "that is an option of `dslc check`, `dslc plan`, `dslc data`, `dslc diff`, `dslc bisect`, `dslc choose`, "
            "`dslc evaluate`, `dslc status`, `dslc why` or `dslc doctor`",
        ),
        ("run job.plt --output_dir x", "`dslc run JOB --out DIR`"),
        ("check job.plt --profile", "`dslc run JOB --profile`"),
        ("check --dry-run job.plt", "`dslc check JOB` starts nothing"),
        ("run job.plt --patience 3", "`--set train.early_stopping.patience=3`"),
        ("fmt --lr 1 job.plt", "`dslc fmt --help` lists what there is"),
        ("run --quux job.plt", "`dslc run --help` lists what there is"),
        ("train job.plt", "there is no command `train`: did you mean `dslc run`?"),
        ("rnu job.plt", "did you mean `dslc run`?"),
        ("job.plt", "`job.plt` is not a command: `dslc run job.plt` trains it"),
        ("quux", "the commands are `run`, `check`, "),
        ("\x1b[2J", "there is no command `\\x1b[2J`"),
    ],
)
def test_what_is_not_there_is_answered(line: str, said: str) -> None:
    words = line.split(" ")
    assert said in mistake(PARSER, words)


@pytest.mark.parametrize(
    "line",
    ["", "--version", "--help", "run -h", "run job.plt --set a=-1 --se b=2", "verify job.plt --steps -1", "fmt -",
     "render job.plt -ox.svg", "run -- --odd", "run job.plt --prof"],
)  # fmt: skip
def test_what_argparse_takes_is_no_mistake(line: str) -> None:
    assert not mistake(PARSER, line.split())


def test_a_word_of_any_length_is_one_short_line() -> None:
    for words in (["x" * 10_000], ["run", "--" + "x" * 10_000], ["run", "--gpus=" + "x" * 10_000]):
        assert len(mistake(PARSER, words)) < 500


@pytest.mark.parametrize(
    "line, said",
    [
        ("run --gpus 2 job.plt", f"dslc: `dslc run` has no option `--gpus`: {HERE}\n"),
        ("train job.plt", "dslc: there is no command `train`: did you mean `dslc run`?\n"),
        ("run job.plt other.plt", "dslc: `other.plt` is one argument too many for `dslc run`, as its `--help` shows\n"),
        (
            "run job.plt data.batch=8",
            "dslc: `data.batch=8` is one argument too many: a setting is `--set data.batch=8`\n",
        ),
    ],
)
def test_the_command_says_so_and_ends_with_status_2(line: str, said: str) -> None:
    found = dslc(*line.split())
    assert (found.returncode, found.stdout, found.stderr) == (2, "", said)


@pytest.mark.parametrize(
    "line",
    [
        "render a.plt -o x.html b.plt",
        "render a.plt --set data.batch=8 b.plt -o x.html",
        "diff a.plt --json b.plt",
    ],
)
def test_a_second_plan_stands_before_or_after_the_options(line: str) -> None:
    chosen = _parse_arguments(line.split())
    assert chosen is not None and chosen.second == "b.plt"
    assert _parse_arguments(f"{line} c.plt".split()) is None


def test_the_tables_name_what_is_there() -> None:
    """Commands, their options, and no name of ours."""
    told = [*aliases().commands.values(), *aliases().options.values()]
    named = [found for said in told for found in re.findall(r"`dslc (\w+)([^`]*)`", said)]
    assert len(named) > 30
    for command, rest in named:
        assert all(option in CHOICES[command]._option_string_actions for option in re.findall(r"--\w+", rest))
    assert not set(CHOICES) & set(aliases().commands)
    assert not set(aliases().options) & {*aliases().fields, *aliases().absent}


@pytest.mark.parametrize(
    "line, said",
    [
        ("run job.plt --parallel 0", "0 is not a number from 1 to 10,000"),
        ("export job.plt -o x --max-shard-size 5", "5 is not a size such as 5GB"),
        ("convert x.json --devices 2x", "2x is not a number of GPUs such as 8, or of nodes and GPUs such as 2x8"),
    ],
)
def test_a_value_that_is_none_is_said(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_args(line.split())
    assert said in capsys.readouterr().err
