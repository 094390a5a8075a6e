"""Tries the user's own functions before any rank starts, each in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dslc.compiler.facts.sources import context_of
from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.network_facts import CodePlace, NetworkFacts, OptimizerFacts
from dslc.compiler.ir.program import LearningRateStep, LossStep, MetricStep, OptimizerStep
from dslc.compiler.ir.steps import LOSS, PythonFunction
from dslc.compiler.model.model import ModelGraph, build
from dslc.compiler.model.opaque import opaque
from dslc.compiler.placement.layout import lay_out
from dslc.compiler.placement.sharding import sharding_of, trained
from dslc.compiler.rules.training.goals import check_names
from dslc.compiler.rules.training.metrics import takes_classes
from dslc.dsl.diagnostics import Diagnostic, Findings, Note, Report
from dslc.dsl.language.calls import Fp8, PythonCall, PythonLoss, PythonStep
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.loggers import LibraryLogger, PythonLogger
from dslc.dsl.language.lr_schedules import PythonSchedule
from dslc.dsl.language.metrics import PythonMetric, TorchMetric
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.remedy import remedy, remove_field, set_argument, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import article, plural, shorten_list
from dslc.probe.child import ChildAnswer, Json, first_line, import_torch_for_children, in_child, where_in_the_users_code
from dslc.probe.network_trial import real_batch
from dslc.probe.sample_outputs import Pair, read_outputs, spread
from dslc.probe.trial import Trial, missing_library
from dslc.runtime.model.errors import LossError
from dslc.runtime.process.frame_ownership import is_users
from dslc.runtime.process.user_code import load_function
from dslc.runtime.process.vision_library import VisionLibraryError

if TYPE_CHECKING:
    from dslc.compiler.trace.structures import UserValue


def try_loss(trial: Trial) -> Findings[Trial | None]:
    """Finds a user's loss and, if its input is known and not large, calls it. Adds whether it counts by itself, and
    what it draws.
    """
    job, call = trial.job, trial.job.model.loss
    if not isinstance(call, PythonLoss):
        return None
    layout = Report().collect(lay_out(job))
    pieces = layout.sizes["data"] * layout.microbatches if layout else 1
    ranks = layout.world_size if layout else 1

    def use(function: Callable[..., UserValue]) -> dict[str, object]:
        from dslc.compiler.trace.devices import cpu_tensor_of_loss, named_gpus
        from dslc.runtime.model.loss_state import LossStateError, try_state
        from dslc.runtime.model.losses import as_rank_0, mixes_samples, try_out

        _refuse_class(function, call)
        step = trial.steps.loss

        def attempt(batches: list[Pair]) -> dict[str, object]:
            try:
                for batch in batches[:1]:
                    if job.devices.gpus is not None and (place := cpu_tensor_of_loss(function, *batch)) is not None:
                        return {"cpu": place.line}
                    try_state(function, call.function, *batch, is_repeated=True)
            except LossStateError as error:
                return {"names": error.names, "moves": error.moves}
            counts = bool(sum(try_out(step, *batch) for batch in batches))  # each of them is tried
            counted_step = replace(step, counts="own") if counts else step
            draws = _draws_of_loss(counted_step, batches[-1])
            if draws is not None or pieces == 1 or call.over is not None:
                mixes = draws is not None and draws.loss_mixes and pieces > 1 and call.over is None
                return {"counts": counts, "mixes": mixes, "draws": to_json(draws)}
            mixes = mixes_samples(counted_step, *batches[-1])
            with contextlib.suppress(Exception):  # any kind: the user's code may refuse what is invented
                if not mixes and (uniform := spread(batches[-1])) is not None:
                    mixes = mixes_samples(counted_step, *uniform)
            return {"counts": counts, "mixes": mixes}

        with as_rank_0(ranks), named_gpus(job):
            return trial.batches.first_accepted("train", attempt) or {}

    answer = (yield from used(trial, call, "loss", use, absent=trial.batches.absent)) or {}
    if (yield from _check_loss_trial(job, call, answer, pieces)):
        return None
    facts: dict[str, object] = {}
    if answer.get("counts"):
        facts["source"] = replace(trial.source, loss_counts=True)
    if answer.get("draws") is not None:
        facts["loss_draws"] = from_json(NetworkFacts, answer["draws"])
    return trial.with_facts(**facts) if facts else None


def _check_loss_trial(job: JobSpec, call: PythonLoss, answer: Mapping[str, Json], pieces: int) -> Findings[bool]:
    """Reports a loss on another device, one with parameters of its own, and one that mixes the samples of a batch.
    Returns True for an error.
    """
    if "cpu" in answer:
        yield Diagnostic(
            "E0681",
            f"the loss computes with a tensor on the CPU beside those on the GPU ({answer['cpu']})",
            job.model.value_span("loss"),
            help="`.to(output.device)` for a tensor that is kept; `device = output.device` for one that the loss makes",
        )
        return True
    if "names" in answer:
        yield _loss_state(call, answer["names"], answer["moves"])
        return True
    if answer.get("mixes"):
        yield Diagnostic(
            "W0625",
            f"the loss of a sample depends on the others of its batch, and a batch is cut into {pieces} pieces: the "
            "training is not that of one process",
            job.model.value_span("loss"),
            help=remedy(
                set_argument(call.span, "over", "all", f'`python("{call.function}", over = all)`'),
                " is given the outputs and targets of the whole batch, on any number of ranks and micro-batches",
            ),
        )
    return False


def _draws_of_loss(step: LossStep, batch: Pair) -> NetworkFacts | None:
    """Returns the facts of a loss that draws random numbers in a batch; None for another."""
    from dslc.compiler.trace.draws import line_of_draw
    from dslc.runtime.model.losses import try_out
    from dslc.runtime.step.draw_trial import draws_of_loss

    line = line_of_draw(lambda: try_out(step, *batch))
    if line is None:
        return None
    try:
        return draws_of_loss(step, *(spread(batch) or batch))
    except Exception as error:  # any kind: the user's code may refuse a part of a batch, or what is invented
        place = CodePlace(module=LOSS, kind="", line=line)
        reason = f"it fails on another batch, which would tell: {first_line(error)}"
        return NetworkFacts(torch_draws=place, uncontrolled_draw=place, uncontrolled_because=reason)


def _loss_state(call: PythonLoss, names: Sequence[str], moves: bool) -> Diagnostic:
    """Returns the diagnostic of a loss that has parameters of its own, or tensors that its calls change."""
    names_text = shorten_list([f"`{name}`" for name in names])
    if moves:
        message = (
            f"changes {names_text} in each call: no checkpoint keeps these numbers, and ranks would have different ones"
        )
    else:
        message = (
            f"has {plural(len(names), 'parameter')} of its own: {names_text}. Only those of the network are trained"
        )
    exception_text = "" if moves else "; what is not to train has `requires_grad_(False)`"
    return Diagnostic(
        "E0661" if moves else "E0660",
        f"the loss `{call.function}` {message}",
        call.value_span("function"),
        help=remedy(
            "make the loss a module of the network, whose `forward` returns it, with ",
            set_field("model.loss", "own()"),
            exception_text,
        ),
    )


def _refuse_class(function: Callable[..., UserValue], call: PythonLoss) -> None:
    """Raises LossError for a class, whose objects may be losses."""

    kind = getattr(function, "func", function)
    if not isinstance(kind, type):
        return
    module, _, name = call.function.partition(":")
    class_name = name.rpartition(".")[2]
    instance = class_name.lower()
    construction = f"{instance} = {name}({', '.join(f'{key} = {value!r}' for key, value in call.arguments)})"
    place = f"`{module}`, `{construction}`"
    if not is_users(inspect.getfile(kind)):
        place = f"a module of yours, `losses.py`: `from {module} import {class_name}`, `{construction}`"
        module = "losses"
    remedy = f'make the object in {place}, and name it: `python("{module}:{instance}")`'
    if "reduction" in inspect.signature(kind).parameters:
        remedy += '; `reduction = "none"` gives the losses of the samples'
    raise LossError(
        f"`{name}` is a class, and a loss is a function, or an object that can be called",
        remedy=remedy,
    )


def try_metrics(trial: Trial) -> Findings[None]:
    """Makes a user's metrics, and looks for the library of others."""
    for call, step in zip(trial.job.evaluate.metrics, trial.steps.metrics, strict=True):
        if isinstance(call, PythonMetric):
            yield from _try_metric(trial, call, step)
        elif isinstance(call, TorchMetric):
            yield from _look_for_torchmetrics(trial, call, step)


def _try_metric(trial: Trial, call: PythonMetric, step: MetricStep) -> Findings[None]:
    """Makes a user's metric. If its input is known and not large, tries whether its states add up over ranks, and
    whether it gives the numbers of the goals.
    """

    def use(function: Callable[..., UserValue]) -> list[str] | None:
        from dslc.runtime.loop.stateful_metrics import MetricError, StatefulMetric, try_out

        loss = trial.steps.loss
        StatefulMetric(step, loss).make_metric({})
        try:
            return trial.batches.first_accepted("eval", lambda batches: try_out(step, loss, batches))
        except Exception as error:  # any kind: the user's code runs, or that of a library on what it does not take
            if isinstance(error, MetricError) or not trial.batches.structured or where_in_the_users_code(error):
                raise
            raise MetricError(
                f"{first_line(error)}: it is given a structure, and not one tensor",
                remedy="a class of yours whose `update(output, target)` hands the tensors it needs to a metric",
            ) from error

    numbers = yield from used(trial, call, "metric", use, absent=trial.batches.absent)
    if numbers is not None:
        yield from check_names(trial.job, call, numbers)


def _look_for_torchmetrics(trial: Trial, metric: TorchMetric, step: MetricStep) -> Iterator[Diagnostic]:
    """Says whether the library can be used. Before a `run` this process imports it, for the ranks that are forked
    from it later.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        yield missing_library("torchmetrics", metric.span)
    elif trial.run:
        from dslc.runtime.loop.stateful_metrics import preload

        try:
            preload([step])
        except VisionLibraryError as error:
            yield Diagnostic("E0803", f"`torchmetrics` cannot be used: {error}", metric.span, help=error.remedy)


def try_targets(trial: Trial) -> Findings[None]:
    """Finds metrics over classes beside a user's loss, if a few samples have a target that is no class and counts."""
    job, file, step = trial.job, trial.batches.file, trial.steps.loss
    metrics = [metric for metric in job.evaluate.metrics if takes_classes(metric)]
    if not file or not isinstance(job.model.loss, PythonLoss) or not metrics:
        return

    def look() -> tuple[int, int] | None:
        from dslc.runtime.data.samples import first_out_of_range
        from dslc.runtime.model.losses import classes_last

        for output, target in read_outputs(file, "eval"):
            scores, labels = classes_last(step, output, target)
            if target.is_floating_point():
                return None
            if (number := first_out_of_range(labels, scores.shape[-1], step.ignore)) is not None:
                return number[1], scores.shape[-1]
        return None

    answer = in_child(look)
    if answer.get("made") is None:  # a rule reports outputs that are no scores
        return
    target, classes = answer["made"]
    for metric in metrics:
        yield Diagnostic(
            "E0691",
            f"`{metric.word}` counts all targets, and a sample has the target {target}, where the network scores "
            f"{plural(classes, 'class')}",
            metric.span or job.evaluate.value_span("metrics"),
            notes=(Note(message="the loss is yours", span=job.model.value_span("loss")),),
            help=remedy(
                set_argument(
                    job.model.loss.span, "ignore", target, f'`python("{job.model.loss.function}", ignore = {target})`'
                ),
                f" leaves {target} out of metrics as well",
            ),
        )


def try_step(trial: Trial) -> Findings[Trial | None]:
    """Does a user's own step with batches of two and of four samples, if the data tells what one is: again, if its
    parts are to be sharded, with parameters that are there only while a part is called. Adds what it draws.
    """
    job, source, call, steps = trial.job, trial.source, trial.job.train.step, trial.steps
    if not isinstance(call, PythonStep) or not isinstance(steps.network, PythonFunction):
        return None
    network, layout = steps.network, Report().collect(lay_out(job))
    shards = layout is not None and sharding_of(job, layout).engine == "fsdp"

    def use(function: Callable[..., UserValue]) -> dict[str, object] | None:
        from dslc.compiler.trace.batch import LARGE, SMALL, batch_of, read_example
        from dslc.runtime.parallel.per_module_sharding import present_when_called
        from dslc.runtime.step.custom_step import try_out
        from dslc.runtime.step.draw_trial import draws_of_step

        if source.structures is not None:
            example = read_example(trial.files.batches)
            batches = {samples: example.input(samples) for samples in (SMALL, LARGE)}
        elif source.input is not None and source.target is not None:
            facts = source.input, source.target
            batches = {samples: tuple(batch_of(fact, samples, None) for fact in facts) for samples in (SMALL, LARGE)}
        else:
            return None
        model, step, loss = load_function(network)(), trial.function(call), steps.loss
        draws = draws_of_step(step, loss, model, batches, _distinct_samples(trial))
        result: dict[str, object] = {"draws": to_json(draws)}
        if shards:
            try:
                with present_when_called(model):
                    try_out(step, loss, model, batches[SMALL], SMALL)
            except Exception as error:  # any kind: the user's code runs
                result["where"] = where_in_the_users_code(error) or first_line(error)
        return result

    result = (yield from used(trial, call, "step", use)) or {}
    if "where" in result:
        yield Diagnostic(
            "E0624",
            "a part of the network is used otherwise than by calling it, and its parameters are gathered only then: "
            f"{result['where']}",
            job.parallelism.value_span("zero"),
            notes=(Note(message="the step", span=job.train.value_span("step")),),
            help=remedy(
                "call the part itself, so that its `forward` uses its parameters; or ",
                set_field("parallelism.zero", 1),
            ),
        )
    if "draws" not in result:
        return None
    return trial.with_facts(step_draws=from_json(NetworkFacts, result["draws"]))


def _distinct_samples(trial: Trial) -> UserValue | None:
    """Returns a batch of different samples, as a step is given it; None if the data gives none."""
    with contextlib.suppress(Exception):  # any kind: the user's data set may fail, which its own trial reports
        batch = real_batch(trial)
        if batch is not None and batch[1] is not None:
            return batch[0] if batch[1] is batch[0] else batch
    return None


def try_schedule(trial: Trial) -> Findings[None]:
    """Asks a user's schedule for the factors of some steps, twice."""
    call, steps = trial.job.train.lr_schedule, trial.job.train.steps or 1000
    if not isinstance(call, PythonSchedule):
        return

    def use(function: Callable[..., UserValue]) -> None:
        from dslc.runtime.loop.learning_rate import schedule

        factor = schedule(LearningRateStep(kind="python", steps=steps, python=trial.function(call)))
        for step in {0, steps // 2, steps - 1}:
            if factor(step) != factor(step):
                raise ValueError(f"it gives another factor when it is asked for step {step} again")

    yield from used(trial, call, "schedule", use)


def try_optimizer(trial: Trial) -> Findings[Trial | None]:
    """Measures the state of a user's optimizer on the parameters that train, if they are known, and tries how its
    updates may be divided. Adds nothing if it cannot be used.
    """
    job, source, model, call = trial.job, trial.source, trial.facts.model, trial.job.train.optimizer
    if call.has_codes and importlib.util.find_spec("torchao") is None:
        yield missing_library("torchao", call.value_span("state_"))
    if isinstance(job.train.precision, Fp8) and importlib.util.find_spec("torchao") is None:
        yield missing_library("torchao", job.train.value_span("precision"))
    if not isinstance(call, PythonOptimizer):
        return None

    graph = Report().collect(opaque(model, job.model, source) if model else build(job.model, source, context_of(job)))
    trained_parameters = _trained(job, graph) if graph is not None else []
    step = OptimizerStep(
        kind=call.function,
        lr=call.lr,
        state=(),
        counts=(),
        fused=(),
        no_decay=job.train.no_decay,
        python=trial.function(call),
    )

    def use(function: Callable[..., UserValue]) -> Json:
        from dslc.runtime.loop.optimizer_trial import try_out

        try:
            return to_json(try_out(step, trained_parameters))
        except Exception as error:  # any kind: the user's code runs
            if step.no_decay:
                with contextlib.suppress(Exception):  # any kind: the user's code fails without groups as well
                    try_out(replace(step, no_decay=()), trained_parameters)
                    return first_line(error)
            raise

    result = yield from used(trial, call, "optimizer", use)
    if isinstance(result, str):
        yield Diagnostic(
            "E0690",
            f"`no_decay` divides the parameters into two groups, which `{call.function}` does not take: {result}",
            job.train.value_span("no_decay"),
            notes=(Note(message="the optimizer", span=job.train.value_span("optimizer")),),
            help=remedy(
                remove_field("train.no_decay"),
                "; or an optimizer whose `params` may be groups, as those of `torch.optim` are",
            ),
        )
        return None
    if result is None:
        return None
    facts = from_json(OptimizerFacts, result)
    return trial.with_facts(optimizer=facts if trained_parameters else replace(facts, kinds=(), parameters=()))


def _trained(job: JobSpec, model: ModelGraph) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Returns all names and the shape of each parameter that trains, each tied one once."""
    all_parameters, names = [q for layer in model.layers for q in layer.parameters], trained(job, model)
    return [(model.names.all_names(q.name), q.shape) for q in all_parameters if q.name in names]


def try_followers(trial: Trial) -> Findings[None]:
    """Looks at the methods of hooks and loggers, which are not made: that may begin something. Looks for the libraries
    of other loggers.
    """
    job = trial.job
    for logger in job.log.loggers:
        if isinstance(logger, LibraryLogger) and logger.library and not importlib.util.find_spec(logger.library):
            yield missing_library(logger.extra, logger.span)
    own_loggers = [logger for logger in job.log.loggers if isinstance(logger, PythonLogger)]
    for call, what in [*((hook, "hook") for hook in job.train.hooks), *((logger, "logger") for logger in own_loggers)]:
        named = trial.function(call)

        def use(function: Callable[..., UserValue], named: PythonFunction = named, what: str = what) -> None:
            from dslc.runtime.loop import hooks

            (hooks.try_hook if what == "hook" else hooks.try_logger)(named)

        yield from used(trial, call, what, use)


def used(
    trial: Trial,
    call: PythonCall,
    kind: str,
    use: Callable[[Callable[..., UserValue]], object],
    wrap: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
    *,
    absent: str = "",
) -> Findings[Json]:
    """Returns the result of `use` on a user's function, in a child, so that nothing it does stays; yields an
    exception's diagnostic. `wrap` wraps the work, if given. `absent` is the reason why it was tried on invented
    numbers, which it may rightly refuse.
    """
    function_facts = trial.function(call)

    def work() -> object:
        import torch

        torch.manual_seed(trial.job.train.seed)
        return use(load_function(function_facts))

    import_torch_for_children()
    answer = in_child(wrap(work) if wrap else work)
    yield from check_what_is_left(f"`{call.function}`", answer, call.value_span("function"))
    if "made" in answer:
        return answer["made"]
    if absent and not answer["absent"]:
        yield Diagnostic(
            "W0650",
            f"`{call.function}` fails on invented numbers ({answer['error']}), and could not be tried on others, as "
            f"{absent}",
            call.value_span("function"),
            label=answer["where"],
            help="`dslc run --try` trains the first steps, on the outputs that the network gives",
        )
        return None
    yield Diagnostic(
        "E0802",
        f"`{call.function}` cannot be used as {article(kind)}: {answer['error']}",
        call.value_span("function"),
        label=answer["where"],
        help=answer["remedy"] or _remedy(call, kind, answer),
    )
    return None


_WANTED = {
    "source": "a data set has `len` and indexing, a stream is an `IterableDataset` or has `shards` and `shard(n)`; and "
    "a sample is a pair (input, target)",
    "model": "it is called once, without data, and returns a `torch.nn.Module` that takes an input of the data",
    "loss": "it takes (output, target) and gives one number for each sample or token, or a pair (sum, count)",
    "metric": "it returns a `torchmetrics.Metric`, or an object with `update(output, target)`, `compute()`, `states`",
    "optimizer": "it takes (params, lr = …) and gives a `torch.optim.Optimizer` over all of them",
    "hook": "it has `start`, `epoch`, `before_step`, `after_backward`, `after_step`, `evaluated`, `end` or `failed`",
    "logger": "it has `log(record)`",
    "sampler": "for `weighted` it takes nothing and gives a number for each sample; for `by_length` it takes a sample "
    "and gives its length",
    "transform": "it takes a picture of Pillow and gives a picture or a tensor, or it returns what does",
    "step": "it takes (training, batch), calls `training.update(losses)`, and returns the losses to be logged",
    "schedule": "it takes (step, steps) and gives the factor on the learning rate, which follows from these alone",
}


def _remedy(call: PythonCall, kind: str, answer: ChildAnswer) -> str:
    """Names the line to correct and whose it is; if nothing was raised, the expected result."""
    line, module = answer["where"], answer["module"]
    if line or module:
        place = f"{line}, where it calls the module {module}" if line and module else line or f"the module {module}"
        return f"correct {place}: `dslc` calls `{call.function}` once before any process starts"
    if answer["absent"]:
        return "the folder of the job is searched first, then where Python looks; `folder/module:function` is elsewhere"
    return _WANTED[kind]


def check_what_is_left(subject: str, answer: ChildAnswer, span: Span | None) -> Iterator[Diagnostic]:
    resources = answer.get("left")
    if resources:
        yield Diagnostic(
            "W0438",
            f"{subject} leaves {resources} running, which `dslc` has ended",
            span,
            help="let it wait for what it starts, or start threads with `daemon = True`: a rank that ends waits for no "
            "other process",
        )
