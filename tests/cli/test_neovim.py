"""Neovim with the configuration of editors/neovim, without a screen: what the editor has of each feature."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT, TESTS

JOB = """\
param rate = 0.1

model {
  network = [flatten(), linear(10)]
  loss    = cross_entropy()
}

data {
  source = digits()
  bach   = 64
}

train {
  epochs    = 1
  optimizer = sgd(lr = rate)
}
"""


def find_neovim() -> str | None:
    """Returns Neovim, None unless there is one of version 0.11 or newer."""
    nvim = shutil.which("nvim")
    shown = subprocess.run([nvim, "--version"], capture_output=True, text=True, check=True).stdout if nvim else ""
    version = re.match(r"NVIM v(\d+)\.(\d+)", shown)
    return nvim if version and (int(version[1]), int(version[2])) >= (0, 11) else None


@pytest.mark.slow
def test_neovim_shows_what_the_page_says(tmp_path: Path) -> None:
    nvim = find_neovim()
    if nvim is None:
        pytest.skip("needs Neovim 0.11 or newer")
    plugins = tmp_path / "config" / "nvim" / "plugin"
    plugins.mkdir(parents=True)
    shutil.copy(ROOT / "editors" / "neovim" / "dslc.lua", plugins)
    (tmp_path / "job.plt").write_text(JOB)
    folders = {f"XDG_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    session = TESTS / "helpers" / "neovim_session.lua"
    done = subprocess.run(
        [nvim, "--headless", "-c", f"luafile {session}"],
        cwd=tmp_path,
        env={**os.environ, **folders, "PATH": path, "DSLC_JOB": "job.plt"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert "error" not in result, result["error"]
    assert result["diagnostic"]["code"] == "E0107" and "did you mean `batch`?" in result["diagnostic"]["message"]
    assert result["underlined"] == ["DiagnosticUnderlineError", 9, 2, 6]
    assert result["fixed"] == "  batch  = 64"
    assert result["hover"].startswith("`data.source`: where samples come from.")
    assert result["hints"] == ["→ 64", "→ 10", "64 samples a rank, 64 at a time"]
    assert result["token"] == "property"
    assert result["renamed"] == 2 and result["definition"] == "param speed = 0.1"
    assert result["omnifunc"] == "v:lua.vim.lsp.omnifunc" and "every" in result["completion"]
    assert result["formatted"] == "param speed = 0.1"
    assert result["symbols"] == 4
    assert (result["filetype"], result["commentstring"]) == ("plt", "# %s")
