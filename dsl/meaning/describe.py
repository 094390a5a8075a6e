"""Kinds and values in words, for messages and the reference page."""

from __future__ import annotations

from dslc.dsl.language import registry, units
from dslc.dsl.syntax import tree
from dslc.dsl.words import article, listed, quoted

# The name of each category in messages; the plural adds an s.
CATEGORIES = {
    "layer": "layer", "rope_scaling": "rotary scaling", "network": "network",
    "experts": "mixture of experts", "balance": "way to balance experts",
    "loss": "loss", "source": "source", "optimizer": "optimizer",
    "lr_schedule": "learning rate schedule", "lr_scale": "scaling rule", "precision": "precision",
    "recompute": "recomputation", "gradients": "gradient exchange", "gpus": "choice of GPUs", "launch": "launcher",
    "metric": "metric", "goal": "goal", "early_stopping": "goal of early stopping",
    "clip": "way to clip", "on_spike": "response to a spike", "collate": "collate function", "ema": "moving average",
    "hook": "hook", "logger": "logger",
    "sampler": "sampler", "numbers": "function of numbers", "adapter": "adapter",
    "weights": "choice of weights", "step": "step", "group": "parameter group",
    "augmentation": "augmentation", "normalization": "normalisation", "transform": "transform",
}  # fmt: skip


def category(name: str) -> str:
    """Returns the category with its article: `an optimizer`."""
    return article(CATEGORIES.get(name, name.replace("_", " ")))


def describe(kind: registry.Kind) -> str:  # noqa: C901 - one case for each kind
    """Describes the values that the kind takes: `a whole number of at least 1`."""
    match kind:
        case registry.Int():
            if kind.choices:
                return " or ".join([", ".join(map(str, kind.choices[:-1])), str(kind.choices[-1])])
            return "a whole number" + limits(kind)
        case registry.Float():
            return "a number" + limits(kind)
        case registry.Bool():
            return "`true` or `false`"
        case registry.Path(name=True):
            return "a name, or a path that begins with `./`, in quotes"
        case registry.Path():
            return "the path of a file or folder, in quotes" + (", where `*` stands for anything" if kind.glob else "")
        case registry.Str():
            return f"text in quotes, {kind.hint}" if kind.hint else "text in quotes"
        case registry.Name():
            return "a name"
        case registry.Word():
            return listed(kind.choices)
        case registry.Measure():
            return measure_in_words(kind)
        case registry.IntRange():
            return "a range of whole numbers such as `1..4`"
        case registry.ListOf():
            return list_in_words(kind)
        case registry.CallOf():
            return " or ".join(category(c) for c in kind.categories)
        case registry.Either():
            return kind.words or ", or ".join(describe(inner) for inner in kind.kinds)
        case registry.AnyValue():
            return "a plain value: number, text, truth value, `none` or a list of them"
        case _:
            raise AssertionError(kind)


def measure_in_words(kind: registry.Measure) -> str:
    names = [units.NAMES[d] for d in kind.dimensions]
    joined = " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    shown = units.EXAMPLES[kind.dimensions[0]]
    if len(kind.dimensions) > 1:
        return f"{joined}, such as `{shown}`"
    numeral = "a whole number of " if joined in ("steps", "epochs") else ""
    return numeral + joined + limits(kind) + f", such as `{shown}`"


def list_in_words(kind: registry.ListOf) -> str:
    if isinstance(kind.item, registry.CallOf):
        items = " or ".join(CATEGORIES.get(c, c) for c in kind.item.categories)
        items = items if items.endswith("s") else items + "s"
    else:
        items = f"values, each {describe(kind.item)}"
    if kind.single:
        return f"{describe(kind.item)}, or a list of these"
    if kind.length is not None:
        return f"a list of {kind.length} {items}"
    return f"a list of one or more {items}" if kind.min_length == 1 else f"a list of {items}"


def limits(kind: registry.NumberKind) -> str:
    if kind.min is not None and kind.max is not None:
        return f" from {units.number(kind.min)} to {units.number(kind.max)}"
    parts = []
    if kind.min is not None:
        parts.append(f"of at least {units.number(kind.min)}")
    if kind.above is not None:
        parts.append(f"above {units.number(kind.above)}")
    if kind.max is not None:
        parts.append(f"of at most {units.number(kind.max)}")
    if kind.below is not None:
        parts.append(f"below {units.number(kind.below)}")
    return " " + " and ".join(parts) if parts else ""


def form(expr: tree.Expr) -> str:
    """Describes the form that was written: `text`, `a list`."""
    match expr:
        case tree.Group():
            return form(expr.inner)
        case tree.Number():
            return "a number" if isinstance(expr.value, int) else f"the number {expr.text}"
        case tree.NumberWithUnit():
            quantity = units.in_base_units(1, expr.unit)
            return units.NAMES[quantity.dimension] if quantity else "a quantity"
        case tree.Text():
            return "text"
        case tree.Boolean():
            return "a truth value"
        case tree.NoneLiteral():
            return "`none`"
        case tree.Name():
            return f"the name `{expr.name}`"
        case tree.List():
            return "a list"
        case tree.RangeOf():
            return "a range"
        case tree.CallOf():
            return f"the call `{expr.name}(…)`"
        case _:
            return "a calculation"


def value(resolved: object) -> str:
    """Writes a resolved value in the language."""
    match resolved:
        case None:
            return "none"
        case bool():
            return "true" if resolved else "false"
        case int() | float():
            return units.number(resolved)
        case str():
            return quoted(resolved)
        case registry.Quantity():
            return units.write(resolved.value, resolved.dimension)
        case registry.Range():
            return f"{resolved.first}..{resolved.last}"
        case tuple() | list():
            return f"[{', '.join(map(value, resolved))}]"
        case registry.Call():
            return f"{resolved.word}(…)"
        case _:
            raise AssertionError(resolved)
