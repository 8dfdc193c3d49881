"""`exhume audit`: recover training samples from a model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from exhume import data as datasets
from exhume import ranks
from exhume.auditing import evidence
from exhume.auditing.folder import RunFolder
from exhume.auditing.forecast import forecast, hours
from exhume.auditing.run import Event, placed, run
from exhume.auditing.settings import Settings
from exhume.cli.console import named, new_console, refuse
from exhume.cli.gate import Limit, judge, limits
from exhume.errors import InputError
from exhume.evaluate.runs import score_run
from exhume.models.card import NOT_TOLD
from exhume.models.folder import TRUTH
from exhume.models.opening import Opened


def audit(
    model: str | None = None,
    out: Path = Path("run"),
    resume: bool = False,
    fail_over: str | None = None,
    truth: Path | None = None,
    held_out: Path | None = None,
    controls: bool = True,
    anyway: bool = False,
    **options: Any,
) -> None:
    """Recover training samples from a model; the attack never sees the truth.

    The model is a folder, `exhume audit FOLDER`, or your own: a factory and its weights before and
    after training, `exhume audit --model package.module:factory --initial FILE --trained FILE
    --input-shape 3,32,32`. With --premise margin or decay the trained weights will do.

    Args:
        model: folder made by `exhume victim` (here the word --model may be left out); or
            package.module:factory or path/file.py:factory, a function or class that makes your
            model. Its code is run.
        out: folder for the run; must be new, unless the run is resumed.
        resume: go on with an interrupted run.
        fail_over: score the run when it is over, and end with exit code 1 if more came back, such
            as recognisable=0.05; see `exhume gate`.
        truth: for --fail-over, the training data; that in the model's folder if left out.
        held_out: samples of the same kind that the model never saw, in a file as the truth: one
            more control. With --fail-over images are drawn if left out.
        controls: attack from another start, too, and where something was found also where there is
            nothing to find; --no-controls saves the time, three times the attack's at most.
        anyway: begin even where there are too few equations for anything to be found.
        **options: those of `Settings`, which has their names, types, defaults and help.
    """
    with ranks.joined():
        settings = ranks.on_each(
            lambda: Settings.told(model=named(model, "audit"), controls=controls, **options)
        )
        ranks.on_first(lambda: RunFolder(out).check(resume))  # before any time is spent
        asked = ranks.on_each(lambda: _limits(settings, fail_over, truth))
        unseen, opened = ranks.on_each(lambda: (_unseen(held_out), _opened(settings)))
        console = new_console()
        opened = _before(console, settings, opened, resume, anyway)
        result = _watched(console, settings, opened, out, resume, unseen)
        if ranks.rank():  # the first says what was found, and writes the report
            return
    from exhume import report as reports

    _say(console, result)
    console.print(f"report: {reports.write(out)}", markup=False)
    if asked is not None:
        factory = settings.model if settings.trained else None
        score_run(out, truth, factory, held_out, trust=True)
        reports.write(out)
        judge(out, asked)


def _say(console: Console, result: dict[str, Any]) -> None:
    """Say what was found, and what to make of it."""
    console.print(
        f"[bold]{result['outcome']}[/]: {result['candidates']} candidates, residual "
        f"{result['residual']:.1e}, {result['seconds']:.1f} s. {result['sentence']}"
    )
    console.print(f"[bold]{evidence.headline(result, None)[0]}[/] {result['reason']}")
    if (compared := evidence.controls(result)) is not None:
        console.print(f"controls: {compared}", markup=False)
    for name in ("claims", "advice"):
        for sentence in result[name]:
            console.print(f"{name.rstrip('s')}: {sentence}", markup=False)


def _watched(
    console: Console,
    settings: Settings,
    opened: Opened,
    out: Path,
    resume: bool,
    held_out: Tensor | None,
) -> dict[str, Any]:
    """Attack the model, show where that is, and return the result."""
    limit, phases = settings.time_limit, {""}
    with Live(Text("starting …"), console=console, refresh_per_second=8, transient=True) as live:

        def show(event: Event) -> None:
            left = "" if limit is None else f", at most {max(0, limit - event.seconds):.0f} s left"
            line = (
                f"{event.phase:8} residual {event.residual:.1e}   "
                f"{event.settled} of {event.candidates} candidates settled   "
                f"step {event.step}   {event.seconds:.1f} s{left}"
            )
            live.update(Text(line))
            if not console.is_terminal and event.phase not in phases:  # a pipe has no live line
                console.print(line, markup=False)
                phases.add(event.phase)

        try:
            return run(settings, opened, out, resume, show, held_out)[1]
        except KeyboardInterrupt:
            live.stop()
            raise KeyboardInterrupt(f"go on with the same command and --resume ({out})") from None


def _limits(settings: Settings, words: str | None, truth: Path | None) -> tuple[Limit, ...] | None:
    """Return what may come back; refuse, before any time is spent, what could not be scored."""
    if words is None:
        needless = "an audit does without; score the run, or give --fail-over"
        refuse({"truth": truth}, needless)
        return None
    file = truth or (None if settings.trained else Path(settings.model or "") / TRUTH)
    if file is None or not file.is_file():
        raise InputError(f"fail_over: needs the training data ({file}); name it with --truth.")
    return limits(words)


def _unseen(held_out: Path | None) -> Tensor | None:
    return None if held_out is None else datasets.read(held_out).inputs


def _opened(settings: Settings) -> Opened:
    """Open the model, with public images as the network is given them, if there are any."""
    opened, card = settings.open(settings.source()), settings.card
    if card is not None and card.untold and settings.public is None:
        raise InputError(f"range: {NOT_TOLD.format(card.dim)}")
    if settings.public is None:
        return opened
    display = opened.problem.display
    if settings.card is None and display is None:
        raise InputError("public: this model's folder does not say how images become inputs.")
    pixels = datasets.read_images(Path(settings.public), opened.problem.shape)
    return settings.open(settings.source(display.to_inputs(pixels) if display else pixels))


def _before(
    console: Console, settings: Settings, opened: Opened, resume: bool, anyway: bool
) -> Opened:
    """Say what the card decided, what was changed in a model, and what weakens the attack.

    Before a new run, say what it has to go by, too, and how long it takes; refuse a hopeless one.
    """
    premise = opened.problem.premise.value
    if settings.premise is None and premise != "change":
        console.print(f"premise {premise}, as the model's card says; give --premise for another")
    if opened.changes:
        brief = "; ".join(change.partition(": ")[0].rstrip(".") for change in opened.changes)
        console.print(f"prepared a copy of the model: {brief}", markup=False)
    for warning in opened.warnings:
        console.print(f"warning: {warning}", markup=False)
    if resume:
        return opened
    expected = forecast(settings, opened)
    for sentence in expected.said:
        console.print(f"before the run: {sentence}", markup=False)
    if expected.hopeless is not None:
        if not anyway:
            raise InputError(f"{expected.hopeless} To try nevertheless, give --anyway.")
        opened = replace(opened, warnings=(*opened.warnings, expected.hopeless))
    if ranks.count() > 1:  # there an attempt that fails on one would leave the others waiting
        return opened
    opened = placed(settings, opened)
    if (takes := hours(settings, opened.problem)) is not None:
        console.print(f"before the run: it {takes}", markup=False)
    return opened
