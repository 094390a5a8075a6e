"""`dslc schema`: the language, read from the registry."""

from __future__ import annotations

import argparse
import json

from dslc.dsl.editor.textmate import textmate_grammar
from dslc.dsl.meaning.schema import reference, schema
from dslc.terminal.exit_codes import GOOD


def main(arguments: argparse.Namespace) -> int:
    if arguments.textmate:
        print(json.dumps(textmate_grammar(), indent=2))
    else:
        print(reference().rstrip() if arguments.markdown else json.dumps(schema(), indent=2))
    return GOOD
