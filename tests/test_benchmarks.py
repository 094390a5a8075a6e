"""What the benchmarks rely on in the package beside its public interface."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from benchmarks.page_blocks import read_block, write_block


@pytest.mark.processes
def test_the_hooks_for_a_shared_gpu_find_what_they_replace() -> None:
    modules = "dslc.probe.gpus, dslc.runtime.worker, dslc.dsl.meaning.load"
    site = str(ROOT / "benchmarks" / "absent_gpu" / "site")
    environment = os.environ | {"SHARED_GPU": "2", "ABSENT_GPUS_FOR_CPUS": "1", "PYTHONPATH": site}
    subprocess.run([sys.executable, "-c", f"import {modules}"], env=environment, check=True)


def test_a_block_of_a_page_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- times, written by `python -m benchmarks times` -->\nold\n<!-- end of times -->\nb\n")
    assert read_block(page, "times") == "old\n"
    write_block(page, "times", "new\n")
    assert (
        page.read_text()
        == "a\n<!-- times, written by `python -m benchmarks times` -->\nnew\n<!-- end of times -->\nb\n"
    )
    with pytest.raises(AssertionError, match="has no block `fits`"):
        write_block(page, "fits", "new\n")
