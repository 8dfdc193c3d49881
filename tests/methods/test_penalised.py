"""haim2022, buzaglo2023 and loo2023: losses against plain autograd, steps, tuning and answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from recipe_problems import KINDS, net_of, posed, spot, watched, weights_of

from exhume import data
from exhume.equation.coefficients import Rule
from exhume.equation.domain import Box
from exhume.equation.objective import fitted_with
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.evaluate import recognised
from exhume.features.activations import softplus
from exhume.methods import (
    Buzaglo2023,
    Haim2022,
    Loo2023,
    Shen2026,
    haim2022,
    loo2023,
    preset,
    presets,
    reconstruct,
)
from exhume.methods.descent import STRIDE, Descent, Moments, advanced, smoothed
from exhume.methods.penalised import TRIALS
from exhume.methods.penalties import loss_at
from exhume.methods.progress import pack
from exhume.search.agreement import agreed
from exhume.solvers import Outcome
from exhume.victims import kkt_mlp
from nets import by_torch, make
from problems import case, gaussian


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_slopes_are_the_published_ones(kind: str) -> None:
    there = spot(kind)
    x = there.place.candidates.clone().requires_grad_()
    multipliers = there.place.multipliers.clone().requires_grad_()
    value = there(x, multipliers)
    slopes = torch.autograd.grad(value, (x, multipliers))
    residual = there.residual(x, multipliers).detach()
    for features in (there.problem.features, by_torch(there.problem.features)):
        seen = smoothed(replace(there.problem, features=features), there.settings, 0)
        found = loss_at(seen, there.settings, there.place)
        assert found.value == pytest.approx(value.item(), rel=1e-12)
        torch.testing.assert_close(found.residual[:, 0], residual)
        assert found.stationarity.item() == pytest.approx(residual.square().sum().item())
        torch.testing.assert_close(found.slope, slopes[0])
        torch.testing.assert_close(found.multiplier_slope, slopes[1])


def test_the_weights_of_the_published_losses() -> None:
    one, change = spot("one").settings, spot("change").settings
    assert (one.box, one.push, one.threshold, one.adam) == (1, 5, 0.4, False)
    assert spot("several").settings.push == 5 and spot("decay").settings.push == 0
    assert change.box == pytest.approx(0.1 / 6)  # 0.1·M·mean is a sum over M·d
    assert change.smoothness == pytest.approx(0.0015 * 30 / 6)
    assert spot("change").place.divisor == 4 * 2 and change.adam


@pytest.mark.parametrize("kind", ["one", "several", "decay", "both"])
def test_steps_are_those_of_torch(kind: str) -> None:
    there = spot(kind)
    x = there.place.candidates.clone().requires_grad_()
    multipliers = there.place.multipliers.clone().requires_grad_()
    chosen, place = there.settings, there.place
    rates = ((x, chosen.rate), (multipliers, chosen.multiplier_rate))
    groups: list[dict[str, Any]] = [{"params": [z], "lr": rate} for z, rate in rates]
    sgd = torch.optim.SGD(groups, momentum=0.9)
    optimiser = torch.optim.Adam(groups) if chosen.adam else sgd
    run = Descent(place, Moments.at_rest(place, chosen), 0, 1.0, 1.0)
    for count in range(3):
        loss = there(x, multipliers)
        x.grad, multipliers.grad = torch.autograd.grad(loss, (x, multipliers))
        optimiser.step()
        before, start = run.place.candidates, run.place.candidates.clone()
        (run,) = advanced(there.problem, [chosen], [run], 1)
        assert torch.equal(before, start) and run.moments.clock == count + 1
        torch.testing.assert_close(run.place.candidates, x.detach())
        torch.testing.assert_close(run.place.multipliers, multipliers.detach())
    assert not torch.allclose(run.place.candidates, place.candidates)


def test_softplus_sharpens_as_published() -> None:
    beta = loo2023.sharpness
    assert [beta(0), beta(20_000)] == [11, 20]
    assert beta(45_000) == pytest.approx(10 + 10**2.25)
    assert beta(46_000) == beta(10**9) == 200
    there, x = spot("change"), gaussian(3, 6)
    for step in (0, 20_000 + STRIDE - 1):
        seen = smoothed(there.problem, there.settings, step).features.linearize(x)
        near = there.problem.features.substituted(softplus(beta(step - step % STRIDE)))
        torch.testing.assert_close(seen.gram(), near.linearize(x).gram())


def test_the_start_is_the_published_one() -> None:
    for method, rule, outputs, scale, (low, high, mean), divisor in (
        (Haim2022(scale=1e-3), Rule.MARGIN, 1, 1e-3, (0.0, 1.0, 0.5), 400),
        (Buzaglo2023(scale=0.1), Rule.MARGIN, 3, 0.1, (0.0, 1.0, 0.5), 400),
        (Buzaglo2023(scale=0.1), Rule.FREE, 3, 0.1, (-9.0, 9.0, 0.0), 400),
        (Loo2023(), Rule.FREE, 3, 0.2, (-0.5, 0.5, 0.0), 1200),
    ):
        place = method.init(posed(net_of(outputs), rule), 200, 0).state.place
        drawn = place.multipliers
        assert place.candidates.shape == (400, 6) and place.divisor == divisor
        assert place.candidates.std().item() == pytest.approx(scale, rel=0.05)
        assert drawn.shape == (400, outputs if rule is Rule.FREE else 1)
        assert low <= drawn.min() and drawn.max() <= high
        assert drawn.mean().item() == pytest.approx(mean, abs=0.06)
        assert drawn.std().item() == pytest.approx(1.0 if high > 1 else 12**-0.5, rel=0.1)
        numbers = place.labels.unique(return_counts=True)[1].tolist()
        assert len(numbers) == max(outputs, 2) and max(numbers) - min(numbers) <= 1
        assert place.shares.eq(1).all()
    assert (Haim2022().steps, Buzaglo2023().steps, Loo2023().steps) == (50_000, 50_000, 80_000)
    last = make("mlp", 3).problem("last")  # the divisor counts the outputs of a network, also there
    for problem, expected in ((last, 4 * 3), (case(10, 2, 8, outputs=2).problem, 4)):
        assert Loo2023().init(problem, 2, 0).state.place.divisor == expected


def test_a_problem_that_a_recipe_is_not_for() -> None:
    for method, (outputs, rule), samples, words in (
        (Haim2022(), (1, Rule.FREE), 2, "buzaglo2023.*premise decay.*loo2023.*premise change"),
        (Haim2022(), (3, Rule.MARGIN), 2, "one output, but this has 3; use buzaglo2023"),
        (Loo2023(), (1, Rule.MARGIN), 2, "premise margin.*haim2022 at the margin.*buzaglo2023"),
        (Loo2023(smoothness=0.05), (1, Rule.FREE), 2, r"smoothness: is for images.*\(6,\)"),
        (Haim2022(), (1, Rule.MARGIN), None, "haim2022 needs the number of samples"),
    ):
        vectors = replace(posed(net_of(outputs), rule), shape=(6,))
        with pytest.raises(InputError, match=words):
            reconstruct(vectors, samples, method=method)


@dataclass(frozen=True)
class Few(Haim2022):
    trials: int | None = 2
    probe: float = 10.0  # 60 steps of 6 candidates
    steps: int = 150
    settings: tuple[Mapping[str, float], ...] = ()

    def sweep(self, problem: Problem) -> Any:
        return haim2022.RANGES, self.settings


GOOD = {"rate": 0.05, "scale": 0.05, "threshold": 0.1, "sharpness": 50.0}
EXPLODES, STANDS_STILL = {**GOOD, "rate": 1e6}, {**GOOD, "rate": 1e-12, "scale": 1e-6}
MARGIN = posed(net_of(1), Rule.MARGIN)


@pytest.mark.parametrize(("terrible", "turned"), [(EXPLODES, True), (STANDS_STILL, False)])
def test_tuning_takes_the_better_of_two(terrible: Mapping[str, float], turned: bool) -> None:
    method = Few(settings=(terrible, GOOD) if turned else (GOOD, terrible))
    found, moves = watched(MARGIN, 3, method)
    last = moves[-1]
    assert (last.phase, found.outcome) == ("run", Outcome.BUDGET)
    assert method.settings_of(MARGIN, last).rate == GOOD["rate"]
    assert last.rung is None and last.state.steps == 150
    lost = 60 if terrible is STANDS_STILL else STRIDE  # of the other; the run goes on from its 60
    assert found.steps == found.products == 150 + lost
    if terrible is STANDS_STILL:  # out of budget while tuning, the best so far is the answer
        trying = moves[3]
        assert trying.rung == 0 and [run.trial for run in trying.runs] == [0, 1]
        best = min(trying.runs, key=lambda run: run.residual).place.candidates
        late = reconstruct(MARGIN, 3, method=method, resume=pack(trying, 9.0), time_limit=1.0)
        assert late.outcome is Outcome.BUDGET and torch.equal(late.samples, best)


def test_a_setting_that_ends_above_its_start_is_dropped() -> None:
    method = Few(probe=2 / 6, settings=({**GOOD, "rate": 3.0, "scale": 1.0}, GOOD))
    problem = replace(MARGIN, domain=Box(-1.0, 1.0))
    first = method.init(problem, 3, 0)
    chosen, after = method.settings_of(problem, first), method.advance(problem, first)
    (end,) = advanced(problem, [chosen], [first.state], 2)
    assert first.state.began < end.residual < math.inf
    assert (after.phase, after.state.trial, after.state.steps) == ("run", 1, 2)


def test_settings_go_on_from_where_they_are_until_one_is_left() -> None:
    rates = (0.05, 0.01, 0.002, 1e-9)
    method = Few(trials=4, probe=20 / 6, settings=tuple({**GOOD, "rate": r} for r in rates))
    found, moves = watched(MARGIN, 3, method)
    counts = [len(move.runs) for move in moves]
    assert sorted(counts, reverse=True) == counts and {*counts} == {4, 2, 1}
    last = moves[-1]
    alone = [
        advanced(MARGIN, [method.settings_of(MARGIN, last, run)], [run], 20)[0].residual
        for run in (method.begin(MARGIN, 6, 0, trial) for trial in range(4))
    ]
    pair = next(move for move in moves if len(move.runs) == 2)
    assert [run.trial for run in pair.runs] == sorted(range(4), key=alone.__getitem__)[:2]
    assert [run.steps for run in pair.runs] == [20, 20]
    assert found.steps == 150 + 2 * 20 + 60  # of those dropped after 20 steps, and after 60


def test_published_settings_alone_are_tried_where_there_are_some() -> None:
    assert Haim2022().tried(MARGIN) == 4 and Haim2022(trials=9).tried(MARGIN) == 9
    assert Buzaglo2023().tried(weights_of(Premise.DECAY)) == 2
    change = posed(net_of(1), Rule.FREE)
    assert change.premise is Premise.CHANGE
    assert Buzaglo2023().tried(change) == Loo2023().tried(change) == TRIALS


def test_fewer_candidates_of_several_classes_take_smaller_steps() -> None:
    several, one = posed(net_of(3), Rule.MARGIN), Buzaglo2023()
    assert [one.pace(several, n) for n in (80, 1000, 2000)] == [0.08, 1, 1]
    assert one.pace(MARGIN, 80) == one.pace(weights_of(Premise.DECAY), 80) == 1
    assert one.begin(several, 50, 0).pace == 0.05
    assert len(Haim2022(surplus=7 / 3, **GOOD).init(MARGIN, 3, 0).candidates) == 7


def test_a_run_that_explodes_has_diverged_and_ends_at_its_last_finite_look() -> None:
    every = Few(settings=(EXPLODES, {**EXPLODES, "scale": 1.0}))
    huge = {"finish": lambda *given: replace(Haim2022.finish(*given), value=1e6)}  # and finite
    blown = type("Blown", (Haim2022,), huge)(steps=10, **GOOD)
    for method in (every, Haim2022(steps=200, **EXPLODES), blown):
        found = reconstruct(MARGIN, 3, method=method)
        assert found.outcome is Outcome.DIVERGED
        assert found.samples.isfinite().all() and math.isfinite(found.residual)


def test_starts_go_side_by_side_and_are_pooled() -> None:
    method = Haim2022(steps=60, starts=3, **GOOD)
    found, moves = watched(MARGIN, 3, method)
    last = moves[-1]
    assert found.samples.shape == (18, 6) and len(last.runs) == 3
    assert last.origins.tolist() == 6 * [0] + 6 * [1] + 6 * [2]
    assert torch.equal(last.candidates, found.samples) and found.steps == found.products == 180
    alone = reconstruct(MARGIN, 3, method=replace(method, starts=1))
    torch.testing.assert_close(found.samples[:6], alone.samples)
    ends = [loss_at(MARGIN, method.settings_of(MARGIN, last), run.place) for run in last.runs]
    assert found.residual <= sum(end.relative for end in ends) / 3
    fewer = reconstruct(MARGIN, 3, method=replace(method, agreed=True)).samples
    torch.testing.assert_close(fewer, agreed(found.samples.view(3, 6, 6)))
    one = reconstruct(MARGIN, 3, method=replace(method, agreed=True, starts=1))
    assert torch.equal(one.samples, alone.samples)
    tuned, moves = watched(MARGIN, 3, Few(settings=(GOOD, EXPLODES), starts=2))
    steps = [run.steps for run in moves[-1].runs]
    assert steps == [150, 150] and tuned.samples.shape == (12, 6)
    assert tuned.outcome is Outcome.BUDGET and not torch.equal(*tuned.samples.split(6))
    with pytest.raises(InputError, match="starts: expected"):
        reconstruct(MARGIN, 3, method=Haim2022(starts=0))


def test_what_is_given_is_not_tuned_and_the_rest_lies_in_the_published_ranges() -> None:
    method = Haim2022(rate=0.123)
    first = method.init(MARGIN, 2, 0)
    assert (first.phase, Haim2022(**GOOD).init(MARGIN, 2, 0).phase) == ("tune", "run")
    for trial in range(30):
        there = replace(first, state=replace(first.state, trial=trial))
        chosen = method.settings_of(MARGIN, there)
        sharpness = chosen.sharpness(0)
        if trial < len(haim2022.PUBLISHED):
            _, *expected = method.sweep(MARGIN)[1][trial].values()
            assert [chosen.scale, chosen.threshold, sharpness] == expected
        assert chosen.rate == 0.123 and 10 <= sharpness <= 500
        assert 1e-6 <= chosen.scale <= 0.1 and 0.01 <= chosen.threshold <= 0.5


def test_what_buzaglo_leaves_open() -> None:
    for rule, outputs, more in (
        (Rule.MARGIN, 1, {"threshold"}),
        (Rule.MARGIN, 3, {"threshold", "multiplier_rate"}),
        (Rule.FREE, 1, {"multiplier_rate"}),
    ):
        ranges, runs = Buzaglo2023().sweep(posed(net_of(outputs), rule))
        assert ranges.keys() == {"rate", "scale", "sharpness"} | more
        for published in runs:
            assert ranges.keys() - {"multiplier_rate"} <= published.keys() <= ranges.keys()
            assert all(ranges[name].low <= z <= ranges[name].high for name, z in published.items())


@pytest.mark.parametrize("kind", ["one", "several", "decay", "change"])
def test_the_answer_has_the_recipes_own_coefficients(kind: str) -> None:
    there = spot(kind)
    recipes = {"one": Haim2022, "several": Buzaglo2023, "decay": Buzaglo2023, "change": Loo2023}
    found, moves = watched(there.problem, 3, recipes[kind](steps=45, trials=3, probe=2.5))
    place = moves[-1].state.place
    assert found.samples.shape == (6, 6) and found.outcome is Outcome.BUDGET
    assert torch.equal(found.samples, place.candidates)
    net = replace(there, sigma=torch.relu, place=place)
    left = net.residual(found.samples, place.multipliers).norm() / there.problem.target.norm()
    assert found.residual == pytest.approx(left.item() ** 2)
    again = fitted_with(there.problem, found.samples, found.coefficients)
    assert again.value == found.residual and not again.eliminated
    counted = [p.total_steps for p in moves]
    assert counted == sorted(counted) and found.steps == counted[-1]
    if kind == "one":  # one output at the margin is the case of both
        other = reconstruct(there.problem, 3, method=Buzaglo2023(steps=45, trials=3, probe=2.5))
        assert torch.equal(found.samples, other.samples)


def test_presets_are_the_published_runs_and_leave_nothing_to_tune() -> None:
    several, free, decay = (
        posed(net_of(3), Rule.MARGIN),
        posed(net_of(1), Rule.FREE),
        weights_of(Premise.DECAY),
    )
    fit: dict[str, tuple[Problem, tuple[str, ...]]] = {
        "haim2022": (MARGIN, ("b9", "k60", "kcf9", "rbij")),
        "buzaglo2023": (several, ("classes1", "classes2")),
        "shen2026": (decay, ("decay1", "decay2")),
        "loo2023": (free, ("published",)),
    }
    for method, (problem, names) in fit.items():
        assert set(names) <= set(presets(method))
        for name in names:
            begun = preset(method, name, problem).init(problem, 2, 0)
            assert begun.phase == "run" and begun.state.trial == 0
    assert presets("haim2022") == fit["haim2022"][1] and presets("exhume") == ()
    method, other = preset("haim2022", "b9"), preset("shen2026", "b9")
    assert isinstance(method, Haim2022) and isinstance(other, Shen2026)
    assert (method.steps, method.rate, method.multiplier_rate) == (50_000, 0.5549, 1e-4)
    assert other.base == replace(method, steps=200_000) and other.every == 50_000
    under = Buzaglo2023().settings_of(decay, Buzaglo2023().init(decay, 2, 0))
    assert under.multiplier_rate == 1e-4 and "multiplier_rate" not in Buzaglo2023().sweep(decay)[0]
    assert Buzaglo2023(multiplier_rate=0.5).settings_of(decay, begun).multiplier_rate == 0.5
    for name, words in (("decay1", "take classes1 or classes2"), ("b10", "buzaglo2023 has b9")):
        with pytest.raises(InputError, match=words):
            preset("buzaglo2023", name, several)
    with pytest.raises(InputError, match="exhume has none; haim2022"):
        preset("exhume", "b9")
    with pytest.raises(InputError, match="haim2022 is for weights at the margin"):
        preset("haim2022", "b9", decay)


def test_faces_are_recognised_from_the_weights_alone_and_others_are_not() -> None:
    known = data.load("faces", 8, centre="pixels")
    victim = kkt_mlp(known, widths=(60, 60), training="flow")
    found = reconstruct(victim.problem, 8, 0, replace(preset("haim2022", "b9"), steps=200))
    seen = recognised(found.samples, known, data.held_out(known))
    assert seen.control is not None
    assert seen.ssim >= 6 and seen.cosine80 >= 3
    assert seen.control.ssim <= 1 and seen.control.cosine80 == 0
