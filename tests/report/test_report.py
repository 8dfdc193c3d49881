"""The report, on run directories made up for the purpose."""

import base64
import io
import json
import math
import re
import stat
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file, save_file

from exhume import report
from exhume.data import Data, Transform
from exhume.errors import InputError
from exhume.evaluate import chance, score
from exhume.report import figures
from exhume.solvers import Outcome

Array = NDArray[np.float64]

SECTIONS = ("verdict", "gallery", "evidence", "progress", "law", "method", "reproduce")
HOSTILE = "<script>alert('$x_1$')</script>\"'&{{ 7 * 7 }}"


def faces(count: int = 10) -> Array:
    """Faces of 25 by 25 pixels that come with scikit-image."""
    pictures = skimage.data.lfw_subset()  # type: ignore[no-untyped-call]
    return np.asarray(pictures[:count], dtype=np.float64)


def colours(count: int = 6) -> Array:
    """Crops of a photograph, three channels of 32 by 32 pixels."""
    photo = skimage.data.astronaut()  # type: ignore[no-untyped-call]
    photo = np.moveaxis(np.asarray(photo, dtype=np.float64), 2, 0) / 255
    corners = [(16 + 70 * (i % 5), 130 + 60 * (i // 5)) for i in range(count)]
    crops = [photo[:, y : y + 64 : 2, x : x + 64 : 2] for y, x in corners]
    return np.ascontiguousarray(np.stack(crops))


def vectors(count: int = 8, dim: int = 100) -> Array:
    """Points on a sphere."""
    points = np.random.default_rng(0).standard_normal((count, dim))
    points *= math.sqrt(dim) / np.linalg.norm(points, axis=1, keepdims=True)
    return points


def make_run(
    path: Path,
    truth: Array,
    noise: float = 1e-4,
    found: int | None = None,
    scored: bool = True,
    **changes: Any,
) -> Path:
    """Write a run directory as an audit and a score would, with candidates near the truth."""
    path.mkdir(mode=0o700, parents=True)
    shape, n, rng = truth.shape[1:], len(truth), np.random.default_rng(1)
    pixels = len(shape) > 1
    inputs = ((truth - 0.5) / 0.25 if pixels else truth).reshape(n, -1)
    kept = n if found is None else found
    scales = noise * np.geomspace(0.3, 3, n)[:, None]
    samples = (inputs + scales * rng.standard_normal(inputs.shape))[:kept]
    order = rng.permutation(kept)
    coefficients = rng.standard_normal((kept, 1))
    save_file(
        {"samples": np.ascontiguousarray(samples[order]), "coefficients": coefficients},
        path / "candidates.safetensors",
    )
    dim = inputs.shape[1]
    result = {
        "schema": 1,
        "exhume": "0.1.0",
        "versions": {"python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.0"},
        "device": "cpu",
        "device_name": "CPU, 2 cores",
        "seed": 0,
        "method": "exhume",
        "started": "2026-11-15T08:00:00Z",
        "seconds": 33.4,
        "outcome": "converged",
        "sentence": "The residual reached its floor.",
        "residual": 1.2e-11,
        "candidates": kept,
        "samples_given": n,
        "steps": 35,
        "products": 220,
        "problem": {
            "name": "random features",
            "dim": dim,
            "width": 4 * dim * n,
            "outputs": 1,
            "shape": list(shape),
            "ratio": 4.0,
            "domain": "sphere of radius √d",
        },
        "threat_model": {
            "knows": ["the trained last layer", "the first layer, fixed at random", "relu"],
            "assumes": ["every sample has the norm √d", "a linear model on the features"],
        },
        "display": {"shift": 0.5, "scale": 0.25} if pixels else None,
        "claims": [
            "The candidates explain the weights up to rounding.",
            "The weights hold four times as many numbers as the samples have unknowns.",
        ],
        "limits": [
            "One seed, one model: other seeds may end elsewhere.",
            "The scale of a sample cannot be told from its coefficient.",
        ],
    } | changes
    (path / "result.json").write_text(json.dumps(result))
    (path / "config.yaml").write_text(
        f"method: exhume\nsamples: {n}\nseed: 0\nsolver:\n  damping: 0.01\n  products: 40\n"
    )
    (path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events(n)))
    if scored:
        add_score(path, truth, inputs, samples[order])
    return path


def events(n: int) -> list[dict[str, Any]]:
    """A search that explores, prunes and polishes."""
    phases = ["explore"] * 18 + ["prune"] * 5 + ["polish"] * 12
    fall = np.concatenate([np.geomspace(0.9, 2e-3, 23), np.geomspace(4e-4, 1.2e-11, 12)])
    counts = [n + 3] * 18 + [n + 2, n + 2, n + 1, n, n] + [n] * 12
    return [
        {
            "seconds": 0.95 * i + 0.2,
            "step": i,
            "residual": float(fall[i]),
            "candidates": counts[i],
            "settled": min(i, n),
            "phase": phases[i],
        }
        for i in range(35)
    ]


def add_score(path: Path, truth: Array, inputs: Array, samples: Array) -> None:
    """Score the candidates as `exhume score` would."""
    pixels = truth.ndim > 2
    data = Data(
        torch.from_numpy(inputs),
        torch.ones(len(truth), 1, dtype=torch.float64),
        truth.shape[1:],
        "faces",
        Transform(0.5, 0.25) if pixels else Transform(),
    )
    result = score(torch.from_numpy(samples), data)
    levels = chance(data, len(samples), trials=1)
    (path / "score.json").write_text(
        json.dumps(
            {
                "score": result.to_dict(),
                "chance": levels.to_dict(),
                "span_residual": 1.3e-3,
                "residual_at_truth": 1e-13,
                "data": "faces",
            }
        )
    )
    if pixels:
        matched = result.matched.numpy()
        pictures = (samples[matched] * 0.25 + 0.5).reshape(truth.shape)
        pictures[matched < 0] = np.nan
        save_file({"originals": truth, "reconstructions": pictures}, path / "matched.safetensors")


def edit(run: Path, name: str, **changes: Any) -> None:
    """Change entries of a JSON file."""
    file = run / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def page(run: Path, redact: bool = False) -> str:
    """The text of a report."""
    return report.write(run, redact=redact).read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Checks that tags nest; collects ids and tag names."""

    VOID = ("meta", "img", "br", "path", "use", "polyline", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for key, value in attrs if key == "id"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parse(text: str) -> Reader:
    """Parse a page that must be well formed."""
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    return reader


CASES: dict[str, tuple[Callable[[], Array], dict[str, Any]]] = {
    "faces": (faces, {}),
    "colour": (colours, {}),
    "vectors": (vectors, {}),
    "faces without truth": (faces, {"scored": False}),
    "vectors without truth": (vectors, {"scored": False}),
    "one sample": (lambda: faces(1), {}),
    "samples missed": (faces, {"found": 7, "noise": 0.1}),
}


@pytest.mark.parametrize(
    ("case", "redact"),
    [*((case, False) for case in CASES), ("faces", True), ("vectors without truth", True)],
)
def test_every_page_is_whole_private_and_offline(tmp_path: Path, case: str, redact: bool) -> None:
    data, options = CASES[case]
    run = make_run(tmp_path / "run", data(), **options)
    file = report.write(run, redact=redact)
    assert file == run / ("report-redacted.html" if redact else "report.html")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {p.name for p in run.iterdir() if p.name.startswith(".")} == set()
    text = file.read_text(encoding="utf-8")
    reader = parse(text)
    assert set(SECTIONS) <= set(reader.ids)
    assert ("samples" in reader.ids) == options.get("scored", True)
    assert ("claims" in reader.ids) != options.get("scored", True)
    assert "script" not in reader.tags and "link" not in reader.tags
    allowed = ("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")
    assert set(re.findall(r"""https?://[^\s"'<]*""", text)) <= set(allowed)
    assert not re.search(r"url\((?!#)", text)
    assert "nan" not in re.sub(r"data:image[^\"]*", "", text).lower().split()
    assert text.count("var(--") > 100 and not re.search(r"#0[1-9a-c]0[1-9a-c]0[1-9a-c]", text)
    if redact:
        assert "data:image" not in text and "<polyline" not in text
        assert "redacted" in text.lower()
    else:
        assert ("<polyline" in text) == ("vectors" in case)
        assert ("data:image/png" in text) == ("vectors" not in case)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", faces(3))
    first = report.write(run).read_bytes()
    assert report.write(run).read_bytes() == first


def test_ids_are_unique_but_for_equal_markers(tmp_path: Path) -> None:
    ids = parse(page(make_run(tmp_path / "run", faces(3)))).ids
    named = [i for i in ids if not re.fullmatch(r"[mp][0-9a-f]{10}", i)]
    assert len(named) == len(set(named))


def test_the_verdict_with_the_truth(tmp_path: Path) -> None:
    text = page(make_run(tmp_path / "run", faces()))
    assert "<h1>10 of 10 training samples recovered, 10 exactly.</h1>" in text
    level = json.loads((tmp_path / "run/score.json").read_text())["chance"]["neighbour"]["error"]
    assert f"chance level {level:.3g}" in text
    assert "95 % interval 72 % to 100 %" in text
    assert "1.2\u00a0×\u00a010⁻¹¹" in text and "residual 1.2 × 10⁻¹¹" in text


def test_the_verdict_without_the_truth_claims_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", faces(), scored=False)
    text = page(run)
    assert "10 candidates explain the weights to a residual of" in text
    assert "nobody may say “recovered”" in text and "contrast" in text
    assert "training samples recovered" not in text
    edit(run, "result.json", outcome="stalled", sentence="It stalled.", samples_given=None)
    text = page(run)
    assert "Not converged: 10 candidates" in text and "It stalled." in text
    assert "their number was found" in text


def test_nothing_recovered_and_under_the_limit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", vectors(), noise=5.0)
    problem = json.loads((run / "result.json").read_text())["problem"]
    edit(run, "result.json", problem=problem | {"ratio": 0.4})
    text = page(run)
    assert "None of 8 training samples recovered." in text and "not that the data are safe" in text
    assert "below the counting limit of 1" in text


@pytest.mark.parametrize("ratio", [1e-4, 0.99, 1.0, 1.01, 37.0, 2e6])
def test_any_ratio_can_be_drawn(ratio: float) -> None:
    svg = figures.law(ratio)
    assert "this run" in svg and ">1</text>" in svg


@pytest.mark.parametrize("ratio", [None, 0.0])
def test_no_ratio_no_axis(tmp_path: Path, ratio: float | None) -> None:
    run = make_run(tmp_path / "run", vectors(2))
    problem = json.loads((run / "result.json").read_text())["problem"]
    edit(run, "result.json", problem=problem | {"ratio": ratio})
    text = page(run)
    assert "this run" not in text and "is not known" in text


def test_a_score_without_its_extras(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", vectors(2))
    record = json.loads((run / "score.json").read_text())
    (run / "score.json").write_text(json.dumps({k: record[k] for k in ("score", "chance")}))
    text = page(run)
    assert "2 of 2 training samples recovered" in text
    assert "PSNR" not in text and "dashed line" not in text


def test_missing_numbers_are_said_to_be_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", faces(), found=7)
    edit(run, "result.json", residual=None, seconds=None, products=None)
    text = page(run, redact=True)
    assert text.count("<td>–</td>") >= 3 * 3
    assert "<dd>n/a</dd>" in text
    assert '<span class="none">none</span>' in page(run)


def test_hostile_strings_are_shown_not_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", faces(2), scored=False)
    result = json.loads((run / "result.json").read_text())
    words: dict[str, Any] = {
        key: HOSTILE
        for key in ("sentence", "method", "device", "device_name", "started", "exhume", "outcome")
    }
    words["problem"] = result["problem"] | dict.fromkeys(("name", "domain"), HOSTILE)
    words |= {"claims": [HOSTILE], "limits": [HOSTILE], "versions": {HOSTILE: HOSTILE}}
    words["threat_model"] = {"knows": [HOSTILE], "assumes": [HOSTILE]}
    words |= {"parameters": HOSTILE, "point": HOSTILE, "rank": HOSTILE}
    words["prepared"] = {"changes": [HOSTILE], "warnings": HOSTILE, "derivative_error": HOSTILE}
    edit(run, "result.json", **words)
    (run / "config.yaml").write_text(f"</pre>{HOSTILE}")
    line = json.dumps({"seconds": 1, "residual": 0.1, "candidates": HOSTILE, "phase": HOSTILE})
    (run / "events.jsonl").write_text(line + "\n")
    text = page(run)
    assert "script" not in parse(text).tags
    assert "&lt;script&gt;" in text and "{{ 7 * 7 }}" in text


def test_events_may_be_cut_or_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", vectors(2))
    whole = page(run)
    with (run / "events.jsonl").open("a") as file:
        file.write('{"seconds": 40.0, "resid')
    assert page(run) == whole
    (run / "events.jsonl").unlink()
    assert "No progress was recorded" in page(run)


@pytest.mark.parametrize("event", [{}, {"seconds": 1}, {"seconds": 1, "residual": math.nan}])
def test_events_that_cannot_be_drawn(event: dict[str, Any]) -> None:
    assert figures.progress([event, {"seconds": "x", "residual": 0.1}]) is None


def test_events_that_can_be_drawn() -> None:
    alone = figures.progress([{"seconds": 700, "residual": 0.02}], floor=1e-13)
    assert alone is not None and "minutes" in alone.svg and "at the truth" in alone.svg
    assert alone.legend == ["search"] and "thin line" not in alone.svg
    several = figures.progress(events(5))
    assert several is not None and "seconds" in several.svg and "thin line" in several.svg
    assert several.legend == ["explore", "prune", "polish"]


def test_a_long_gallery_shows_the_best_and_the_worst(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", faces(70)[:, ::5, ::5])
    text = page(run)
    assert "The 30 best" in text and "The 30 worst" in text and "10 more pairs" in text
    assert text.count("<figure>") == 60 and text.count("data:image/png") == 120
    run = make_run(tmp_path / "other", faces(70)[:, ::5, ::5], scored=False)
    text = page(run)
    assert text.count("data:image/png") == 60 and "10 more candidates" in text


def test_a_thumbnail_holds_the_pixels(tmp_path: Path) -> None:
    truth = colours(1)
    text = page(make_run(tmp_path / "run", truth))
    first, second = re.findall(r"data:image/png;base64,([^\"]+)", text)
    for encoded in (first, second):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))), dtype=np.float64)
        assert np.abs(pixels / 255 - np.moveaxis(truth[0], 0, 2)).max() < 0.01


def test_display_by_channel(tmp_path: Path) -> None:
    display = {"shift": [0.5, 0.4, 0.3], "scale": [0.2, 0.3, 0.4]}
    run = make_run(tmp_path / "run", colours(2), scored=False, display=display)
    text = page(run)
    assert "shift and scale were undone" in text and text.count("data:image/png") == 2
    edit(run, "result.json", display=None)
    assert "shift and scale were undone" not in page(run)


# Networks


FLOORS = {"initial": 2.6e-5, "final": 1.8e-4, "midpoint": 1.7e-5, "both": 1e-8}
NETWORK: dict[str, Any] = {
    "parameters": "last",
    "point": "midpoint",
    "prepared": {
        "changes": ["0.relu: the in-place ReLU was replaced by one that is not."],
        "warnings": ["1.norm: a normalisation before the first layer."],
        "derivative_error": 3e-9,
    },
}
SPAN = {"rank": 8, "largest_angle": 2.1e-7, "outside": 3.4e-9, "kept": 0.97}


def network_run(path: Path, scored: bool = True, **changes: Any) -> Path:
    """A run on a two-layer net whose model folder is at hand."""
    run = make_run(path / "run", vectors(), scored=scored, **(NETWORK | changes))
    card = {
        "kind": "network",
        "architecture": {"name": "two_layer", "arguments": {"width": 640, "shape": [100]}},
        "training": {"laziness": {"first": 4.1e-3, "1.weight": 4.1e-3}},
    }
    (path / "model").mkdir()
    (path / "model/card.json").write_text(json.dumps(card))
    (run / "config.yaml").write_text(f"model: {path / 'model'}\nmethod: exhume\n")
    if scored:
        edit(run, "score.json", floors=FLOORS, verdict="All 8 samples recovered.", subspace=SPAN)
    return run


def test_a_run_without_the_new_entries_has_no_part_on_a_network(tmp_path: Path) -> None:
    for name, scored in (("scored", True), ("open", False)):
        text = page(make_run(tmp_path / name, vectors(), scored=scored))
        assert {"model", "floor"} & set(parse(text).ids) == set()
        assert "Attacked:" not in text and "by point" not in text and "Reading:" not in text
        assert "p·m / (d·n), the limit is 1" in text and "p·m/(d·n) = 4." in text
    plain = {"parameters": "last", "point": None, "rank": None}
    nothing = {"changes": [], "warnings": [], "derivative_error": None}
    run = make_run(tmp_path / "random", vectors(), **plain, prepared=nothing)
    assert "model" not in parse(page(run)).ids


@pytest.mark.parametrize("redact", [False, True])
def test_a_run_on_a_network_says_what_was_attacked(tmp_path: Path, redact: bool) -> None:
    text = page(network_run(tmp_path), redact)
    assert {"model", "floor"} <= set(parse(text).ids)
    assert "<dd>two_layer, width 640</dd>" in text and "<dd>random features</dd>" in text
    assert "<dd>the last layer</dd>" in text and "<dd>the midpoint of training</dd>" in text
    assert "moved by 0.0041 of its norm" in text and "3.0\u00a0×\u00a010⁻⁹ from finite" in text
    assert "<li>0.relu: the in-place" in text and "<li>1.norm: a normalisation" in text
    assert "<td>midpoint (this run)</td><td>1.7\u00a0×\u00a010⁻⁵</td>" in text
    assert "<td>initial</td><td>2.6\u00a0×\u00a010⁻⁵</td>" in text
    assert "<p>All 8 samples recovered.</p>" in text
    assert "spans 8 directions" in text and "2.1\u00a0×\u00a010⁻⁷°" in text
    assert "Weight decay left 0.97" in text
    card = text[text.index('<pre class="paste">') :]
    assert "- Attacked: architecture: two_layer, width 640; parameters: the last layer;" in card
    assert "laziness: the first layer moved by 0.0041" in card
    assert "- Changed before the audit: 0.relu" in card and "- Warning: 1.norm" in card
    assert "by point: initial 2.6 × 10⁻⁵, final 1.8 × 10⁻⁴, midpoint 1.7 × 10⁻⁵" in card
    assert "- Reading: All 8 samples recovered." in card and "- Subspace: The change" in card


def test_trained_weights_alone_are_called_weak_evidence(tmp_path: Path) -> None:
    weak = "so a small residual is weak evidence"
    for name, scored in (("open", False), ("scored", True)):
        (tmp_path / name).mkdir()
        run = network_run(tmp_path / name, scored, premise="margin", parameters="all")
        card = json.loads((tmp_path / name / "model/card.json").read_text())
        card["training"] = {"premise": "margin", "stationarity": 2e-4, "violation": 0.07}
        (tmp_path / name / "model/card.json").write_text(json.dumps(card))
        text = page(run)
        assert "<dd>trained to the margin: the trained weights alone</dd>" in text
        assert "up to 2.0\u00a0×\u00a010⁻⁴ of the weights" in text
        assert (weak in text, "leave no other explanation" in text) == (not scored, False)
    assert "- Subspace: The first layer spans 8 directions" in text
    (tmp_path / "change").mkdir()
    other = page(network_run(tmp_path / "change", False, premise="change"))
    assert weak not in other and "<dd>the change of the weights in training</dd>" in other


def test_a_network_whose_folder_is_gone_or_damaged(tmp_path: Path) -> None:
    run = network_run(tmp_path, scored=False)
    card = tmp_path / "model/card.json"
    for content in (
        "{",
        "[]",
        '{"kind": "network", "architecture": [], "training": {"laziness": 1}}',
    ):
        card.write_text(content)
        text = page(run)
        assert "the midpoint of training" in text and "two_layer" not in text
        assert "Laziness" not in text and 'id="floor"' not in text
    card.unlink()
    assert "the midpoint of training" in page(run)
    for config in ("model: 3\n", "model: [", "- a\n", "", "model: 'package.module:factory'\n"):
        (run / "config.yaml").write_text(config)
        assert "the midpoint of training" in page(run)


def test_a_score_of_a_network_with_parts_missing(tmp_path: Path) -> None:
    run = network_run(tmp_path, prepared=None, parameters="1.*", point=None)
    sentence = "the change of the first layer spans all directions"
    edit(run, "score.json", subspace=sentence, floors={"final": 1e-4, "both": None})
    text = page(run)
    assert f"<p>{sentence}</p>" in text and "<td>final</td>" in text and "<td>both</td>" not in text
    assert "<dd>1.*</dd>" in text and "Derivatives" not in text and "Warnings" not in text
    edit(run, "score.json", subspace={"rank": 8, "kept": 1.0}, floors=None, verdict=None)
    text = page(run)
    assert "Weight decay" not in text and "n/a°" in text and "Residual at the truth" not in text


def test_in_a_subspace_the_ratio_is_that_of_the_subspace(tmp_path: Path) -> None:
    run = network_run(tmp_path, rank=8)
    problem = json.loads((run / "result.json").read_text())["problem"]
    edit(run, "result.json", problem=problem | {"ratio": 0.5, "width": 400})
    text = page(run)
    assert "<dd>6.25</dd><small>p·m / (r·n) with r = 8, the limit is 1</small>" in text
    assert "p·m/(r·n) = 6.25." in text and "The ratio of this run is 6.25" in text
    assert "sought in a subspace of dimension 8, hide r·n = 64" in text
    assert "8 of 100 dimensions" in text and "below the counting limit" not in text
    edit(run, "result.json", rank=None)
    assert "below the counting limit" in page(run)


def test_settled_is_neither_converged_nor_failed(tmp_path: Path) -> None:
    sentence = Outcome.SETTLED.sentence
    run = make_run(tmp_path / "run", vectors(), scored=False, outcome="settled", sentence=sentence)
    text = page(run)
    assert "Settled: 8 candidates, found again by independent trials at a residual of" in text
    assert "A residual is left. Trials that dropped" in text
    assert "did not converge" not in text and "Not converged" not in text
    assert "nobody may say “recovered”" in text


@pytest.mark.parametrize("name", ["result.json", "config.yaml", "candidates.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", vectors(2))
    (run / name).unlink()
    with pytest.raises(InputError, match=rf"{name} does not exist: run exhume audit first"):
        report.write(run)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("result.json", "{", "not JSON"),
        ("result.json", "[]", "JSON object"),
        ("result.json", "{}", "has no exhume"),
        ("score.json", "{}", "has no score, chance"),
        ("candidates.safetensors", "x", "run exhume audit again"),
        ("matched.safetensors", "x", "run exhume score again"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    run = make_run(tmp_path / "run", faces(2), scored=name[0] in "ms")
    (run / name).write_text(content)
    with pytest.raises(InputError, match=words) as caught:
        report.write(run)
    assert name in str(caught.value)
    assert not (run / "report.html").exists()


def test_another_schema_and_foreign_pictures_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", faces(3))
    pictures = load_file(run / "matched.safetensors")
    save_file({k: v[:2].copy() for k, v in pictures.items()}, run / "matched.safetensors")
    with pytest.raises(InputError, match="does not belong"):
        report.write(run)
    edit(run, "result.json", schema=2)
    with pytest.raises(InputError, match="schema 2"):
        report.write(run)


@pytest.mark.parametrize("data", [faces, colours])
def test_gallery_png(tmp_path: Path, data: Any) -> None:
    run = make_run(tmp_path / "run", data(), found=5)
    out = report.gallery_png(run, tmp_path / "gallery.png", limit=6)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    with Image.open(out) as picture:
        assert picture.format == "PNG" and picture.width > 2 * picture.height
    first = out.read_bytes()
    assert report.gallery_png(run, out, limit=6).read_bytes() == first


def test_gallery_png_needs_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", vectors(2))
    with pytest.raises(InputError, match=r"matched\.safetensors"):
        report.gallery_png(run, tmp_path / "gallery.png")
