"""Changes to pictures before the network: the transforms of `torchvision.transforms.v2`, and their normalisation.

A class here has the name of a class there, and its arguments with their defaults.
"""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl.language.registry import Bool, Call, Float, Int, Kind, ListOf, arg, call, calls, either, word
from dslc.dsl.record import record

_COUNT = Int(min=1)
_CHANCE = Float(min=0, max=1)
_CHANCE_DOC = "the share of pictures that it changes"
_AMOUNT = either(ListOf(Float(min=0), length=2), Float(min=0))
_ANGLES = either(ListOf(Float(), length=2), Float(min=0))
_SHARES = ListOf(Float(min=0, max=1), length=2)
_POSITIVE = ListOf(Float(above=0), length=2)
_BYTE = Int(min=0, max=255)
_FILL = either(ListOf(_BYTE, min_length=1), _BYTE)
_FILL_DOC = "the colour of what a picture does not cover, 0 to 255"
_SIZE_DOC = "the height and width of what is cut out"
_INTERPOLATION = word("nearest", "bilinear", "bicubic")
_INTERPOLATION_DOC = "how pixels between pixels are made"


@record
class Augmentation(Call):
    """`makes` is the picture's size afterwards: the same, `size` x `size`, or `size` on its shorter side."""

    makes: ClassVar[str] = "same"
    normalized: ClassVar[bool] = False  # it works on normalised numbers rather than on a picture
    lowest: ClassVar[tuple[str, ...]] = ()  # pairs (lowest, highest)


# ------------------------------------------------------------------------------------------------ sizes and places


@call("augmentation")
class Resize(Augmentation):
    """Scales the shorter side."""

    makes: ClassVar = "shorter"
    size: int = arg(_COUNT, "the length of the shorter side")
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="bilinear")


@call("augmentation")
class CenterCrop(Augmentation):
    """Cuts out the middle."""

    makes: ClassVar = "square"
    size: int = arg(_COUNT, _SIZE_DOC)


@call("augmentation")
class RandomCrop(Augmentation):
    """Cuts out a square at a random place."""

    makes: ClassVar = "square"
    size: int = arg(_COUNT, _SIZE_DOC)
    padding: int | None = arg(Int(min=0), "pixels added on each side before", default=None, shown="none")
    pad_if_needed: bool = arg(Bool(), "a picture that is smaller is padded", default=False)
    fill: int | tuple[int, ...] = arg(_FILL, _FILL_DOC, default=0)
    padding_mode: str = arg(
        word("constant", "edge", "reflect", "symmetric"), "what the padding is made of", default="constant"
    )


@call("augmentation")
class RandomResizedCrop(Augmentation):
    """Cuts out a random part and scales it to a square (Szegedy et al. 2015, arXiv:1409.4842)."""

    makes: ClassVar = "square"
    lowest: ClassVar = ("scale", "ratio")
    size: int = arg(_COUNT, "the height and width to which the part is scaled")
    scale: tuple[float, ...] = arg(_SHARES, "the lowest and highest share of the picture's area", default=(0.08, 1.0))
    ratio: tuple[float, ...] = arg(
        _POSITIVE, "the lowest and highest width over height", default=(3 / 4, 4 / 3), shown="[3/4, 4/3]"
    )
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="bilinear")


@call("augmentation")
class RandomHorizontalFlip(Augmentation):
    """Mirrors left and right."""

    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomVerticalFlip(Augmentation):
    """Mirrors top and bottom."""

    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomRotation(Augmentation):
    """Rotates about the middle."""

    lowest: ClassVar = ("degrees",)
    degrees: float | tuple[float, ...] = arg(_ANGLES, "the largest angle to either side, or [lowest, highest]")
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="nearest")
    fill: int | tuple[int, ...] = arg(_FILL, _FILL_DOC, default=0)


@call("augmentation")
class RandomAffine(Augmentation):
    """Rotates, shifts, scales and shears."""

    lowest: ClassVar = ("degrees", "scale", "shear")
    degrees: float | tuple[float, ...] = arg(_ANGLES, "the largest angle to either side, or [lowest, highest]")
    translate: tuple[float, ...] | None = arg(
        _SHARES, "the largest shift, as shares of width and height", default=None, shown="none"
    )
    scale: tuple[float, ...] | None = arg(_POSITIVE, "the lowest and highest factor", default=None, shown="none")
    shear: float | tuple[float, ...] | None = arg(
        _ANGLES, "the largest shear in degrees, or [lowest, highest]", default=None, shown="none"
    )
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="nearest")
    fill: int | tuple[int, ...] = arg(_FILL, _FILL_DOC, default=0)


@call("augmentation")
class RandomPerspective(Augmentation):
    """Looks at the picture from another side."""

    distortion_scale: float = arg(_CHANCE, "the strength", default=0.5)
    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="bilinear")
    fill: int | tuple[int, ...] = arg(_FILL, _FILL_DOC, default=0)


# --------------------------------------------------------------------------------------------------------- colours


@call("augmentation")
class ColorJitter(Augmentation):
    """Changes brightness, contrast, saturation and hue: a factor from max(0, 1 - x) to 1 + x, or from [lowest,
    highest].
    """

    lowest: ClassVar = ("brightness", "contrast", "saturation", "hue")
    brightness: float | tuple[float, ...] = arg(_AMOUNT, "x of brightness", default=0.0)
    contrast: float | tuple[float, ...] = arg(_AMOUNT, "x of contrast", default=0.0)
    saturation: float | tuple[float, ...] = arg(_AMOUNT, "x of saturation", default=0.0)
    hue: float | tuple[float, ...] = arg(
        either(ListOf(Float(min=-0.5, max=0.5), length=2), Float(min=0, max=0.5)),
        "the largest change of hue to either side, as a share of the circle of hues",
        default=0.0,
    )


@call("augmentation")
class RandomGrayscale(Augmentation):
    """Takes the colours away."""

    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.1)


@call("augmentation")
class GaussianBlur(Augmentation):
    """Blurs."""

    lowest: ClassVar = ("sigma",)
    kernel_size: int = arg(_COUNT, "the size of the kernel, odd")
    sigma: float | tuple[float, ...] = arg(
        either(_POSITIVE, Float(above=0)), "the lowest and highest deviation", default=(0.1, 2.0)
    )


@call("augmentation")
class RandomInvert(Augmentation):
    """Turns a picture into its negative."""

    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomPosterize(Augmentation):
    """Keeps some bits of each channel."""

    bits: int = arg(Int(min=0, max=8), "how many")
    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomSolarize(Augmentation):
    """Inverts the pixels above a threshold."""

    threshold: float = arg(Float(min=0), "the threshold, 0 to 255")
    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomAdjustSharpness(Augmentation):
    """Sharpens or blurs."""

    sharpness_factor: float = arg(Float(min=0), "below one it blurs, above one it sharpens")
    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomAutocontrast(Augmentation):
    """Makes the darkest pixel black and the lightest white."""

    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


@call("augmentation")
class RandomEqualize(Augmentation):
    """Equalizes the histogram."""

    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)


# ------------------------------------------------------------------------------------------------------- policies


@call("augmentation")
class AutoAugment(Augmentation):
    """A policy that was learnt on a data set (Cubuk et al. 2019, arXiv:1805.09501)."""

    policy: str = arg(word("imagenet", "cifar10", "svhn"), "the data set", default="imagenet")
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="nearest")


@call("augmentation")
class RandAugment(Augmentation):
    """Some operations of one strength (Cubuk et al. 2020, arXiv:1909.13719)."""

    num_ops: int = arg(_COUNT, "how many operations", default=2)
    magnitude: int = arg(Int(min=0), "their strength, below `num_magnitude_bins`", default=9)
    num_magnitude_bins: int = arg(Int(min=1), "the number of strengths", default=31)
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="nearest")


@call("augmentation")
class TrivialAugmentWide(Augmentation):
    """One operation of a random strength (Müller and Hutter 2021, arXiv:2103.10158)."""

    num_magnitude_bins: int = arg(Int(min=1), "the number of strengths", default=31)
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="nearest")


@call("augmentation")
class AugMix(Augmentation):
    """Mixes chains of operations on one picture (Hendrycks et al. 2020, arXiv:1912.02781)."""

    severity: int = arg(Int(min=1, max=10), "the strength of the operations", default=3)
    mixture_width: int = arg(_COUNT, "the number of chains", default=3)
    chain_depth: int = arg(Int(min=-1), "the length of a chain; -1: from 1 to 3, at random", default=-1)
    alpha: float = arg(Float(above=0), "the parameter of the distributions of the weights", default=1.0)
    all_ops: bool = arg(Bool(), "brightness, contrast, colour and sharpness are among the operations", default=True)
    interpolation: str = arg(_INTERPOLATION, _INTERPOLATION_DOC, default="bilinear")


# ------------------------------------------------------------------------------------------- of normalised numbers


@call("augmentation")
class RandomErasing(Augmentation):
    """Replaces a random rectangle (Zhong et al. 2017, arXiv:1708.04896). It works on normalised numbers, after all
    others.
    """

    normalized: ClassVar = True
    lowest: ClassVar = ("scale", "ratio")
    p: float = arg(_CHANCE, _CHANCE_DOC, default=0.5)
    scale: tuple[float, ...] = arg(_SHARES, "the lowest and highest share of the picture's area", default=(0.02, 0.33))
    ratio: tuple[float, ...] = arg(_POSITIVE, "the lowest and highest height over width", default=(0.3, 3.3))
    value: float | str = arg(
        either(word("random"), Float()), "the number that replaces all others, or `random`", default=0.0
    )


# --------------------------------------------------------------------------------------------------- normalisation


@call("normalization")
class Normalize(Call):
    """Subtracts `mean` from the numbers 0 … 1 of each channel, and divides by `std`."""

    mean: tuple[float, ...] = arg(ListOf(Float(), min_length=1, single=True), "of each channel, or one for all")
    std: tuple[float, ...] = arg(ListOf(Float(above=0), min_length=1, single=True), "of each channel, or one for all")


NORMALIZED = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "mnist": ((0.1307,), (0.3081,)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}  # mean and deviation of the channels of these data sets; CLIP's are those of its 400 million pictures

AUGMENT: Kind = ListOf(calls("augmentation"))
NORMALIZE: Kind = either(word(*NORMALIZED), calls("normalization"))
AUGMENT_DOC = "what training pictures go through, in this order: transforms of torchvision"
NORMALIZE_DOC = "subtracts a mean from each channel of all pictures, and divides by a deviation"
