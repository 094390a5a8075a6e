"""`dslc predict`: a checkpoint's outputs for every sample, in order, on any devices."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.compiler.ir.program import PredictMode
from dslc.dsl.meaning.load import load_each
from dslc.dsl.plain import plain
from dslc.jobs.inference import CommandFailedError, prepare_inference, run_inference
from dslc.terminal.exit_codes import GOOD, TRAINING_FAILED, WRONG_USAGE


def main(arguments: argparse.Namespace) -> int:
    output = os.path.abspath(arguments.output)
    if not output.endswith((".npz", ".safetensors")):
        print("dslc: predictions are written as .npz or .safetensors", file=sys.stderr)
        return WRONG_USAGE
    folder = os.path.dirname(output)
    if not os.path.isdir(folder):
        print(plain(f"dslc: there is no folder {folder}"), file=sys.stderr)
        return WRONG_USAGE
    _, combinations = load_each(arguments.job, arguments.settings)
    try:
        made, taken = prepare_inference(
            combinations[0], arguments.checkpoint, PredictMode, split=arguments.split, output=output, raw=arguments.raw
        )
        data = made.program.data
        if arguments.split in ("validation", "test") and not getattr(data, f"{arguments.split}_samples"):
            print(
                f"dslc: the job holds no samples out for its {arguments.split}: `--split train` or `--split all`",
                file=sys.stderr,
            )
            return WRONG_USAGE
        if arguments.split in ("train", "all") and data.stream is not None:
            print("dslc: a stream has no samples to number: `--split validation`", file=sys.stderr)
            return WRONG_USAGE
        with run_inference(made, beside=folder) as parts:
            from dslc.runtime.loop.predictions import join

            try:
                shapes = join(parts, made.program.world_size, output)
            except (OSError, ValueError) as error:
                print(plain(f"dslc: {output} cannot be written: {error}"), file=sys.stderr)
                return TRAINING_FAILED
    except CommandFailedError as refused:
        return refused.status
    told = ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in shapes.items())
    print(plain(f"{arguments.output}: {told} of {taken}"))
    return GOOD
