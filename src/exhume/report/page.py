"""The report: from a run directory to one HTML file.

`auditing.evidence` decides what is said. Here it is put in its place, beside pictures, plots and
the settings of the run.
"""

from dataclasses import asdict
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from exhume import wording
from exhume.auditing import evidence
from exhume.auditing.answers import answers
from exhume.auditing.evidence import Record, counts, rank_of, ratio_of
from exhume.auditing.folder import RunFolder, read_run
from exhume.auditing.judgement import SURE
from exhume.files import write_private
from exhume.models.formulation import POINTS
from exhume.report import plots
from exhume.report.gallery import gallery, grade, table
from exhume.wording import duration, finite, number, percent

# Longer tables are cut here, so that a browser can still show them; score.json has every row
ROWS = 1000
LIKELY, LEAST = f"probability {SURE} or more", "recognisable at least"

WORDS = {
    **POINTS,
    "last": "the last layer",
    "first": "the first layer",
    "change": "the change of the weights in training",
    "weights": "the trained weights themselves",
    "margin": "trained to the margin",
    "decay": "at rest under weight decay",
}


def write(run: Path, redact: bool = False) -> Path:
    """Write a report into a run directory: one file, offline, readable by its owner only.

    The same directory gives the same bytes. With `redact` every picture and signal is left out, of
    files only their names are shown, and the file is `report-redacted.html`.
    """
    folder = read_run(Path(run))
    result, scored, extras = folder.result, folder.scored, folder.scored or {}
    ratio, seen = ratio_of(result), extras.get("recognised")
    values = {point: finite(value) for point, value in extras.get("floors", {}).items()}
    floors = [(at, x, at == result["point"]) for at, x in values.items() if x is not None]
    likenesses = (evidence.recognition_rows(seen), evidence.recognition(seen)) if seen else None
    template = environment().get_template("report.html.jinja")
    page = template.render(
        result=result,
        problem=result["problem"],
        config=redacted(folder) if redact else folder.config,
        redact=redact,
        scored=scored,
        baseline=evidence.baseline(scored["chance"]) if scored else None,
        headline=evidence.headline(result, scored),
        answers=answers(result, scored),
        cautions=evidence.cautions(result, scored),
        controls=evidence.controls(result),
        likely=evidence.likely(result),
        sure=SURE,
        cards=cards(folder),
        counts=counts(scored["score"]) if scored else None,
        unmeasured=evidence.unmeasured(scored) if scored else 0,
        gallery=None if redact else gallery(folder),
        table=None if redact else table(folder),
        progress=plots.progress(folder.events, finite(extras.get("residual_at_truth"))),
        rank=rank_of(result),
        ratio=ratio,
        law=plots.law(ratio) if ratio > 0 else None,
        alone=evidence.weights_alone(result),
        model=model(folder),
        floors=floors,
        subspace=extras.get("subspace"),
        recognition=likenesses,
        level=evidence.LEVEL,
        rows=ROWS,
        inputs=inputs(result, extras),
        grade=grade,
    )
    name = "report-redacted.html" if redact else "report.html"
    return write_private(folder.path / name, page.encode())


def inputs(result: Record, scored: Record) -> list[tuple[str, str, str]]:
    """Return role, file and SHA-256 of what an audit and its score were given."""
    entries = [*result["inputs"], *scored.get("inputs", ())]
    return [(entry["role"], entry["file"] or "", entry["sha256"]) for entry in entries]


def redacted(run: RunFolder) -> str:
    """Return the settings as YAML, of files only the names: their folders often name a person."""

    def named(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: named(entry) for key, entry in value.items()}
        kinds = (PurePosixPath, PureWindowsPath)
        whole = isinstance(value, str) and any(kind(value).is_absolute() for kind in kinds)
        return PureWindowsPath(value).name if whole else value

    return yaml.safe_dump(named(asdict(run.settings)), sort_keys=False)


@cache
def environment() -> Environment:
    """Return the templates of this package, with its ways to write numbers."""
    loader, strict = PackageLoader("exhume", "report"), StrictUndefined
    found = Environment(
        loader=loader, autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True
    )
    names = ("number", "fixed", "percent", "plural", "duration", "moment")
    found.filters |= {name: getattr(wording, name) for name in names}
    found.globals["wilson"] = wording.wilson
    return found


def cards(run: RunFolder) -> list[tuple[str, str, str]]:
    """Return the key numbers, each with a label and a note."""
    result, rank = run.result, rank_of(run.result)
    residual_note = "share of the weights left unexplained"
    unknowns = "equations for each unknown" + ("" if rank is None else f", r = {number(rank)}")
    if run.scored is None:
        given = result["samples_given"]
        found = "their number was found" if given is None else f"of {number(given)} asked for"
        sure, count = evidence.likely(result)
        head = [
            ("Verdict", result["verdict"], f"the search: {result['outcome']}"),
            ("Likely samples", f"{number(sure)} / {number(count)}", LIKELY),
            ("Candidates", number(count), found),
        ]
    else:
        score = run.scored["score"]
        graded, total = counts(score), int(score["samples"])
        if finite(run.scored.get("residual_at_truth")) is not None:
            residual_note = f"at the truth {number(run.scored['residual_at_truth'])}"
        back, exact = total - graded["not found"], graded["exact"]
        recovered = f"{number(exact + graded['recovered'])} / {number(total)}"
        share = f"{percent(back / total)}, {LEAST}"
        if more := evidence.unmeasured(run.scored):
            share = f"at least; {number(more)} more were not measured"
        head = [
            ("Came back", f"{number(back)} / {number(total)}", share),
            ("Recovered", recovered, f"{number(exact)} of them exact"),
            ("Mean error", number(score["error"]), evidence.level(run.scored)),
        ]
    return [
        *head,
        ("Residual", number(result["residual"]), residual_note),
        ("Ratio", number(ratio_of(result)), f"{unknowns}, the limit is 1"),
        ("Time", duration(result["seconds"]), str(result["device_name"])),
    ]


def model(run: RunFolder) -> dict[str, Any] | None:
    """Say what of a network was attacked; None for a run on other models."""
    result, problem, prepared = run.result, run.result["problem"], run.result["prepared"]
    card = result["model"] or {}
    facts = []
    if card.get("architecture") is not None:
        facts.append(("Architecture", card["architecture"]))
    if not (facts or result["point"] or any(prepared.values())):
        return None
    asked = {"Premise": "premise", "Target": "target", "Parameters": "parameters"}
    asked["Features at"] = "point"
    for name, key in asked.items():
        if result[key] is not None:
            facts.append((name, WORDS.get(str(result[key]), str(result[key]))))
    subspace = f"candidates sought in {{}} of {number(problem['dim'])} dimensions"
    stationarity = "up to {} of the weights, as the model's card says"
    for name, value, words in (
        ("At rest", card.get("stationarity"), stationarity),
        ("Laziness", card.get("laziness"), "the first layer moved by {} of its norm in training"),
        ("Subspace", rank_of(result), subspace),
        ("Derivatives", prepared["derivative_error"], "{} from finite differences, relative"),
    ):
        if finite(value) is not None:
            facts.append((name, words.format(number(value))))
    return {"facts": [("Features", str(problem["name"])), *facts], **prepared}
