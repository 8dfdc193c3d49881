"""`exhume score` and `exhume report`: what a run is worth, and the page that says so."""

from pathlib import Path
from typing import Any

from exhume.auditing import evidence
from exhume.auditing.folder import CONFIG, RunFolder
from exhume.cli.console import new_console, table
from exhume.cli.gate import judge, limits
from exhume.evaluate.runs import named, score_run

SHARES = ("exact", "recovered", "recognisable", "recall", "precision")
FIGURES = (*SHARES, "error", "cosine", "psnr", "ssim")


def score(
    run: Path,
    truth: Path | None = None,
    model: str | None = None,
    held_out: Path | None = None,
    fail_over: str | None = None,
    trust: bool = False,
    renew: bool = False,
) -> None:
    """Compare a run with the training data: matches, errors, chance; floors and angles.

    Args:
        run: folder of an audit.
        truth: the training data, such as truth.safetensors in the model's folder.
        model: the factory of a model of your own, once more; without it there are no floors.
        held_out: images that the model never saw, in a file as the truth; drawn if left out.
        fail_over: end with exit code 1 if more came back, such as recognisable=0.05; see
            `exhume gate`.
        trust: use what the config of a run that you did not begin here names, and show it: the
            model's folder and the truth in it, weights, arguments of the factory. Not for runs
            that you were sent.
        renew: put this score in the place of one that was made with another truth.
    """
    from exhume import report as reports

    asked = None if fail_over is None else limits(fail_over)
    if trust:
        names = named(RunFolder(run).settings)
        new_console().print(f"trusting {run / CONFIG}, which names {names}", markup=False)
    record = score_run(run, truth, model, held_out, trust, renew)
    reports.write(run)
    _say(run, record)
    if asked is not None:
        judge(run, asked)


def _say(run: Path, record: dict[str, Any]) -> None:
    """Print what a run is worth."""
    sides = record["score"], record["chance"]["neighbour"] or {}
    rows = [
        [word, *("" if (x := side.get(word)) is None else f"{x:.4g}" for side in sides)]
        for word in FIGURES
        if record["score"].get(word) is not None
    ]
    console, folder = new_console(), RunFolder(run)
    result = folder.result
    console.print(f"[bold]{evidence.headline(result, record)[0]}[/]")
    for caution in evidence.cautions(result, record):
        console.print(f"caution: {caution}", markup=False)
    console.print(table(("", "this run", "nearest other sample"), rows))
    if (seen := record.get("recognised")) is not None:
        counted = evidence.recognition_rows(seen)
        console.print(table(("recognisable by", "training images", "held-out images"), counted))
        console.print(evidence.recognition(seen), markup=False)
    if evidence.weights_alone(result) and not record["score"]["recovered"]:
        console.print(evidence.LEVEL, markup=False)
    if "verdict" not in record:
        ways = ["--model, the factory,"] * (folder.settings.trained is not None)
        ways += ["--trust, if the run is yours,"] * (not folder.made_here)
        console.print(f"give {' and '.join(ways)} to see the floor and the verdict")
        return
    console.print(
        f"residual at the truth {record['residual_at_truth']:.1e}, span residual "
        f"{record['span_residual']:.1e}"
    )
    if record["floors"]:
        floors = ", ".join(f"{point} {value:.1e}" for point, value in record["floors"].items())
        console.print(f"floor with features at: {floors}", markup=False)
    if (span := record.get("subspace")) is not None:
        if isinstance(span, dict):
            angle = f"{span['largest_angle']:.1e}°"
            span = f"{span['rank']} directions, largest angle to the samples' span {angle}"
        console.print(f"first layer: {span}", markup=False)
    console.print(record["verdict"], markup=False)


def report(run: Path, redact: bool = False) -> None:
    """Write the report of a run again, as one HTML file.

    Args:
        run: folder of an audit.
        redact: leave out everything that shows a sample, in report-redacted.html.
    """
    from exhume import report as reports

    new_console().print(f"report: {reports.write(run, redact)}", markup=False)
