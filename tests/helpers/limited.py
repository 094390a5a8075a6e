"""Commands of `dslc`, each in a process with little memory; measures what each took and finds faults.

    python limited.py FOLDER       reads lists of commands, a line of JSON each, and answers each with another

Each command is `main` itself in a process that is forked from one that has imported it: what is measured is its work,
and not its start. Its CPU time counts, which a busy machine lengthens less than the time on the wall; one that does
nothing is ended after a minute, which is a fault too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

START = 0.4  # seconds of CPU that the start of the command takes, of the 2 allowed
IMPORTS = 0.15  # seconds of CPU of what `_pace` imports on the machine of these limits, that of benchmarks/README.md
SECONDS, MEGABYTES, TALK = 2.0 - START, 300, 150_000
GOOD = """
model { network = mlp(), loss = cross_entropy() }
data { source = digits(), batch = 64 }
train { steps = 10, optimizer = sgd(lr = 0.1) }
"""


def _pace() -> float:
    """Returns how many times as long as on the machine of the limits the imports of a check take; 1 if it is faster."""
    code = "import dslc.main, dslc.jobs.check_job, dslc.compiler.rules.analyse"
    seconds = []
    for _ in range(2):  # the first may compile modules
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return max(1.0, min(seconds) / IMPORTS)


PACE = _pace()


def measured(arguments: list[str], folder: Path) -> dict[str, Any]:
    """One command in a process of its own: its exit status, seconds of CPU, megabytes, and what is wrong with them.

    One that takes too long is measured once more: cores that are shared make work of the same length take longer.
    """
    told = _run_measured(arguments, folder)
    return _run_measured(arguments, folder) if told["seconds"] > SECONDS * PACE else told


def _run_measured(arguments: list[str], folder: Path) -> dict[str, Any]:
    child = os.fork()
    if child == 0:
        _become(arguments, folder)
    _, status, used = os.wait4(child, 0)
    code, seconds, size = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    said = (folder / "said").read_bytes()
    faults = {
        f"it ended with {code}": code not in (0, 1, 2),
        "a traceback": b"Traceback (most recent" in said,
        f"{seconds:.1f} s of CPU": seconds > SECONDS * PACE,
        f"{size:.0f} MB": size > MEGABYTES,
        f"{len(said)} bytes of output": len(said) > TALK,
        "control characters": any(byte < 32 and byte not in b"\n" for byte in said),
    }
    found = [fault for fault, is_so in faults.items() if is_so]
    end = said[-600:].decode(errors="replace") if found else ""
    return {"command": arguments[0], "code": code, "seconds": seconds, "megabytes": size, "faults": found, "end": end}


def _become(arguments: list[str], folder: Path) -> None:
    """Runs the command with little memory, its output in a file."""
    code = 70
    try:
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(60)
        said = os.open("said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, into in ((null, 0), (said, 1), (said, 2)):
            os.dup2(descriptor, into)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        from dslc.main import main

        code = main(arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folder = Path(sys.argv[1])
    import networkx  # noqa: F401

    from dslc.commands import check, fmt, plan, render  # noqa: F401
    from dslc.compiler.show import draw, explain  # noqa: F401
    from dslc.dsl import codes, show  # noqa: F401
    from dslc.dsl.language import suggest  # noqa: F401
    from dslc.dsl.syntax import grammar, parser  # noqa: F401

    grammar.load()
    (folder / "warm.plt").write_text(GOOD)
    assert not measured(["check", "warm.plt"], folder)["faults"]
    for line in sys.stdin:
        print(json.dumps([measured(arguments, folder) for arguments in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
