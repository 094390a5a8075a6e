"""`dslc tokens`: the file holds the text, however it is split, and a job can train on it directly."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands import dslc
from helpers.launcher import DSLC
from helpers.paths import EXAMPLES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dslc.compiler.facts.sources import source_facts
from dslc.dsl.language import calls as c
from dslc.runtime.data.sources import token_files
from dslc.runtime.data.sources.token_files import TokensError, pieces_of, write_tokens

TEXT = Path(argparse.__file__).read_text()


def tokens_of(file: Path, item: str = "<u2") -> list[int]:
    found: list[int] = np.fromfile(file, item, offset=1024).tolist()
    return found


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that splits text as GPT-2's does, with 400 tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(file))
    return file


# ---------------------------------------------------------------------------------------------------- the command


def test_bytes_of_files_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("día\n", encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"\xff\x00")
    run = dslc("tokens", "a.txt", "b.txt", "-o", "t.bin", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("t.bin: 7 tokens of 16 bits, vocabulary 256\n")
    assert tokens_of(tmp_path / "t.bin") == list("día\n".encode() + b"\xff\x00")
    assert np.fromfile(tmp_path / "t.bin", "<i4", 5).tolist() == [20240520, 1, 7, 256, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b.txt", "t.bin"]


def test_the_lines_it_prints_are_a_job_that_is_good(tmp_path: Path, gpt2: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    run = dslc("tokens", "a.txt", "-o", "t.bin", "--tokenizer", gpt2, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    summary, _, block = run.stdout.partition("\n")
    assert "of 16 bits, vocabulary 400, `<|endoftext|>` behind each text" in summary
    (tmp_path / "job.plt").write_text(
        "model { network = gpt(layers = 1, width = 8, heads = 2, context = 16), loss = cross_entropy() }\n"
        + block.replace("validation", "batch      = 8\n  validation")
        + "train { epochs = 1, optimizer = sgd() }\n"
    )
    check = dslc("check", "job.plt", cwd=tmp_path)
    assert check.returncode == 0 and "is good" in check.stdout, check.stderr
    facts = source_facts(c.Tokens(files=str(tmp_path / "t.bin")), 16)
    assert facts.vocab == 400 and facts.samples == (len(tokens_of(tmp_path / "t.bin")) - 1) // 16


def test_what_it_cannot_do_is_said(tmp_path: Path, gpt2: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 70_000 + b"\xe2\x82\xac\xe2\x28")
    (tmp_path / "there.bin").write_bytes(b"")
    for words, message in (
        (("none.txt", "-o", "t.bin"), "none.txt: there is no such file"),
        (("a.txt", "-o", "there.bin"), "there.bin exists already"),
        (("a.txt", "-o", "t.bin", "--tokenizer", "none.json"), "there is no none.json"),
        (("a.txt", "-o", "t.bin", "--tokenizer", "a.txt"), "a.txt is not a tokenizer"),
        (("a.txt", "-o", "t.bin", "--tokenizer", gpt2), "a.txt is not UTF-8: byte 70003 is 0xe2"),
        (("a.txt", "-o", "none/t.bin"), "none/t.bin.part: No such file or directory"),
    ):
        run = dslc("tokens", *words, cwd=tmp_path)
        assert run.returncode == 2 and message in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "there.bin"]


# ------------------------------------------------------------------------------------------------------ the pieces


def test_pieces_give_the_tokens_of_the_whole_text(tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "PIECE", 500)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("two")
    read: list[int] = []
    texts = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    made = write_tokens(texts, str(tmp_path / "t.bin"), str(gpt2), read.append)
    tokenizer = Tokenizer.from_file(str(gpt2))
    end = tokenizer.token_to_id("<|endoftext|>")
    assert tokens_of(tmp_path / "t.bin") == [*tokenizer.encode(TEXT).ids, end, *tokenizer.encode("two").ids, end]
    assert made.tokens == len(tokens_of(tmp_path / "t.bin")) and made.end == "<|endoftext|>"
    assert sum(read) == len(TEXT.encode()) + 3 and len(read) > 100


@settings(max_examples=150)
@given(st.text(st.sampled_from("a1é€ \n\r.\u2028𝄞"), max_size=80), st.integers(1, 9), st.integers(5, 40))
@example("\n\n\n", 1, 5)
def test_pieces_are_the_text_when_put_together(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int, longest: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "pieces.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_files, "PIECE", piece)
        patch.setattr(token_files, "LONGEST", longest)
        made = list(pieces_of(str(file), lambda read: None))
    assert "".join(made) == text and all(made)
    for one, next in itertools.pairwise(made):
        assert (one[-1].isalnum() and next[0] == "\n") or len(one) > longest


def test_a_large_vocabulary_takes_32_bits(tmp_path: Path) -> None:
    words = {f"w{n}": n for n in range(70_000)}
    made: Any = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w1 w69999\nw3")
    write = write_tokens(
        [str(tmp_path / "a.txt")], str(tmp_path / "t.bin"), str(tmp_path / "tokenizer.json"), lambda read: None
    )
    assert (write.item, write.vocab, write.end) == ("uint32", 70_000, "")
    assert tokens_of(tmp_path / "t.bin", "<u4") == [1, 69_999, 3]
    facts = source_facts(c.Tokens(files=str(tmp_path / "t.bin")), 2)
    assert facts.vocab == 70_000 and facts.samples == 1


def test_a_file_that_could_not_be_finished_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_files, "MOST", 5)
    (tmp_path / "a.txt").write_text("more than five")
    with pytest.raises(TokensError, match="more than 5 tokens"):
        write_tokens([str(tmp_path / "a.txt")], str(tmp_path / "t.bin"), None, lambda read: None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.slow
def test_the_example_trains_on_the_file_that_it_says_how_to_make(tmp_path: Path) -> None:
    example = EXAMPLES / "tokens.plt"
    command = example.read_text().splitlines()[1].removeprefix("#   ")
    here = {**os.environ, "PATH": f"{DSLC.parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, shell=True, cwd=tmp_path, env=here, check=True, capture_output=True)
    (tmp_path / "tokens.plt").write_text(example.read_text())
    shorter = ("--set", "train.steps=25", "--set", "evaluate.every=none")
    run = dslc("run", "tokens.plt", "--out", "run", *shorter, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["split"] == "validation" and lines[-1]["loss"] < 4.5 < lines[0]["loss"]
