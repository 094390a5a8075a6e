"""Rules for what pictures go through: their sizes on the way, the arguments of augmentations, the normalisation.

E0335 arguments that do not fit, E0336 another size at the end, E0337 augmentation of what is no picture. Sizes are
known without torchvision; cli/probe/data_trials.py makes the transforms themselves, and reports W0335.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.data_steps import AugmentStep, PictureStep
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.model.job_steps import arguments_of, python_function
from dslc.dsl.diagnostics import Diagnostic, Note, passes
from dslc.dsl.language import augmentations
from dslc.dsl.language import calls as c
from dslc.dsl.language.augmentations import NORMALIZED, Augmentation, Normalize
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call
from dslc.dsl.remedy import Edit, Fix, Help, remedy, remove_argument, replace_text, set_argument
from dslc.dsl.source import Span

_CHANNELS = {1: "gray pictures have 1 channel", 3: "pictures have 3 channels"}
_MODES = {"L": 1, "RGB": 3}
_GIVEN = ("augment", "transform", "normalize")


def check_pictures(job: JobSpec, facts: SourceFacts) -> Iterator[Diagnostic]:
    """Reports what pictures cannot go through."""
    source = job.data.source
    if not isinstance(source, c.PictureSource):
        return
    if isinstance(source, c.Images) and source.resize is not None and source.resize < source.size:
        yield Diagnostic(
            "E0335",
            f"pictures are scaled to {source.resize} on their shorter side, which is less than `size`, {source.size}",
            source.value_span("resize"),
            notes=(Note("`size`", source.value_span("size")),) if source.is_set("size") else (),
            help=remedy("`resize` is at least `size`: ", _larger(source), ", for instance"),
        )
    arguments = [name for name in _GIVEN if getattr(source, name)]
    if not arguments or facts.input is None:
        return
    if (channels := channels_of(facts)) is None:
        yield Diagnostic(
            "E0337",
            f"`{arguments[0]}` is for pictures, and the inputs of this source are numbers"
            + (f" (column `{source.input[0]}`)" if isinstance(source, c.Parquet | c.Datasets) and source.input else ""),
            source.value_span(arguments[0]),
            help=remedy(
                remove_argument(source.span, arguments[0], f"remove `{arguments[0]}`"),
                ", or name the column of the pictures as `input`",
            ),
        )
        return
    faults = _arguments(source, channels)
    if (yield from passes(Diagnostic("E0335", message, where, help=help) for message, where, help in faults)):
        yield from _check_size(source, facts.input.shape)


def channels_of(facts: SourceFacts) -> int | None:
    """Returns the channels of the pictures of a source; None if its inputs are none."""
    if facts.input is None:
        return None
    kinds = facts.found.get("kinds")
    if kinds is not None:
        return _MODES.get(kinds[0])
    return facts.input.shape[0]


def is_fitted(source: c.PictureSource) -> bool:
    """True if training pictures are scaled and cropped to `size` before they are augmented: unless the job says how."""
    sized = any(each.makes != "same" for each in source.augment or ())
    return getattr(source, "size", None) is not None and not sized and source.transform is None


def normalization(source: c.PictureSource, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation of each channel; none if numbers stay as they are."""
    chosen = source.normalize
    if chosen is None:
        return (), ()
    mean, std = (chosen.mean, chosen.std) if isinstance(chosen, Normalize) else NORMALIZED[chosen]
    return mean * (channels if len(mean) == 1 else 1), std * (channels if len(std) == 1 else 1)


def picture_step(source: Call, facts: SourceFacts) -> PictureStep | None:
    """Returns what pictures go through; None if they are given to the network as they are."""
    if not isinstance(source, c.PictureSource):
        return None
    if not (source.augment or source.transform or source.normalize):
        return None
    channels = channels_of(facts)
    if facts.input is None or channels is None:  # a rule reports it
        return None
    mean, std = normalization(source, channels)
    size: int | None = getattr(source, "size", None)
    steps = list(source.augment or ())
    changes = steps or source.transform
    return PictureStep(
        shape=facts.input.shape,
        fit=(size, getattr(source, "resize", None) or size) if size and changes and is_fitted(source) else None,
        augment=tuple(_augment_step(each) for each in steps if not each.normalized),
        erase=tuple(_augment_step(each) for each in steps if each.normalized),
        transform=python_function(source.transform) if isinstance(source.transform, c.PythonTransform) else None,
        mean=mean,
        std=std,
    )


def _augment_step(each: Augmentation) -> AugmentStep:
    return AugmentStep(kind=type(each).__name__, arguments=arguments_of(each))


# -------------------------------------------------------------------------------------------------------- arguments


def _arguments(source: c.PictureSource, channels: int) -> Iterator[tuple[str, Span | None, str]]:
    """Yields a message, its place and the remedy for each argument that does not fit."""
    transforms = source.augment or ()
    for number, each in enumerate(transforms):
        yield from _of_augmentation(each, channels)
        later = next((other for other in transforms[number + 1 :] if not other.normalized), None)
        if each.normalized and later is not None:
            yield (
                f"`{each.word}` works on normalised numbers, and `{later.word}` after it on a picture",
                each.span,
                _put_last(source, number),
            )
    chosen = source.normalize
    if isinstance(chosen, str):
        if len(NORMALIZED[chosen][0]) not in (1, channels):
            fitting = [name for name, (mean, _) in NORMALIZED.items() if len(mean) in (1, channels)]
            yield (
                f"`{chosen}` has {len(NORMALIZED[chosen][0])} channels, and {_CHANNELS[channels]}",
                source.value_span("normalize"),
                remedy(
                    replace_text(source.value_span("normalize"), fitting[0]),
                    ", or ",
                    replace_text(source.value_span("normalize"), "normalize(mean = [0.5], std = [0.5])"),
                ),
            )
    elif isinstance(chosen, Normalize):
        for name in ("mean", "std"):
            if (count := len(getattr(chosen, name))) not in (1, channels):
                yield (
                    f"`{name}` is of {count} channels, and {_CHANNELS[channels]}",
                    chosen.value_span(name),
                    "one for each",
                )


def _of_augmentation(each: Augmentation, channels: int) -> Iterator[tuple[str, Span | None, str]]:
    for name in each.lowest:
        value = getattr(each, name)
        if isinstance(value, tuple) and value[0] > value[1]:
            yield (
                f"`{name}` is [lowest, highest], and {value[0]:g} is more than {value[1]:g}",
                each.value_span(name),
                remedy(set_argument(each.span, name, f"[{value[1]:g}, {value[0]:g}]")),
            )
    if isinstance(each, augmentations.GaussianBlur) and each.kernel_size % 2 == 0:
        odd = each.kernel_size + 1
        larger = remedy(set_argument(each.span, "kernel_size", odd, f"{odd}"))
        yield f"a kernel of {each.kernel_size} has no middle", each.value_span("kernel_size"), larger
    if isinstance(each, augmentations.RandAugment) and each.magnitude >= each.num_magnitude_bins:
        yield (
            f"`magnitude` is one of the strengths 0 to {each.num_magnitude_bins - 1}, and not {each.magnitude}",
            each.value_span("magnitude"),
            "`num_magnitude_bins` is their number",
        )
    fill = getattr(each, "fill", 0)
    if isinstance(fill, tuple) and len(fill) not in (1, channels):
        yield f"`fill` has {len(fill)} channels, and {_CHANNELS[channels]}", each.value_span("fill"), "one for each"
    if isinstance(each, augmentations.AutoAugment) and channels == 1:
        yield (
            "the policies of `auto_augment` were learnt on pictures with colours, and these are gray",
            each.span,
            remedy(
                replace_text(each.span, "rand_augment()"), " or ", replace_text(each.span, "trivial_augment_wide()")
            ),
        )


# ------------------------------------------------------------------------------------------------------------ sizes


def _put_last(source: c.PictureSource, number: int) -> str:
    """Advises to put one augmentation after all others."""
    *_, last = steps = source.augment or ()
    here, end, text = steps[number].span, last.span, f"put `{steps[number].word}` last"
    if here is None or end is None:
        return text
    edits = Edit("", None, here, ""), Edit("", f"{end.text()}, {here.text()}", end, "")
    return remedy(Fix(edits, text))


def _larger(source: c.Images) -> Edit | str:
    larger = source.size * 8 // 7
    return set_argument(source.span, "resize", larger, f"{larger}")


def _cropped(last: Call | None, width: int) -> Help:
    """Advises a crop after the last augmentation that changes the size."""
    parts: list[Edit | str] = []
    for word in ("random_crop", "center_crop"):
        crop = f"{word}({width})"
        place = last.span if last is not None else None
        parts.append(replace_text(place, f"{place.text()}, {crop}" if place else crop, f"`{crop}`"))
    return remedy(parts[0], " or ", parts[1], " after it")


def _of_the_source(source: c.PictureSource, size: int) -> tuple[str | Edit, ...]:
    if getattr(source, "size", None) is None:
        return ()
    return (", or ", set_argument(source.span, "size", size), " of the source")


def _check_size(source: c.PictureSource, shape: tuple[int, ...]) -> Iterator[Diagnostic]:
    """Reports training pictures that end up of another size than the network's input."""
    if source.transform is not None or not source.augment:
        return
    height, width = shape[-2:]
    size: tuple[int, int] | None = None if getattr(source, "size", None) is not None else (height, width)
    if is_fitted(source):
        size = height, width
    last: Call | None = None
    for each in source.augment or ():
        if isinstance(each, augmentations.CenterCrop | augmentations.RandomCrop | augmentations.RandomResizedCrop):
            size, last = (each.size, each.size), each
        elif isinstance(each, augmentations.Resize):
            size, last = None, each
            if source.word in ("mnist", "cifar10"):
                size = each.size, each.size
    if size == (height, width):
        return
    wanted = f"{height} x {width}"
    where = last.value_span("size") if last is not None else source.value_span("augment")
    if size is None:
        yield Diagnostic(
            "E0336",
            f"training pictures end up of unequal sizes, and the network is given {wanted}",
            where,
            help=_cropped(last, width),
        )
        return
    yield Diagnostic(
        "E0336",
        f"training pictures end up {size[0]} x {size[1]}, and those of the validation split are {wanted}",
        where,
        notes=(Note("the size of all pictures", source.value_span("size")),) if source.is_set("size") else (),
        help=remedy(
            set_argument(last.span, "size", width, f"`{width}`") if last is not None else f"`{width}`",
            " here",
            *_of_the_source(source, size[0]),
        ),
    )
