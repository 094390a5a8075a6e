"""`dslc tokens`: a memory-mapped file of tokens from text."""

from __future__ import annotations

import argparse
import os

from dslc.dsl.words import plural
from dslc.terminal.exit_codes import GOOD, CommandFailedError
from dslc.terminal.progress_bar import progress_bar


def main(arguments: argparse.Namespace) -> int:
    from dslc.runtime.data.sources.token_files import TokensError, write_tokens

    if os.path.exists(arguments.output):
        raise CommandFailedError(f"{arguments.output} exists already")
    absent = next((text for text in arguments.texts if not os.path.isfile(text)), None)
    if absent is not None:
        raise CommandFailedError(f"{absent}: {'is no file' if os.path.exists(absent) else 'there is no such file'}")
    try:
        with progress_bar(in_bytes=True) as bar:
            task = bar.add_task(os.path.basename(arguments.output), total=sum(map(os.path.getsize, arguments.texts)))
            tokens = write_tokens(
                arguments.texts, arguments.output, arguments.tokenizer, lambda bytes_read: bar.advance(task, bytes_read)
            )
    except TokensError as error:
        raise CommandFailedError(str(error)) from error
    end_text = f", `{tokens.end}` behind each text" if tokens.end else ""
    bits = tokens.item.removeprefix("uint")
    print(f"{tokens.file}: {plural(tokens.tokens, 'token')} of {bits} bits, vocabulary {tokens.vocab:,}{end_text}")
    print(f'\ndata {{\n  source     = tokens("{tokens.file}")\n  validation = 5%\n}}')
    return GOOD
