"""`torch.compile`, module by module and in place.

Model: the module's `forward` is replaced, on the instance, by its compiled form, which torch makes at the first call.
`nn.Module.compile` would leave torch's own modules uncompiled; and the work of hooks, such as gathering parameters, is
better left outside. The loss is compiled by itself (model/losses.py).

Contract: names, parameters and hooks stay; results agree with the plain module within rounding. If the machine lacks a
tool that torch needs to compile, a CompileError before the first step names it.

Limits: code that torch cannot compile runs as it is, between compiled parts. A second batch size (the last of an epoch,
evaluation) is compiled once more, for any size; on the tensor axis each size is compiled, as torch (2.13) has no
dynamic sizes for DTensors.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import nn

from dslc.compiler.trace.private_torch import compiler_settings, default_compile_cache, has_cpp_compiler, has_triton

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_VARIANTS = 16  # variants of one module: training or not, with gradients or not, sizes of a batch


class CompileError(RuntimeError):
    """The machine lacks a tool that `train.compile` needs."""


def apply(modules: tuple[str, ...], model: nn.Module, device: torch.device, *, cut: bool = False) -> None:
    """Has torch compile these modules of `model`, which will run on `device`, at their first call; `cut`: the tensor
    axis cuts them. Raises CompileError.
    """
    if not modules:
        return
    keep_to_oneself()
    _expect_compiler(device)
    # Torch's limits count all modules that share a line of code; beyond them it runs modules uncompiled.
    limits = compiler_settings()
    limits.recompile_limit = max(limits.recompile_limit, _VARIANTS * len(modules))
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, 2 * limits.recompile_limit)
    limits.fail_on_recompile_limit_hit = True
    for name in modules:
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward, dynamic=False if cut else None)


def keep_to_oneself() -> None:
    """Sets torch's compile cache to a folder of this user's, unless the user has named one. Another user could take the
    name of torch's default first; torch would load code and pickles from there.
    """
    if os.environ.get(_CACHE, default_compile_cache()) == default_compile_cache():
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        os.environ[_CACHE] = folder = os.path.join(caches, "dslc", "inductor")
        os.makedirs(folder, mode=0o700, exist_ok=True)


def _expect_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        if not has_triton():
            raise CompileError(_text("triton, which PyTorch's builds for GPUs bring along", "install it, or"))
        if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
            raise CompileError(_text("a C compiler (cc, gcc or clang)", "install one, or"))
        return
    if not has_cpp_compiler():
        raise CompileError(_text("a C++ compiler (g++)", "install one (or name it in CXX), or"))


def _text(what: str, remedy: str) -> str:
    return f"`train.compile` needs {what}, and this machine has none: {remedy} set `train.compile = false`"
