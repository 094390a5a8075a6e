"""Configurations of each tool, the jobs that they become, and what is reported, as golden files.

Each folder of `cases` holds the files of one training. `UPDATE_GOLDEN=1` writes `expected` anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.golden import hold
from helpers.paths import TESTS

from dslc.conversion.convert import convert
from dslc.conversion.job_text import job_text
from dslc.conversion.report_text import head_line, key_lines
from dslc.dsl.show import render
from dslc.jobs.check_job import check_one
from dslc.terminal.diagnostic_formats import github

CASES = sorted(path for path in (TESTS / "conversion" / "cases").iterdir() if path.is_dir())


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name)
def test_a_configuration_becomes_a_job(case: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(case)
    paths = sorted(path.name for path in case.iterdir() if path.suffix in (".json", ".yaml", ".yml", ".toml"))
    draft = convert(paths)
    parts = [render(draft.report, color=False)]
    if not draft.report.errors:
        text = job_text(draft, "converted")
        parts += ["\n".join([head_line(paths, draft), *key_lines(draft)]) + "\n", text]
        (tmp_path / "job.plt").write_text(text)
        report, _ = check_one(str(tmp_path / "job.plt"), [])
        assert not report.errors, render(report, color=False)
    hold("\n".join(part for part in parts if part), TESTS / "conversion" / "expected" / f"{case.name}.txt")


OPTIMIZERS = [
    ("deepspeed", "lion", "lion(lr = 0.001, betas = [0.95, 0.98])", ""),
    (
        "deepspeed",
        "muon",
        'muon(lr = 0.001, momentum = 0.95, weight_decay = 0, adamw = ["*embed*", "*lm_head*"], adamw_lr = 0.001, '
        "adamw_betas = [0.95, 0.98], adamw_eps = 1e-10)",
        "",
    ),
    ("lightning", "torch.optim.Adam", "adam(lr = 0.001, betas = [0.0, 0.98])", ""),
    ("transformers", "lion_32bit", "lion(lr = 0.001, betas = [0.9, 0.999])", ""),
    ("transformers", "adamw_torch_8bit", "adamw(lr = 0.001, weight_decay = 0, state = 8bit)", ""),
    ("transformers", "paged_adamw_8bit", "adamw(lr = 0.001, weight_decay = 0, state = 8bit)", "round otherwise"),
    ("transformers", "adafactor", "adafactor(lr = 0.001)", "the scale of a parameter"),
    ("transformers", "paged_lion_8bit", "lion(lr = 0.001, betas = [0.9, 0.999])", "in fp32"),
]


@pytest.mark.parametrize(("tool", "name", "call", "reason"), OPTIMIZERS)
def test_optimizers_become_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, name: str, call: str, reason: str
) -> None:
    """An optimizer of a tool is the call with the same update; what its state differs in is said of its key."""
    parameters = {"lr": 1e-3, "betas": [0.95, 0.98]}
    config: dict[str, object] = {"train_batch_size": 8, "optimizer": {"type": name, "params": parameters}}
    if tool == "transformers":
        config = {"output_dir": "out", "per_device_train_batch_size": 8, "optim": name, "learning_rate": 1e-3}
    if tool == "lightning":
        arguments = {"lr": 1e-3, "betas": [0, 0.98]}
        config = {"trainer": {"devices": 2}, "optimizer": {"class_path": name, "init_args": arguments}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    draft = convert(["config.json"])
    assert f"optimizer = {call}" in " ".join(job_text(draft, "converted").split())
    assert reason in "\n".join(key_lines(draft)) and (reason or "there is no" not in "\n".join(key_lines(draft)))


QUANTIZED = [
    ({"adapter": "lora", "load_in_4bit": True, "load_in_8bit": True}, ""),
    ({"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True}, "int8"),
    ({"use_peft": True, "load_in_4bit": True, "load_in_8bit": True}, ""),
    ({"finetuning_type": "lora", "quantization_bit": 8, "load_in_4bit": True}, ""),
    ({"finetuning_type": "lora", "quantization_bit": 4, "load_in_4bit": True}, "nf4"),
]


@pytest.mark.parametrize(("keys", "kind"), QUANTIZED, ids=str)
def test_keys_of_quantization_agree_or_contradict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: dict[str, object], kind: str
) -> None:
    config: dict[str, object] = {"base_model": "./base", "datasets": [], "micro_batch_size": 1}
    if "adapter" not in keys:
        config = {"model_name_or_path": "./base", "output_dir": "out", "per_device_train_batch_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    monkeypatch.chdir(tmp_path)
    draft = convert(["config.json"])
    if not kind:
        (error,) = draft.report.errors
        assert error.code == "E1103" and "in int8" in error.message and "in nf4" in error.message and error.notes
    else:
        weights = f'weights = pretrained("./base", quantize = {kind})'
        assert not draft.report.errors and weights in " ".join(job_text(draft, "converted").split())


@pytest.mark.parametrize(
    ("stage", "more", "zero"),
    [(1, {}, 1), (2, {}, 1), (3, {}, 1), (1, {"bf16": {"enabled": True}}, 0), (2, {"sequence_parallel_size": 2}, 0)],
)
def test_muon_keeps_whole_matrices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: int, more: dict[str, object], zero: int
) -> None:
    """Stages of ZeRO that `muon` has not become the next that it has, and the report says so."""
    parameters = {"muon_lr": 0.01, "lr": 1e-3, "eps": 1e-9, "momentum": 0.9, "nesterov": False}
    config = {"optimizer": {"type": "Muon", "params": parameters}, "zero_optimization": {"stage": stage}}
    (tmp_path / "config.json").write_text(json.dumps({"train_batch_size": 8, **config, **more}))
    monkeypatch.chdir(tmp_path)
    draft = convert(["config.json"])
    text, lines = " ".join(job_text(draft, "converted").split()), "\n".join(key_lines(draft))
    call = 'muon(lr = 0.01, momentum = 0.9, weight_decay = 0, adamw = ["*embed*", "*lm_head*"], adamw_lr = 0.001, '
    assert f"optimizer = {call}adamw_betas = [0.9, 0.95], adamw_eps = 1e-9)" in text
    assert f"zero = {zero} #" in text and ("`muon` needs whole matrices" in lines) is (zero != stage)
    assert "optimizer.params.nesterov " in lines and "does not read it" in lines
    assert "`adamw_betas = [0.9, 0.95]`" in " ".join(diagnostic.message for diagnostic in draft.report)


def test_each_diagnostic_is_an_annotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TESTS / "conversion" / "cases" / "deepspeed_contradictions")
    lines = github({"ds_config.json": list(convert(["ds_config.json"]).report)}).splitlines()
    assert lines[0] == (
        "::error file=ds_config.json,line=6,endLine=6,col=12,endColumn=21,title=dslc E1103::`fp16` and `bf16` are both "
        "enabled, and DeepSpeed refuses it%0Ahelp: enable one of them"
    )
    assert len(lines) == 5


LOGGERS = [
    ("transformers", {"report_to": ["wandb", "trackio"], "run_name": "a", "project": "p"},
     '[wandb(name = "a"), trackio(name = "a", project = "p")]'),
    ("transformers", {"report_to": "mlflow"}, "[mlflow()]"),
    ("axolotl", {"wandb_project": "p", "wandb_name": "a", "use_mlflow": True, "mlflow_tracking_uri": "http://m:5000"},
     '[wandb(project = "p", name = "a"), mlflow(uri = "http://m:5000")]'),
    ("axolotl", {"use_trackio": True, "trackio_project_name": "p"}, '[trackio(project = "p")]'),
    ("deepspeed", {"wandb": {"enabled": True, "team": "t"}, "csv_monitor": {"enabled": True}},
     '[wandb(entity = "t"), csv()]'),
    ("torchtitan", {"metrics": {"enable_wandb": True}}, "[wandb()]"),
    ("lightning", [{"class_path": "lightning.WandbLogger", "init_args": {"project": "p", "offline": True}},
                   {"class_path": "CSVLogger", "init_args": {"save_dir": "out"}}],
     '[wandb(project = "p", mode = offline), csv(dir = "out")]'),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "keys", "loggers"), LOGGERS)
def test_keys_of_loggers_become_loggers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, keys: Any, loggers: str
) -> None:
    config = {"trainer": {"logger": keys}} if tool == "lightning" else keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    draft = convert(["config.json"], tool=tool)
    assert draft.settings["log.loggers"].text == loggers
    verdicts = [verdict for _, verdict in draft.verdicts_of("carried") if verdict.text.startswith("log.loggers = ")]
    assert verdicts and "it writes no such records" not in "\n".join(key_lines(draft))


@pytest.mark.parametrize(("paths", "tool"), [(["args.json"], "transformers"), (["args.json", "ds.json"], "")])
def test_a_deepspeed_file_that_another_file_names_is_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, paths: list[str], tool: str
) -> None:
    """Also if `--from` names the tool of the other file, and if the DeepSpeed file has no `zero_optimization`."""
    arguments = {"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 1e-4, "deepspeed": "ds.json"}
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "steps_per_print": 7}))
    monkeypatch.chdir(tmp_path)
    draft = convert(paths, tool=tool)
    assert not draft.report.errors and draft.tools == ["transformers", "deepspeed"]
    assert draft.settings["log.every"].text == "7 steps"


@pytest.mark.parametrize(("precision", "offloads"), [("fp16", False), ("bf16", True)])
def test_fsdp_of_the_trainer_offloads_where_a_job_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, precision: str, offloads: bool
) -> None:
    config = {"output_dir": "out", "per_device_train_batch_size": 4, "fsdp": "full_shard offload", precision: True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    draft = convert(["config.json"])
    assert ("memory.offload" in draft.settings) is offloads
    assert ("scaling the loss" in "\n".join(key_lines(draft))) is not offloads
