"""Pages name only commands, options, targets and modules that exist. No command is run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.paths import ROOT

from dslc.dsl.codes import titles
from dslc.main import build_parser
from dslc.terminal.version import __version__

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/index.md")),
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "index.md"),
]
(COMMANDS,) = (a.choices for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.M))
VARIABLES = {*re.findall(r"^([A-Z_]+) *\?=", MAKEFILE, re.M), *re.findall(r"\$\(if \$\(([A-Z]+)\)", MAKEFILE)}
BENCHMARKS = set(re.findall(r'"(\w+)": bench_', (ROOT / "benchmarks" / "__main__.py").read_text()))
EXTERNAL_OPTIONS = {  # of commands other than dslc that pages name
    "mpirun": {"--map-by", "-mca", "-np", "-x"},
    "torchrun": {"--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"},
    "srun": {"--cpus-per-task", "--exclusive", "--nodes", "--ntasks-per-node"},
    "sbatch": {"--signal"},
    "docker": {"--rm"},
    "%%plt": {"--name"},
    "benchmarks": {"--pairs"},
    "pytest": {"-p", "--dslc-locked", "--dslc-verify"},
}
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
END = re.compile(r"\s[|&>;#]+\s|[`)]|$")


def snippets(text: str) -> Iterator[str]:
    """Yields the code of a page: lines of blocks, with continued lines joined, and code spans."""
    fences = re.split(r"^\s*```.*$", text, flags=re.M)
    for block in fences[1::2]:
        yield from re.sub(r"\\\n\s*", "", block).splitlines()
    for prose in fences[::2]:
        for span in re.findall(r"`([^`]+)`", prose):
            yield " ".join(span.split())


def faults(text: str) -> list[str]:
    """Returns what a page names and does not exist."""
    # Rows of docs/systems.md without a test describe commands that are planned.
    text = "\n".join(line for line in text.splitlines() if not line.rstrip(" |").endswith("| not yet"))
    faults = [fault for row in text.splitlines() for fault in row_faults(row)]
    known = {option for parser in COMMANDS.values() for option in parser._option_string_actions}
    known |= build_parser()._option_string_actions.keys() | set().union(*EXTERNAL_OPTIONS.values())
    for code in snippets(text):
        faults += dslc_faults(code) + make_faults(code) + module_faults(code)
        if code.startswith("-"):
            faults += [f"option {option}" for option in OPTION.findall(code)[:1] if option not in known]
    return faults


def dslc_faults(code: str) -> list[str]:
    faults = []
    for use in re.finditer(r"(?:^|[\s/])dslc ([a-z]+)(.*)", code):
        name, rest = use[1], re.split(END, use[2])[0]
        before = code[: use.start()].split()
        if not is_command(before):
            continue
        if name not in COMMANDS:
            faults.append(f"dslc {name}")
            continue
        actions = COMMANDS[name]._option_string_actions
        words = rest.split()
        for word, value in zip(words, [*words[1:], ""], strict=False):
            option, _, given = word.partition("=")
            if not OPTION.fullmatch(option):
                continue
            if option not in actions:
                faults.append(f"dslc {name} {option}")
            elif (choices := actions[option].choices) and re.fullmatch(r"[a-z]+", given or value):
                faults += [f"dslc {name} {option} {given or value}"] * ((given or value) not in choices)
    return faults


def is_command(before: list[str]) -> bool:
    """True if `dslc` after these words begins a command, and is not an argument such as docker's image."""
    return not before or before[-1].endswith("$") or before[0] in ("torchrun", "mpirun", "srun", "docker")


def row_faults(row: str) -> list[str]:
    """Returns the options in the row of a table that the command in its first cell lacks."""
    named = re.match(r"\| `dslc (\w+)", row)
    if named is None or named[1] not in COMMANDS:
        return []
    options = re.findall(r"`(--?[a-z][\w-]*)", row)
    return [f"dslc {named[1]} {o}" for o in options if o not in COMMANDS[named[1]]._option_string_actions]


def make_faults(code: str) -> list[str]:
    use = re.search(r"(?:^|&& |[A-Z]+=\w+ )make\b((?: [\w-]+(?![\w=…]))*)((?: [A-Z_]+=\S+)*)", code)
    if use is None:
        return []
    targets = [word for word in use[1].split() if not word.startswith("-")]
    variables = re.findall(r"\b([A-Z_]+)=", code)
    return [f"make {t}" for t in targets if t not in TARGETS] + [f"make {v}=" for v in variables if v not in VARIABLES]


def module_faults(code: str) -> list[str]:
    faults = []
    for module, rest in re.findall(r"python3? -m ([\w.]+)(.*)", code):
        if module == "benchmarks":
            names = re.findall(r"^(?: ([a-z]\w*))", rest)
            faults += [f"benchmark {name}" for name in names if name not in BENCHMARKS]
        elif module not in ("dslc", "http.server", "pip", "venv", "pytest"):
            path = module.replace(".", "/")
            homes = [ROOT / f"{folder}{path}{end}" for folder in ("", "tests/") for end in (".py", "/__main__.py")]
            faults += [f"module {module}"] * (not any(home.exists() for home in homes))
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_names_what_exists(page: Path) -> None:
    assert not faults(page.read_text())


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """The strict build of `make docs` fails otherwise, and no other test builds the site."""
    named = set(re.findall(r": ([a-z/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    generated = {"examples.md", "gallery.md", "codes/index.md"}
    assert named == generated | {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_site_has_a_heading_for_each_kind_of_code() -> None:
    text = (ROOT / "docs" / "generated_pages.py").read_text(encoding="utf-8")
    assert {code[1:3] for code in titles()} == set(re.findall(r'^    "(\d\d)": "', text, re.MULTILINE))


@pytest.mark.parametrize(
    ("text", "fault"),
    (
        ("`dslc translate x`", "dslc translate"),
        ("```\nnode-a$ dslc run job.plt \\\n  --rendezvuos x\n```", "dslc run --rendezvuos"),
        ("`dslc render\nJOB --view rank`", "dslc render --view rank"),
        ("`torchrun --nproc-per-node 2 -m dslc rum job.plt`", "dslc rum"),
        ("| `dslc fmt JOB` | one layout; `--json` |", "dslc fmt --json"),
        ("takes `--no-such`", "option --no-such"),
        ("`make tset`", "make tset"),
        ("`make run JBO=x`", "make JBO="),
        ("`python -m benchmarks memroy`", "benchmark memroy"),
        ("`python -m helpers.nothing`", "module helpers.nothing"),
    ),
)
def test_what_does_not_exist_is_a_fault(text: str, fault: str) -> None:
    assert faults(text) == [fault]


def test_files_name_one_version() -> None:
    def read(path: str, pattern: str) -> str:
        found = re.search(pattern, (ROOT / path).read_text(), re.M)
        assert found, f"{path} names no version"
        return found[1]

    versions = {
        "pyproject.toml": read("pyproject.toml", r'^version = "(.+)"'),
        "CITATION.cff": read("CITATION.cff", r"^version: (.+)"),
        "CHANGELOG.md": read("CHANGELOG.md", r"^## \[(\d.+?)\]"),
        "dslc --version": __version__,
    }
    assert len(set(versions.values())) == 1, versions


def test_an_entry_of_the_changelog_is_one_line() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2].splitlines()
    for entry in lines:
        assert not entry.startswith(" ") and len(entry) <= 120, f"more than a line: {entry}"


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
