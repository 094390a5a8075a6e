"""Starts another tool on the configuration, in the interpreter that has it, and reads its curve."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass

from dslc.proof.runners.accelerate_runner import write_launch_file
from dslc.proof.runners.proof_files import CURVE, Curve, read_curve

_ENTRY = os.path.join(os.path.dirname(__file__), "runners", "entry.py")
LOG = "tool.log"
_SHOWN = 12  # lines of a failed tool's log
_PATIENCE = 900  # seconds; DeepSpeed compiles its operations at its first start


class ToolError(Exception):
    """The tool is not installed, or it failed; the text says which, and the remedy."""


def torchrun(folder: str, ranks: int) -> list[str]:
    return ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def accelerate_launch(folder: str, ranks: int) -> list[str]:
    return ["accelerate.commands.launch", "--config_file", write_launch_file(folder)]


@dataclass(frozen=True)
class Tool:
    """A tool that proofs run. `module` shows that it is installed, and `package` is its name for pip."""

    title: str
    module: str
    package: str
    start: Callable[[str, int], list[str]] = torchrun  # the launcher's module and arguments, by folder and ranks


RUNNERS = {
    "deepspeed": Tool("DeepSpeed", "deepspeed", "deepspeed"),
    "transformers": Tool("transformers", "transformers", "transformers[torch]"),
    "accelerate": Tool("Accelerate", "accelerate", "accelerate", accelerate_launch),
    "lightning": Tool("Lightning", "lightning", "lightning"),
    "torchtitan": Tool("torchtitan", "torchtitan", "torchtitan==0.2.2 triton"),
    "axolotl": Tool("Axolotl", "axolotl", "axolotl"),
}


def check_tool(tool: Tool, python: str) -> None:
    """Raises ToolError if the interpreter does not have the tool."""
    here = "sys.path = [path for path in sys.path if path]"  # a folder of the tool's name there is no installation
    found = f"u.find_spec('torch') and u.find_spec({tool.module!r})"
    code = f"import importlib.util as u, sys; {here}; sys.exit(not ({found}))"
    try:
        result = subprocess.run([python, "-c", code], env=_environment(python), capture_output=True, timeout=60)
    except OSError as error:
        raise ToolError(f"{python} cannot be started: {error.strerror}; --python names the interpreter that has "
                        f"{tool.title}") from None  # fmt: skip
    if result.returncode:
        raise ToolError(
            f"{tool.title} is not installed in {python}: `{python} -m pip install torch {tool.package}`, or name the "
            "interpreter that has it with --python"
        )


def run_tool(name: str, python: str, folder: str, ranks: int) -> Curve:
    """Runs the tool on the files of the folder. Raises ToolError if it fails."""
    tool = RUNNERS[name]
    command = [python, "-m", *tool.start(folder, ranks), _ENTRY, name, folder]
    log = os.path.join(folder, LOG)
    with open(log, "w", encoding="utf-8") as file:
        try:
            status = subprocess.run(
                command, env=_environment(python), stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=_PATIENCE
            ).returncode
        except subprocess.TimeoutExpired:
            raise ToolError(f"{tool.title} has not ended after {_PATIENCE} s; its output is in {log}") from None
    if status or not os.path.exists(os.path.join(folder, CURVE)):
        raise ToolError(f"{tool.title} fails on this configuration; its output is in {log}:\n{_reason(log)}")
    return read_curve(folder)


def _environment(python: str) -> dict[str, str]:
    """Returns the environment of a tool: without GPUs, and with the packages of dslc behind the tool's own."""
    paths = sysconfig.get_paths()
    return {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "DSLC_PACKAGES": os.pathsep.join(dict.fromkeys([paths["purelib"], paths["platlib"]])),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([os.path.dirname(os.path.abspath(python)), os.environ.get("PATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _reason(log: str) -> str:
    """Returns the lines of the first exception, or the last lines."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = [line.rstrip() for line in file if line.strip()]
    for number, line in enumerate(lines):
        text = line.split("]:", 1)[-1].strip()
        if text.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception")) and "Traceback" not in text:
            return "\n".join(f"  {shown}" for shown in lines[number : number + 4])
    return "\n".join(f"  {line}" for line in lines[-_SHOWN:])
