"""`dslc new`: a job to start from."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.dsl.plain import plain
from dslc.status import GOOD, WRONG_USAGE


def main(arguments: argparse.Namespace) -> int:
    name = arguments.name.removesuffix(".plt")
    path = f"{name}.plt"
    if os.path.exists(path):
        print(plain(f"dslc: {path} exists already"), file=sys.stderr)
        return WRONG_USAGE
    templates = os.path.join(os.path.dirname(os.path.dirname(__file__)), "templates")
    files = {f"{arguments.template}.plt": path}
    if arguments.template == "python":
        module = os.path.join(os.path.dirname(path), "net.py")
        if os.path.exists(module):
            print(plain(f"dslc: {module} exists already"), file=sys.stderr)
            return WRONG_USAGE
        files["net.py.txt"] = module
    for source, target in files.items():
        with open(os.path.join(templates, source), encoding="utf-8") as file:
            text = file.read()
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
        print(plain(f"{target} written"))
    print(plain(f"next: dslc check {path}, dslc run {path}"))
    return GOOD
