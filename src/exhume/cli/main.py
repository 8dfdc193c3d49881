"""The command line: puts the commands together; errors of input end with exit code 2."""

import inspect
import io
import itertools
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from exhume.errors import InputError, printable, quoted
from exhume.version import VERSION

# Commands, and the file of each: only that of the command at hand is imported
COMMANDS = {
    "victim": "victim",
    "audit": "audit",
    "score": "score",
    "gate": "gate",
    "report": "score",
    "identify": "identify",
    "bound": "bound",
    "law": "law",
    "reproduce": "reproduce",
    "demo": "demo",
}

# Options that may be written as numbers with commas between them
LISTS = ("--input_shape", "--range", "--mean", "--std", "--widths", "--labels")
# What the parser expects, in words
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "list": "numbers with commas between them, such as 3,32,32",
    "tuple": "a list in brackets, such as '[1,2]'",
    "bool": "true or false",
}
# Options whose word may be left out
BARE = dict.fromkeys(("audit", "identify", "bound"), "--model")
BARE |= {"gate": "--run", "reproduce": "--name"}


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the words name; those of the shell if None are given."""
    words = sys.argv[1:] if arguments is None else arguments
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    rank = os.environ.get("RANK", "0") if several else "0"  # as torchrun says
    _open_streams()
    try:
        _run(words)
        sys.stdout.flush()
    except KeyboardInterrupt as way:  # in words, where a command can go on
        if rank == "0":
            print(f"\ninterrupted{'; ' if str(way) else ''}{way}", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:  # Python would end with 1, the gate's word for a model that leaks
        _give_up_stdout()
        if (reason := _reason(error)) is None:
            traceback.print_exc()
        elif reason and (rank == "0" or not isinstance(error, InputError)):  # that all ranks meet
            who = "exhume" if rank == "0" else f"exhume (rank {rank})"
            print(f"{who}: {printable(reason)}", file=sys.stderr)
        raise SystemExit(2) from None


def _run(words: list[str]) -> None:
    if words == ["--version"]:  # at once, without torch
        print(f"exhume {VERSION}", flush=True)
        raise SystemExit(0)
    if words[:1] != ["audit"] and os.environ.get("WORLD_SIZE", "1") != "1":
        raise InputError("ranks: only `torchrun -m exhume audit` uses several; leave torchrun out.")
    from jsonargparse import ArgumentError, auto_cli, set_parsing_settings

    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    commands: dict[str, Any] = dict(_named(words))
    if len(commands) > 1:
        from exhume.experiments import benchmarks

        about = "Measurements, each printed with the hardware."
        commands["bench"] = {"_help": about, **benchmarks.COMMANDS}
    try:
        auto_cli(commands, args=plain(words), prog="exhume", version=VERSION, exit_on_error=False)
    except ArgumentError as error:
        known = words[:1] in [[name] for name in commands]
        command = words[: 1 + (words[0] == "bench")] if known else []
        more = f"; {' '.join(('exhume', *command, '--help'))} says what there is."
        raise InputError(misread(str(error)).rstrip(".") + more) from None


def misread(said: str) -> str:
    r"""Say which option cannot be read, and what it takes: the parser says it in Python's types.

    Example:
        >>> misread('Parser key "samples":\n  Expected a <class \'int\'>. Got value: ten')
        "samples: expected a whole number, got 'ten'"
    """
    option = re.search(r'Parser key "([\w.]+)"', said)
    value = re.search(r"(?:Given|Got) value: (.*)", said)
    if option is None or value is None:
        return said
    types = re.findall(r"Expected a <class '(\w+)'>", said)
    kinds = list(dict.fromkeys(KINDS[kind] for kind in types if kind in KINDS))
    if (words := re.search(r"Expected a typing.Literal\[(.*)\]", said)) is not None:
        kinds.append(f"one of {words[1].replace(chr(39), '')}")
    asked = f"expected {' or '.join(kinds)}, got" if kinds else "cannot read"
    return f"{option[1]}: {asked} {value[1]!r}"


def _reason(error: Exception) -> str | None:
    """Say what a user can mend; nothing where nobody listens; None for a fault of ours."""
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, BrokenPipeError):
        return ""
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}; finished files are whole, and a run can resume."
    kinds = {kind.__name__ for kind in type(error).__mro__}  # torch's, which is not imported here
    if kinds & {"MemoryError", "OutOfMemoryError"}:
        return "the memory is used up; take fewer samples, a smaller model, or --device cpu."
    if any("LinAlgError" in kind for kind in kinds):
        scale = "the scale of the weights and of the inputs, which may be far too large or small"
        return f"equations cannot be solved ({quoted(error)}); check {scale}."
    return None


def _open_streams() -> None:
    """Have somewhere to write to: streams may be closed, and terminals may know no Greek."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _give_up_stdout() -> None:
    """Let what nobody can read vanish: Python would fail once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _named(words: list[str]) -> dict[str, Callable[..., None]]:
    """Return the command that the first word names, or all: their parser takes far longer."""
    names = words[:1] if words and words[0] in COMMANDS else list(COMMANDS)
    return {name: getattr(import_module(f"exhume.cli.{COMMANDS[name]}"), name) for name in names}


def plain(words: list[str]) -> list[str]:
    """Let options be written as people write them.

    `--time-limit 3`, `--resume` alone, `--no-controls`, `--range 0,1`, and what a command is about
    without a word.

    Example:
        >>> plain(["audit", "a-b", "--resume", "--time-limit=3-4", "--range", "-1,1"])
        ['audit', '--model', 'a-b', '--resume=true', '--time_limit=3-4', '--range', '[-1,1]']
    """
    commands = _named(words).values()
    signatures = (inspect.signature(function).parameters.values() for function in commands)
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
        if (flag := word.replace("--no_", "--", 1)) in flags and flag != word:
            word = f"{flag}=false"
        elif word in flags and following not in ("true", "false"):
            word += "=true"
        elif equals and name in LISTS:
            word = f"{name}={_bracketed(value)}"
        elif bare and bare not in result and not word.startswith("-"):
            result.append(bare)
        result.append(word)
    return result


def _bracketed(numbers: str) -> str:
    """Return numbers with commas, or an x as in 3x32x32, between them as a list."""
    numbers = numbers.replace("x", ",") if re.fullmatch(r"\d+(x\d+)+", numbers) else numbers
    return f"[{numbers}]" if "," in numbers and not numbers.startswith("[") else numbers
