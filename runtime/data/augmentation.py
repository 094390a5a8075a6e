"""Pictures for training, changed at random by transforms of torchvision or of the user, and the normalisation of all.

Model: a picture goes through the transforms on pictures of Pillow, then numbers 0 … 1, the normalisation, and the
transforms on normalised numbers. The pictures of the validation split come from the source's own `batch`, resized and
cropped, and are normalised alone.

Contract: a picture is a pure function of the seed, the epoch and its number in the source. It does not depend on the
rank, the worker, the micro-batch or the pictures made before it.

Limits: pictures are transformed one by one, as data sets of torchvision do; mixtures of several are not made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dslc.compiler.ir.program import AugmentStep, DataStep, PictureStep
from dslc.runtime.data.images import fitted, pixels_of
from dslc.runtime.data.samples import DerivedSamples, Pair, Samples, SourceError
from dslc.runtime.process.job_line import mark_errors
from dslc.runtime.process.random_numbers import begin_sample
from dslc.runtime.process.user_code import load_function
from dslc.runtime.process.vision_library import let_torchvision_load

if TYPE_CHECKING:
    from PIL import Image


Picture: TypeAlias = Any  # of Pillow, an array or a tensor: what transforms take and give


class WithPictures(Samples, Protocol):
    """Samples whose inputs are pictures."""

    def picture(self, index: int) -> tuple[Image.Image, Tensor]:
        """Returns an image as it is stored, in the mode that the training uses, and its target."""
        ...


def training_pictures(step: DataStep, samples: Any) -> Samples:
    """Returns the samples as a training sees them; `samples` if their pictures are only normalised, or not at all."""
    look = step.pictures
    if look is None or not (look.augment or look.erase or look.transform):
        return plain_pictures(step, samples)
    return Augmented(samples, prepared(look), look, step.seed, step.line)


def plain_pictures(step: DataStep, samples: Samples) -> Samples:
    """Returns the samples as an evaluation sees them."""
    look = step.pictures
    if look is None or not look.mean:
        return samples
    return NormalizedSamples(samples, look)


# --------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True)
class Augmented(DerivedSamples):
    """Samples whose pictures go through `prepare`, each with random numbers of its own."""

    samples: WithPictures
    prepare: Callable[[Picture], Tensor]
    look: PictureStep
    seed: int
    line: str

    @property
    def by_process(self) -> bool:
        return True

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        pictures = torch.empty(len(indices), *self.look.shape)
        targets: list[Tensor] = []
        for n, index in enumerate(indices.tolist()):
            picture, target = self.samples.picture(index)
            begin_sample(self.seed, "train", epoch, index)
            pictures[n] = self._augment_picture(picture, index)
            targets.append(target)
        return pictures, torch.stack(targets) if targets else torch.empty(0, dtype=torch.int64)

    def _augment_picture(self, picture: Picture, index: int) -> Tensor:
        place = self.place
        name = place(torch.tensor([index]))[0] if place else f"sample {index}"
        try:
            made = self.prepare(picture)
        except WrongPicture as wrong:
            raise SourceError(f"{self.line}: {name}: {wrong}") from wrong
        except Exception as error:  # any kind: a transform is the user's, or gets a picture of any size
            if self.look.transform is not None:
                raise
            raise SourceError(f"{self.line}: {name} cannot be augmented: {error}") from error
        if tuple(made.shape) != self.look.shape:
            raise SourceError(f"{self.line}: {name} is of shape {tuple(made.shape)}, and others are {self.look.shape}")
        return made


@dataclass(frozen=True)
class NormalizedSamples(DerivedSamples):
    """Samples whose inputs (n, channels, height, width) are normalised."""

    look: PictureStep

    def batch(self, indices: Tensor, epoch: int = 0) -> Pair:
        input, target = self.samples.batch(indices, epoch)
        return normalized(input, self.look), target


def normalized(numbers: Tensor, look: PictureStep) -> Tensor:
    """Returns (…, channels, height, width) less the mean of each channel, divided by its deviation."""
    if not look.mean or not numbers.numel():
        return numbers
    mean, std = (torch.tensor(each)[:, None, None] for each in (look.mean, look.std))
    return (numbers - mean) / std


# ------------------------------------------------------------------------------------------------------ transforms


class WrongPicture(RuntimeError):
    """A user's transform gave something that is no picture."""


def prepared(look: PictureStep) -> Callable[[Picture], Tensor]:
    """Returns the function that makes a picture of Pillow a tensor (channels, height, width), normalised."""
    before, after = _composed(look.augment), _composed(look.erase)
    own = own_transform(look) if look.transform is not None else None
    here = mark_errors(look.transform.line) if look.transform is not None else None

    def prepare(picture: Picture) -> Tensor:
        if look.fit is not None:
            picture = fitted(picture, *look.fit)
        if own is not None:
            assert here is not None
            with here:
                picture = own(picture)
        made: Tensor = after(normalized(numbers_of(before(picture)), look))
        return made

    return prepare


def _composed(steps: tuple[AugmentStep, ...]) -> Callable[[Picture], Picture]:
    if not steps:
        return lambda picture: picture
    let_torchvision_load()
    from torchvision.transforms import v2

    composed: Callable[[Picture], Picture] = v2.Compose([transform_of(step) for step in steps])
    return composed


def transform_of(step: AugmentStep) -> object:
    """Returns the transform of `torchvision.transforms.v2`. Raises what its class raises for wrong arguments."""
    let_torchvision_load()
    from torchvision.transforms import v2

    arguments = {name: list(value) if isinstance(value, tuple) else value for name, value in step.arguments.items()}
    if "interpolation" in arguments:
        arguments["interpolation"] = v2.InterpolationMode(arguments["interpolation"])
    if "policy" in arguments:
        arguments["policy"] = v2.AutoAugmentPolicy(arguments["policy"])
    return getattr(v2, step.kind)(**arguments)


def own_transform(look: PictureStep) -> Callable[[object], object]:
    """Returns the user's transform: the object or function itself, or what a factory without a picture argument
    returns.
    """
    assert look.transform is not None
    found = load_function(look.transform)
    bare = getattr(found, "func", found)
    if not (inspect.isclass(bare) or inspect.isroutine(bare)):
        return found
    if inspect.isroutine(bare) and _takes_a_picture(found):
        return found
    made: Callable[[object], object] = found()
    if not callable(made):
        raise TypeError(f"it returns {type(made).__name__}, which cannot be called with a picture")
    return made


def _takes_a_picture(function: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a function in C
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is inspect.Parameter.empty for each in parameters)


def normalizes(transform: object) -> bool:
    """True if there is a `Normalize` among the transforms of a user's own."""
    inner = getattr(transform, "transforms", None)
    found = type(transform).__name__ == "Normalize"
    return found or (isinstance(inner, list | tuple) and any(normalizes(each) for each in inner))


def numbers_of(picture: Picture) -> Tensor:
    """Returns a picture of Pillow, an array or a tensor as float32 (channels, height, width): bytes as 0 … 1."""
    from PIL import Image

    if isinstance(picture, Image.Image):
        return torch.from_numpy(pixels_of(picture))
    if isinstance(picture, np.ndarray):
        picture = torch.from_numpy(picture)
    if not isinstance(picture, Tensor):
        raise WrongPicture(f"the transform gives {type(picture).__name__}, which is no picture and no tensor")
    pixels: Tensor = picture.as_subclass(Tensor)
    if pixels.dtype == torch.uint8:
        return pixels.to(torch.float32).div_(255)
    if not pixels.is_floating_point():
        raise WrongPicture(f"the transform gives numbers of type {pixels.dtype}, and not uint8 or floats")
    return pixels.to(torch.float32)


def preload(step: DataStep) -> None:
    """Imports, in the launcher, the library that each rank would otherwise import (0.6 s)."""
    if step.pictures is not None and (step.pictures.augment or step.pictures.erase):
        let_torchvision_load()
        import torchvision.transforms.v2  # noqa: F401
