"""Experiments: judges that can say each verdict, results that are written, a page that follows."""

import base64
import io
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from PIL import Image

from exhume.cli.reproduce import reproduce
from exhume.errors import InputError
from exhume.experiments import Attack, Failure, LabelFit, runner
from exhume.experiments.cells.flips import Flips
from exhume.experiments.cells.identifiability import Determined, Rank, Stationary, TensorTerms
from exhume.experiments.cells.splitting import Splitting
from exhume.experiments.claims import CLAIMS
from exhume.experiments.claims.claim import Claim, Finding
from exhume.experiments.document import document, publish, stored
from exhume.experiments.runner import missing, perform, without_picture
from exhume.experiments.table import NEAR, Table, Threshold, onset
from exhume.report import plots
from exhume.sweep import Cell, Record

DOCS = Path(__file__).parents[2] / "docs"
NAMES = list(CLAIMS)
VERDICTS = {"holds", "holds in part", "does not hold", "not decided"}

Outcome = dict[str, Any]


def png() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (16, 4)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def attacked(cell: Attack, recovered: float, **more: Any) -> Outcome:
    """What an attack would say that recovers so much."""
    dim = cell.dim or 192
    width = round(cell.ratio * dim * cell.samples)
    return {
        "inputs": dim,
        "outputs": 1,
        "width": width,
        "parameters": width,
        "actual_ratio": cell.ratio,
        "fit": 0.0,
        "label_error": 0.0,
        "recovered": recovered,
        "exact": recovered,
        "error": 1.2 - 1.2 * recovered,
        "published_error": 0.8 - 0.8 * recovered,
        "recall": recovered,
        "precision": recovered,
        "span_residual": 0.5 * (1 - recovered) + 1e-6,
        "residual": 1e-14,
        "floor": 1e-9,
        "recovered_flips": 0,
        "chance": 1.2,
        "picture": png() if cell.keep else None,
        **more,
    }


def at(threshold: float) -> Any:
    """Attacks that succeed from a ratio on; labels that fit from p = n on."""

    def values(cell: Cell) -> Outcome:
        if isinstance(cell, Determined):
            return {"rank": 120 if cell.ratio < 1 else 126, "unknowns": 126}
        if isinstance(cell, LabelFit):
            left = 1e-15 if cell.width >= cell.samples else 0.3
            return {"label_error": left, "inputs": cell.dim or 192, "outputs": 1}
        assert isinstance(cell, Attack)
        if cell.data == "cifar10" and cell.ratio == 1.0 < threshold < 2:
            return attacked(cell, 0.5)  # half of the error at p = dn, as published
        unit = 1.0
        if cell.rank is not None and cell.method == "tansley2026":
            unit = cell.rank / (cell.dim or 1)
        return attacked(cell, float(cell.ratio / unit >= threshold))

    return values


def records(cells: Iterable[Cell], values: Any) -> list[Record]:
    return [Record(cell, values(cell), None, 0.5) for cell in cells]


def verdict(name: str, values: Any, keep: Any = lambda cell: True) -> str:
    experiment = CLAIMS[name]
    found = records((cell for cell in experiment.cells("small") if keep(cell)), values)
    finding = experiment.judge(found)
    assert finding.figure and "\n" not in finding.figure
    return finding.verdict


THRESHOLDS = [
    "sphere-thresholds", "cifar10-thresholds", "span-residual", "two-layer", "residual-net",
    "transformer", "logistic", "cross-entropy", "subspace-synthetic",
]  # fmt: skip


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_at_one_holds(name: str) -> None:
    assert verdict(name, at(1.2)) == "holds"


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_that_is_never_reached_does_not(name: str) -> None:
    assert verdict(name, at(1e9)) == "does not hold"


@pytest.mark.parametrize("name", [n for n in THRESHOLDS if n != "subspace-synthetic"])
def test_recovery_that_stays_partial_holds_in_part(name: str) -> None:
    def values(cell: Cell) -> Outcome:
        found = at(1.2)(cell)
        return attacked(cell, 0.6 * found["recovered"]) if isinstance(cell, Attack) else found

    assert verdict(name, values) == "holds in part"


@pytest.mark.parametrize("name", ["sphere-thresholds", "cifar10-thresholds", "span-residual"])
def test_a_threshold_far_off_holds_in_part(name: str) -> None:
    assert verdict(name, at(5.0)) == "holds in part"


@pytest.mark.parametrize("name", [n for n in THRESHOLDS if n != "subspace-synthetic"])
def test_a_threshold_just_beyond_about_one_holds_in_part(name: str) -> None:
    assert verdict(name, at(4.0)) == "holds in part"


def test_a_place_beyond_about_one_is_part_of_a_threshold() -> None:
    assert Threshold.of({0.5: 0.0, NEAR[1]: 1.0}) is None
    assert Threshold.of({0.5: 0.0, NEAR[1]: 0.0, 4.0: 1.0}) is not None


def test_a_rank_without_its_upper_side_decides_nothing() -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        lost = cell.rank == 8 and cell.method == "exhume" and cell.ratio > 1
        return {**at(1.2)(cell), **({"recovered": None} if lost else {})}

    assert verdict("subspace-synthetic", values) == "not decided"


def diverged(values: Any, where: Any = lambda cell: True) -> Any:
    """The same, with attacks that ended at no residual."""

    def changed(cell: Cell) -> Outcome:
        found: Outcome = values(cell)
        none = isinstance(cell, Attack) and where(cell)
        return {**found, "residual": None, "span_residual": None} if none else found

    return changed


@pytest.mark.parametrize("name", ["two-layer", "transformer"])
def test_attacks_that_diverged_at_the_top_decide_nothing(name: str) -> None:
    experiment = CLAIMS[name]
    at_top = diverged(at(1e9), lambda cell: cell.ratio >= 4)
    finding = experiment.judge(records(experiment.cells("small"), at_top))
    assert finding.verdict == "not decided" and "diverged" in finding.note


def test_a_share_of_zero_counts_where_an_attack_diverged() -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        if cell.ratio == 8 and cell.seed == 20:
            return attacked(cell, 0.0, residual=None)
        return at(1.2)(cell)  # type: ignore[no-any-return]

    assert verdict("two-layer", values) == "holds in part"  # 67 % at the top


def test_what_did_not_diverge_is_judged() -> None:
    one = lambda cell: cell.seed == 20  # noqa: E731
    assert verdict("span-residual", diverged(at(1.2), one)) == "holds"
    assert verdict("span-residual", diverged(at(1.2))) == "not decided"
    assert verdict("sample-count", diverged(counted(True, True), one)) == "holds"
    assert verdict("sample-count", diverged(counted(True, True))) == "not decided"


def test_a_search_that_failed_decides_nothing() -> None:
    def values(cell: Cell) -> Outcome:
        found = at(1e9)(cell)
        return {**found, "residual": 1e-3, "floor": 1e-6} if isinstance(cell, Attack) else found

    experiment = CLAIMS["transformer"]
    finding = experiment.judge(records(experiment.cells("small"), values))
    assert finding.verdict == "not decided"
    assert "all unknowns from p_L = 1 dn on (95 % at 0.5, 95 % at 0.75)" in finding.note


@pytest.mark.parametrize("name", THRESHOLDS)
def test_one_side_of_a_threshold_decides_nothing(name: str) -> None:
    assert verdict(name, at(1.2), lambda cell: getattr(cell, "ratio", 9) <= 0.2) == "not decided"


@pytest.mark.parametrize("name", ["sphere-thresholds", "cifar10-thresholds"])
def test_labels_that_do_not_fit_count(name: str) -> None:
    def values(cell: Cell) -> Outcome:
        unfit = {"label_error": 0.3, "inputs": 192, "outputs": 1}
        return unfit if isinstance(cell, LabelFit) else at(1.2)(cell)

    assert verdict(name, values) == "holds in part"


@pytest.mark.parametrize("name", ["sphere-thresholds", "cifar10-thresholds"])
def test_labels_that_were_not_measured_decide_nothing(name: str) -> None:
    def values(cell: Cell) -> Outcome:
        return {**at(1.2)(cell), "label_error": None}

    assert verdict(name, values) == "not decided"


def test_on_images_the_error_at_dn_counts() -> None:
    def values(cell: Cell) -> Outcome:
        sharp = isinstance(cell, Attack) and cell.ratio == 1.0
        return attacked(cell, 0.0) if sharp else at(1.2)(cell)  # type: ignore[arg-type]

    assert verdict("cifar10-thresholds", values) == "holds in part"


def test_thresholds_that_do_not_collapse_hold_in_part() -> None:
    def values(cell: Cell) -> Outcome:
        dim = getattr(cell, "dim", 20)
        return at(1.0 if dim == 20 else 3.0)(cell)

    assert verdict("sphere-thresholds", values) == "holds in part"


def test_recovery_that_follows_the_full_dimension_does_not_hold() -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        return attacked(cell, float(cell.ratio >= 1.2))

    assert verdict("subspace-synthetic", values) == "does not hold"


def test_an_estimated_subspace_that_helps_less_holds_in_part() -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        return at(9.0 if cell.architecture == "two_layer" else 1.2)(cell)

    assert verdict("subspace-synthetic", values) == "holds in part"


@pytest.mark.parametrize(
    ("inside", "outside", "expected"),
    [(0.1, 2.0, "holds"), (2.0, 0.1, "does not hold"), (2.0, 2.0, "does not hold")],
)
def test_subspace_on_images(inside: float, outside: float, expected: str) -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        start = inside if cell.method == "tansley2026" else outside
        return attacked(cell, float(cell.ratio >= start))

    assert verdict("subspace-cifar10", values) == expected
    assert verdict("subspace-cifar10", values, lambda cell: cell.ratio < 0.15) == "not decided"


def test_an_attack_that_is_ahead_and_once_behind_holds_in_part() -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        inside = cell.method == "tansley2026"
        full = 1.0 if cell.ratio >= 2 else 0.0
        share = (0.9 if cell.ratio == 4 else float(cell.ratio >= 0.1)) if inside else full
        return attacked(cell, share)

    assert verdict("subspace-cifar10", values) == "holds in part"


def signs(relu: int, tanh: int, paired: float = 1e-15) -> Any:
    def values(cell: Cell) -> Outcome:
        first = cell.activation == "relu"  # type: ignore[attr-defined]
        if isinstance(cell, Flips):
            return {"alone": 0.1, "paired": paired if first else 0.01, "odd": 0.0 if first else 0.1}
        assert isinstance(cell, Attack)
        return attacked(cell, 1.0, recovered_flips=relu if first else tanh)

    return values


def test_signs() -> None:
    assert verdict("signs", signs(1, 0)) == "holds"
    assert verdict("signs", signs(0, 0)) == "holds in part"
    assert verdict("signs", signs(1, 0, paired=0.1)) == "holds in part"
    assert verdict("signs", signs(0, 0, paired=0.1)) == "does not hold"
    assert verdict("signs", signs(1, 1)) == "does not hold"
    assert verdict("signs", signs(0, 1)) == "does not hold"
    assert verdict("signs", signs(1, 0), lambda cell: isinstance(cell, Flips)) == "not decided"


def test_flips_are_free_with_two_candidates_more_and_relu_alone() -> None:
    relu = Flips("relu", dim=10, samples=4).run("cpu")
    tanh = Flips("relu+tanh", dim=10, samples=4).run("cpu")
    assert relu["paired"] < 1e-12 < 1e-3 < relu["alone"]
    assert tanh["paired"] > 1e-4
    assert relu["odd"] < 1e-12 < 1e-2 < tanh["odd"]


def test_tiny_imagenet() -> None:
    for share, expected in ((1.0, "holds"), (0.6, "holds in part"), (0.2, "does not hold")):
        values = lambda cell, share=share: attacked(cell, share)  # noqa: E731
        assert verdict("tiny-imagenet", values) == expected
    assert CLAIMS["tiny-imagenet"].judge([]).verdict == "not decided"


def test_an_image_that_was_not_found_counts_without_an_error_too() -> None:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        lost = cell.seed == 20
        return {**attacked(cell, float(not lost)), **({"published_error": None} if lost else {})}

    assert verdict("tiny-imagenet", values) == "holds in part"


def counted(elbow: bool, duplicates: bool) -> Any:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Attack)
        told, n = cell.told or 0, cell.samples
        return attacked(
            cell,
            min(1.0, told / n),
            residual=1e-3 if told < n or not elbow else 1e-14,
            precision=1.0 if duplicates or told <= n else n / told,
        )

    return values


def test_sample_count() -> None:
    assert verdict("sample-count", counted(True, True)) == "holds"
    assert verdict("sample-count", counted(True, False)) == "holds in part"
    assert verdict("sample-count", counted(False, True)) == "does not hold"
    few = lambda cell: cell.told < cell.samples  # noqa: E731
    assert verdict("sample-count", counted(True, True), few) == "not decided"


def failing(share: Any) -> Any:
    def values(cell: Cell) -> Outcome:
        assert isinstance(cell, Failure)
        failed = share(cell.width)
        return {"failed": failed, "wrong": failed, "exact": 1, "error": 1.0, "residual": 0.0}

    return values


def test_failure_probability() -> None:
    name = "failure-probability"
    assert verdict(name, failing(lambda width: width < 6)) == "holds"
    assert verdict(name, failing(lambda width: False)) == "holds in part"
    assert verdict(name, failing(lambda width: True)) == "does not hold"
    narrow = lambda cell: cell.width < 6  # noqa: E731
    assert verdict(name, failing(lambda width: False), narrow) == "not decided"


def test_only_the_certified_width_is_a_guarantee() -> None:
    experiment = CLAIMS["failure-probability"]
    found = records(experiment.cells("small"), failing(lambda width: width <= 256))
    finding = experiment.judge(found)
    assert finding.verdict == "holds"
    assert "far from tight" in finding.note and "p = 256" in finding.note


def splits(split: float, control: float, count: int = 15) -> Any:
    def values(cell: Cell) -> Outcome:
        run = {"candidates": 12, "cosine": 0.5}
        arms = {"base": run}
        for rule in ("published", "adaptive"):
            arms[f"split, {rule}"] = {"candidates": count, "cosine": split}
            arms[f"count of {rule}"] = {"candidates": count, "cosine": control}
        return {"runs": arms, "predicted": 1.0}

    return values


def test_splitting() -> None:
    assert verdict("splitting", splits(0.7, 0.6)) == "holds"
    assert verdict("splitting", splits(0.7, 0.8)) == "holds in part"
    assert verdict("splitting", splits(0.4, 0.3)) == "does not hold"
    assert verdict("splitting", splits(0.7, 0.6, count=12)) == "not decided"
    in_turns = lambda cell: splits(0.7 if cell.seed % 2 else 0.4, 0.6)(cell)  # noqa: E731
    even = lambda cell: cell.seed < 2  # noqa: E731
    assert verdict("splitting", in_turns, even) == "not decided"


def test_a_splitting_cell_runs_a_budget_of_steps() -> None:
    found = Splitting("projection", steps=12, samples=3, seed=100).run("cpu")
    assert set(found["runs"]) == {
        "base", "split, published", "count of published", "split, adaptive", "count of adaptive"
    }  # fmt: skip
    assert found["runs"]["base"]["steps"] == 12
    assert json.loads(json.dumps(found)) == found


def ranked(first: dict[int, int], flat: float = 0.9, missed: bool = False) -> Any:
    def values(cell: Cell) -> Outcome:
        if isinstance(cell, Rank):
            holds = cell.width >= first[cell.dim]
            return {"rank": 9 + holds, "unknowns": 10, "holds": holds}
        if isinstance(cell, TensorTerms):
            return {"rest": 0.0, "error": flat if cell.degree == 2 else 1e-12}
        return {"error": None if missed else 1e-12}

    return values


def test_identifiability() -> None:
    name, right = "identifiability", {3: 4, 4: 5, 5: 8}
    assert verdict(name, ranked(right)) == "holds"
    assert verdict(name, ranked({**right, 5: 9})) == "holds in part"
    assert verdict(name, ranked(right, flat=1e-12)) == "holds in part"
    assert verdict(name, ranked(right, missed=True)) == "does not hold"
    assert verdict(name, ranked(right), lambda cell: isinstance(cell, Rank)) == "not decided"


def test_cells_of_identifiability() -> None:
    assert Rank(3, 4).run("cpu") == {"rank": 10, "unknowns": 10, "holds": True}
    assert not Rank(3, 3).run("cpu")["holds"]
    assert TensorTerms(degree=3).run("cpu")["error"] < 1e-6
    flat = TensorTerms(degree=2).run("cpu")
    assert flat["rest"] < 1e-12 and flat["error"] > 0.1
    assert Stationary(dim=8, samples=3).run("cpu")["error"] < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_experiments_without_results_are_not_decided(name: str) -> None:
    broken = [Record(cell, None, "ValueError: no", 0.0) for cell in CLAIMS[name].cells("small")]
    assert CLAIMS[name].judge(broken).verdict == "not decided"


@pytest.mark.parametrize("name", NAMES)
def test_experiments_of_which_cells_failed_are_not_decided(name: str) -> None:
    experiment = CLAIMS[name]
    found = records(experiment.cells("small"), SYNTHETIC[name])
    assert experiment.judge(found).verdict in ("holds", "does not hold")
    more = len(found) // 20 + 1
    failed = [Record(record.cell, None, "ValueError:\nno.", 0.0) for record in found[-more:]]
    finding = experiment.judge([*found[:-more], *failed])
    assert finding.verdict == "not decided"
    assert f"{more} of {len(found)} failed, the first with ValueError: no." in finding.note


def test_few_cells_may_fail() -> None:
    experiment = CLAIMS["sphere-thresholds"]
    found = records(experiment.cells("small"), at(1.2))
    failed = [Record(record.cell, None, "ValueError: no", 0.0) for record in found[:5]]
    assert experiment.judge([*failed, *found[5:]]).verdict == "holds"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", ["small", "full"])
def test_cells_are_sound(name: str, scale: Any) -> None:
    cells = CLAIMS[name].cells(scale)
    assert cells and len(set(cells)) == len(cells)
    for cell in cells:
        check = getattr(cell, "check", None)
        if check is not None:
            check()


SYNTHETIC: dict[str, Any] = {
    **{name: at(1.2) for name in (*THRESHOLDS, "subspace-cifar10", "tiny-imagenet")},
    "signs": signs(1, 0),
    "sample-count": counted(True, True),
    "failure-probability": failing(lambda width: width < 6),
    "splitting": splits(0.7, 0.6),
    "identifiability": ranked({3: 4, 4: 5, 5: 8}),
}


def has_data(axes: Axes) -> bool:
    """Whether a panel shows more than lines that mark a place."""
    curves = [line for line in axes.lines if line.get_transform() is axes.transData]
    points = [x for line in curves for x in line.get_xdata()]
    return bool(points or axes.containers or axes.images)


def damaged(values: Any, share: float, generator: random.Random) -> Any:
    """Values of which a share is None, or zero where they are errors, at any depth."""
    if isinstance(values, dict):
        zero = {key for key in values if "error" in key or "residual" in key}
        return {
            key: 0.0
            if key in zero and generator.random() < 0.2 * share
            else damaged(value, share, generator)
            for key, value in values.items()
        }
    return None if generator.random() < share else values


def damage(found: list[Record], seed: int) -> list[Record]:
    """Records with values None'd at random: here and there, a field everywhere, whole cells."""
    generator = random.Random(seed)
    share = generator.choice((0.01, 0.3, 0.9, 1.0))
    names = sorted({name for record in found for name in record.values or {}})
    gone = {name for name in names if generator.random() < generator.choice((0, 0.3))}
    failures = generator.choice((0, 0, 0.04, 0.9))
    changed = []
    for record in found:
        values = damaged(record.values, share * generator.random(), generator)
        values |= dict.fromkeys(gone & values.keys())
        error = "ValueError: no" if generator.random() < failures else None
        changed.append(Record(record.cell, None if error else values, error, 0.5))
    return changed


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_judges_survive_what_was_not_measured(name: str, seed: int) -> None:
    experiment = CLAIMS[name]
    found = damage(records(experiment.cells("small"), SYNTHETIC[name]), seed)
    for judge in (experiment.judge, experiment.rule):
        finding = judge(found)
        assert finding.verdict in VERDICTS
        assert "None" not in finding.figure + finding.note


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, deadline=None)
def test_figures_survive_what_was_not_measured(name: str, seed: int) -> None:
    experiment = CLAIMS[name]
    figure = experiment.draw(damage(records(experiment.cells("small"), SYNTHETIC[name]), seed))
    assert figure is None or "<svg" in plots.svg(figure)


@pytest.mark.parametrize("name", ["tiny-imagenet", "cifar10-thresholds"])
def test_figures_do_without_pictures(name: str) -> None:
    def values(cell: Cell) -> Outcome:
        return {**at(1.2)(cell), "picture": None}

    experiment = CLAIMS[name]
    figure = experiment.draw(records(experiment.cells("small"), values))
    assert (None if figure is None else len(figure.axes)) == (1 if "cifar" in name else None)


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_drawn_and_are_small(name: str) -> None:
    experiment = CLAIMS[name]
    found = records(experiment.cells("small"), SYNTHETIC[name])
    first, second = experiment.draw(found), experiment.draw(found)
    assert first is not None and second is not None
    assert all(has_data(axes) for axes in first.axes)
    text = plots.svg(first)
    assert text == plots.svg(second)
    assert "<svg" in text and len(text.encode()) < 200_000


shares = st.lists(st.floats(0, 1), min_size=2, max_size=8)


@given(shares)
def test_onset_separates_low_from_high(share: list[float]) -> None:
    curve = {float(2**k): y for k, y in enumerate(share)}
    place = onset(curve)
    if place is None:
        assert share[-1] < 0.5
    else:
        assert all(y >= 0.5 for x, y in curve.items() if x > place)


@given(shares, st.floats(0.1, 10))
def test_onset_moves_with_the_unit(share: list[float], unit: float) -> None:
    curve = {float(2**k): y for k, y in enumerate(share)}
    first, second = onset(curve), onset({unit * x: y for x, y in curve.items()})
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert second == pytest.approx(unit * first)


def test_means_leave_out_what_was_not_attacked() -> None:
    rows = [{"ratio": 1, "error": None}, {"ratio": 1, "error": 0.5}, {"ratio": 2, "error": None}]
    assert Table(rows).curve("error") == {1: 0.5}
    assert Threshold.of({}) is None


@dataclass(frozen=True)
class Half:
    """A cell that fails where it is told to."""

    seed: int
    data: str = "sphere"

    def run(self, device: str) -> dict[str, Any]:
        if self.seed == 9:
            raise ValueError("nine")
        return {"half": self.seed / 2, "picture": "long"}


def tiny(name: str = "sphere-thresholds", seeds: Iterable[int] = (1, 2)) -> Claim:
    def judge(found: Any) -> Finding:
        total = sum(row["half"] for row in Table.of(found, Half))
        return Finding(f"{total:g} in all", "holds" if total > 1 else "does not hold", "A | note.")

    def draw(found: Any) -> Any:
        figure, (axes,) = plots.sheet("Halves")
        halves = Table.of(found, Half).curve("half", "seed")
        plots.lines(axes, {"half": halves}, "seed", "half")
        return figure

    return Claim(
        name, "A source", "A claim.", lambda scale: [Half(seed) for seed in seeds], judge, draw,
        (1, 1),
    )  # fmt: skip


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are run in this process: workers could not import those of a test."""

    def run(cells: Any, **_: Any) -> list[Record]:
        found = []
        for cell in cells:
            try:
                found.append(Record(cell, cell.run("cpu"), None, 0.5))
            except ValueError as error:
                found.append(Record(cell, None, f"ValueError: {error}", 0.5))
        return found

    monkeypatch.setattr(runner.sweep, "run", run)


@pytest.mark.usefixtures("here")
def test_a_result_holds_what_it_takes_to_find_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "sphere-thresholds-small"
    result = perform(tiny(seeds=range(1, 22)), "small", folder)
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["figure"] == "111 in all" and result["verdict"] == "holds"
    assert result["command"] == "exhume reproduce sphere-thresholds --scale small"
    assert (result["cells"], result["failed"], result["seconds"]) == (21, 1, 10.5)
    assert set(result) >= {"claim", "source", "note", "hardware", "torch", "exhume", "date"}
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text()
    table = (folder / "table.csv").read_text()
    assert "ValueError: nine" in table and "long" not in table


@pytest.mark.usefixtures("here")
def test_a_result_is_written_also_if_cells_failed(tmp_path: Path) -> None:
    result = perform(tiny(seeds=(1, 2, 9)), "small", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    assert result["verdict"] == "not decided" and "ValueError: nine" in result["note"]


def test_tables_have_no_pictures() -> None:
    record = Record(Half(1), {"half": 0.5, "picture": "long"}, None, 0.5)
    assert without_picture(record).values == {"half": 0.5}
    failed = Record(Half(9), None, "ValueError: nine", 0.5)
    assert without_picture(failed) == failed


@pytest.mark.parametrize(
    "wrong", [{"engine": "abacus"}, {"workers": 0}, {"address": "tcp://localhost:1"}]
)
def test_a_sweep_that_cannot_run_leaves_no_folder(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        perform(tiny(), "small", tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("here")
def test_documents_that_cannot_be_written(tmp_path: Path) -> None:
    known = {"signs": tiny("signs")}
    with pytest.raises(InputError, match="no results in"):
        publish(tmp_path / "nothing", tmp_path / "docs", known)
    assert not (tmp_path / "docs").exists()
    perform(known["signs"], "small", tmp_path / "out" / "signs-small")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: expected a folder"):
        reproduce(out=tmp_path / "out", document=tmp_path / "file")


@pytest.mark.usefixtures("here")
def test_documents_keep_what_is_not_among_the_new(tmp_path: Path) -> None:
    out, docs = tmp_path / "out", tmp_path / "docs"
    known = {name: replace(tiny(name)) for name in ("sphere-thresholds", "signs")}
    perform(known["signs"], "small", out / "signs-small")
    (out / "else").mkdir()
    (out / "else" / "result.json").write_text(json.dumps({"name": "else", "scale": "small"}))
    assert publish(out, docs, known) == [("signs-small", None)]
    perform(known["sphere-thresholds"], "full", tmp_path / "new" / "sphere-thresholds-full")
    publish(tmp_path / "new", docs, known)
    assert [result["name"] for result in stored(docs)] == ["signs", "sphere-thresholds"]
    page = (docs / "reproduction.md").read_text()
    assert page == document(stored(docs), list(known))
    assert page.index("## sphere-thresholds") < page.index("## signs")
    assert "| [signs](#signs) | A claim. | 1.5 in all | holds | small |" in page
    assert "![signs, small](reproduction/signs-small.svg)" in page
    assert (docs / "reproduction" / "signs-small.svg").exists()


@pytest.mark.usefixtures("here")
def test_a_large_figure_stays_out_of_the_docs(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "signs-small"
    perform(tiny("signs"), "small", folder)
    (folder / "figure.svg").write_text("x" * 200_001)
    ((name, why),) = publish(tmp_path / "out", tmp_path / "docs", {"signs": tiny("signs")})
    assert name == "signs-small" and why is not None and "200,001" in why
    assert not stored(tmp_path / "docs")[0]["drawn"]
    assert "signs-small.svg" not in (tmp_path / "docs" / "reproduction.md").read_text()


def test_missing_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    assert missing(CLAIMS["two-layer"], "small") is None
    reason = missing(CLAIMS["cifar10-thresholds"], "small")
    assert reason is not None and "cifar10" in reason
    assert CLAIMS["two-layer"].data("full") == ["cifar10"]


@pytest.mark.usefixtures("here")
def test_all_leaves_out_what_it_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path / "nothing"))
    images = replace(tiny("signs"), cells=lambda scale: [Half(1, "cifar10")])
    known = {"sphere-thresholds": tiny(), "signs": images}
    monkeypatch.setattr("exhume.experiments.claims.CLAIMS", known)
    reproduce("all", out=tmp_path / "out", device="cpu")
    said = capsys.readouterr().out
    assert "signs left out" in said and "verdict: holds" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["sphere-thresholds-small"]
    with pytest.raises(InputError, match="cifar10"):
        reproduce("signs", out=tmp_path / "out", device="cpu")
    reproduce(out=tmp_path / "out", document=tmp_path / "docs")
    assert "sphere-thresholds" in (tmp_path / "docs" / "reproduction.md").read_text()


def test_list_names_every_experiment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    jsonargparse.auto_cli(reproduce, args=["--list=true"])
    said = capsys.readouterr().out
    assert all(name in said for name in NAMES)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({}, "--list"), ({"name": "nothing"}, "sphere-thresholds"),
     ({"name": "all", "scale": "full"}, "one by one"),
     ({"name": "signs", "device": "abacus"}, "abacus")],
)  # fmt: skip
def test_bad_requests(arguments: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=word):
        reproduce(**arguments, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_experiment_through_the_engine(tmp_path: Path) -> None:
    experiment = replace(
        CLAIMS["identifiability"],
        cells=lambda scale: [Rank(3, 3), Rank(3, 4), TensorTerms(3, 2, 2), TensorTerms(3, 2, 3)],
    )
    first = perform(experiment, "small", tmp_path / "out", workers=1)
    assert first["failed"] == 0 and first["verdict"] == "not decided"
    again = perform(experiment, "small", tmp_path / "out", workers=1)
    assert again == first


def test_the_page_says_what_about_dn_is() -> None:
    assert "0.7 to 3 equations for each unknown" in " ".join(document([], []).split())


def test_the_page_follows_from_the_stored_results() -> None:
    results = stored(DOCS)
    assert (DOCS / "reproduction.md").read_text() == document(results, NAMES)
    for result in results:
        assert result["verdict"] in VERDICTS
        assert result["claim"] == CLAIMS[result["name"]].sentence
        name = f"{result['name']}-{result['scale']}"
        assert (DOCS / "reproduction" / f"{name}.svg").exists() == result["drawn"]


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_small_result(name: str) -> None:
    assert any((r["name"], r["scale"]) == (name, "small") for r in stored(DOCS))


@pytest.mark.parametrize("name", ["cifar10-thresholds", "tiny-imagenet"])
def test_experiments_on_images_have_a_full_result(name: str) -> None:
    assert any((r["name"], r["scale"]) == (name, "full") for r in stored(DOCS))
