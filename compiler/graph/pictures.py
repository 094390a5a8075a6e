"""The step of what pictures go through, from a source's `augment`, `transform` and `normalize`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.program import AugmentStep, PictureStep, PythonFunction
from dslc.compiler.rules.data.images import channels_of, is_fitted, normalization
from dslc.dsl.language import calls as c
from dslc.dsl.language.augmentations import Augmentation
from dslc.dsl.language.registry import Call, fields


def picture_step(source: Call, facts: SourceFacts, own: Callable[[c.PythonCall], PythonFunction]) -> PictureStep | None:
    """Returns the step; None if pictures are given to the network as they are. `own` finds a user's function."""
    if not isinstance(source, c.PICTURES):
        return None
    if not (source.augment or source.transform or source.normalize):
        return None
    channels = channels_of(facts)
    if facts.input is None or channels is None:  # a rule reports it
        return None
    mean, std = normalization(source, channels)
    size: int | None = getattr(source, "size", None)
    steps: list[Any] = list(source.augment or ())
    changes = steps or source.transform
    return PictureStep(
        shape=facts.input.shape,
        fit=(size, getattr(source, "resize", None) or size) if size and changes and is_fitted(source) else None,
        augment=tuple(_step(each) for each in steps if not each.normalized),
        erase=tuple(_step(each) for each in steps if each.normalized),
        transform=own(source.transform) if isinstance(source.transform, c.PythonTransform) else None,
        mean=mean,
        std=std,
    )


def _step(each: Augmentation) -> AugmentStep:
    given = {field.name: getattr(each, field.name) for field in fields(type(each))}
    return AugmentStep(kind=type(each).__name__, arguments=given)
