"""What the commands and the Python API share: from a path to an analysis, and how mistakes are shown."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from dslc.compiler.cost.reuse import READING, Reuse
from dslc.compiler.facts.sources import source_facts
from dslc.compiler.ir.facts import Facts, MachineFacts, SourceFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.model.model import build
from dslc.compiler.model.opaque import opaque
from dslc.compiler.placement.layout import lay_out
from dslc.compiler.placement.sharding import low_copy, low_precision, units
from dslc.compiler.rules.analyse import analyse, context_of
from dslc.compiler.rules.analysis import Analysis
from dslc.compiler.rules.training import configuration_file
from dslc.dsl.bounds import LOOKS, MISTAKES
from dslc.dsl.diagnostics import Diagnostic, Full, Note, Report
from dslc.dsl.language.calls import Datasets, Parquet, PythonLoss, PythonSource
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import PythonNetwork, TransformersNetwork
from dslc.dsl.language.registry import Range
from dslc.dsl.meaning.load import Loaded
from dslc.dsl.show import render
from dslc.dsl.source import Span
from dslc.dsl.words import plural
from dslc.unseen import can_be_tried, tell_of_network

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts


def show(diagnostics: Iterable[Diagnostic]) -> None:
    """Prints diagnostics to standard error, coloured on a terminal."""
    found = presented(diagnostics)
    if found:
        color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        print(render(found, color=color), file=sys.stderr)


def presented(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """What a person is shown: of what this version cannot run yet, one warning with a note for each field, and nothing
    while there are errors to mend. `run` has each of them as an error, and those stay."""
    found = list(diagnostics)
    later = [each for each in found if each.code == "W0801"]
    kept = [each for each in found if each not in later]
    if not later or any(each.severity == "error" for each in kept):
        return kept
    notes = tuple(Note(message=each.message.split(" is checked")[0], span=each.span) for each in later[1:])
    label = "and what the notes name" if notes else ""
    return [*kept, replace(later[0], notes=notes, label=label)]


def inspect(
    loaded: Loaded, report: Report, reuse: Reuse | None = None, *, trace: bool = False, run: bool = False
) -> Analysis | None:
    """Adds what `load` and the rules found to the report, and gives the analysis where there can be one.

    An elastic job is analysed for each admissible count of nodes, the largest last. `reuse` is handed from one
    combination of a sweep to the next.
    """
    try:
        report.extend(loaded.report.found)
        if loaded.job is None:
            return None
        return _inspect(loaded, loaded.job, report, reuse or Reuse(), trace=trace, run=run)
    except Full:
        return None


def over(report: Report) -> bool:
    """Whether a bound was met after which no further combination of a sweep is looked at."""
    return any(d.code in (MISTAKES.code, LOOKS.code) for d in report.errors)


def _inspect(loaded: Loaded, job: JobSpec, report: Report, reuse: Reuse, *, trace: bool, run: bool) -> Analysis | None:
    reuse.spent += READING
    nodes = job.devices.nodes
    counts = range(nodes.first, nodes.last) if isinstance(nodes, Range) else range(0)
    if not _few(job, loaded.looks * (len(counts) + 1), report):
        return None
    facts = gather(job, report, trace=(trace or run) and not report.errors, run=run)
    for count in counts:
        if reuse.enough:
            tell_of_work(f"{count - counts.start} of {len(counts) + 1} counts of nodes were", job, report)
            break
        smaller = replace(job, devices=replace(job.devices, nodes=count))
        analyse(smaller, facts, report, loaded.broken, reuse=reuse)
    return analyse(job, facts, report, loaded.broken, reuse=reuse)


def _few(job: JobSpec, looks: int, report: Report) -> bool:
    """Whether each count of nodes of an elastic job, in each combination of the sweep, can be looked at."""
    if looks <= LOOKS.most:
        return True
    report.add(
        LOOKS.code,
        f"an elastic job is checked for each count of its nodes, in each combination of its sweep: {looks:,} times",
        job.devices.at("nodes"),
        help=f"{LOOKS.most} are the most: a shorter range",
    )
    return False


def tell_of_work(seen: str, job: JobSpec, report: Report) -> None:
    """Says how much of a sweep or a range of nodes was looked at, where all of it would take too long."""
    report.add(
        "W0614",
        f"{seen} looked at: all of them would take long for a job of this size",
        job.model.at("network"),
        help="`--set` chooses one to be looked at",
    )


# ------------------------------------------------------------------------------------------------------------ facts


def gather(job: JobSpec, report: Report, *, trace: bool, run: bool) -> Facts:
    """What the job does not say: of its data, of the user's own functions (only with `trace`), of this machine."""
    source = source_facts(job.data.source, context_of(job))
    if isinstance(job.data.source, Parquet | Datasets) and not source.missing:
        source = _opened(job.data.source, fetch=run)
    model: ModelFacts | None = None
    if trace and isinstance(job.data.source, PythonSource):
        source = _traced_source(job, job.data.source, report) or source
    network = job.model.network
    if trace and isinstance(network, PythonNetwork):
        model = _traced_model(job, network, source, report)
    elif trace and isinstance(network, TransformersNetwork) and _is_here(network, job.folder):
        model = _traced_transformers(job, network, source, report, run)
    made = isinstance(network, PythonNetwork | TransformersNetwork) and _is_here(network, job.folder)
    if trace and not run and made and source.input is None and not report.errors:
        tell_of_network(job, source, report)
    if trace and isinstance(job.model.loss, PythonLoss):
        _try_loss(job, job.model.loss, source, model, report)
    return Facts(source=source, model=model, machine=_machine(job) if run else None)


def _is_here(network: PythonNetwork | TransformersNetwork, folder: str) -> bool:
    """Whether there is a configuration to build the network from; that there is none is a rule's to say."""
    if isinstance(network, PythonNetwork):
        return True
    file = configuration_file(network, folder)
    return file is None or os.path.exists(file)


def _opened(call: Parquet | Datasets, *, fetch: bool) -> SourceFacts:
    """Opens a table in a child, so that the library is not loaded here. It may be fetched by `run` alone."""
    from dslc.compiler.facts.sources import source_key
    from dslc.compiler.ir.program import from_json

    _, arguments = source_key(call)

    def work() -> Any:
        from dslc.runtime.data import tables

        try:
            if isinstance(call, Parquet):
                return tables.parquet_facts(call.files, call.input, call.target, call.size)
            return tables.datasets_facts(arguments, fetch=fetch)
        except tables.TableFault as fault:
            return fault.facts()

    answer = in_child(work)
    if "made" in answer:
        return from_json(SourceFacts, answer["made"])
    return SourceFacts(
        missing=f"the data cannot be opened: {answer['error']}",
        help="the library that opens it failed; call it alone to see the whole traceback",
        code="E0311",
    )


def _machine(job: JobSpec) -> MachineFacts:
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus_here() if job.devices.gpus is not None else (),
    )


def gpus_here() -> tuple[int, ...]:
    """The memory of each GPU of this machine, in bytes. A child looks: no process can use a GPU that is forked from one
    in which CUDA has begun. Raises RuntimeError."""

    def look() -> list[int]:
        import torch

        return [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]

    answer = in_child(look)
    if "made" not in answer:
        raise RuntimeError(f"the GPUs of this machine cannot be looked at: {answer['error']}")
    return tuple(answer["made"])


def _traced_source(job: JobSpec, call: PythonSource, report: Report) -> SourceFacts | None:
    from dslc.compiler.ir.program import from_json, to_json

    def use(make: Callable[..., Any]) -> Any:
        from dslc.compiler.trace.trace import trace_source
        from dslc.runtime.process.random_numbers import begin_sample

        return to_json(trace_source(make, lambda index: begin_sample(job.train.seed, "train", 0, index)))

    made = _used(job, call, "source", use, report)
    return made and from_json(SourceFacts, made)


def _traced_model(job: JobSpec, call: PythonNetwork, source: SourceFacts, report: Report) -> ModelFacts | None:
    from dslc.compiler.ir.module_facts import ModelFacts
    from dslc.compiler.ir.program import from_json, to_json

    def use(make: Callable[..., Any]) -> Any:
        from dslc.compiler.trace.trace import try_to_make

        return to_json(_told(job, make, source)) if source.input is not None else try_to_make(make)

    made = _used(job, call, "model", use, report)
    return made and from_json(ModelFacts, made)


def _try_loss(job: JobSpec, call: PythonLoss, source: SourceFacts, model: ModelFacts | None, report: Report) -> None:
    """Looks a user's loss up and, where it is known what it is given, and that is not large, calls it."""
    from dslc.compiler.graph.constants import loss_step

    made = model or build(job.model, source, context_of(job), Report())
    output, target = made.output if made is not None else None, source.target

    def use(function: Callable[..., Any]) -> None:
        if output is not None and target is not None and can_be_tried(output, target):
            from dslc.runtime.model.losses import try_out

            layout = lay_out(job, Report())
            ranks = layout.world_size if layout else 1
            try_out(loss_step(job, source), output.shape, target.shape, target.dtype, ranks)

    _used(job, call, "loss", use, report)


def _used(
    job: JobSpec,
    call: PythonSource | PythonNetwork | PythonLoss,
    what: str,
    use: Callable[[Callable[..., Any]], Any],
    report: Report,
) -> Any:
    """What `use` makes of a user's function, in a child, so that nothing it does stays; reports what it raised."""
    from dslc.compiler.graph.constants import python_function

    named = python_function(call, job.folder)

    def work() -> Any:
        import torch

        from dslc.runtime.process.user_code import load_function

        torch.set_num_threads(1)  # a parent that ran parallel operations leaves no threads to its child
        torch.manual_seed(job.train.seed)
        return use(load_function(named))

    answer = in_child(work)
    _tell_what_is_left(f"`{call.function}`", answer, call.at("function"), report)
    if "made" in answer:
        return answer["made"]
    report.add(
        "E0802",
        f"`{call.function}` cannot be used as a {what}: {answer['error']}",
        call.at("function"),
        label=answer["where"],
        help=answer["remedy"] or _remedy(call, what, answer),
    )
    return None


_WANTED = {
    "source": "a data set has `len` and indexing, and a sample of it is a pair (input, target)",
    "model": "it is called once, without data, and returns a `torch.nn.Module` that takes one tensor and gives one",
    "loss": "it takes (output, target) and gives one number for each sample or token",
}


def _remedy(call: PythonSource | PythonNetwork | PythonLoss, what: str, answer: dict[str, Any]) -> str:
    """Which line of whose is to be corrected; of what raised nothing, what is wanted."""
    where, module = answer["where"], answer["module"]
    if where or module:
        place = f"{where}, where it calls the module {module}" if where and module else where or f"the module {module}"
        return f"correct {place}: `dslc` calls `{call.function}` once before any process starts"
    if answer["absent"]:
        return "the folder of the job is searched first, then where Python looks; `folder/module:function` is elsewhere"
    return _WANTED[what]


def _tell_what_is_left(what: str, answer: dict[str, Any], where: Span | None, report: Report) -> None:
    left = answer.get("left")
    if left:
        report.add(
            "W0438",
            f"{what} leaves {left} running, which `dslc` has ended",
            where,
            help="let it wait for what it starts, or start threads with `daemon = True`: a rank that ends waits for no "
            "other process",
        )


def _told(job: JobSpec, make: Callable[[], Any], source: SourceFacts) -> ModelFacts:
    """What the module that `make` gives is made of, and, where the job has a pipeline, how it can be cut."""
    from dslc.compiler.graph.constants import precision_step
    from dslc.compiler.trace.trace import trace_model, try_low_copy

    kept: list[Any] = []

    def keep() -> Any:
        kept.append(make())
        return kept[-1]

    assert source.input is not None
    facts = trace_model(keep, source.input, **_axes(job))
    graph = opaque(facts, job.model, source, Report()) if low_copy(job) else None
    if graph is not None:
        sharded = [unit.name for unit in units(graph) if unit.name]
        try_low_copy(kept[0], source.input, precision_step(job).dtype, sharded)
    if job.parallelism.pipeline == 1:
        return facts
    from dslc.compiler.ir.program import TensorParallelStep
    from dslc.runtime.pipeline.captured import look
    from dslc.runtime.pipeline.recording import CaptureError

    axis: TensorParallelStep | None = None
    if facts.shares is not None and not facts.shares.fault:
        styles, ranks = facts.shares.styles, facts.shares.ranks
        axis = TensorParallelStep(size=ranks, sequence=False, styles=styles, loss_parallel=False)
    layers = {layer.name: layer for layer in facts.layers}
    rest = layers[""].parameters if "" in layers else ()
    try:
        ordered, seams = look(
            kept[0], tuple(layers), rest, source.input.shape, source.input.dtype, precision_step(job), axis
        )
    except CaptureError as error:
        return replace(facts, uncut=(str(error), error.where))
    except Exception as error:  # of any kind: it is the user's code that runs
        return replace(facts, uncut=(_first_line(error), _where(error)))
    from dslc.compiler.ir.module_facts import SeamFacts

    told = tuple(
        SeamFacts(refused=seam.refused, sent=tuple(TensorFact(shape=s, dtype=d) for s, d in seam.sent))  # type: ignore[arg-type]
        for seam in seams
    )
    return replace(facts, layers=tuple(layers[name] for name in ordered), seams=told)


def _axes(job: JobSpec) -> dict[str, Any]:
    """What the job does to its network, as far as tracing looks at it."""
    parallelism = job.parallelism
    return {
        "low": low_precision(job),
        "compile": job.train.compile,
        "tensor": parallelism.tensor,
        "tensor_plan": parallelism.tensor_plan,
    }


def _traced_transformers(
    job: JobSpec, network: TransformersNetwork, source: SourceFacts, report: Report, run: bool
) -> ModelFacts | None:
    """Builds the model without memory in a child, and reports what the library says against its configuration. Before a
    `run` this process imports the library, for the child and for the ranks that are forked from it later."""
    from dslc.compiler.graph.constants import transformers_step
    from dslc.compiler.ir.program import from_json, to_json

    if importlib.util.find_spec("transformers") is None:
        report.add(
            "E0803",
            "the library `transformers` is not installed",
            network.span,
            help="`pip install 'dslc[transformers]'`",
        )
        return None

    if run:
        from dslc.runtime.model.transformers_model import preload

        preload(transformers_step(network, source, job.folder))

    padding: list[int | None] = []

    def work() -> Any:
        import torch

        from dslc.compiler.trace.trace import TraceError
        from dslc.runtime.model.transformers_model import (
            build_transformers,
            check_configuration,
            longest,
            padding_of,
        )

        torch.set_num_threads(1)
        step = transformers_step(network, source, job.folder, job.data.pad)
        if source.input is None:
            return check_configuration(step)

        def make() -> torch.nn.Module:
            model = build_transformers(step)
            padding.append(padding_of(model))
            most, length = longest(model), source.input.shape[0] if source.input and source.input.shape else 0
            if source.input and source.input.dtype == "int64" and most is not None and most < length:
                raise TraceError(
                    f"it has positions for {plural(most, 'token')}, and the data's sequences have {length}"
                )
            return model

        facts = _told(job, make, source)
        return to_json(replace(facts, padding=padding[0]))

    answer = in_child(work)
    _tell_what_is_left(f"`{network.path}`", answer, network.at("path"), report)
    if "made" in answer:
        from dslc.compiler.ir.module_facts import ModelFacts

        return answer["made"] and from_json(ModelFacts, answer["made"])
    report.add(
        "E0805",
        f"`{network.path}` cannot be used as a model: {answer['error']}",
        network.at(answer["argument"] or "path"),
        help="arguments of `transformers(…)` take the place of what the configuration says",
    )
    return None


def in_child(work: Callable[[], Any]) -> dict[str, Any]:
    """`{"made": work()}` from a forked child, or what it raised: `error`, `where`, `module`, `absent`, `argument` and
    `remedy`; `left` says in words what `work` left running, which is ended.

    In a program that has used torch on a machine with GPUs, whose children may not, the work is done here.
    """
    import tempfile  # here, as most checks need no child

    from dslc.leftovers import in_words, supervise

    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:  # a pipe would stay open with what the child leaves

        def tell(status: int, left: Sequence[int]) -> None:
            _write({"status": status, "processes": left}, file)

        child = os.fork()
        if child == 0:
            supervise(lambda: _answer(work, file), tell)
        os.waitpid(child, 0)
        file.seek(0)
        answers = [json.loads(line) for line in file]
    answer, ended = answers[0], answers[-1]
    if answer is ended:  # the child said nothing
        said = f"the process ended with status {ended['status']}"
        told = ("where", "argument", "remedy", "module", "absent")
        answer = {"error": said, "threads": [], "processes": []} | dict.fromkeys(told, "")
    answer["left"] = in_words(answer["threads"], [*answer["processes"], *ended["processes"]])
    return _attempt_here(work) if "barred" in answer else answer


def _answer(work: Callable[[], Any], file: TextIO) -> NoReturn:
    """Writes the answer of a child, and ends it, whatever `work` has left running."""
    from dslc.leftovers import end_own

    here = os.getpid()
    _hush_libraries()
    try:
        answer = {"barred": True} if _torch_is_barred() else _attempt(work, BaseException)
        if os.getpid() == here:  # else `work` forked, and this is the process that it forked
            threads, processes = end_own()
            _write(answer | {"threads": threads, "processes": processes}, file)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(0)


def _write(said: dict[str, Any], file: TextIO) -> None:
    file.write(json.dumps(said) + "\n")
    file.flush()


def _hush_libraries() -> None:
    """In a child: what torch and the libraries around it log is not for the reader of our messages. What they do in a
    training stands in the logs of its ranks."""
    import logging
    import warnings

    torch = sys.modules.get("torch")
    if torch is None:
        os.environ.setdefault("TORCH_LOGS", "-all")  # read when it is imported: errors alone
    elif "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(all=logging.ERROR)
    logging.getLogger("torchao").setLevel(logging.ERROR)
    for name in ("torch", "torchao"):
        warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _attempt(work: Callable[[], Any], *caught: type[BaseException]) -> dict[str, Any]:
    try:
        return {"made": work()}
    except caught as error:  # handed on, to be reported
        own = {name: getattr(error, name, "") for name in ("argument", "remedy")}
        place = {"where": _where(error), "module": _module(error), "absent": isinstance(error, ImportError)}
        return {"error": _first_line(error), **place, **own}


def _torch_is_barred() -> bool:
    """Whether torch refuses to work in this child: CUDA, or the threads of its backward pass, began in the parent."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    try:
        torch.zeros((), requires_grad=True).backward()
    except RuntimeError:
        return True
    return bool(torch.cuda._is_in_bad_fork())


def _attempt_here(work: Callable[[], Any]) -> dict[str, Any]:
    """The program keeps its threads and its random numbers."""
    import torch

    threads = torch.get_num_threads()
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    try:
        with torch.random.fork_rng(gpus):
            return _attempt(work, Exception, SystemExit)
    finally:
        torch.set_num_threads(threads)


def _first_line(error: BaseException) -> str:
    from dslc.runtime.process.error_text import error_text, narrow

    text = narrow(error_text(error).strip().split("\n")[0])
    kind = type(error).__name__
    plain = kind in ("TraceError", "TransformersError", "ImportError")
    return text if plain and text else f"{kind}: {text}" if text else kind


def _module(error: BaseException) -> str:
    """Which module of a network was called when its forward pass raised this: "`out` (Linear)"; "" where none was."""
    import traceback

    torch = sys.modules.get("torch")
    calls = traceback.walk_tb((error.__cause__ or error).__traceback__)
    called = [frame.f_locals.get("self") for frame, _ in calls]
    modules = [each for each in called if torch is not None and isinstance(each, torch.nn.Module)]
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    name = names.get(id(modules[-1]), "")
    return f"`{name}` ({type(modules[-1]).__name__})" if name else ""


def _where(error: BaseException) -> str:
    """The deepest line of the traceback that is the user's own."""
    import traceback

    from dslc.runtime.process.whose_code import is_users

    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}, line {error.lineno}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{os.path.basename(own[-1].filename)}, line {own[-1].lineno}" if own else ""
