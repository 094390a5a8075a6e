"""Jobs at a git revision: `REV:job.plt`.

`load_revision` reads the texts of the job; data and modules come from the checkout. That is enough to plan. A job that
is trained needs the code of its revision: `export_revision` writes all files that git tracks to a folder, and links
what git does not track (data, downloads) to the checkout.

Limits: submodules come from the checkout. The modules that such a job imports are chosen by `revision_imports`.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence

from dslc.dsl.bounds import BYTES
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import LoadResult, load_kept


def is_revision(name: str) -> bool:
    """True for `REV:path`, if there is no file of this name."""
    return ":" in name and not os.path.exists(name)


def load_revision(name: str, settings: Sequence[str], report: Report, export_folder: str = "") -> LoadResult | None:
    """Loads the job of `REV:path`, with `settings` laid over it; the path is relative to the current folder. Its data
    and modules are those of the checkout, or of the revision if there is an empty `export_folder` to write them to.
    Returns None with the reason in the report.
    """
    revision, _, path = name.partition(":")
    try:
        top = repository_top()
        commit = _git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
        archive = _git("-C", top, "archive", "--format=tar", commit, "--", ":(glob)**/*.plt")
        if export_folder:
            export_revision(top, commit, export_folder)
    except (OSError, subprocess.CalledProcessError) as error:
        text = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        report.add("E0101", f"`{name}` cannot be read: {(text.strip() or 'git failed').splitlines()[0]}", None)
        return None
    full = os.path.abspath(path)
    texts = _texts(archive, os.path.realpath(os.path.dirname(full)), os.path.realpath(top))
    if os.path.basename(full) not in texts:
        report.add("E0101", f"`{name}` cannot be read: {revision} has no such file", None)
        return None
    place = os.path.join(
        os.path.realpath(export_folder), os.path.relpath(os.path.realpath(full), os.path.realpath(top))
    )
    return load_kept(texts, place if export_folder else path, settings, os.getcwd(), shown=path)


def repository_top() -> str:
    """Returns the top folder of the repository of the current folder. Raises OSError or CalledProcessError."""
    return _git("rev-parse", "--show-toplevel").decode().strip()


def export_revision(top: str, commit: str, folder: str) -> None:
    """Writes the files of a commit to an empty folder, and links to the files of the checkout at `top` that git does
    not track. Raises OSError or subprocess.CalledProcessError.
    """
    index = {**os.environ, "GIT_INDEX_FILE": os.path.join(os.path.realpath(folder), ".index")}
    _git("-C", top, "read-tree", commit, env=index)
    _git("-C", top, "checkout-index", "--all", f"--prefix={os.path.realpath(folder)}/", env=index)
    os.remove(index["GIT_INDEX_FILE"])
    untracked = _git("-C", top, "ls-files", "--others", "--directory", "-z")
    submodules = _git("-C", top, "ls-files", "--stage", "-z").split(b"\0")
    names = [*untracked.split(b"\0"), *(line.partition(b"\t")[2] for line in submodules if line.startswith(b"160000"))]
    for name in (os.fsdecode(each).rstrip("/") for each in names):
        link = os.path.join(folder, name)
        # Compiled modules of the checkout could be taken for those of the revision.
        if name and os.path.basename(name) != "__pycache__" and (not os.path.lexists(link) or _is_empty(link)):
            os.makedirs(os.path.dirname(link), exist_ok=True)
            if os.path.isdir(link):
                os.rmdir(link)
            os.symlink(os.path.join(top, name), link)


def _is_empty(path: str) -> bool:
    """True for an empty folder, which `checkout-index` makes for a submodule."""
    return os.path.isdir(path) and not os.path.islink(path) and not os.listdir(path)


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


def _git(*arguments: str, env: Mapping[str, str] | None = None) -> bytes:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, env=env).stdout
