"""Tries what pictures go through before a training: that torchvision is there, and takes these arguments, and that a
user's transform gives pictures of the network's size.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from dslc.compiler.ir.facts import SourceFacts
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.language.calls import PICTURES, PythonTransform
from dslc.dsl.language.job import JobSpec
from dslc.probe.child import in_child
from dslc.probe.user_code_trials import used

SIDE = 1.25  # sides of the pictures that are tried, over those of the network's input


def look_for_library(job: JobSpec, report: Report) -> None:
    """Reports that torchvision is not installed: a warning, as another machine may have it."""
    source = job.data.source
    if isinstance(source, PICTURES) and source.augment and importlib.util.find_spec("torchvision") is None:
        said = Diagnostic(
            code="E0803",
            message="`augment` needs the library `torchvision`, which is not installed",
            span=source.at("augment"),
            help="`pip install 'dslc[torchvision]'`; torch for CPUs alone is best beside torchvision for CPUs alone, "
            "from the same index",
        )
        report.extend([said.as_warning()])


def try_pictures(job: JobSpec, facts: SourceFacts, report: Report) -> None:
    """Makes the transforms in a child, and sends a picture of random numbers through them."""
    from dslc.compiler.graph.constants import python_function
    from dslc.compiler.graph.pictures import picture_step

    source: Any = job.data.source
    step = picture_step(source, facts, lambda call: python_function(call, job.folder))
    if report.errors or step is None or not (step.augment or step.erase or step.transform):
        return

    def work() -> dict[str, Any]:
        from dslc.runtime.data.augmentation import normalizes, own_transform, prepared
        from dslc.runtime.process.random_numbers import begin_sample

        begin_sample(job.train.seed, "train", 0, 0)
        made = prepared(step)(_picture(step.shape, exact=getattr(source, "size", None) is None))
        double = step.transform is not None and normalizes(own_transform(step))
        return {"shape": tuple(made.shape), "normalizes": double}

    own = source.transform
    if isinstance(own, PythonTransform):
        tried = used(job, own, "transform", lambda _: work(), report)
    elif importlib.util.find_spec("torchvision") is None:
        return
    else:
        answer = in_child(work)
        tried = answer.get("made")
        if tried is None:
            report.add("E0335", f"torchvision does not take this: {answer['error']}", source.at("augment"))
    if tried is not None:
        _compare(source, tuple(step.shape), tried, report)


def _compare(source: Any, wanted: tuple[int, ...], tried: dict[str, Any], report: Report) -> None:
    place = source.at("transform" if source.transform is not None else "augment")
    made = tuple(tried["shape"])
    if made != wanted:
        crop = f"`RandomResizedCrop({wanted[-1]})` or `CenterCrop({wanted[-1]})` in it"
        said = f"gives a picture of shape {_shape_text(made)}, and the network is given {_shape_text(wanted)}"
        report.add("E0336", f"`{_name(source)}` {said}", place, help=crop)
    elif tried["normalizes"]:
        chosen = "is normalised twice" if source.normalize else "is normalised in training alone"
        report.add(
            "W0335",
            f"`{_name(source)}` normalises, and `normalize` of the source is of all pictures: each {chosen}",
            place,
            help="leave `Normalize` out of the transform, and give its numbers as `normalize = normalize(mean = …, "
            "std = …)`",
        )


def _name(source: Any) -> str:
    return source.transform.function if source.transform is not None else "augment"


def _shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _picture(shape: tuple[int, ...], *, exact: bool) -> Any:
    """Returns a picture of random numbers, of the size that stored ones have (`exact`), or larger."""
    import numpy as np
    from PIL import Image

    channels, height, width = shape
    sides = (height, width) if exact else (round(height * SIDE) + 1, round(width * SIDE) + 2)
    pixels = np.random.default_rng(0).integers(0, 256, (*sides, channels), dtype=np.uint8)
    return Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
