"""What the benchmarks rely on in the package beside its public interface."""

import os
import subprocess
import sys

import pytest
from helpers.paths import ROOT


@pytest.mark.processes
def test_the_hooks_for_a_shared_gpu_find_what_they_replace() -> None:
    modules = "dslc.probe.gpus, dslc.runtime.worker, dslc.dsl.meaning.load"
    site = str(ROOT / "benchmarks" / "absent_gpu" / "site")
    environment = os.environ | {"SHARED_GPU": "2", "ABSENT_GPUS_FOR_CPUS": "1", "PYTHONPATH": site}
    subprocess.run([sys.executable, "-c", f"import {modules}"], env=environment, check=True)
