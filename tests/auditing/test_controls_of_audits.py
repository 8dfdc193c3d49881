"""Controls: the same attack where there is nothing to find takes a claim away, and adds none."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import pytest
import torch
from hypothesis import given, strategies
from hypothesis import settings as bounded
from torch import Tensor

from commands import PASSING, audit, events_of, result_of, same
from exhume import data, report, victims
from exhume.auditing import controls, evidence, forms
from exhume.auditing.controls import (
    Control,
    Repeat,
    again,
    elsewhere,
    permuted,
    tried,
    weighed_against,
)
from exhume.auditing.folder import RESULT
from exhume.auditing.judgement import judge
from exhume.auditing.run import Event
from exhume.auditing.run import run as run_audit
from exhume.auditing.settings import Settings
from exhume.cli.main import plain
from exhume.equation.problem import Problem
from exhume.errors import InputError
from exhume.features import Features
from exhume.features.replay import TrainingRun
from exhume.methods import Reconstruction, reconstruct
from exhume.models.formulation import Known
from exhume.recipes import Recipe
from exhume.solvers import Outcome
from problems import case, gaussian
from replays import posed, small, trained

KNOWN = case(10, 4, 3.0, dtype=torch.float32)
FOUND = reconstruct(KNOWN.problem, 4)


def entries(tensor: Tensor) -> Tensor:
    return tensor.flatten().sort().values


@given(strategies.integers(0, 2**31))
@bounded(max_examples=20, deadline=None)
def test_a_permuted_target_has_the_same_rows(seed: int) -> None:
    ten = case(6, 3, 9.0, outputs=3).problem
    other = permuted(ten, seed)
    assert other.features is ten.features and not torch.equal(other.target, ten.target)
    assert {tuple(row) for row in other.target.tolist()} == {tuple(x) for x in ten.target.tolist()}
    assert torch.equal(other.target, permuted(ten, seed).target)
    assert permuted(replace(ten, target=torch.ones_like(ten.target)), seed) is None


@pytest.fixture(scope="module")
def run() -> Problem:
    """What three steps of SGD on two samples pose."""
    recipe, x = Recipe(lr=0.1, steps=3), gaussian(2, 6)
    weights = trained(small(), x, torch.eye(3, dtype=torch.float64)[:2], recipe)
    return posed(small(), weights, Known(recipe))


def test_tensors_keep_their_entries(run: Problem) -> None:
    features = run.features
    assert isinstance(features, TrainingRun)
    sizes = [features.points[0][name].numel() for name in features.block]
    other = permuted(run, 1)
    for old, new in zip(run.target.split(sizes), other.target.split(sizes), strict=True):
        assert torch.equal(entries(old), entries(new))
    for changed in (other, elsewhere(run, 1)):
        assert changed is not None and isinstance(changed.features, TrainingRun)
        torch.testing.assert_close(changed.features.change, changed.target[:, 0])
        assert changed.features.points[0].keys() == features.points[0].keys()


def test_other_initial_weights_are_of_the_same_kind(run: Problem) -> None:
    moved = elsewhere(run, 1)
    assert moved is not None and torch.equal(moved.target, run.target)
    before, after = run.features.points[0], moved.features.points[0]
    for name, tensor in before.items():
        assert torch.equal(entries(tensor), entries(after[name]))
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
    stored = elsewhere(KNOWN.problem, 0).features.weights.tensor
    mine = KNOWN.problem.features.weights.tensor
    assert torch.equal(entries(stored), entries(mine)) and not torch.equal(stored, mine)
    seeded = victims.random_features(data.sphere(6, 2), 30).problem
    assert elsewhere(seeded, 0).features.weights.seed != seeded.features.weights.seed
    unknown = Mock(spec=Features, dim=10, width=120, dtype=torch.float32)
    assert elsewhere(replace(KNOWN.problem, features=unknown), 0) is None


def repeat(left: float | None = None, found: Reconstruction = FOUND) -> Repeat:
    return Repeat(found, "exhume", lambda: left, lambda phase: None)


def attempt(left: float | None = None, sought: bool = False) -> tuple[Control, ...]:
    return tried(KNOWN.problem, repeat(left), sought)


def test_another_start_leads_to_samples_and_not_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    most = replace(FOUND, products=2000)  # more than it took: not every start is as good
    assert again(KNOWN.problem, repeat(found=most)).tolist() == [1.0] * 4
    # pairs are one to one: a candidate that is there twice was found once
    twice = FOUND.samples[[0, 0, 1, 2]] * torch.tensor([[1.0], [-1.0], [1.05], [1.2]])
    ended = again(KNOWN.problem, repeat(found=replace(most, samples=twice)))
    assert sorted(ended[:2].tolist()) == [-1.0, 1.0] and ended[2:].tolist() == [1.0, -1.0]
    assert again(KNOWN.problem, repeat(left=0.0)) is None
    failed = replace(FOUND, samples=-twice, residual=0.1, outcome=Outcome.STALLED)
    other = Mock(return_value=failed)
    monkeypatch.setattr(controls, "reconstruct", other)
    assert again(KNOWN.problem, repeat()).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert other.call_args.args[2] != FOUND.seed
    assert other.call_args.kwargs["product_limit"] == FOUND.products
    monkeypatch.setattr(controls, "reconstruct", Mock(side_effect=InputError("no span.")))
    assert again(KNOWN.problem, repeat()) is None


def test_what_is_found_again_is_more_likely_a_sample() -> None:
    loose = replace(FOUND, samples=KNOWN.inputs + 0.05 * gaussian(4, 10), residual=3e-2)
    sought = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    plain_, judged = (judge(KNOWN.problem, loose, again=x).probabilities for x in (None, sought))
    assert judged[0] > plain_[0] and judged[1] < plain_[1]
    assert torch.equal(judged[2:], plain_[2:])


def test_nothing_is_found_where_there_is_nothing() -> None:
    judged = judge(KNOWN.problem, FOUND)
    found = attempt(sought=True)
    assert [control.sure for control in found] == [0, 0]
    assert all(control.residual > 0.1 and not control.cut for control in found)
    assert all(0 < control.products <= 2 * FOUND.products for control in found)
    assert weighed_against(judged, found) is judged


def test_what_was_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"candidates": 4, "controls": [], "again": [None] * 4}
    late = attempt(left=0.0)
    assert {control.why for control in late} == {"the time limit was reached"}
    assert evidence.controls(result) is None
    said = evidence.controls(result | {"controls": [asdict(control) for control in late]})
    assert said == "No control was run: the time limit was reached."
    sought = evidence.controls(result | {"again": [True, False, False, True]})
    assert sought == "Found again from another start: 2 of 4."
    sought = evidence.controls(result | {"again": [True, None, None, None]})
    assert "start: 1 of 4. Its search failed elsewhere, which says nothing" in sought
    monkeypatch.setattr(controls, "reconstruct", Mock(side_effect=InputError("no span.")))
    assert "cannot be attacked (no span.)" in attempt()[0].why
    judged = weighed_against(judge(KNOWN.problem, FOUND), late)
    assert judged.verdict == "reconstructed" and "No control was run" in judged.reason
    some = weighed_against(judge(KNOWN.problem, FOUND), (Control("other", sure=2),))
    assert some.verdict == "partly" and "other, the same attack is sure of 2" in some.reason


def test_a_control_that_time_cuts_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter(range(10**9))
    monkeypatch.setattr("exhume.methods.time.perf_counter", lambda: float(next(clock)))
    found = attempt(left=8.0)
    assert all(control.cut and control.products < FOUND.products for control in found)
    said = evidence.controls({"candidates": 4, "again": [], "controls": [asdict(x) for x in found]})
    assert said.count("cut off by the time limit") == 2 and "sure of 0 of 4" in said


def test_an_audit_compares_with_controls_and_can_be_stopped_in_one(
    settings: Settings, workshop: Path, tmp_path: Path
) -> None:
    on = replace(settings, controls=True)
    shown: list[Event] = []
    audit(on, tmp_path / "whole", show=shown.append)
    result = result_of(tmp_path / "whole")
    jsonschema.Draft202012Validator(forms.SCHEMA).validate(result)
    plain_run = result_of(workshop / "run")
    assert {x for x in result if result[x] != plain_run[x]} <= {
        *("again", "probabilities", "controls"),
        *PASSING,
    }
    assert (result["again"], plain_run["again"]) == ([True] * 4, [None] * 4)
    assert [x["sure"] for x in result["controls"]] == [0, 0]
    assert {x["why"] for x in plain_run["controls"]} == {"it was not asked for"}
    phases = dict.fromkeys(event.phase for event in shown)
    names = ["another start", "control: target permuted", "control: other initial weights"]
    assert list(phases)[-3:] == names
    assert sorted(event.seconds for event in shown) == [event.seconds for event in shown]
    assert not any("control" in event["phase"] for event in events_of(tmp_path / "whole"))
    page = report.write(tmp_path / "whole").read_text()
    assert page.count(", found again<") == 4
    assert "Found again from another start: 4 of 4. The same attack" in page
    assert page.count("where there is nothing to find: target permuted: sure of 0 of 4") == 2

    def stop(event: Event) -> None:
        if event.phase == "control: other initial weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(on, tmp_path / "run", show=stop)
    assert not (tmp_path / "run" / RESULT).exists()
    phases = []
    audit(on, tmp_path / "run", resume=True, show=lambda event: phases.append(event.phase))
    assert phases[0] == "judging", "the attack is over, and is not done again"
    assert same(tmp_path / "run", tmp_path / "whole")


def test_as_much_in_a_control_is_no_evidence(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "CONTROLS", {"target permuted": lambda problem, seed: problem})
    out = tmp_path / "run"
    audit(replace(settings, controls=True), out)
    result = result_of(out)
    jsonschema.Draft202012Validator(forms.SCHEMA).validate(result)
    assert result["verdict"] == "no evidence" and result["probabilities"] == [None] * 4
    assert "in a control: target permuted, 4 of 4" in result["reason"]
    said = " ".join(result["claims"])
    assert "as much in a control" in said and "not met by chance" not in said
    assert evidence.headline(result, None)[0].startswith("No evidence")
    assert evidence.likely(result) == (0, 4)
    assert "No evidence" in report.write(out).read_text()


@pytest.mark.parametrize("attacked", [True, False])
def test_held_out_samples_are_named_in_the_result(
    settings: Settings, tmp_path: Path, attacked: bool
) -> None:
    others = gaussian(3, settings.open(settings.source()).problem.dim, seed=8)
    told = replace(settings, controls=attacked)
    result = run_audit(told, told.open(told.source()), tmp_path / "run", held_out=others)[1]
    assert [x["name"] for x in result["controls"]][-1] == "held-out samples"
    assert [x["why"] is None for x in result["controls"]] == [attacked, attacked, True]
    jsonschema.Draft202012Validator(forms.SCHEMA).validate(result_of(tmp_path / "run"))


def test_controls_are_left_out_by_a_word() -> None:
    assert plain(["audit", "m", "--no-controls"])[-1] == "--controls=false"
    assert plain(["audit", "m", "--controls"])[-1] == "--controls=true"


def test_held_out_samples_that_are_found_as_well_are_a_control() -> None:
    judged, others = judge(KNOWN.problem, FOUND), gaussian(7, KNOWN.problem.dim, seed=5)
    rows = controls.comparable(KNOWN.problem, others)
    assert controls.unseen(judged, FOUND, rows) == Control("held-out samples", sure=0)
    rows[:4] = -1.05 * FOUND.samples  # near all of them, with the other sign
    control = controls.unseen(judged, FOUND, rows)
    assert judged.sure == control.sure == 4
    assert weighed_against(judged, (control,)).verdict == "no evidence"
    for wrong in (others[:, 1:], others * float("nan")):
        with pytest.raises(InputError, match="held_out: expected samples of 10 finite entries"):
            controls.comparable(KNOWN.problem, wrong)
