"""`dslc convert --prove`: other tools in real processes beside the job, and what is said of their curves.

`DSLC_TOOLS_PYTHON` names an interpreter that has the tools, if they are not installed here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dslc.conversion.convert import convert
from dslc.main import main
from dslc.proof.compare_curves import compare_curves
from dslc.proof.runners import (
    accelerate_runner,
    axolotl_runner,
    lightning_runner,
    torchtitan_runner,
    transformers_runner,
)
from dslc.proof.runners.proof_files import Curve, ProofSetup

PYTHON = os.environ.get("DSLC_TOOLS_PYTHON", sys.executable)
LOSSES = [4.0, 3.5, 3.0, 2.5, 2.25, 2.0]
RATES = [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
FACTORS = {"rank": 2, "micro-batch": 4, "micro-batch of each rank": 8}


def curve(losses: list[float] = LOSSES, norm: float | None = 1.0, rates: list[float] = RATES) -> Curve:
    return Curve(name="tool", losses=losses, norms=[norm] * len(losses), rates=rates)


@pytest.mark.parametrize(
    ("tool", "at_its_rates", "finding"),
    [
        (curve(), None, "losses differ by at most 0.0e+00: the curves are the same"),
        (curve([loss / 4 for loss in LOSSES]), None, "the loss of step 1 is 1/4 of the job's: each micro-batch counts"),
        (
            curve(norm=8.0),
            None,
            "the norm of the gradient of step 1 is 8 times the job's: each micro-batch of each rank counts",
        ),
        (
            Curve(name="tool", losses=[3.9, *LOSSES[1:]], norms=[1.0] * 6, rates=RATES, targets=(31, 93)),
            None,
            "0.975 times the job's: the tool averages the means of micro-batches, which have 31 to 93 targets",
        ),
        (curve(norm=None), None, "tool reports no norm of the gradient"),
        (curve(rates=[0.0, *RATES[:-1]]), None, "the tool's schedule is 1 step behind"),
        (curve(rates=[0.0, 0.5, 1.0, 2.0, 2.0, 2.0]), None, "moves 2 times in a step: once for each rank"),
        (curve(rates=[0, 0, *(math.log(k) / math.log(5) for k in (2, 3, 4, 5))]), None, "rises along a logarithm"),
        (curve(rates=[0.0, 1.0, 0.9, 0.8, 0.6, 0.4]), None, "peaks at step 2 in the tool, and at step 5 in the job"),
        (curve(rates=[0.1, *RATES[1:]]), None, "the learning rates differ from step 1 on: 0.1 and 0 in the job"),
        (curve([4.0, 3.5, 3.1, *LOSSES[3:]]), None, "same up to there: the update itself differs"),
        (curve([*LOSSES[:-1], 2.5]), curve([*LOSSES[:-1], 2.5]), "the schedule is all that differs"),
        (curve([*LOSSES[:-1], 2.5]), curve(), "still differs by 2.5e-01: more than the schedule differs"),
    ],
)
def test_the_first_number_that_differs_names_the_cause(tool: Curve, at_its_rates: Curve | None, finding: str) -> None:
    found = compare_curves(tool, curve(), at_its_rates, FACTORS)
    assert any(finding in text for text in found), found


CONFIGURATIONS = {
    "deepspeed": (
        "ds_config.json",
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        },
    ),
    "transformers": (
        "args.json",
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 12, "warmup_ratio": 0.3,
         "learning_rate": 0.01, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "bf16": True},
    ),
    "accelerate": ("accelerate.json", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU",
                                       "num_processes": 8, "mixed_precision": "bf16"}),
    "accelerate, FSDP 2": ("accelerate.json", {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP",
                           "num_processes": 8, "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True,
                           "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}),
    "transformers, FSDP 2": (
        "args.json",
        {"per_device_train_batch_size": 2, "max_steps": 12, "learning_rate": 0.01, "fsdp": "full_shard auto_wrap"},
    ),
    "torchtitan": ("train.toml", "[training]\nlocal_batch_size = 2\nseq_len = 32\nsteps = 12\n"),
    "axolotl": (
        "axolotl.json",
        {"base_model": "tiny", "datasets": [{"path": "a.jsonl", "type": "completion"}], "micro_batch_size": 2,
         "gradient_accumulation_steps": 2, "max_steps": 12, "learning_rate": 0.01, "optimizer": "adamw_torch"},
    ),
    "axolotl, FSDP 2": (
        "axolotl.json",
        {"base_model": "tiny", "datasets": [{"path": "a.jsonl", "type": "completion"}], "micro_batch_size": 2,
         "max_steps": 12, "learning_rate": 0.01, "optimizer": "adamw_torch", "fsdp_version": 2,
         "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "offload_params": True,
                         "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "reshard_after_forward": True}},
    ),
    "lightning": (
        "trainer.json",
        {
            "trainer": {"devices": 8, "max_steps": 20, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        },
    ),
}  # fmt: skip
IMPORTS = {"transformers": "from transformers import Trainer", "accelerate": "from accelerate import Accelerator"}


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "accelerate, FSDP 2")) for name in CONFIGURATIONS]
)
def test_a_tool_and_its_job_have_one_curve(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool, _, engine = name.partition(", ")
    if subprocess.run([PYTHON, "-c", IMPORTS.get(tool, f"import {tool}")], capture_output=True).returncode:
        pytest.skip(f"{tool} cannot be imported in {PYTHON}")
    file, config = CONFIGURATIONS[name]
    (tmp_path / file).write_text(config if isinstance(config, str) else json.dumps(config))
    command = ["convert", str(tmp_path / file), "--from", tool, "--prove", "--python", PYTHON, "--steps", "6"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "the losses of step 1 are the same" in printed
    assert engine in printed.splitlines()[1]
    if tool == "accelerate":  # its schedule moves once for each process, and the curves meet at its rates
        assert "moves 2 times in a step: once for each rank" in printed
        assert "the schedule is all that differs" in printed
    else:
        assert "the curves are the same" in printed, printed


def test_a_share_of_warm_up_resolves_auto(tmp_path: Path) -> None:
    """A proof of both files showed a job without the warm-up."""
    (tmp_path / "args.json").write_text(json.dumps({"per_device_train_batch_size": 2, "warmup_ratio": 0.1}))
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "scheduler": schedule}))
    draft = convert([str(tmp_path / "args.json"), str(tmp_path / "ds.json")])
    assert draft.schedule is not None and draft.schedule.arguments["warmup"] == "10.0%"


def test_a_tool_that_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    python = tmp_path / "python"  # an interpreter without packages
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    assert main(["convert", str(tmp_path / "ds.json"), "--prove", "--python", str(python)]) == 3
    assert (
        f"DeepSpeed is not installed in {python}: `{python} -m pip install torch deepspeed`" in capsys.readouterr().err
    )
    assert not list((tmp_path / "temporary").iterdir())


def test_a_folder_of_configurations_is_no_installation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("work/deepspeed", "site/torch"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "work" / "deepspeed" / "ds.json").write_text(json.dumps({"train_batch_size": 8}))
    python = tmp_path / "python"  # an interpreter that has torch alone
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path / "work")
    assert main(["convert", "deepspeed/ds.json", "--prove", "--python", str(python)]) == 3
    assert f"DeepSpeed is not installed in {python}" in capsys.readouterr().err


def test_options_of_a_proof_need_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "ds.json"), "--model", "net.plt"]) == 2
    assert "belong to --prove" in capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accelerate is installed, and DeepSpeed beside it is not."""
    python = tmp_path / "python"
    code = "import sys; sys.modules['deepspeed'] = None; exec(sys.argv[-1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "a.json").write_text(
        json.dumps({"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "num_processes": 2})
    )
    assert main(["convert", str(tmp_path / "a.json"), "--prove", "--python", str(python)]) == 3
    assert f"DeepSpeed is not installed in {python}" in capsys.readouterr().err


def setup(config: dict[str, Any], **others: Any) -> ProofSetup:
    return ProofSetup(config=config, micro=2, accumulation=1, ranks=2, steps=4, length=9, **others)


def test_settings_that_cpus_do_not_run_are_named() -> None:
    """What ran in their place is never silent."""
    fsdp = {"fsdp_offload_params": True, "fsdp_sync_module_states": True, "fsdp_transformer_layer_cls_to_wrap": "Block",
            "fsdp_sharding_strategy": "HYBRID_SHARD"}  # fmt: skip
    config, changes = accelerate_runner.adapt_config(setup({"distributed_type": "FSDP", "fsdp_config": fsdp}))
    section = config["fsdp_config"]
    assert isinstance(section, dict)
    assert config["distributed_type"] == "FSDP" and section["fsdp_sync_module_states"] is False
    assert [change.partition(" ")[0] for change in changes] == [
        "FSDP", "fsdp_offload_params", "fsdp_sync_module_states", "fsdp_sharding_strategy",
        "fsdp_transformer_layer_cls_to_wrap"
    ]  # fmt: skip
    deepspeed = {"zero_stage": 3, "offload_param_device": "cpu", "deepspeed_multinode_launcher": "standard"}
    stated = {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed}
    config, changes = accelerate_runner.adapt_config(setup(stated))
    assert config["deepspeed_config"] == {"zero_stage": 3, "gradient_accumulation_steps": 1}
    assert changes[1:] == ["offload_param_device cpu -> none: all memory is the host's here"]

    known = {"fsdp", "fsdp_config", "deepspeed", "learning_rate"}
    stated = {"fsdp": "full_shard offload", "fsdp_config": {"fsdp_offload_params": True, "version": 2}}
    arguments, changes = transformers_runner.adapt_arguments(setup(stated), known)
    assert arguments["fsdp"] == ["full_shard"] and arguments["fsdp_config"]["version"] == 2
    assert not arguments["use_cpu"] and len(changes) == 3
    engine = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}, "bf16": {"enabled": True},
              "train_batch_size": "auto"}  # fmt: skip
    arguments, changes = transformers_runner.adapt_arguments(setup({"learning_rate": "5e-5"}, engine=engine), known)
    assert arguments["deepspeed"]["zero_optimization"] == {"stage": 3}
    assert arguments["deepspeed"]["train_batch_size"] == 4 and changes[1].startswith("bf16 -> fp32")
    assert transformers_runner.adapt_arguments(setup({}), known)[0]["use_cpu"]
    one = replace(setup({"fsdp": "full_shard", "distributed_type": "FSDP"}), ranks=1)
    assert accelerate_runner.adapt_config(one)[1] == ["FSDP is off: one rank shards nothing"]
    assert transformers_runner.adapt_arguments(one, known)[1] == ["fsdp is off: one rank shards nothing"]

    tuning: dict[str, Any] = {
        "bf16": True,
        "rl": "dpo",
        "optimizer": "adamw_bnb_8bit",
        "lora_r": 8,
        "micro_batch_size": 64,
    }
    config, changes = axolotl_runner.adapt_config(setup(tuning))
    assert config["micro_batch_size"] == 2 and "lora_r" not in config
    assert changes == ["bf16 is off: both train in fp32", "rl is off: the loss is the job's",
                       "optimizer adamw_bnb_8bit -> adamw_torch"]  # fmt: skip
    fsdp = {"fsdp_version": 2, "fsdp_config": {"fsdp_offload_params": True, "transformer_layer_cls_to_wrap": "Block"}}
    one = replace(setup(fsdp), ranks=1)
    assert axolotl_runner.adapt_config(one)[1] == ["fsdp_config is off: one rank shards nothing"]
    assert not axolotl_runner.shards_by_fsdp(one) and axolotl_runner.shards_by_fsdp(setup(fsdp))
    config, changes = axolotl_runner.adapt_config(setup(fsdp))
    network = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])})
    changes += axolotl_runner.adapt_fsdp(config, network)
    assert [change.partition(" ")[0] for change in changes] == [
        "FSDP", "fsdp_config.offload_params", "fsdp_config.transformer_layer_cls_to_wrap"
    ]  # fmt: skip
    section = config["fsdp_config"]
    assert isinstance(section, dict)
    assert section["transformer_layer_cls_to_wrap"] == "Linear" and config["fsdp_version"] == 2

    stated = {"trainer": {"strategy": "fsdp", "devices": 8}}
    arguments, changes = lightning_runner.adapt_trainer(setup(stated), {"strategy", "devices"}, lambda _: "no GPU")
    assert arguments["strategy"] == "ddp" and changes == ["strategy fsdp -> ddp: no GPU"]


def test_torchtitan_keeps_replicas_apart_from_shards() -> None:
    def config(**parallelism: int) -> Any:
        sections = {
            name: SimpleNamespace(**dict.fromkeys(keys, "stated")) for name, keys in torchtitan_runner._FIXED.items()
        }
        sections["parallelism"].__dict__.update(parallelism)
        return SimpleNamespace(**sections)

    replicated = config(data_parallel_replicate_degree=8, data_parallel_shard_degree=1)
    changes = torchtitan_runner.adapt_config(replicated, setup({}))
    assert replicated.parallelism.data_parallel_replicate_degree == 2 and replicated.training.global_batch_size == 4
    assert "training.mixed_precision_param stated -> float32: both train in fp32" in changes
    sharded = config(data_parallel_replicate_degree=8, data_parallel_shard_degree=4)
    torchtitan_runner.adapt_config(sharded, setup({}))
    degrees = sharded.parallelism.data_parallel_replicate_degree, sharded.parallelism.data_parallel_shard_degree
    assert degrees == (1, -1) and sharded.training.steps == 9
