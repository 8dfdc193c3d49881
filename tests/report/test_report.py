"""The report, on run directories made up for the purpose."""

import base64
import io
import json
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch
import yaml
from PIL import Image
from safetensors.numpy import load_file, save_file

from exhume import data, report
from exhume.errors import InputError
from exhume.evaluate.runs import score_run
from exhume.report import plots as figures
from problems import gaussian, on_sphere
from runs import make_run, result_of

Array = np.ndarray
HOSTILE = "<script>alert('$x_1$')</script>\"'&{{ 7 * 7 }}"


def faces(count: int = 10) -> Array:
    return np.asarray(skimage.data.lfw_subset()[:count], dtype=np.float64)


def colours(count: int = 6) -> Array:
    photo = np.asarray(skimage.data.astronaut(), dtype=np.float64) / 255
    crops = [photo[130:194:2, x : x + 64 : 2] for x in range(16, 16 + 70 * count, 70)]
    return np.ascontiguousarray(np.moveaxis(np.stack(crops), 3, 1))


def vectors(count: int = 8) -> Array:
    return on_sphere(count, 100).numpy()


def run_of(path: Path, truth: Array, noise=1e-4, found=None, scored=True, **changes: Any) -> Path:
    """A run as an audit and a score leave it, with candidates near the truth."""
    shape, n = truth.shape[1:], len(truth)
    transform = data.Transform(*((0.5, 0.25) if len(shape) > 1 else ()))
    inputs = transform.apply(torch.from_numpy(truth.reshape(n, -1)))
    samples = inputs + noise * torch.linspace(0.3, 3, n)[:, None] * gaussian(*inputs.shape)
    samples = samples.flip(0)[n - found if found is not None else 0 :]
    result = result_of(n, shape, candidates=len(samples), **changes)
    make_run(path, samples, {"model": None, "method": "exhume"}, result)
    (path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events(n)))
    if scored:
        file, targets = path.with_suffix(".truth"), torch.ones(n, 1, dtype=torch.float64)
        data.save(data.Data(inputs, targets, shape, "made up", transform), file)
        score_run(path, file)
        edit(path, "score.json", span_residual=1.3e-3, residual_at_truth=1e-13)
    return path


def events(n: int) -> list[dict[str, Any]]:
    phases = ["explore"] * 18 + ["prune"] * 5 + ["polish"] * 12
    counts = [n + 3] * 18 + [n + 2, n + 2, n + 1, n, n] + [n] * 12
    columns = (0.95 * np.arange(35) + 0.2, np.geomspace(0.9, 1.2e-11, 35), counts, phases)
    names = ("seconds", "residual", "candidates", "phase")
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def edit(run: Path, name: str, **changes: Any) -> None:
    """Change entries of a JSON file; those of the problem are added to it."""
    record = json.loads((run / name).read_text())
    if "problem" in changes:
        changes["problem"] = record["problem"] | changes["problem"]
    (run / name).write_text(json.dumps(record | changes))


def page(run: Path, redact: bool = False) -> str:
    return report.write(run, redact=redact).read_text(encoding="utf-8")


def ids(text: str) -> list[str]:
    """The ids of a page, all of whose tags are closed."""
    for tag in set(re.findall(r"</(\w+)>", text)):
        opened = re.findall(rf"<{tag}\b[^>]*[^/]>|<{tag}>", text)
        assert len(opened) == text.count(f"</{tag}>"), tag
    return re.findall(r"\bid=\"([^\"]+)\"", text)


@pytest.mark.parametrize(
    ("truth", "options", "redact"),
    [
        *((truth, {}, False) for truth in (faces, colours, vectors, lambda: faces(1))),
        *((truth, {"scored": False}, False) for truth in (faces, vectors)),
        (faces, {"found": 7, "noise": 0.1}, False),
        (faces, {}, True),
        (vectors, {"scored": False}, True),
    ],
)
def test_every_page_is_whole_private_and_offline(
    tmp_path: Path, truth: Callable[[], Array], options: dict[str, Any], redact: bool
) -> None:
    run = run_of(tmp_path / "run", truth(), **options)
    file = report.write(run, redact=redact)
    assert file == run / ("report-redacted.html" if redact else "report.html")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not any(path.name.startswith(".") for path in run.iterdir())
    text = file.read_text(encoding="utf-8")
    named = ids(text)
    always = {"verdict", "gallery", "evidence", "progress", "law", "method", "reproduce"}
    assert always <= set(named)
    assert ("samples" in named) == ("claims" not in named) == options.get("scored", True)
    named = [i for i in named if not re.fullmatch(r"[mp][0-9a-f]{10}", i)]
    assert len(named) == len(set(named))  # markers of plots may repeat, and are equal
    assert "<script" not in text and "<link" not in text
    assert all(link.startswith("www.w3.org/") for link in re.findall(r"https?://(\S*)", text))
    assert not re.search(r"url\((?!#)", text)
    assert "nan" not in re.sub(r"data:image[^\"]*", "", text).lower().split()
    plots = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert plots.count("var(--") > 20
    assert not any(colour in plots for colour in figures.VARIABLES)
    assert ("<polyline" in text) == (truth is vectors and not redact)
    assert ("data:image/png" in text) == (truth is not vectors and not redact)
    assert ("redacted" in text.lower()) == redact or "a redacted report" in text


def test_the_page_with_the_truth(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", faces())
    text = page(run)
    assert page(run) == text  # the same run, the same bytes
    assert "<h1>10 of 10 training samples came back: 10 exact.</h1>" in text
    level = json.loads((run / "score.json").read_text())["chance"]["neighbour"]["error"]
    assert f"nearest other sample has {level:.3g}" in text and "dashed line" in text
    assert "100 % (95 % interval 72 % to 100 %): 10 exact, 0 recovered, 0 recognisable" in text
    assert "1.2\u00a0×\u00a010⁻¹¹" in text and "residual 1.2 × 10⁻¹¹" in text
    before = " ".join(text.split())  # what was said without the truth
    assert "Before the comparison the verdict was <strong>" in before


def test_what_is_missing_is_said_to_be_missing(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", faces(), found=7, residual=None, seconds=None)
    rests = json.loads((run / "result.json").read_text())["support"]
    edit(run, "result.json", support=rests | {"equations": 0})
    text = page(run)
    assert text.count("<td>–</td>") >= 3 * 3 and "<dd>n/a</dd>" in text
    assert '<span class="none">none</span>' in text
    assert "this run" not in text  # no ratio, no axis
    bare = run_of(tmp_path / "bare", vectors(2))
    edit(bare, "score.json", residual_at_truth=None)
    (bare / "events.jsonl").unlink()
    text = page(bare)
    assert "2 of 2 training samples came back" in text and "No progress was recorded" in text
    assert "PSNR" not in text and "dashed line" not in text


def test_hostile_strings_are_shown_not_run(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", faces(2), scored=False)
    keys = "sentence method device device_name started exhume outcome parameters point"
    words: dict[str, Any] = dict.fromkeys(keys.split(), HOSTILE)
    words["problem"] = dict.fromkeys(("name", "domain"), HOSTILE)
    words |= {"claims": [HOSTILE], "limits": [HOSTILE], "versions": {HOSTILE: HOSTILE}}
    words["threat_model"] = {"knows": [HOSTILE], "assumes": [HOSTILE]}
    words["prepared"] = {"changes": [HOSTILE], "warnings": [HOSTILE], "derivative_error": None}
    edit(run, "result.json", **words)
    (run / "config.yaml").write_text(f"</pre>{HOSTILE}")
    line = json.dumps({"seconds": 1, "residual": 0.1, "candidates": HOSTILE, "phase": HOSTILE})
    (run / "events.jsonl").write_text(line + '\n{"seconds": 40.0, "resid')  # a line was cut
    text = page(run)
    assert "<script" not in text and ids(text)
    assert "&lt;script&gt;" in text and "{{ 7 * 7 }}" in text


def test_plots_of_any_ratio_and_of_events_that_can_be_drawn() -> None:
    for ratio in (1e-4, 0.99, 1.0, 37.0, 2e6):
        svg = figures.law(ratio)
        assert "this run" in svg and ">1</text>" in svg
    for event in ({}, {"seconds": 1}, {"seconds": 1, "residual": math.nan}):
        assert figures.progress([event, {"seconds": "x", "residual": 0.1}]) is None
    for moments, floor, phases, words in (
        ([{"seconds": 700, "residual": 0.02}], 1e-13, ["search"], ("minutes", "at the truth")),
        (events(5), None, ["explore", "prune", "polish"], ("seconds", "thin line")),
    ):
        svg, drawn = figures.progress(moments, floor)
        assert drawn == phases
        for word in ("minutes", "seconds", "at the truth", "thin line"):
            assert (word in svg) == (word in words)


def test_a_long_gallery_shows_the_best_and_the_worst(tmp_path: Path) -> None:
    text = page(run_of(tmp_path / "run", faces(70)[:, ::5, ::5]))
    assert "The 30 best" in text and "The 30 worst" in text and "10 more pairs" in text
    assert text.count("<figure>") == 60 and text.count("data:image/png") == 120
    numbers = [float(x) for x in re.findall(r"</b>([0-9.]+)</figcaption>", text)]
    assert len(set(re.findall(r"<b>(\d+)</b>", text))) == 60 and numbers == sorted(numbers)
    text = page(run_of(tmp_path / "other", faces(70)[:, ::5, ::5], scored=False))
    assert text.count("data:image/png") == 60 and "10 more candidates" in text
    numbers = [float(x) for x in re.findall(r"</b>([0-9.]+), p = 0.50</figcaption>", text)]
    assert len(numbers) == 60 and numbers == sorted(numbers, reverse=True)  # largest first


def test_weights_alone_show_what_can_be_recognised_beside_held_out_images(tmp_path: Path) -> None:
    known = data.load("digits", 20, centre="pixels")
    data.save(known, tmp_path / "truth")
    found = 9 * (known.inputs + 0.05 * gaussian(20, 64))
    result = result_of(20, (8, 8), premise="margin")
    run = make_run(tmp_path / "run", found, {"model": None}, result)
    record = score_run(run, tmp_path / "truth")
    seen, count = record["recognised"], round(20 * record["score"]["recognisable"])
    text = page(run)
    own, other = (f"{side['ssim']} of 20" for side in (seen, seen["control"]))
    best = max(seen["control"]["ssims"])
    assert count == sum(ssim > best for ssim in seen["ssims"]) > 10
    assert f"{count} of 20 training samples came back: {count} recognisable." in text
    assert f"<td>SSIM over 0.4</td><td>{own}</td><td>{other}</td>" in text
    assert f"SSIM over 0.4 {own} ({other}); cosine over 0.8" in text  # of the card
    assert text.count("data:image/png") == 80 and "The best of the held-out images" in text
    assert text.count("0.90 to 0.94 at best") == 2 and "recognised" in ids(text)
    shown = [float(x) for x in re.findall(r"SSIM ([0-9.]+), cosine", text)]
    assert shown[:20] == sorted(shown[:20], reverse=True)
    assert report.gallery_png(run, tmp_path / "gallery.png", limit=4).exists()
    alone = run_of(tmp_path / "alone", faces(), noise=9)
    text = page(alone)
    assert "<td>none at hand</td>" in text and "Too few held-out images are at hand" in text
    assert text.count("data:image/png") == 20
    assert "data:image" not in page(run, redact=True)


def test_without_the_truth_candidates_are_marked_by_their_probability(tmp_path: Path) -> None:
    said = {"verdict": "partly", "probabilities": [0.99, 0.2, 0.1]}
    text = page(run_of(tmp_path / "run", faces(3), scored=False, **said))
    assert "<dd>1 / 3</dd><small>probability" in text and "Yes, very likely: not all" in text
    assert text.count('dot sure"') == 1 and text.count('dot unsure"') == 2  # those are marked
    assert 'class="bar"' not in text  # nothing was measured, which is not 0 %


def test_thumbnails_and_candidates_by_channel(tmp_path: Path) -> None:
    truth = colours(1)
    text = page(run_of(tmp_path / "scored", truth))
    for encoded in re.findall(r"data:image/png;base64,([^\"]+)", text):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))), dtype=np.float64)
        assert np.abs(pixels / 255 - np.moveaxis(truth[0], 0, 2)).max() < 0.01
    display = {"shift": [0.5, 0.4, 0.3], "scale": [0.2, 0.3, 0.4]}
    options: dict[str, Any] = {"scored": False, "display": display, "samples_given": None}
    run = run_of(tmp_path / "run", colours(2), **options)
    text = page(run)
    assert "shift and scale were undone" in text and text.count("data:image/png") == 2
    assert "training samples recovered" not in text and "their number was found" in text
    edit(run, "result.json", display=None)
    assert "shift and scale were undone" not in page(run)


@pytest.mark.parametrize("truth", [faces, colours])
def test_gallery_png(tmp_path: Path, truth: Any) -> None:
    run = run_of(tmp_path / "run", truth(5), found=3)
    out = report.gallery_png(run, tmp_path / "gallery.png", limit=4)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    picture = Image.open(io.BytesIO(out.read_bytes()))
    assert picture.format == "PNG" and picture.width > 1.5 * picture.height
    (run / "matched.safetensors").unlink()
    with pytest.raises(InputError, match=r"matched\.safetensors"):
        report.gallery_png(run, out)


PREPARED = {"changes": ["0.relu: the in-place"], "warnings": ["1.norm: a normalisation"]}
PREPARED |= {"derivative_error": 3e-9}
NETWORK = {"parameters": "last", "point": "midpoint", "prepared": PREPARED}
SPAN = {"rank": 8, "largest_angle": 2.1e-7, "outside": 3.4e-9, "kept": 0.97}
FLOORS = {"initial": 2.6e-5, "final": 1.8e-4, "midpoint": 1.7e-5, "both": 1e-8}
TRAINING = {"laziness": 4.1e-3}


def network_run(path: Path, scored: bool = True, training=TRAINING, **changes: Any) -> Path:
    told = NETWORK | {"model": {"architecture": "two_layer, width 640", **training}}
    run = run_of(path / "run", vectors(), scored=scored, **(told | changes))
    card = {"kind": "network", "architecture": {"name": "secret", "arguments": {}}}
    (path / "model").mkdir()  # which is not opened: the run says where it is
    (path / "model/card.json").write_text(json.dumps(card))
    (run / "config.yaml").write_text(f"model: {path / 'model'}\nmethod: exhume\n")
    if scored:
        edit(run, "score.json", floors=FLOORS, subspace=SPAN, verdict="All 8 samples recovered.")
    return run


def test_a_run_on_other_models_has_no_part_on_a_network(tmp_path: Path) -> None:
    text = page(run_of(tmp_path / "run", vectors()))
    assert not {"model", "floor"} & set(ids(text))
    assert "Attacked:" not in text and "by point" not in text and "Reading:" not in text
    assert "unknown, the limit is 1" in text and ", 4 equations for each unknown." in text


@pytest.mark.parametrize("redact", [False, True])
def test_a_run_on_a_network_says_what_was_attacked(tmp_path: Path, redact: bool) -> None:
    text = page(network_run(tmp_path, premise="change"), redact)
    assert {"model", "floor"} <= set(ids(text))
    facts = ("two_layer, width 640", "random features", "the last layer")
    facts += ("the midpoint of training", "the change of the weights in training")
    assert all(f"<dd>{fact}</dd>" in text for fact in facts)
    assert "moved by 0.0041 of its norm" in text and "3.0\u00a0×\u00a010⁻⁹ from finite" in text
    assert "<li>0.relu: the in-place" in text and "<li>1.norm: a normalisation" in text
    assert "<td>midpoint (this run)</td><td>1.7\u00a0×\u00a010⁻⁵</td>" in text
    assert "<td>initial</td><td>2.6\u00a0×\u00a010⁻⁵</td>" in text
    assert "<p>All 8 samples recovered.</p>" in text
    span = "The change of the first layer spans 8 directions; the largest angle to the span of the"
    assert f"<p>{span}" in text and "left 0.97 of the initial layer.</p>" in text
    card = text[text.index('<pre class="paste">') :]
    assert "- Attacked: architecture: two_layer, width 640; premise: the change" in card
    assert "laziness: the first layer moved by 0.0041" in card
    assert "- Changed before the audit: 0.relu" in card and "- Warning: 1.norm" in card
    assert "by point: initial 2.6 × 10⁻⁵, final 1.8 × 10⁻⁴, midpoint 1.7 × 10⁻⁵" in card
    assert f"- Reading: All 8 samples recovered.\n- Subspace: {span}" in card


@pytest.mark.parametrize(
    "folder", ["/home/anna b/x", "/o'anna/" + 9 * "far away ", "C:\\Users\\anna"]
)
def test_a_redacted_report_names_files_without_their_folders(tmp_path: Path, folder: str) -> None:
    run = run_of(tmp_path / "run", vectors())
    settings = {"model": f"{folder}/net.py:make", "trained": f"{folder}/after.pt", "seed": 3}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    assert "anna" in page(run)
    text = page(run, redact=True)
    assert not any(word in text for word in ("anna", "home", "far", "Users"))
    assert "model: net.py:make\n" in text and "trained: after.pt\n" in text and "seed: 3\n" in text


def test_trained_weights_alone_and_a_ratio_in_a_subspace(tmp_path: Path) -> None:
    margin = {"premise": "margin", "stationarity": 2e-4, "violation": 0.07}
    text = page(network_run(tmp_path / "alone", False, margin, premise="margin", parameters="all"))
    assert "<dd>trained to the margin</dd>" in text
    assert "up to 2.0\u00a0×\u00a010⁻⁴ of the weights" in text
    assert "so a small residual is weak evidence" in text
    run = network_run(tmp_path / "within", rank=8)
    rests = {"equations": 350, "unknowns": 56, "slack": [0.0] * 8, "errors": [0.0] * 8}
    edit(run, "result.json", support=rests)
    text = page(run)
    assert "<dd>6.25</dd><small>equations for each unknown, r = 8, the limit is 1</small>" in text
    assert ", 6.25 equations for each unknown." in text and "The ratio of this run is 6.25" in text
    assert "8 of 100 dimensions" in text and "below the counting limit" not in text
    said = "these are 350 equations for the 56 unknowns of 8 samples of 100 entries, sought in a"
    assert f"{said} subspace of dimension 8." in text


def test_a_network_with_parts_missing_or_damaged(tmp_path: Path) -> None:
    none = {"changes": [], "warnings": [], "derivative_error": None}
    run = network_run(tmp_path, prepared=none, parameters="1.*", model=None)
    edit(run, "score.json", subspace="no span", floors={"final": 1e-4, "both": None}, verdict=None)
    for config in (f"model: {tmp_path / 'model'}\n", "model: 3\n", "model: [", "- a\n", ""):
        (run / "config.yaml").write_text(config)
        text = page(run)
        facts = text[text.index('id="model"') : text.index('id="method"')]
        names = ["Features", "Premise", "Parameters", "Features at"]
        assert re.findall("<dt>(.*?)</dt>", facts) == names and "<dd>1.*</dd>" in facts
    assert "<p>no span</p>" in text and "<td>final</td>" in text and "<td>both</td>" not in text


FIRST, AGAIN = "does not exist: run exhume audit first", "(?i)run exhume {} again"
FILES = ("result.json", "config.yaml", "candidates.safetensors")
OTHER = json.dumps(result_of(2, (3,), schema=2))
RESULTS = {"{": "as JSON", "[]": "JSON object", "{}": "has no schema, exhume", OTHER: "schema 2"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *((name, None, FIRST) for name in FILES),
        *(("result.json", text, words) for text, words in RESULTS.items()),
        ("score.json", "{}", "has no data, inputs, score, chance"),
        ("candidates.safetensors", "x", AGAIN.format("audit")),
        ("matched.safetensors", "x", AGAIN.format("score")),
        ("matched.safetensors", 2, "does not belong"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: Any, words: str) -> None:
    run = run_of(tmp_path / "run", faces(3), scored=name[0] in "ms")
    if content is None:
        (run / name).unlink()
    elif isinstance(content, str):
        (run / name).write_text(content)
    else:  # pictures of fewer samples
        save_file({k: v[:content].copy() for k, v in load_file(run / name).items()}, run / name)
    with pytest.raises(InputError, match=words) as caught:
        report.write(run)
    assert name in str(caught.value)
    assert not (run / "report.html").exists()
