"""Hostile jobs: the worst of each kind by name, and any number drawn from seeds.

NAMED                  attacks by name, each made when it is called
drawn(seed)            returns one attack; the same for the same seed
lay(attack, folder)    writes its files; returns the commands that have to withstand it
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from helpers.paths import EXAMPLES

from dslc.dsl.language import blocks  # noqa: F401  (fills the registry)

ARGUMENT = 2**17 - 1  # bytes that Linux lets an argument of a command have
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")
COMMANDS = ("check", "fmt", "plan", "render")
FIELDS = {
    "network": "mlp()", "loss": "cross_entropy()", "source": "digits()", "batch": "64", "steps": "10",
    "optimizer": "sgd(lr = 0.1)",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`beside` holds files by name; `pipes` names of pipes that no one writes to. What is `planned` is large and well
    meant: `plan` and `render`, which prove and draw each pass of it, take longer over it.
    """

    job: bytes
    beside: dict[str, bytes] = field(default_factory=dict)
    pipes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    planned: bool = False


def written(after: str = "", before: str = "", *, model: str = "", train: str = "", **fields: str) -> str:
    """Returns a job that is valid except for the given part."""
    f = FIELDS | fields
    return (
        f"{before}model {{\n  network = {f['network']}\n  loss = {f['loss']}\n{model}}}\n"
        f"data {{\n  source = {f['source']}\n  batch = {f['batch']}\n}}\n"
        f"train {{\n  steps = {f['steps']}\n  optimizer = {f['optimizer']}\n{train}}}\n{after}"
    )


def gpt(layers: object, after: str = "", **more: str) -> str:
    network = f"gpt(layers = {layers}, width = 64, heads = 4, context = 32, vocab = 256)"
    return written(after, network=network, source="synthetic(vocab = 256, context = 32)", **more)


def attack(
    text: str | bytes, *settings: str, beside: dict[str, bytes] | None = None, pipes: tuple[str, ...] = ()
) -> Attack:
    job = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    return Attack(job=job, settings=settings, pipes=pipes, beside=beside or {})


# -------------------------------------------------------------------------------------------------------- by name


def many(count: int, form: str = "{}", between: str = ",") -> str:
    return between.join(form.format(n) for n in range(count))


def chain(count: int, first: str, form: str) -> str:
    return f"param p0 = {first}\n" + "".join(f"param p{n + 1} = {form.replace('@', f'p{n}')}\n" for n in range(count))


def weights(header: bytes, rest: int = 0) -> Attack:
    made = len(header).to_bytes(8, "little") + header + b"\0" * rest
    return attack(written(model='  weights = "w.safetensors"\n'), beside={"w.safetensors": made})


def _texts() -> Iterator[tuple[str, str]]:
    """Yields texts with one very long item, or one item many times."""
    million = 10**6
    yield "a long string", 'import "' + "a" * million + '"\n'
    yield "a string of escapes", 'param a = "' + "\\\\" * (million // 2) + '"\n'
    yield "a string without an end", 'param a = "' + "a" * million
    yield "a long string in single quotes", "param a = '" + "a" * million + "'"
    yield "escapes in single quotes", "param a = '" + "\\a" * (million // 4)
    for sign in (
        "'",
        '"\n',
        '"""',
        "“",
        "“a",
        "/*",
        "/* \n",
        "//\n",
        "--\n",
        ";",
        "=",
        "{",
        "a {",
        "a {}",
        "}",
        "\x01",
    ):
        yield f"many {sign!r}", sign * (million // 10)
    for sign in ("1", "1_", "1.", "1e", "a", "a.", " ", "\n", "#\n", "\t", "\r", "\ufeff", "€", "é", "\u202e", "ａ"):
        yield f"no end of {sign!r}", sign * (million // len(sign.encode()) - 1)
    for sign in ("(", "[", "f(", "-", "+", "2**", "[1,", "f(a=", "not ", "..", "1..", "1,"):
        yield f"a value of {sign!r}", "param a = " + sign * (million // 12)
    yield "deep brackets", "param a = " + "(" * 40000 + ")" * 40000
    yield "deep lists", "param a = " + "[" * 20000 + "]" * 20000
    yield "a sum", "param a = " + many(million // 8, "1", "+")
    yield "a sum of the batch", written(batch=many(100_000, "1", "+"))
    yield "a field repeated", written("log {\n" + "every = 1 step\n" * 100_000 + "}")
    yield "a field repeated within bounds", written("log {\n" + "every = 1 step\n" * 7_500 + "}")
    yield "unknown fields", written("log {\n" + many(9_000, "e{} = 1", "\n") + "\n}")
    yield "unknown blocks", written(many(5_500, "e{} {{ a = 1 }}", "\n"))
    yield "a block repeated", written("log {}\n" * 9_500)
    yield "params", written(many(7_500, "param p{} = 1", "\n"))
    yield "a quote left open", 'param a = "\n' + many(7_500, "param p{} = 1", "\n")
    yield "unknown names", written(network='python("a:b", x = [' + many(20_000, "y{}") + "])")
    yield "a path without end", written("sweep {" + many(20_000, "a", ".") + " = [1] }")
    yield "promises", written("expect {" + "devices < 10\n" * 9_000 + "}")
    yield "broken promises", written("expect {" + many(5_000, "devices < 1.{}", "\n") + "}")
    yield "names that are near", written("log {" + many(60, "evry" * 1000 + "{} = 1", "\n") + "}")
    yield "entries on one line", "a { " + many(9_000, "b = {}", " ") + " }"
    yield "words on one line", "a { x = 1 " + many(30_000, "b", " ") + " }"
    yield "lines of nothing", "\n".join("x y z" for _ in range(12_000))
    yield "YAML", "a:\n - b\n" * 9_000
    yield "JSON", '{"a": [' * 9_000
    yield "a zero byte", "\0" * 1000


def _values() -> Iterator[tuple[str, str]]:
    """Yields numbers, params and networks that expand to much."""
    for number in ("2**63", "2**100", "10**18", "9**9**9", "2**-9**9", "1.5**1e300", "1e400", "1e308*10", "1e308/1",
                   "-1", "0", "1/0", "0**-1", "1e-320", "(-8)**0.5", "2**63-1", "1" * 401, "10**30//3"):  # fmt: skip
        for name in ("batch", "steps"):
            yield f"{name} = {number[:20]}", written(**{name: number})
        yield f"nodes = {number[:20]}", written(f"devices {{ nodes = {number} }}")
        yield f"cpus = {number[:20]}", written(f"devices {{ cpus = {number} }}", batch=number)
        yield f"gpt of {number[:20]}", gpt(number)
        yield f"microbatches = {number[:20]}", written(f"parallelism {{ microbatches = {number} }}", batch="2**63")
        yield f"widths = [{number[:20]}]", written(network=f"mlp(widths = [{number}, {number}])")
        yield f"repeat {number[:20]}", written(network=f"[flatten(), repeat({number}, [linear(10)])]")
        yield f"a shape of {number[:20]}", written(source=f"synthetic(shape = [{number}, {number}], classes = 10)")
        yield f"a sweep of {number[:20]}", written(f"sweep {{ data.batch = [{number}, 1, {number}] }}")
    for axis in ("data", "pipeline", "tensor", "context"):
        axes = f"devices {{ cpus = 10**6 }}\nparallelism {{ {axis} = 10**6 }}\n"
        yield f"a million on {axis}", gpt(2, axes, batch="10**6")
    for schedule in SCHEDULES:
        for pieces in (10**5, 2**40):
            cut = f"pipeline = 2, schedule = {schedule}, microbatches = {pieces}"
            axes = f"devices {{ cpus = 2 }}\nparallelism {{ {cut} }}"
            yield f"{schedule} of {pieces}", written(axes, batch=str(2 * pieces), network="mlp(widths = [8, 8, 8])")
    yield (
        "virtual stages",
        written(
            "devices { cpus = 2 }\nparallelism { pipeline = 2, virtual_stages = 10**9, schedule = interleaved_1f1b }"
        ),
    )
    images = "synthetic(samples = 1000, shape = [3, 2**61 - 1, 2**61 - 1], classes = 10)"
    yield "a batch of no known pieces", written("parallelism { microbatches = auto }", batch="2**61 - 1")
    yield "heads of a prime width", gpt(2).replace("width = 64", "width = 2**61 - 1")
    yield "no patch", written(network="vit(layers = 1, width = 8, heads = 2, patch = 7)", source=images)
    for heads in ("kv_heads = 7", "kv_heads = 4"):
        many_heads = f"llama(layers = 1, width = 64, heads = 2**31, {heads}, head_dim = 2, hidden = 8, context = 32)"
        cut = "devices { cpus = 3 }\nparallelism { tensor = 3 }"
        tokens = "synthetic(vocab = 256, context = 32)"
        yield f"2**31 heads, {heads}", written(cut, network=many_heads, source=tokens)
    unequal = ", ".join(f"residual([linear({100 + 37 * n % 1000}), relu(), linear(64)])" for n in range(60))
    budget = "memory { recompute = budget(1 MB) }\n"
    for name, axis in (("", ""), (" in stages", "devices { cpus = 4 }\nparallelism { pipeline = 4 }")):
        yield f"unequal blocks{name}", written(budget + axis, network=f"[flatten(), linear(64), {unequal}, linear(10)]")
    yield "counts of nodes", written("devices { nodes = 1..100000 }")
    yield "no end of counts of nodes", written("devices { nodes = 1..10**18 }")
    yield "GPUs by number", written("devices { gpus = [" + many(20_000) + "] }")
    yield "GPUs by text", written('devices { gpus = "' + many(100_000) + '" }')
    yield "GPUs by a text that is none", written('devices { gpus = "' + "1 " * 50_000 + 'x" }')
    yield "a chain of params", written(chain(4_000, "1", "@"), batch="p4000")
    yield "a chain of params, backwards", written(many(4_000, "param p{0} = p1{0}", "\n"), batch="p0")
    yield "a circle of params", written(many(900, "param p{0} = p{0}0", "\n") + "\nparam p0 = p1\nparam p1 = p0\n")
    yield "params in brackets", written(chain(500, "1", "(((((((((@)))))))))"), batch="p500")
    yield "params that double", written(chain(60, "1", "@ + @"), batch="p60")
    yield "layers that double", written(chain(40, "[relu()]", "[repeat(2, @), repeat(2, @)]"), network="p40")
    yield "lists that treble", written(chain(30, "1", "[@, @, @]"), network='python("a:b", x = p30)')
    yield "repeats in repeats", written(network="[" + "repeat(1000, [" * 6 + "linear(10)" + "])" * 6 + "]")
    yield "residuals in residuals", written(network="[flatten()," + "residual([" * 45 + "linear(10)" + "])" * 45 + "]")
    yield "widths", written(network="mlp(widths = [" + many(20_000, "8") + "])")
    yield "widths within bounds", written(network="mlp(widths = [" + many(990, "{0}") + "])".replace("[0,", "[1,"))
    yield "a thousand layers", gpt(990)
    yield "a thousand layers in little memory", gpt(990, "memory { limit = 1MB }")
    yield "many layers in little memory on many", gpt(1000, "devices { cpus = 8 }\nmemory { limit = 1MB }")
    devices = "devices { nodes = 1..64, cpus = 64 }\n"
    split = "parallelism { tensor = 4, context = 4, pipeline = 4, zero = 3, microbatches = 4, schedule = 1f1b }\n"
    little = "memory { recompute = every(2), limit = 1MB }"
    yield "stages in little memory", gpt(128, devices + split + little, batch="884736")
    yield "layers in a sweep", gpt(990, "sweep { data.batch = [" + many(99, "1{}") + "] }")
    yield "a sweep", written("sweep { data.batch = [" + many(9_000, "1{}") + "] }")
    yield "a sweep within bounds", written("sweep { data.batch = [" + many(99, "1{}") + "] }")
    yield (
        "a sweep of products",
        written("sweep { data.batch = [" + many(99, "1{}") + "], train.optimizer.lr = [" + many(99, "0.1{}") + "] }"),
    )
    yield "a sweep of many paths", written("sweep {" + many(3_000, "train.optimizer.lr{} = [1, 2]", "\n") + "}")
    yield (
        "a sweep of all params",
        written(many(300, "param p{} = 1", "\n") + "\nsweep {" + many(300, "p{} = [1, 2]", "\n") + "}"),
    )
    yield "a sweep of a long job", written(many(7_500, "param p{} = 1", "\n") + "\nsweep { p0 = [" + many(99) + "] }")
    yield "a pattern of stars", written(model='  freeze = ["' + "*a" * 90 + 'b"]\n')
    yield "patterns", gpt(300, model="  freeze = [" + many(5_000, '"{}*"') + "]\n")
    yield "patterns within bounds", gpt(300, model="  freeze = [" + many(190, '"{}*"') + "]\n")
    yield "a pattern of brackets", written(train='  no_decay = ["' + "[" * 50_000 + '"]\n')
    yield "stages", written("devices { cpus = 2 }\nparallelism { pipeline = 2, stages = [" + many(9_000, "1") + "] }")
    yield "arguments", written(network='python("a:b", ' + many(9_000, "a{} = 1") + ")")
    yield "an argument repeated", written(network="mlp(" + many(9_000, "dropout = 0.1") + ")")
    yield "unknown arguments", written(network="mlp(" + many(9_000, "a{} = 1") + ")")
    yield "a long name", written(network="a" * 100_000)
    yield "a long unit", written(batch="1 " + "a" * 100_000)
    yield "a long text for a number", written(batch='"' + "x" * 100_000 + '"')
    yield "a long list for a number", written(batch="[" + "1,\n" * 9_000 + "]")
    yield "metrics", written("evaluate { metrics = [" + many(9_000, "loss") + "] }")
    yield "hosts", written("launch { with = ssh(hosts = [" + many(9_000, '"a{}"') + "]) }")
    yield "a shape of many dims", written(source="synthetic(shape = [" + many(9_000, "1") + "], classes = 10)")


def planned(draw: random.Random) -> Attack:
    """A large job on many ranks that is well meant, of any size up to the bounds and a little over."""
    stages = 2 ** draw.randrange(8)
    sizes = {axis: 2 ** draw.randrange(3) for axis in ("data", "tensor", "context") if draw.random() < 0.4}
    ranks = stages * math.prod(sizes.values()) * draw.choice((1, 1, 1, 3))
    axes = [f"{axis} = {size}" for axis, size in sizes.items()]
    axes += [f"pipeline = {stages}", f"zero = {draw.randrange(4)}", f"microbatches = {stages * _amount(draw, 300)}"]
    axes.append(f"schedule = {draw.choice(SCHEDULES)}")
    memory = [f"recompute = {draw.choice(('none', 'full', 'every(2)'))}"]
    memory += [f"limit = {draw.choice((1, 100, 300))}MB"] * (draw.random() < 0.5)
    swept = draw.choice(("train.optimizer.lr = 0.", "data.batch = 1", "train.seed = ", "parallelism.microbatches = 1"))
    name, _, start = swept.partition(" = ")
    sweep = f"sweep {{ {name} = [{many(_amount(draw, 250), start + '{}')}] }}" * (draw.random() < 0.3)
    nodes = draw.choice(("", "", "nodes = 1..64, "))
    axes_of = f"devices {{ {nodes}cpus = {ranks} }}\nparallelism {{ {', '.join(axes)} }}\n"
    text = gpt(_amount(draw, 1_000), f"{axes_of}memory {{ {', '.join(memory)} }}\n{sweep}", batch=str(2**15 * 27))
    text = text.replace("synthetic(", "synthetic(samples = 10_000_000, ")
    return Attack(job=text.encode(), planned=True)


def _plans() -> Iterator[tuple[str, Attack]]:
    for zero in range(4):
        axes = f"devices {{ cpus = 2 }}\nparallelism {{ data = 2, zero = {zero}, microbatches = 2**30 }}"
        text = gpt(100, axes, batch="2**31").replace("synthetic(", "synthetic(samples = 2**40, ")
        yield f"micro-batches without end, zero {zero}", attack(text)
    for schedule in SCHEDULES:
        for cut in ("", "zero = 3, tensor = 2, data = 2, "):
            for limit in ("", "memory { limit = 1MB }"):
                axes = f"{cut}pipeline = 64, microbatches = 128, schedule = {schedule}"
                ranks = f"devices {{ cpus = {256 if cut else 64} }}"
                text = gpt(600, f"{ranks}\nparallelism {{ {axes} }}\n{limit}", batch="512")
                yield f"{schedule} of 64 ranks {cut}{limit}", Attack(job=text.encode(), planned=True)


def _files() -> Iterator[tuple[str, Attack]]:
    """Yields attacks by the files that a job names: devices, pipes, and files of another kind than they should be."""
    for path in ("/dev/zero", "/dev/tty", "/dev/stdin", "/proc/self/mem", "/proc/kmsg", "/tmp", "pipe", "/", "~root/x",
                 "\\n", "a" * 300, "/proc/self/fd/0", "/dev/full", "../" * 3000):  # fmt: skip
        imported = f'import "{path}"\n' + written()
        yield f"import {path[:20]!r}", attack(imported, pipes=("pipe",))
        for name in ("weights", "freeze"):
            yield f"{name} {path[:20]!r}", attack(written(model=f'  {name} = "{path}"\n'), pipes=("pipe",))
        for call in ("text", "arrays", "tokens", "images", "mnist", "cifar10"):
            yield f"{call} {path[:20]!r}", attack(gpt(2).replace("synthetic(vocab = 256, context = 32)",
                                                                f'{call}("{path}")'), pipes=("pipe",))  # fmt: skip
        yield f"catalogue {path[:20]!r}", attack(written(f'devices {{ catalogue = "{path}" }}'), pipes=("pipe",))
        yield f"resume {path[:20]!r}", attack(written(f'checkpoint {{ resume = "{path}" }}'), pipes=("pipe",))
        yield f"transformers {path[:20]!r}", attack(written(network=f'transformers("{path}")'), pipes=("pipe",))
    folders = "/" + "*/" * 30
    yield "a pattern of folders", attack(gpt(2).replace("synthetic(vocab = 256, context = 32)", f'tokens("{folders}")'))
    yield (
        "missing imports beside many files",
        attack(
            many(100, 'import "missing_some_name_{:03}.plt"', "\n") + "\n" + written(),
            beside={f"existing_xome_fame_{n:03}.plt": b"" for n in range(700)},
        ),
    )
    yield "a large import", attack('import "large"\n', beside={"large": b"# aaaaaaaaaaaaaaaa\n" * 2_800_000})
    yield "an import that is not text", attack('import "odd"\n', beside={"odd": b"# good\n# caf\xe9\n"})
    links = {f"c{n}": f'import "c{n + 1}"\n'.encode() for n in range(1500)}
    yield "a chain of imports", attack('import "c0"\n' + written(), beside=links)
    yield (
        "many imports",
        attack(many(1500, 'import "c{}"', "\n") + "\n" + written(), beside=dict.fromkeys(links, b"log {}\n")),
    )
    yield "an import many times", attack('import "c0"\n' * 9_000 + written(), beside={"c0": b"log {}\n"})
    yield "not text", attack(b"\xff\xfe" * 1000)
    yield "half of a letter", attack(written().encode() + b"# caf\xe9\n")
    yield "half of a pair", attack(b"\xed\xa0\x80")
    yield "other line ends", attack(written().replace("\n", "\r\n"))
    for name, index in (
        ("names of files", b'{"weight_map":{' + b",".join(b'"%d":"%d"' % (n, n) for n in range(300_000)) + b"}}"),
        ("brackets", b'{"weight_map":' + b"[" * 200_000),
        ("devices", b'{"weight_map":{"a":"/dev/zero"}}'),
    ):
        there = {"m.safetensors.index.json": index}
        yield f"an index of {name}", attack(written(model='  weights = "m.safetensors.index.json"\n'), beside=there)
    yield "a header of brackets", weights(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}")
    yield "a header that is a list", weights(b"[1,2,3]")
    yield (
        "a header of odd entries",
        weights(
            b'{"a":{"dtype":"F32","shape":{"a":1},"data_offsets":["x","y"]},"b":{"dtype":3,"shape":"abc","data_offsets":[0,1e999]}}'
        ),
    )
    yield (
        "a header of numbers",
        weights(b'{"a":{"dtype":"F32","shape":[1e400,-1,true],"data_offsets":[0,' + b"9" * 5000 + b"]}}"),
    )
    entry = b'"w%d":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    yield "a header of many", weights(b"{" + b",".join(entry % n for n in range(300_000)) + b"}", 8)
    yield "a header of many within bounds", weights(b"{" + b",".join(entry % n for n in range(100_000)) + b"}", 8)
    yield (
        "a catalogue of brackets",
        attack(written('devices { catalogue = "c", kind = a }'), beside={"c": b"a = " + b"[" * 50_000}),
    )
    yield (
        "a catalogue of digits",
        attack(
            written('devices { catalogue = "c", kind = a }'),
            beside={"c": b'[a]\nmemory = "' + b"9" * 9000 + b'GiB"\nefficiency = nan\n'},
        ),
    )
    yield (
        "a catalogue of tables",
        attack(
            written('devices { catalogue = "c", kind = a }'),
            beside={"c": b"".join(b"[a%d]\nx = 1\n" % n for n in range(20_000))},
        ),
    )


def _settings() -> Iterator[tuple[str, Attack]]:
    for name, settings in {
        "a number": ["data.batch=" + "1" * 60_000], "brackets": ["data.batch=" + "(" * 50_000],
        "many": ["data.batch=1"] * 3000, "a sum": ["data.batch=" + many(30_000, "1", "+")],
        "a sequence for the terminal": ["data.batch=\x1b[31m\x9b31m\u202e"], "a path": [many(30_000, "a", ".") + "=1"],
        "a device": ["model.weights=/dev/zero"], "a sweep": ["sweep.data.batch=[" + many(9_000, "1{}") + "]"],
        "a promise": ["expect." + "a" * 50_000 + "<1"], "spaces": [" " * 60_000 + "=1"],
        "a promise of nothing": ["expect" + " " * 50_000 + ".x"], "nothing": [""], "no name": ["=1"],
        "half of a pair": ["data.batch=\udcff"], "quotes": ['data.batch="' * 5000], "lines": ["data.batch=\n" * 900],
        "everything": ["a=" + "x" * 60_000] * 20,
    }.items():  # fmt: skip
        yield f"--set: {name}", attack(written(), *settings)


def named() -> dict[str, Callable[[], Attack]]:
    """Returns the attacks by name."""
    made: dict[str, Callable[[], Attack]] = {}
    for name, text in [*_texts(), *_values()]:
        made[name] = lambda text=text: attack(text)  # type: ignore[misc]
    for name, whole in [*_plans(), *_files(), *_settings()]:
        made[name] = lambda whole=whole: whole  # type: ignore[misc]
    return made


# ------------------------------------------------------------------------------------------------------- by chance

SIGNS = list("(){}[]=,.+-*/<>#\"'\\;:!?&|^~@$%`\n\t\r \0\x1b\u202e\ufeffé€“0123456789abcxyz_") + [
    "**", "//", "..", "<=", "==", "param ", "import ", "true", "none", "1f1b", "2 GiB", "repeat(", "sweep {", "--",
]  # fmt: skip
NUMBERS = [
    "0", "1", "-1", "2", "3", "7", "64", "1000", "10**6", "2**31", "2**63", "10**18", "1e9", "1e300", "0.5",
    "1..3", "1..100000", "1 GiB", "3 epochs", "20%", "1 ms", "9**9", "none", "true", '"x"', "[]", "[1, 2]",
]  # fmt: skip


def drawn(seed: int) -> Attack:
    """Returns one attack; the same for the same seed."""
    draw = random.Random(seed)
    kind = draw.choice(
        (_mutated, _mutated, _repeated, _fields, _fields, _fields, _circular_imports, _bytes, _named, planned)
    )
    made = kind(draw)
    settings = tuple(_setting(draw) for _ in range(draw.choice((0, 0, 0, 1, 1, 3))))
    settings = tuple(text[:ARGUMENT] for text in (*made.settings, *settings))
    return replace(made, settings=settings)


def _valid_job(draw: random.Random) -> str:
    jobs = sorted((EXAMPLES).glob("*.plt"))
    return draw.choice([job.read_text() for job in jobs] + [written(), gpt(draw.randrange(1, 40))])


def _amount(draw: random.Random, most: float) -> int:
    """Draws a size from few to many, each as likely as its double."""
    return int(most ** draw.random())


def _mutated(draw: random.Random) -> Attack:
    text = _valid_job(draw)
    for _ in range(_amount(draw, 40)):
        at = draw.randrange(len(text) + 1)
        end = min(len(text), at + _amount(draw, 30))
        piece = draw.choice((draw.choice(SIGNS), draw.choice(NUMBERS), text[at:end] * _amount(draw, 2000), ""))
        text = text[:at] + piece + text[draw.choice((at, end)) :]
    return attack(text[: 2**21])


def _repeated(draw: random.Random) -> Attack:
    piece = "".join(draw.choice(SIGNS) for _ in range(_amount(draw, 12)))
    before, after = draw.choice(
        (("", ""), ("param a = ", "\n"), ("a { x = ", " }"), ("a {\n", "\n}"), ("model { network = [", "] }"))
    )
    return attack(before + piece * _amount(draw, 10**6 / max(1, len(piece))) + after)


def _fields(draw: random.Random) -> Attack:
    """Returns a valid job in which any field of the registry holds anything."""
    from dslc.dsl.language.registry import BLOCKS
    from dslc.dsl.language.suggest import words_of

    text = draw.choice((written(), gpt(draw.randrange(1, 60)), gpt(draw.randrange(60, 600))))
    settings = []
    for _ in range(draw.randrange(1, 6)):
        block = draw.choice(list(BLOCKS))
        name = draw.choice(words_of(BLOCKS[block]) or ["x"])
        settings.append(f"{block}.{name}={_value(draw, 0)}")
    if draw.random() < 0.3:
        swept = [
            f"{block}.{name} = [{many(_amount(draw, 400), _value(draw, 2).replace('{', '').replace('}', '') + '{}')}]"
        ]
        text += "\nsweep {\n" + "\n".join(swept) + "\n}\n"
    return attack(text, *settings)


def _value(draw: random.Random, depth: int) -> str:
    from dslc.dsl.language.registry import CALLS

    kind = draw.randrange(6 if depth < 4 else 3)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice(SIGNS).strip("\0\n") or "x"
    if kind == 3:
        return "[" + ", ".join([_value(draw, depth + 1)] * _amount(draw, 300)) + "]"
    if kind == 4:
        word = draw.choice([word for calls in CALLS.values() for word in calls])
        return f"{word}({', '.join(_value(draw, depth + 1) for _ in range(draw.randrange(4)))})"
    return f"{_value(draw, depth + 1)} {draw.choice(('+', '*', '**', '/', '//', '-', '..'))} {_value(draw, depth + 1)}"


def _circular_imports(draw: random.Random) -> Attack:
    """Returns two files, one of which imports the other, and itself."""
    other = _mutated(draw).job
    circle = draw.choice(("", 'import "job.plt"\n'))
    return attack(f'import "other"\n{circle}{_valid_job(draw)}', beside={"other": other})


def _bytes(draw: random.Random) -> Attack:
    if draw.random() < 0.5:
        return attack(draw.randbytes(_amount(draw, 10**5)))
    text = bytearray(_valid_job(draw).encode())
    for _ in range(_amount(draw, 50)):
        text[draw.randrange(len(text))] = draw.randrange(256)
    return attack(bytes(text))


NAMED = named()


def _named(draw: random.Random) -> Attack:
    return NAMED[draw.choice(list(NAMED))]()


def _setting(draw: random.Random) -> str:
    name = draw.choice(("data.batch", "train.steps", "model.network", "devices.nodes", "devices.cpus", "x", "a.b.c.d",
                        "parallelism.pipeline", "parallelism.microbatches", "train.optimizer.lr", "sweep.data.batch",
                        "model.freeze", "parallelism", "expect.devices", "memory.limit"))  # fmt: skip
    value = draw.choice((_value(draw, 0), draw.choice(SIGNS) * _amount(draw, 20_000)))
    return f"{name}{draw.choice('===<')}{value}".replace("\0", "")[:100_000]


# -------------------------------------------------------------------------------------------------------- laid down


def lay(made: Attack, folder: Path) -> list[list[str]]:
    """Fills the folder, which then holds nothing else, and returns the arguments of each command."""
    for old in folder.iterdir():
        old.unlink()
    for name, data in made.beside.items():
        (folder / name).write_bytes(data)
    for name in made.pipes:
        os.mkfifo(folder / name)
    (folder / "job.plt").write_bytes(made.job)
    settings = [part for setting in made.settings for part in ("--set", setting)]
    commands = [["check", "job.plt", *settings], ["fmt", "job.plt"]]
    if not made.planned:
        commands += [["plan", "job.plt", *settings], ["render", "job.plt", "-o", "plan.dot", *settings]]
    return commands
