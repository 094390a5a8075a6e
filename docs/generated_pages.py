"""MkDocs hook: adds the pages of the diagnostics, the examples and the gallery, the files of the planner, and links to
files of the repository.

mkdocs.yml names this file. MkDocs calls `on_files` once, and `on_page_markdown` for each page.
"""

from __future__ import annotations

import logging
import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from planner_site import FailedToolError, MissingToolError, planner_files

from dslc.commands.new import summary
from dslc.dsl.codes import explain, titles

ROOT = Path(__file__).resolve().parent.parent
# MkDocs counts the warnings of this logger: a warning fails the build.
LOG = logging.getLogger("mkdocs.hooks.generated_pages")

KINDS = {
    "00": "Syntax",
    "01": "Names and values",
    "02": "Shapes",
    "03": "Data",
    "04": "Devices and axes",
    "05": "Memory and promises",
    "06": "Training",
    "07": "Sharding and saving of models",
    "08": "Features of other machines or later versions",
    "09": "Checkpoints",
    "10": "Plan files",
    "11": "Configurations of other tools",
    "12": "Comparisons of trainings",
}
# The diagrams of the gallery: job, view, caption.
DIAGRAMS = (
    ("digits", "placement", "Two processes, the memory of each, and the traffic between them"),
    ("cluster", "placement", "Two nodes of eight GPUs"),
    ("llama_cpu", "placement", "A Llama over the tensor axis"),
    ("pipeline", "placement", "Pipeline stages, with two replicas of each"),
    ("pipeline", "schedule", "The schedule of the pipeline"),
    ("digits", "graph", "The plan graph of two processes"),
)
PLACEHOLDER = re.compile(r"<(?=[a-z]+>)")
CODE = re.compile(r"\b[EWN]\d{4}\b")
LINK = re.compile(r"\]\(([^)#\s]+)")
LEXERS = {".py": "python", ".plt": "plt"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    pages = {"codes/index.md": _code_index(), "examples.md": _examples()}
    pages |= {f"codes/{code}.md": _code_page(code) for code in titles() if _page_of(code) == code}
    pages |= {_source_page(path): _source(path) for path in _linked_files(files)}
    diagrams = {f"gallery/{job}-{view}.svg": _render(job, view) for job, view, _ in DIAGRAMS}
    pages["gallery.md"] = _gallery()
    for name, content in {**pages, **diagrams, **_planner()}.items():
        files.append(File.generated(config, name, content=content))
    return files


def _planner() -> dict[str, bytes]:
    """Returns the files of the planner. Raises PluginError if Node.js or its package is missing, or fails."""
    try:
        return {f"planner/{name}": content for name, content in planner_files(ROOT / "build")}
    except (MissingToolError, FailedToolError) as error:
        raise PluginError(str(error)) from None


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Points links to files of the repository at their pages, links codes to their pages, and escapes `<name>`."""
    here = posixpath.dirname(page.file.src_uri)
    markdown = LINK.sub(lambda link: f"]({_target(link[1], here)}", markdown)
    return markdown if here == "codes" and page.file.name == "index" else _prepare_prose(markdown, here)


# ------------------------------------------------------------------------------------------------------------- codes


def _page_of(code: str) -> str:
    """Returns the code whose page explains `code`: a warning may share the page of the error with its number."""
    error = f"E{code[1:]}"
    return error if code[0] != "E" and explain(code) == explain(error) else code


def _code_page(code: str) -> str:
    text = explain(code)
    assert text is not None
    return f"# {code}: {text.removeprefix('# ')}"


def _code_index() -> str:
    lines = ["# Diagnostics", "", "`dslc explain CODE` prints the same pages. E: error, W: warning, N: note.", ""]
    names = titles()
    for number, kind in KINDS.items():
        lines += [f"## {kind}", "", "| code | meaning |", "| --- | --- |"]
        codes = [code for code in names if code[1:3] == number]
        lines += [f"| [{code}]({_page_of(code)}.md) | {names[code]} |" for code in codes]
        lines.append("")
    for code in names:
        if code[1:3] not in KINDS:
            LOG.warning(f"{code} has a kind that docs/generated_pages.py does not name")
    return "\n".join(lines)


def _prepare_prose(markdown: str, here: str) -> str:
    """Links codes and escapes placeholders in prose: not in headings, links, or code."""
    names, lines, in_fence = titles(), [], False
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
        if not (in_fence or line.startswith(("#", "    ", "```")) or "](" in line):
            pieces = line.split("`")
            prose = [PLACEHOLDER.sub("&lt;", piece) for piece in pieces[::2]]
            pieces[::2] = [CODE.sub(lambda code: _code_link(code[0], here, names), piece) for piece in prose]
            line = "`".join(pieces)
        lines.append(line)
    return "\n".join(lines)


def _code_link(code: str, here: str, names: dict[str, str]) -> str:
    return f"[{code}]({posixpath.relpath(f'codes/{_page_of(code)}.md', here or '.')})" if code in names else code


# ---------------------------------------------------------------------------------------------- files of the repository


def _source_page(path: str) -> str:
    return f"source/{path.removesuffix('.md')}.md"


def _target(link: str, here: str) -> str:
    path = posixpath.normpath(posixpath.join("docs", here, link))
    if "://" in link or path.startswith("docs/"):
        return link
    return posixpath.relpath(_source_page(path), here or ".")


def _linked_files(files: Files) -> set[str]:
    """Returns the paths outside docs/ that pages link to, and those of all examples."""
    paths = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.plt")}
    for file in files.documentation_pages():
        for link in LINK.findall(file.content_string):
            path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(file.src_uri), link))
            if "://" in link or path.startswith("docs/"):
                continue
            if (ROOT / path).exists():
                paths.add(path)
            else:
                LOG.warning(f"{file.src_uri} links to {link}, which does not exist")
    return paths


def _source(path: str) -> str:
    source = ROOT / path
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    if source.is_file():
        is_job = source.suffix == ".plt" and path.startswith("examples/")
        link = f"{_planner_link(path, posixpath.dirname(_source_page(path)))}\n\n" if is_job else ""
        return f"# {path}\n\n{link}{_fence(source)}"
    jobs = sorted(source.rglob("*.plt"))
    return f"# {path}\n\n" + "\n".join(f"## {job.relative_to(source)}\n\n{_fence(job)}" for job in jobs)


def _planner_link(path: str, here: str) -> str:
    """Returns the link that opens a job in the planner, which reads it from the address."""
    job = quote((ROOT / path).read_text(encoding="utf-8"), safe="")
    return f"[Open in the planner]({posixpath.relpath('planner/index.html', here or '.')}#job={job})"


def _fence(source: Path) -> str:
    return f"````{LEXERS.get(source.suffix, 'text')}\n{source.read_text(encoding='utf-8')}````\n"


# ------------------------------------------------------------------------------------------------ examples and gallery


def _examples() -> str:
    lines = ["# Examples", "", "| job | what it shows |", "| --- | --- |"]
    for path in sorted((ROOT / "examples").glob("*.plt")):
        lines.append(f"| [{path.name}]({_source_page(f'examples/{path.name}')}) | {summary(path)} |")
    return "\n".join(lines) + "\n\n`dslc new --list` prints this list, and the templates that `dslc new` writes.\n"


def _gallery() -> str:
    parts = ["# Gallery", "Each diagram is drawn by the command above it, when this site is built."]
    for job, view, caption in DIAGRAMS:
        path = f"examples/{job}.plt"
        command = f"dslc render {path} --view {view} -o {job}.svg"
        image = f"![{caption}](gallery/{job}-{view}.svg)"
        parts += [
            f"## {caption}",
            f"The job: [{path}]({_source_page(path)}). {_planner_link(path, '')}.",
            f"```\n{command}\n```",
            image,
        ]
    return "\n\n".join(parts) + "\n"


def _render(job: str, view: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{job}.svg"
        command = ["render", f"examples/{job}.plt", "--view", view, "-o", str(path)]
        run = subprocess.run([sys.executable, "-m", "dslc", *command], cwd=ROOT, capture_output=True, text=True)
        if run.returncode:
            raise PluginError(run.stderr)
        return path.read_bytes()
