"""Following a diagnostic's advice removes it, and nothing of its kind comes in its place.

Remedies are read from the help of each error: a number to use at its place, a batch, and settings in backquotes. Those
that leave something to the reader ("fewer ranks", "`tensor_plan = [...]`") are not.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dslc.compiler.ir.facts import Facts
from dslc.compiler.rules.analyse import analyse
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.language.registry import BLOCKS, fields
from dslc.dsl.meaning.load import load_text

# Rules that answer to one another's advice. Every other rule stands by itself.
KINDS = (
    frozenset({"E0301", "E0302", "E0303", "E0304", "E0307", "E0412", "E0413"}),
    frozenset({"E0417", *(f"E02{n:02}" for n in range(100))}),
    frozenset({"E0410", "E0411", "E0432"}),
)
_SETTING = r"`([\w.]+) = ([^`…<]+)`"


def diagnostics(text: str, *changes: str) -> list[Diagnostic]:
    loaded = load_text(text, settings=list(changes))
    report = Report()
    report.extend(loaded.report.found)
    if loaded.job is not None:
        report.collect(analyse(loaded.job, Facts(), loaded.broken))
    return report.errors


def remedies(text: str, found: Diagnostic) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields for each remedy the changed text, and the `--set`s."""
    for numbers in re.findall(r"(?:^|, or )use (\d+(?: or \d+)?)\b", found.help):
        span, value = found.span, re.search(r"\d+", found.message)
        assert span is not None and value is not None
        old = re.search(r"\d+", span.text())
        assert old is not None, f"{found.code} says to use another number where there is none: {span.text()}"
        for number in numbers.split(" or "):
            start = span.start + old.start()
            yield text[:start] + number + text[start + len(old[0]) :], ()
    for numbers in re.findall(r"a batch of (\d+(?: or \d+)?)", found.help):
        yield from ((text, (f"data.batch={number}",)) for number in numbers.split(" or "))
    for name, values, other, value in re.findall(f"{_SETTING}(?: with {_SETTING})?", found.help):
        beside = (f"{_path(other)}={value}",) if other else ()
        yield from ((text, (f"{_path(name)}={each}", *beside)) for each in values.split(" or "))


def _path(name: str) -> str:
    if "." in name:
        return name
    blocks = [word for word, block in BLOCKS.items() if name in (field.word for field in fields(block))]
    assert len(blocks) <= 1, f"`{name}` is a field of {blocks}"
    return f"{blocks[0]}.{name}" if blocks else f"model.network.{name}"


def check(text: str) -> int:
    """Returns the number of remedies tried. Raises AssertionError for one that does not help."""
    before, tried = diagnostics(text), 0
    counts = Counter(each.code for each in before)
    for found in before:
        kind = next((kind for kind in KINDS if found.code in kind), frozenset({found.code}))
        for changed, changes in remedies(text, found):
            after = Counter(each.code for each in diagnostics(changed, *changes))
            said = f"{found.code} {found.message}\nhelp: {found.help}\nthen {changes} {dict(after)}\n{changed}"
            assert after[found.code] < counts[found.code], said
            assert not [code for code in kind if after[code] > counts[code]], said
            tried += 1
    return tried


JOB = """
model {{ network = {network}, loss = {loss} }}
data {{ source = {source}, batch = {batch}, last_batch = {last_batch}, validation = {validation} }}
devices {{ cpus = {cpus} }}
parallelism {{ {axes} }}
train {{ {length}, optimizer = sgd() }}
"""


@st.composite
def jobs(draw: st.DrawFn) -> str:
    """Draws jobs whose numbers usually do not fit one another."""
    number = st.integers(1, 24)
    data, pipeline, tensor = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 5))
    axes: dict[str, int | str] = {"data": data, "pipeline": pipeline, "tensor": tensor}
    if draw(st.booleans()):
        axes["microbatches"] = draw(number)
    schedule = draw(st.sampled_from(["", "gpipe", "interleaved_1f1b", "dualpipev"]))
    axes |= {"schedule": schedule} if schedule else {}
    if draw(st.booleans()) and pipeline > 1:
        axes["stages"] = draw(st.sampled_from(["[1, 2]", "[3, 3]", "[1, 1, 1]"]))
    samples, outputs = draw(st.integers(1, 200)), draw(number)
    heads = draw(st.integers(1, 9))
    context = draw(st.sampled_from([8, 9, 15]))
    gpt = f"gpt(layers = 2, width = {heads * draw(number)}, heads = {heads}, context = {context}, vocab = {outputs})"
    dense = f"[flatten(), linear({draw(number)}), relu(), linear({draw(number)}), relu(), linear({outputs})]"
    tokens = f"synthetic(vocab = {max(1, outputs - draw(st.integers(0, 2)))}, samples = {samples})"
    classes = f"synthetic(shape = [6], classes = {max(2, outputs - draw(st.integers(0, 2)))}, samples = {samples})"
    numbers = f"synthetic(shape = [6], targets = [{outputs}], samples = {samples})"
    network, source, loss = draw(
        st.sampled_from(
            [(gpt, tokens, "cross_entropy()"), (dense, classes, "cross_entropy()"), (dense, numbers, "mse()")]
        )
    )
    return JOB.format(
        network=network,
        loss=loss,
        source=source,
        batch=draw(st.integers(1, 220)),
        last_batch=draw(st.sampled_from(["drop", "keep"])),
        validation=draw(st.sampled_from(["0", "0.3", "0.001", "0.999"])),
        cpus=draw(st.sampled_from([data * pipeline * tensor, data, 6])),
        axes=", ".join(f"{name} = {value}" for name, value in axes.items()),
        length=draw(st.sampled_from(["steps = 1", "steps = 5", "epochs = 2"])),
    )


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(jobs())
def test_a_remedy_helps(text: str) -> None:
    check(text)


GPT = JOB.format(
    network="gpt(layers = 2, width = 66, heads = 6, context = 8, vocab = 257)",
    loss="cross_entropy()",
    source="synthetic(vocab = 257, samples = 100)",
    batch=8,
    last_batch="drop",
    validation=0,
    cpus=4,
    axes="tensor = 4",
    length="steps = 1",
)


def test_remedies_are_found() -> None:
    """Shows that the test above tries remedies."""
    assert [each.code for each in diagnostics(GPT)] == ["E0417", "E0417"], "heads with the width, the vocabulary once"
    assert [each.help for each in diagnostics(GPT)][1] == "use 260", "256 would not hold the data's"
    assert check(GPT) == 3
    assert check(GPT.replace("batch = 8", "batch = 50").replace("tensor = 4", "data = 4")) == 2
