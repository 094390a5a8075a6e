"""Jobs at a git revision: `REV:job.plt`. Its texts are the revision's; data and modules come from the checkout."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Sequence

from dslc.dsl.bounds import BYTES
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult, load_kept


def is_revision(name: str) -> bool:
    """True for `REV:path`, if there is no file of this name."""
    return ":" in name and not os.path.exists(name)


def load_revision(name: str, settings: Sequence[str], report: Report) -> LoadResult | None:
    """Loads the job of `REV:path`, with `settings` laid over it; the path is relative to the current folder. Returns
    None with the reason in the report.
    """
    revision, _, path = name.partition(":")
    try:
        top = _git("rev-parse", "--show-toplevel").decode().strip()
        commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
        archive = _git("-C", top, "archive", "--format=tar", commit, "--", ":(glob)**/*.plt")
    except (OSError, subprocess.CalledProcessError) as error:
        text = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        report.add("E0101", f"`{name}` cannot be read: {(text.strip() or 'git failed').splitlines()[0]}", None)
        return None
    full = os.path.abspath(path)
    texts = _texts(archive, os.path.realpath(os.path.dirname(full)), os.path.realpath(top))
    if os.path.basename(full) not in texts:
        report.add("E0101", f"`{name}` cannot be read: {revision} has no such file", None)
        return None
    return load_kept(texts, path, settings, os.getcwd())


def _texts(archive: bytes, folder: str, top: str) -> dict[str, str]:
    """Returns the texts of an archive by their paths from `folder`; files that are too large for a job are left out."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [each for each in files if each.isfile() and each.size <= BYTES.most]
        contents = {each.name: files.extractfile(each) for each in members}
        return {
            os.path.relpath(os.path.join(top, name), folder): file.read().decode(errors="replace")
            for name, file in contents.items()
            if file is not None
        }


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], check=True, capture_output=True).stdout
