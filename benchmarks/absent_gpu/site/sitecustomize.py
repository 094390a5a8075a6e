"""Replaces the parts of torch that ask absent GPUs (../README.md) for answers and depend on them; with SHARED_GPU, lets
several ranks use one real GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _without_cudnn(module: ModuleType) -> None:
    """Turns cuDNN off: it plans each call on the device."""
    import torch

    torch._C._set_sdp_use_cudnn(False)
    torch._C._set_cudnn_enabled(False)


def _stages_as_given(module: ModuleType) -> None:
    """Skips the vote of a pipeline's ranks on what is sent, which uses products that no GPU computes."""
    import torch

    def vote(stage: Any, *_: Any, **__: Any) -> torch.Tensor:
        dynamic = vars(module)["InferenceMode"].needs_dynamic(stage._user_meta, True)
        return torch.full((1,), int(not dynamic), dtype=torch.int32)

    for kind in vars(module).values():
        if isinstance(kind, type) and "_warmup_forward_vote" in vars(kind):
            kind._warmup_forward_vote = vote  # type: ignore[attr-defined]
            kind._warmup_backward_result = vote  # type: ignore[attr-defined]


class _ImportHook(importlib.abc.MetaPathFinder):
    """Calls a function after each of some modules was imported."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        call = self._calls.pop(name, None)  # removed while the other finders are asked
        if call is None:
            return None
        spec = importlib.util.find_spec(name)
        self._calls[name] = call  # looking for a module need not import it
        if spec is None or spec.loader is None:
            return None
        plain = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            plain(module)
            call(module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def _computed_by_the_cpu(module: ModuleType) -> None:
    importlib.import_module("on_host").replace_kernels()


def _compiled_to_operations(module: ModuleType) -> None:
    """Runs compiled code operation by operation: no GPU runs Triton's kernels."""
    from torch._dynamo.backends.debugging import aot_eager

    vars(module)["compile_fx"] = aot_eager


def _masks_by_operations(module: ModuleType) -> None:
    """Makes masks of dropout by operations of torch: no GPU runs Triton's kernels."""
    vars(module)["_has_kernel"] = lambda device: False


def _gpus_for_cpus(module: ModuleType) -> None:
    """Gives jobs that ask for CPUs GPUs instead; the name is as wide, so that messages still point to the right
    place.
    """
    read, laid, asked = module._read_sources, module._apply_settings, re.compile(r"\bcpus(?=\s*=)")

    def of_text(source: Any, *more: Any) -> Any:
        return read(type(source)(source.name, asked.sub("gpus", source.text)), *more)

    def with_settings(job: Any, settings: Sequence[str], *more: Any) -> Any:
        return laid(job, [asked.sub("gpus", setting) for setting in settings], *more)

    vars(module).update(_read_sources=of_text, _apply_settings=with_settings)


def _several_for_one(module: ModuleType) -> None:
    """Says that this machine has SHARED_GPU devices, each with the memory of its one GPU."""
    one: Callable[[], list[Any]] = module._visible_gpus

    def several() -> list[Any]:
        return one()[:1] * int(os.environ["SHARED_GPU"])

    vars(module)["_visible_gpus"] = several


def _all_ranks_on_one(module: ModuleType) -> None:
    """Gives every rank the first GPU. NCCL refuses two ranks of one host on a GPU, so each says that it is a host."""
    prepare = module._prepare

    def on_first(job: Any, place: Any) -> Any:
        os.environ["NCCL_HOSTID"] = f"rank {place.rank}"
        return prepare(
            dataclasses.replace(job, gpus=(0,) * (place.local_rank + 1)) if job.device != "cpu" else job, place
        )

    vars(module)["_prepare"] = on_first


_calls: dict[str, Callable[[ModuleType], None]] = {}
if os.environ.get("SHARED_GPU"):
    _calls |= {"dslc.probe.gpus": _several_for_one, "dslc.runtime.worker": _all_ranks_on_one}
else:
    _calls |= {"torch.backends.cuda": _without_cudnn}
if os.environ.get("ABSENT_GPUS_COMPUTE"):
    _calls |= {"torch": _computed_by_the_cpu, "torch._inductor.compile_fx": _compiled_to_operations}
    _calls |= {"dslc.runtime.technique.philox_tensors": _masks_by_operations}
elif not os.environ.get("SHARED_GPU"):
    _calls["torch.distributed.pipelining.stage"] = _stages_as_given
if os.environ.get("ABSENT_GPUS_FOR_CPUS"):
    _calls["dslc.dsl.meaning.load"] = _gpus_for_cpus
sys.meta_path.insert(0, _ImportHook(_calls))
