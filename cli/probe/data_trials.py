"""Tries what samples go through before a training: the transforms of images, and the numbers of a sampler.

torchvision must be installed and take these arguments; a user's transform must give images of the network's size. A
file of numbers is read, and a function is called once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dslc.compiler.facts.sample_numbers import count_of
from dslc.compiler.facts.source_look import MissingDataError
from dslc.compiler.facts.sources import each_source
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.model.job_steps import locate_paths
from dslc.compiler.rules.data.images import picture_step
from dslc.dsl.diagnostics import Diagnostic, Findings
from dslc.dsl.language.blocks import ByLength, PythonNumbers, Weighted
from dslc.dsl.language.calls import PictureSource, PythonSource, PythonTransform
from dslc.dsl.language.registry import Call
from dslc.dsl.words import plural
from dslc.probe.child import Json, in_child
from dslc.probe.trial import Trial
from dslc.probe.user_code_trials import used
from dslc.runtime.process.user_code import load_function

if TYPE_CHECKING:
    from PIL.Image import Image

    from dslc.compiler.trace.structures import UserValue

SIDE = 1.25  # sides of the images that are tried, over those of the network's input


def try_images(trial: Trial) -> Findings[None]:
    """Makes the transforms of each source in a child, and sends an image of random numbers through them."""
    for source_job, facts in each_source(trial.job, trial.source):
        yield from _try_images(trial, source_job.data.source, facts)


def _try_images(trial: Trial, source: Call, facts: SourceFacts) -> Findings[None]:
    step = picture_step(source, facts)
    if not trial.sound or step is None or not isinstance(source, PictureSource):
        return
    if not (step.augment or step.erase or step.transform):
        return
    step = locate_paths(step, trial.job.folder)

    def work() -> dict[str, object]:
        from dslc.runtime.data.augmentation import normalizes, own_transform, prepared
        from dslc.runtime.process.random_numbers import begin_sample

        begin_sample(trial.job.train.seed, "train", 0, 0)
        image = prepared(step)(_picture(step.shape, exact=getattr(source, "size", None) is None))
        double = step.transform is not None and normalizes(own_transform(step))
        return {"shape": tuple(image.shape), "normalizes": double}

    transform = source.transform
    if isinstance(transform, PythonTransform):
        image_facts = yield from used(trial, transform, "transform", lambda _: work())
    elif importlib.util.find_spec("torchvision") is None:
        return
    else:
        answer = in_child(work)
        image_facts = answer.get("made")
        if image_facts is None:
            yield Diagnostic(
                "E0335", f"torchvision does not take this: {answer['error']}", source.value_span("augment")
            )
    if image_facts is not None:
        yield from _compare(source, tuple(step.shape), image_facts)


def _compare(
    source: PictureSource, expected_shape: tuple[int, ...], image_facts: dict[str, Json]
) -> Iterator[Diagnostic]:
    place = source.value_span("transform" if source.transform is not None else "augment")
    shape = tuple(image_facts["shape"])
    if shape != expected_shape:
        crop = f"`RandomResizedCrop({expected_shape[-1]})` or `CenterCrop({expected_shape[-1]})` in it"
        reason = (
            f"gives a picture of shape {_shape_text(shape)}, and the network is given {_shape_text(expected_shape)}"
        )
        yield Diagnostic("E0336", f"`{_name(source)}` {reason}", place, help=crop)
    elif image_facts["normalizes"]:
        consequence = "is normalised twice" if source.normalize else "is normalised in training alone"
        yield Diagnostic(
            "W0335",
            f"`{_name(source)}` normalises, and `normalize` of the source is of all pictures: each {consequence}",
            place,
            help="leave `Normalize` out of the transform, and give its numbers as `normalize = normalize(mean = …, "
            "std = …)`",
        )


def _name(source: PictureSource) -> str:
    return source.transform.function if isinstance(source.transform, PythonTransform) else "augment"


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _picture(shape: tuple[int, ...], *, exact: bool) -> Image:
    """Returns a picture of random numbers, of the size that stored ones have (`exact`), or larger."""
    import numpy as np
    from PIL import Image

    channels, height, width = shape
    sides = (height, width) if exact else (round(height * SIDE) + 1, round(width * SIDE) + 2)
    pixels = np.random.default_rng(0).integers(0, 256, (*sides, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)


def try_sampler(trial: Trial) -> Findings[None]:
    """Tries the numbers of a sampler, which may fail or be such that nothing can be drawn by them. Lengths are tried on
    the first sample of a user's data set.
    """
    sampler = trial.job.data.sampler
    if isinstance(sampler, ByLength) and isinstance(sampler.length, PythonNumbers):
        yield from _try_length(trial, sampler.length)
    elif isinstance(sampler, Weighted):
        yield from _try_weights(trial, sampler)


def _try_weights(trial: Trial, sampler: Weighted) -> Findings[None]:
    samples, step = trial.source.samples, trial.steps.sampler
    assert step is not None

    def look() -> str:
        from dslc.runtime.data.sample_keys import fault_of, load_numbers

        values = load_numbers(step)
        is_function = isinstance(sampler.weights, PythonNumbers)  # a rule counts the numbers of a file
        if is_function and samples is not None and len(values) != samples:
            return f"it gives {plural(len(values), 'number')}, and the data has {plural(samples, 'sample')}"
        return fault_of(step, values, len(values))

    name = f"`{sampler.weights.function}`" if isinstance(sampler.weights, PythonNumbers) else "the file of weights"
    if isinstance(sampler.weights, PythonNumbers):
        fault = yield from used(trial, sampler.weights, "sampler", lambda _: look())
    elif not _is_readable(sampler.weights):
        return  # the rules say so
    else:
        answer = in_child(look)
        fault = answer.get("made", answer.get("error"))
    if fault:
        yield Diagnostic(
            "E0318",
            f"{name} does not fit: {fault.removeprefix(f'{step.line}: ')}",
            sampler.value_span("weights"),
            help="one number of at least 0 for each sample, in the order of the source",
        )


def _is_readable(path: str) -> bool:
    """Returns True for a file of numbers that can be read."""
    try:
        count_of(path, path)
    except MissingDataError:
        return False
    return True


def _try_length(trial: Trial, call: PythonNumbers) -> Findings[None]:
    user_source = trial.job.data.source
    if not isinstance(user_source, PythonSource):
        return

    def use(length: Callable[..., UserValue]) -> float:
        from dslc.runtime.process.random_numbers import begin_sample

        data_set = load_function(trial.function(user_source))()
        samples = data_set[0] if trial.source.validation_samples is not None else data_set
        begin_sample(trial.job.train.seed, "train", 0, 0)
        return float(length(samples[0]))

    yield from used(trial, call, "sampler", use)
