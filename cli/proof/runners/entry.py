"""Starts the runner of a tool: `python entry.py TOOL FOLDER`, by the tool's own launcher.

The interpreter has the tool and need not have dslc: packages that it lacks come from the environment of dslc, which
`DSLC_PACKAGES` names. Its own packages come first.
"""

import importlib
import os
import site
import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    for folder in os.environ["DSLC_PACKAGES"].split(os.pathsep):
        site.addsitedir(folder)
    tool, proof_folder = sys.argv[1:3]
    importlib.import_module(f"dslc.proof.runners.{tool}_runner").main(proof_folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch may wait for gloo's thread forever: it holds the interpreter's lock, which that thread needs
