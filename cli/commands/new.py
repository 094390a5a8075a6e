"""`dslc new`: a job to start from."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from dslc.dsl.files import write_file
from dslc.dsl.plain import plain
from dslc.terminal.exit_codes import GOOD, CommandFailedError

TEMPLATES = Path(__file__).parent.parent / "templates"
EXAMPLES = Path(__file__).parent.parent.parent / "examples"  # of a checkout: a wheel has none


def main(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _print_list()
    if arguments.name is None:
        raise CommandFailedError("`dslc new` needs a NAME; `dslc new --list` lists the templates")
    name = arguments.name.removesuffix(".plt")
    path = f"{name}.plt"
    files = {f"{arguments.template}.plt": path}
    if arguments.template == "python":
        files["net.py.txt"] = os.path.join(os.path.dirname(path), "net.py")
    for data_path in sorted(TEMPLATES.joinpath(arguments.template).rglob("*.*")):  # that the template reads
        source = str(data_path.relative_to(TEMPLATES))
        files[source] = os.path.join(os.path.dirname(path), source)
    if os.path.exists(path):
        raise CommandFailedError(plain(f"{path} exists already: choose another name"))
    texts = {target: TEMPLATES.joinpath(source).read_text(encoding="utf-8") for source, target in files.items()}
    for target, text in texts.items():
        if os.path.exists(target) and not _is_text_of(target, text):
            raise CommandFailedError(plain(f"{target} exists already, with other content: choose another folder"))
    for source, target in files.items():
        if os.path.exists(target):
            continue  # another job in the folder reads it, too
        if inside := os.path.dirname(source):
            os.makedirs(os.path.join(os.path.dirname(path), inside), exist_ok=True)
        write_file(target, texts[target])
        print(plain(f"{target} written"))
    print(plain(f"next: dslc check {path}, dslc run {path}"))
    return GOOD


def _is_text_of(path: str, text: str) -> bool:
    try:
        return Path(path).read_bytes() == text.encode()
    except OSError:  # a folder, or not readable
        return False


def summary(job: Path) -> str:
    """Returns the first sentence of the comment that a job begins with."""
    comment = []
    with open(job, encoding="utf-8") as file:
        for line in file:
            if not line.startswith("#"):
                break
            comment.append(line.strip("# \n"))
    return re.split(r"(?<=[.?])\s", " ".join(comment))[0]


def _print_list() -> int:
    """Prints the templates, and the examples of a checkout, with what each shows."""
    _print_jobs("templates, for `dslc new NAME --template TEMPLATE`:", TEMPLATES, ".plt")
    if any(EXAMPLES.glob("*.plt")):
        print()
        _print_jobs(f"examples, in {plain(str(EXAMPLES))}:", EXAMPLES, "")
    return GOOD


def _print_jobs(heading: str, folder: Path, suffix: str) -> None:
    jobs = sorted(folder.glob("*.plt"))
    width = max(len(job.name.removesuffix(suffix)) for job in jobs)
    print(heading)
    for job in jobs:
        print(f"  {job.name.removesuffix(suffix):{width}}  {summary(job)}")
