"""The modules that a check of a job imports, which are most of its time: counted, as times depend on the machine."""

from __future__ import annotations

import subprocess
import sys

from helpers.paths import ROOT

MOST = 225  # of dslc's own; 219 were counted on 2026-11-29
EXAMPLES = ("digits", "cluster", "llama_cpu")
CHECKING = """
import sys
from dslc.main import main
status = main({arguments!r})
assert status == 0, status
print("\\n", *sys.modules)
"""
PROGRAM = """
import sys, dslc
dslc.check({job!r})
print("\\n", *sys.modules)
"""


def modules(code: str) -> set[str]:
    """Returns the modules that a fresh interpreter has imported after `code`."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.rpartition("\n ")[2].split())


def test_a_check_imports_few_modules_and_of_libraries_lark_alone() -> None:
    bare = modules('import sys; print("\\n", *sys.modules)')
    for name in EXAMPLES:
        job = f"examples/{name}.plt"
        for code in (CHECKING.format(arguments=["check", job]), PROGRAM.format(job=job)):
            found = modules(code) - bare
            libraries = {module.partition(".")[0] for module in found} - sys.stdlib_module_names
            assert libraries == {"dslc", "lark"}, (name, libraries)
            own = sorted(module for module in found if module.partition(".")[0] == "dslc")
            assert len(own) <= MOST, (name, len(own), own)


def test_a_program_that_imports_dslc_loads_nothing_of_it_yet() -> None:
    own = {module for module in modules('import sys, dslc; print("\\n", *sys.modules)') if module.startswith("dslc")}
    assert len(own) <= 3, own
