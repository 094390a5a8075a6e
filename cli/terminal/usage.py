"""Messages for a command line with an unknown command or option: a similar one, or the setting in the job."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence

from dslc.dsl.plain import plain

Commands = Mapping[str, argparse.ArgumentParser]
_SHOWN = 80  # characters of a word


def mistake(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Reports the first unknown command or option, with a suggestion; "" if all are known."""
    commands = _commands(parser)
    for at, word in enumerate(words):
        if _is_option(word):
            if not _has(parser, word):
                return _of_option(parser, word, words[at + 1 :], commands)
        elif word in commands:
            return _mistake_in_options(word, words[at + 1 :], commands)
        elif word.endswith(".plt"):
            return f"`{_short(word)}` is not a command: `dslc run {_short(word)}` trains it"
        else:
            from dslc.dsl.language.suggest import for_command  # here, as below: a command line is seldom wrong

            return f"there is no command `{_short(word)}`: {for_command(word, commands)}"
    return ""


def too_many(command: str, takes_settings: bool, words: Sequence[str]) -> str:
    """Reports words that a command has no place for."""
    word = _short(words[0])
    name, equals, value = words[0].partition("=")
    if takes_settings and equals:
        return f"`{word}` is one argument too many: {_setting(name, value) or f'a setting is `--set {word}`'}"
    return f"`{word}` is one argument too many for `dslc {command}`, as its `--help` shows"


def _mistake_in_options(command: str, words: Sequence[str], commands: Commands) -> str:
    for at, word in enumerate(words):
        if word == "--":
            break
        if _is_option(word) and not _has(commands[command], word):
            return _of_option(commands[command], word, words[at + 1 :], commands)
    return ""


def _of_option(parser: argparse.ArgumentParser, word: str, after: Sequence[str], commands: Commands) -> str:
    option, _, value = word.partition("=")
    if not value and after and not _is_option(after[0]) and not after[0].endswith(".plt"):
        value = after[0]
    instead = _instead(parser, option.lstrip("-"), value, commands)
    return f"`{parser.prog}` has no option `{_short(option)}`: {instead}"


def _instead(parser: argparse.ArgumentParser, name: str, value: str, commands: Commands) -> str:
    from dslc.dsl.language.suggest import for_option, nearest_choice
    from dslc.dsl.words import listed

    own = [option[2:] for option in _options(parser) if option.startswith("--")]
    if ("version" in own or "set" in own) and (said := _setting(name, value)):
        return said
    if found := nearest_choice(name, own):
        return f"did you mean `--{found}`?"
    if said := for_option(name):
        return said
    having = [other.prog for other in commands.values() if f"--{name}" in _options(other)]
    if having:
        return f"that is an option of {listed(having)}"
    return f"`{parser.prog} --help` lists what there is"


def _setting(name: str, value: str) -> str:
    """Names the setting in the job, and how to give it with `--set`."""
    from dslc.dsl.language import blocks  # noqa: F401  (`blocks` fills the registry)
    from dslc.dsl.language.registry import BLOCKS
    from dslc.dsl.language.suggest import place_of

    if name.partition(".")[0] in BLOCKS and "." in name:
        return f"a setting is `--set {_set(name, value)}`"
    place = place_of(name)
    if place is None:
        return ""
    block, *rest = place.path.split(".")
    if not rest:
        return f"that is the block `{block}` of the job"
    value = place.value or value
    after = f" ({place.note})" if place.note else ""
    told = (
        f"`{block} {{ {rest[0]} = {_short(value) or '…'} }}`"
        if len(rest) == 1
        else f"an argument of `{block}.{rest[0]}`"
    )
    return f"that is {told} in the job, or `--set {_set(place.path, value)}`{after}"


def _set(path: str, value: str) -> str:
    return _short(shlex.quote(f"{path}={value}") if value else f"{path}=…")


def _short(word: str) -> str:
    shown = plain(word[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"


# --------------------------------------------------------------------------------------------------------- argparse


def _is_option(word: str) -> bool:
    """True for an option as argparse sees it: not a number, and not a text with blanks."""
    return len(word) > 1 and word[0] == "-" and not re.match(r"-\d|-\.\d", word) and " " not in word


def _has(parser: argparse.ArgumentParser, word: str) -> bool:
    name, known = word.partition("=")[0], _options(parser)
    if name.startswith("--"):
        return any(option.startswith(name) for option in known)
    return name[:2] in known  # with a value behind it


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return list(parser._option_string_actions)


def _commands(parser: argparse.ArgumentParser) -> Commands:
    (found,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    choices: Commands = found.choices
    return choices
