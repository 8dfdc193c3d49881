"""The command line: puts the commands together; errors of input end with exit code 2."""

import inspect
import itertools
import re
import sys
from typing import Any

from exhume.cli.audit import audit
from exhume.cli.bound import bound
from exhume.cli.demo import demo
from exhume.cli.identify import identify
from exhume.cli.law import law
from exhume.cli.reproduce import reproduce
from exhume.cli.score import report, score
from exhume.cli.victim import victim
from exhume.errors import InputError

COMMANDS = (victim, audit, score, report, identify, bound, law, reproduce, demo)

# Options that may be written as numbers with commas between them
LISTS = ("--input_shape", "--range", "--mean", "--std", "--widths", "--labels")
# Options whose word may be left out
BARE = {"audit": "--model", "identify": "--model", "bound": "--model", "reproduce": "--name"}


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the words name; those of the shell if None are given."""
    from jsonargparse import auto_cli, set_parsing_settings

    from exhume import __version__

    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    words = plain(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Any] = {command.__name__: command for command in COMMANDS}
    if words and words[0] in commands:  # a parser of all would take four times as long to build
        commands = {words[0]: commands[words[0]]}
    else:
        from exhume.experiments import benchmarks

        about = "Measurements, each printed with the hardware."
        commands["bench"] = {"_help": about, **benchmarks.COMMANDS}
    try:
        auto_cli(commands, args=words, prog="exhume", version=__version__)
    except InputError as error:
        print(f"exhume: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def plain(words: list[str]) -> list[str]:
    """Let options be written as people write them.

    `--time-limit 3`, `--resume` alone, `--range 0,1`, and what a command is about without a word.

    Example:
        >>> plain(["audit", "a-b", "--resume", "--time-limit=3-4", "--range", "-1,1"])
        ['audit', '--model', 'a-b', '--resume=true', '--time_limit=3-4', '--range', '[-1,1]']
    """
    signatures = (inspect.signature(function).parameters.values() for function in COMMANDS)
    known = (option for options in signatures for option in options)
    flags = {f"--{option.name}" for option in known if option.annotation in (bool, bool | None)}
    result: list[str] = []
    for word, following in itertools.pairwise([*words, ""]):
        before, bare = (result[-1], BARE.get(result[0], "")) if result else ("", "")
        if before.startswith("--") and "=" not in before:  # the value of an option
            result.append(_bracketed(word) if before in LISTS else word)
            continue
        word = re.sub(r"^--[\w-]+", lambda m: "--" + m[0][2:].replace("-", "_"), word)
        name, equals, value = word.partition("=")
        if word in flags and following not in ("true", "false"):
            word += "=true"
        elif equals and name in LISTS:
            word = f"{name}={_bracketed(value)}"
        elif bare and bare not in result and not word.startswith("-"):
            result.append(bare)
        result.append(word)
    return result


def _bracketed(numbers: str) -> str:
    """Return numbers with commas between them as a list."""
    return f"[{numbers}]" if "," in numbers and not numbers.startswith("[") else numbers
