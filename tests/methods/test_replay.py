"""Replay: samples back from a model that was not trained lazily, and no claim where told wrong."""

import dataclasses
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import exhume
import replays
from exhume.auditing.evidence import claims as claimed
from exhume.auditing.suspects import suspects
from exhume.equation.domain import Box, Span
from exhume.equation.objective import fitted_with
from exhume.equation.problem import Problem
from exhume.features import replay
from exhume.features.network import Weights
from exhume.methods import reconstruct, starts
from exhume.methods.labels import (
    fractional,
    label_sets,
    least_count,
    likely_counts,
    pulls,
    rows_of,
    softened,
    telling,
    unlabelled,
)
from exhume.methods.progress import Checkpoint, pack, unpack
from exhume.methods.replay import LazySearch, Replay, Trials, span_count, spanned
from exhume.methods.starts import stride_of
from exhume.models.architectures import vit
from exhume.models.formulation import Known
from exhume.recipes import Recipe
from exhume.solvers.levenberg_marquardt import DampedState, LevenbergMarquardt
from replays import small

RECIPE, SHORT = Recipe(lr=0.5, steps=10), Recipe(lr=1.0, steps=4)
ADAM = Recipe("adam", lr=0.05, steps=4)
LABELS = (0, 1, 1)


def samples() -> Tensor:
    return torch.rand(3, 6, generator=torch.Generator().manual_seed(5))


@cache
def trained(recipe: Recipe) -> tuple[Weights, Weights]:
    """Return weights before and after, in float32 as people have them."""
    return replays.trained(small(), samples(), torch.eye(3)[list(LABELS)], recipe)


def audited(made: Recipe = RECIPE, **options: Any) -> exhume.Audit:
    known = {"samples": 3, "range": [0, 1], "device": "cpu", "premise": "replay", "recipe": made}
    return exhume.audit(small(), *trained(made), (6,), controls=False, **known | options)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        pytest.param(RECIPE, {"labels": [1, 0, 1]}, id="labels told, in another order"),
        pytest.param(RECIPE, {}, id="labels found"),
        pytest.param(RECIPE, {"samples": None, "labels": list(LABELS)}, id="number from labels"),
        pytest.param(Recipe(lr=0.2, epochs=4, momentum=0.9, batch_size=2, shuffle=1),
                     {"labels": list(LABELS), "public": torch.rand(20, 6)}, id="batches, public"),
    ],
)  # fmt: skip
def test_samples_come_back_exactly(recipe: Recipe, options: dict[str, Any]) -> None:
    found = audited(recipe, **options)
    assert found.found.outcome is exhume.Outcome.CONVERGED
    errors = torch.cdist(found.samples, samples().double()).min(0).values
    assert (errors / samples().norm(dim=1)).max() < 1e-3
    assert any("not met by chance" in claim for claim in found.claims)
    assert "how it was trained, step by step, but not on what" in found.problem.threat_model.knows


def posed(
    told: Recipe, labels: tuple[int, ...] | None, weights: tuple[Weights, Weights]
) -> Problem:
    return replays.posed(small(), weights, Known(told, labels), domain=Box(0.0, 1.0))


@pytest.mark.parametrize(
    ("opened", "labels", "samples"),
    [
        pytest.param({"lr": None}, LABELS, 3, id="rate"),
        pytest.param({"steps": (3, 4), "batch_size": (2, 3)}, LABELS, 3, id="steps and batches"),
        pytest.param({}, None, None, id="number of samples and labels"),
        pytest.param({"batch_size": 2}, None, 3, id="labels in the order of batches"),
    ],
)
def test_what_is_not_known_is_found(
    opened: dict[str, Any], labels: tuple[int, ...] | None, samples: int | None
) -> None:
    made = dataclasses.replace(SHORT, batch_size=2) if opened == {"batch_size": 2} else SHORT
    problem = posed(dataclasses.replace(SHORT, **opened), labels, trained(made))
    found = reconstruct(problem, samples, 0, Replay(products=100))
    assert found.outcome is exhume.Outcome.CONVERGED
    assert found.samples.shape == (3, 6)
    recipe = found.recipe
    assert recipe is not None
    assert (recipe.lr, recipe.steps) == (pytest.approx(1.0, rel=1e-4), 4)
    assert recipe.batch_size in (None, 3, made.batch_size)
    words = {"lr": "with them: lr 1.", "steps": "with them: steps 4, batch_size 3."}
    assert words.get(max(opened, default=""), "by chance") in claimed(problem, found)[-1]
    assert problem.threat_model.knows[3].endswith(("on what", "its rate", "batch size"))


@pytest.mark.parametrize(
    ("recipe", "told", "samples", "words"),
    [
        pytest.param(SHORT, {"lr": 1.2}, 3, "rate is suspected: with 1 in the", id="rate"),
        pytest.param(SHORT, {"steps": 5}, 3, "number of steps is suspected: with 4", id="steps"),
        pytest.param(ADAM, {}, 3, "optimiser is suspected: nearly all", id="Adam, not SGD"),
        pytest.param(SHORT, dataclasses.asdict(ADAM), 3, "optimiser is suspected: weights",
                     id="SGD, not Adam"),
        pytest.param(SHORT, {}, 2, "number of samples is suspected", id="samples"),
        pytest.param(None, {}, 3, "base model is suspected", id="base model"),
    ],
)  # fmt: skip
def test_nothing_is_claimed_where_the_auditor_is_wrong(
    recipe: Recipe | None, told: dict[str, Any], samples: int, words: str
) -> None:
    weights = trained(recipe or SHORT)
    if recipe is None:
        weights = small(1).state_dict(), weights[1]
    problem = posed(dataclasses.replace(SHORT, **told), LABELS[:samples], weights)
    found = reconstruct(problem, samples, 0, Replay(products=100), product_limit=300)
    assert found.residual > 1e-6
    claims = claimed(problem, found)
    assert any("nothing is claimed" in claim for claim in claims)
    assert words in suspects(problem, found)[0]


def test_what_is_suspected_is_the_first_advice_and_no_claim() -> None:
    found = audited(ADAM, recipe=SHORT, labels=list(LABELS), product_limit=300)
    assert "optimiser is suspected" in found.advice[0] and len(found.advice) > 1
    assert found.claims and not any("suspected" in claim for claim in found.claims)


def test_a_search_that_was_cut_short_is_not_blamed_on_the_recipe() -> None:
    problem = posed(SHORT, LABELS, trained(SHORT))
    found = reconstruct(problem, 3, 0, Replay(products=100), product_limit=150)
    assert found.residual > 1e-6
    claims = claimed(problem, found)
    assert any("nothing is claimed" in claim for claim in claims)
    assert "The search is suspected, and not the recipe" in suspects(problem, found)[0]


def test_simudy2025_descends_on_the_angle() -> None:
    known = {"method": "simudy2025", "labels": list(LABELS)}
    short, long = (audited(**known, product_limit=limit).found for limit in (1, 50))
    assert long.residual < short.residual
    assert long.outcome is exhume.Outcome.BUDGET


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": None}, "needs the recipe"),
        ({"labels": [0, 1]}, "there are 2 for 3 samples"),
        ({"labels": [0, 1, 7]}, "expected classes from 0 to 2"),
        ({"public": torch.zeros(4, 5)}, "expected inputs of 6 entries"),
        ({"method": "loo2023"}, "does not simulate training"),
        ({"parameters": "last"}, "takes all trained weights"),
        ({"premise": "change", "recipe": None, "method": "simudy2025"}, "needs the premise replay"),
        ({"premise": "change"}, "recipe: is for the premise replay"),
        ({"premise": "change", "recipe": None, "labels": [0, 1, 1]}, "labels: is for the premise"),
        ({"recipe": Recipe(lr=0.5, steps=10, frozen="0.*")}, "names 0.weight, which was trained"),
        ({"recipe": Recipe(lr=0.5, steps=10, frozen="9.*")}, "matches no parameter"),
    ],
)
def test_refusals(options: dict[str, Any], words: str) -> None:
    with pytest.raises(exhume.InputError, match=words):
        audited(**options)


def test_small_steps_are_explained_as_nearly_as_their_rounding_allows() -> None:
    slow = Recipe(lr=3e-4, steps=4)
    found = audited(slow, labels=list(LABELS))
    assert found.found.outcome is exhume.Outcome.CONVERGED and found.found.residual > 1e-9
    assert "The precision in which weights are kept" in found.claims[-1]


def first_trial(problem: Problem, method: Replay) -> Trials:
    """Return the first trial, after as long a search for the lazy solution as the method allows."""
    progress = method.init(problem, 3, 0)
    while isinstance(progress, LazySearch):
        progress = method.advance(problem, progress)
    return progress


def stalled(problem: Problem, candidates: Tensor, **changes: Any) -> Trials:
    """Return a trial that has ended in the span at candidates, with the true labels."""
    progress, labels = first_trial(problem, Replay(products=2)), torch.eye(3)[list(LABELS)]
    fit = fitted_with(spanned(problem), candidates, labels.double().view(-1, 1))
    state = dataclasses.replace(progress.state, fit=fit, outcome=exhume.Outcome.STALLED)
    return dataclasses.replace(progress, state=state, **{"free": False, **changes})


def test_a_trial_that_stalls_near_goes_on_with_slopes_that_jump_and_then_leaves_the_span() -> None:
    method, truth = Replay(products=2), samples().double()

    def after(error: float, sigma: nn.Module, **changes: bool) -> Trials:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 24), sigma, nn.Linear(24, 3))
        weights = replays.trained(module, samples(), torch.eye(3)[list(LABELS)], SHORT)
        problem = replays.posed(module, weights, Known(SHORT, LABELS))
        following = method.advance(problem, stalled(problem, truth + error, **changes))
        assert isinstance(following, Trials)
        return following

    near = after(1e-3, nn.ReLU())
    assert near.sharp and near.rounds == 0 and torch.equal(near.candidates, truth + 1e-3)
    sharp, smooth = after(1e-3, nn.ReLU(), sharp=True), after(1e-3, nn.GELU())
    assert torch.equal(sharp.candidates, truth + 1e-3)
    assert [(t.sharp, t.free, t.rounds) for t in (near, sharp, smooth)] == [
        (True, False, 0),
        (True, True, 0),
        (False, True, 0),  # without kinks there is nothing to sharpen
    ]
    far, again = after(1.0, nn.ReLU()), after(1e-3, nn.ReLU(), sharp=True, free=True)
    assert (far.sharp, far.free, far.rounds) == (False, True, 0)  # there are ways past traps
    assert (again.sharp, again.legs, again.rounds) == (False, 0, 1)


def test_a_trial_that_has_left_the_span_moves_across_it() -> None:
    problem, truth, method = posed(SHORT, LABELS, trained(SHORT)), samples().double(), Replay()
    across = torch.randn(3, 6, dtype=torch.float64)
    across = across - spanned(problem).domain.project(across)
    here = stalled(problem, truth + 1e-3 * across)
    free = method.advance(problem, here)
    assert isinstance(free, Trials) and free.free
    assert free.residual > 1e3 * here.residual  # W₁ was looked at along the span alone
    for one, ended in ((here, None), (stalled(problem, truth), exhume.Outcome.CONVERGED)):
        state = dataclasses.replace(one.state, outcome=exhume.Outcome.CONVERGED)
        assert method._stepped(problem, one, state).outcome is ended  # all weights decide
    again = unpack(problem, pack(free, 0.0))
    moved, resumed = (method.advance(problem, one) for one in (free, again))
    assert moved.residual < 0.1 * free.residual
    assert torch.equal(moved.candidates, resumed.candidates)


@pytest.mark.parametrize("recipe", [SHORT, Recipe(lr=0.1, steps=9, momentum=0.9, batch_size=2)])
def test_candidates_stay_in_the_span_of_the_samples_where_sgd_shows_it(recipe: Recipe) -> None:
    problem, truth = posed(recipe, LABELS, trained(recipe)), samples().double()
    inside = spanned(problem)
    domain, run = inside.domain, starts.run_of(inside)
    assert isinstance(domain, Span) and domain.within is problem.domain and span_count(problem) == 3
    torch.testing.assert_close(domain.project(truth), truth, rtol=0, atol=1e-5)
    assert (domain.project(torch.eye(6).double()) - torch.eye(6).double()).norm() > 1
    assert run.span is not None and torch.equal(run.span, domain.every)
    assert spanned(inside) is inside


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_no_span_is_seen_where_the_optimiser_rescales_gradients(name: str) -> None:
    other = dataclasses.replace(ADAM, optimizer=name)
    adam = posed(other, LABELS, trained(other))
    assert spanned(adam) is adam and span_count(adam) is None
    told = posed(ADAM, LABELS, trained(SHORT))  # nor where the auditor is told so
    assert spanned(told) is told


def test_no_span_is_seen_of_as_many_samples_as_entries() -> None:
    x, labels = torch.rand(7, 6), torch.eye(3)[[0, 1, 2, 0, 1, 2, 0]]
    problem = posed(SHORT, None, replays.trained(small(), x, labels, SHORT))
    assert spanned(problem) is problem and span_count(problem) is None


def test_the_tiles_of_a_transformer_span_what_its_samples_are_made_of() -> None:
    torch.manual_seed(0)
    module, x = vit((3, 8, 8), patch=4, dim=32, outputs=3), torch.randn(3, 3, 8, 8)
    weights = replays.trained(module, x, torch.eye(3)[list(LABELS)], SHORT)
    problem = replays.posed(module, weights, Known(SHORT, LABELS), (3, 8, 8))
    domain, truth = spanned(problem).domain, x.flatten(1).double()
    assert isinstance(domain, Span) and domain.basis.shape == (12, 48)
    assert domain.every.shape == (48, 192)
    assert span_count(problem) is None  # tiles too small to be unmixed may depend on each other
    torch.testing.assert_close(domain.project(truth), truth, rtol=0, atol=1e-3)
    assert (domain.project(truth.flip(1)) - truth.flip(1)).norm() > 0.1 * truth.norm()


@pytest.mark.parametrize("kept", [True, False])
def test_labels_are_free_in_the_span(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(replay, "DENSE", 0)
        monkeypatch.setattr(replay, "COORDINATES", 0)
    problem, given = posed(SHORT, None, trained(SHORT)), torch.zeros(9, 1, dtype=torch.float64)
    soft, wide = unlabelled(spanned(problem)), unlabelled(problem)
    draw = partial(torch.randn, dtype=torch.float64)
    rows, direction = (soft.domain.project(draw(3, 9)) for _ in range(2))
    span = cast(Span, spanned(problem).domain).basis

    def along(change: Tensor) -> Tensor:
        first = change[: 24 * 6].view(24, 6) @ span.T  # W₁ has as many inputs as the span has rows
        return torch.cat([first.flatten(), change[24 * 6 :, 0]])[:, None]

    target = draw(len(problem.target), 1)
    target[: 24 * 6] = (target[: 24 * 6].view(24, 6) @ span.T @ span).view(-1, 1)
    torch.testing.assert_close(soft.target, along(problem.target))
    inside, outside = soft.features.linearize(rows), wide.features.linearize(rows)
    torch.testing.assert_close(inside.combine(given), along(outside.combine(given)))
    pushed = inside.push(direction, given)
    torch.testing.assert_close(pushed, along(outside.push(direction, given)))
    target, full = along(target), target
    pulled, whole = inside.pull(target, given), outside.pull(full, given)
    assert float((pulled * direction).sum()) == pytest.approx(float((pushed * target).sum()))
    torch.testing.assert_close(pulled[:, 6:], whole[:, 6:])
    project = spanned(problem).domain.project
    torch.testing.assert_close(project(pulled[:, :6]), project(whole[:, :6]))
    assert isinstance(inside, replay.Replayed) and (inside.jacobian is not None) == kept


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_first_layer_with_few_inputs_is_trained_as_the_whole_is(momentum: float) -> None:
    recipe = Recipe(lr=0.2, steps=5, momentum=momentum, weight_decay=0.1, batch_size=2)
    run = starts.run_of(posed(recipe, LABELS, trained(recipe)))
    rows = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64)).Q.T
    labels, narrow = rows_of(torch.tensor(LABELS), 3).view(-1, 1), run.within(rows)
    x = torch.randn(3, 2, dtype=torch.float64) @ rows
    few, whole = narrow.linearize(x).combine(labels), run.linearize(x).combine(labels)
    first = whole[: 24 * 6].view(24, 6) @ rows.T
    assert narrow.width == run.width - 24 * 4 and narrow.dim == run.dim
    torch.testing.assert_close(few, torch.cat([first.view(-1, 1), whole[24 * 6 :]]))


def test_a_trial_from_unmixed_samples_stays_in_the_span_and_comes_to_them() -> None:
    problem, method = posed(SHORT, LABELS, trained(SHORT)), Replay(products=100)
    number = Replay().init(posed(SHORT, None, trained(SHORT)), None, 0)
    assert isinstance(number, LazySearch) and number.known == 3
    lazily = first_trial(problem, method)
    assert lazily.free and starts.run_of(lazily.seen(problem)).span is None
    unmixed = dataclasses.replace(lazily, unmixed=True)
    progress = dataclasses.replace(unmixed, **method._begin(problem, unmixed, 0, 0))
    domain = spanned(problem).domain
    while progress.outcome is None and progress.rounds == 0:
        assert not progress.free and starts.run_of(progress.seen(problem)).span is not None
        torch.testing.assert_close(domain.project(progress.candidates), progress.candidates)
        following = method.advance(problem, progress)
        assert isinstance(following, Trials)
        progress = following
    assert progress.outcome is exhume.Outcome.CONVERGED
    errors = torch.cdist(progress.candidates, samples().double()).min(0).values
    assert errors.max() < 1e-3


def test_a_jacobian_serves_again_while_it_serves_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step by another's Jacobian that fails is taken again by one's own, no shorter."""
    problem = spanned(posed(SHORT, LABELS, trained(SHORT)))
    labels = torch.eye(3, dtype=torch.float64)[list(LABELS)].view(-1, 1)
    start = problem.domain.project(samples().double() * 1.05)
    state = DampedState(fit=fitted_with(problem, start, labels), damping=1e-6)
    made: list[int] = []
    columns = replay.Replayed._columns

    def counted(at: replay.Replayed) -> Tensor:
        made.append(len(made))
        return columns(at)

    monkeypatch.setattr(replay.Replayed, "_columns", counted)
    solver = LevenbergMarquardt(tolerance=1e-12, accuracy=1e-6, chords=True)
    first = solver.step(problem, state)
    at = first.fit.linearization
    assert isinstance(at, replay.Replayed) and at.borrowed and len(made) == 1
    second = solver.step(problem, first)
    assert second.fit.value < first.fit.value < state.fit.value and len(made) == 1
    at.__dict__["squared"] = -cast(Tensor, at.squared)  # leads upwards
    failed = solver.step(problem, first)
    assert failed.fit is first.fit and failed.damping == first.damping and not at.borrowed
    again = solver.step(problem, failed)
    assert again.fit.value < first.fit.value and len(made) == 2


def test_a_class_whose_bias_grew_has_samples_however_little_it_gained() -> None:
    gains = torch.tensor([0.25, 1.0, 0.2, -0.7, 1e-3, -0.75], dtype=torch.float64)
    given = torch.tensor([0.0, 0.1, 0.3, 0.3, 0.1, 0.2], dtype=torch.float64)
    first, *others = likely_counts(gains, torch.eye(6) - given, 3, gains > 0.01)
    assert first.tolist() == [1, 1, 1, 0, 0, 0]
    assert any(counts[0] == 0 for counts in others)  # these are tried, too, but later


def test_labels_are_found_as_unknowns_beside_samples_and_come_back_as_classes() -> None:
    problem, method = posed(SHORT, None, trained(SHORT)), Replay(products=2)
    progress = first_trial(problem, method)
    labels = torch.eye(3, dtype=torch.float64)[list(LABELS)]
    rows = torch.cat([samples().double() + 0.02, softened(labels, labels.new_full((3,), 1 / 3))], 1)
    fit = fitted_with(unlabelled(problem), rows, labels.flip(0).reshape(-1, 1))
    begun = dataclasses.replace(progress.state, fit=fit, steps=0)
    soft = unpack(problem, pack(dataclasses.replace(progress, state=begun, soft=True), 0.0))
    assert soft.candidates.shape == (3, 6) and soft.residual == fit.value
    assert torch.equal(method.finish(problem, soft).shares, labels)
    while soft.outcome is None and soft.rounds == 0:
        soft = method.advance(problem, soft)
    assert soft.outcome is exhume.Outcome.CONVERGED and not soft.soft
    assert torch.equal(soft.state.fit.shares, labels)


def test_sets_of_labels_are_followed_by_labels_of_several_classes() -> None:
    problem = posed(SHORT, None, trained(SHORT))
    sets = label_sets(problem, samples().double(), torch.zeros(3, 3), 3, 12)
    assert [fractional(labels) for labels in sets] == [False] * (len(sets) - 1) + [True]
    for labels in sets:
        torch.testing.assert_close(labels.sum(1), labels.new_ones(3))


@pytest.mark.parametrize(("lr", "momentum", "stride"), [(0.01, 0, 16), (0.01, 0.5, 16), (1, 0, 1)])
def test_a_run_of_many_short_steps_is_solved_as_one_of_few_long_ones_first(
    lr: float, momentum: float, stride: int
) -> None:
    recipe = Recipe(lr=lr, steps=128, momentum=momentum)
    problem = posed(recipe, LABELS, trained(recipe))
    fit = fitted_with(problem, samples().double() / 2, torch.eye(3)[list(LABELS)].view(-1, 1))
    assert stride_of(problem, fit) == stride
    assert stride_of(posed(ADAM, LABELS, trained(ADAM)), fit) == 1


def test_samples_come_back_after_long_steps() -> None:
    recipe, moves = Recipe(lr=0.05, steps=32), []
    run = partial(reconstruct, posed(recipe, LABELS, trained(recipe)), 3, 0, Replay(products=10))
    found = run(observe=lambda progress, _: moves.append(progress))
    eased = [move for move in moves if move.phase == "long steps"]
    assert eased[-1].stride > 1 and moves[-1].stride == 1 and moves[-1].phase == "replay"
    assert found.outcome is exhume.Outcome.CONVERGED and found.recipe == recipe
    assert torch.equal(run(resume=pack(eased[-1], 0.0)).samples, found.samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_labels_are_unknowns_after_the_likeliest_sets(dtype: torch.dtype) -> None:
    problem, moves = posed(SHORT, None, trained(SHORT)).to("cpu", dtype), []
    run = partial(reconstruct, problem, 3, 0, Replay(products=2, trial=1, trials=13))
    found = run(observe=lambda progress, _: moves.append(progress))
    soft = [move for move in moves if move.phase == "soft labels"]
    assert soft and all(move.soft and move.candidates.shape == (3, 6) for move in soft)
    assert set(found.coefficients.flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(run(resume=pack(soft[-1], 0.0)).samples, found.samples)


def test_starts_are_public_inputs_or_means_of_the_labels_and_chosen_by_what_they_leave() -> None:
    public = torch.rand(60, 6, generator=torch.Generator().manual_seed(1)).double()
    problem = replays.posed(small(), trained(SHORT), Known(SHORT, LABELS, public))
    given = starts.run_of(problem).predict(public).argmax(1)
    labels, draw = rows_of(given[:1].expand(3), 3).double(), torch.Generator().manual_seed(0)
    drawn = starts.drawn_start(problem, labels, "public", draw)
    assert all((public[given == given[0]] == row).all(1).any() for row in drawn)
    means = starts.drawn_start(problem, labels, "means", draw)
    assert torch.cdist(means, public).min() > 0 and torch.pdist(means).min() > 0
    kept = torch.tensor([True, False, False])
    chosen, told = starts.picked(problem, drawn, labels, draw, kept)
    assert torch.equal(told, labels)
    before, after = (fitted_with(problem, x, labels.view(-1, 1)).value for x in (drawn, chosen))
    assert after < before and torch.equal(chosen[0], drawn[0])


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param({"label_smoothing": 0.2}, id="label smoothing"),
        pytest.param({"loss": "mse", "lr": 0.1}, id="mse"),
        pytest.param({"frozen": ("2.*",)}, id="frozen last layer"),
    ],
)
def test_labels_are_chosen_with_public_inputs_where_the_last_layer_does_not_tell(
    entries: dict[str, Any],
) -> None:
    recipe = dataclasses.replace(SHORT, **entries)
    public = 3 * torch.randn(60, 6, generator=torch.Generator().manual_seed(1)).double()
    classes = starts.run_of(posed(SHORT, None, trained(SHORT))).predict(public).argmax(1)
    own = torch.tensor([(classes == label).nonzero()[3] for label in (0, 1, 2)])
    weights = replays.trained(small(), public[own].float(), torch.eye(3), recipe)
    problem = replays.posed(small(), weights, Known(recipe, None, public))
    assert not telling(problem) and telling(posed(SHORT, None, trained(SHORT)))
    assert least_count(problem) == 1
    wrong, draw = torch.eye(3).double()[[1, 1, 1]], torch.Generator().manual_seed(0)
    drawn, kept = starts.drawn_start(problem, wrong, "public", draw), torch.zeros(3).bool()
    chosen, labels = starts.picked(problem, drawn, wrong, draw, kept, sure=False)
    before, after = (
        fitted_with(problem, *pair).value
        for pair in ((drawn, wrong.view(-1, 1)), (chosen, labels.view(-1, 1)))
    )
    assert after < before
    mse = "loss" in entries  # by which other labels explain a start as well
    assert mse or sorted(labels.argmax(1).tolist()) == [0, 1, 2]
    none = replays.posed(small(), weights, Known(recipe, None))
    start, alone = starts.picked(none, public[own], wrong, draw, kept, sure=False)
    assert torch.equal(start, public[own]) and torch.equal(alone, torch.eye(3).double())
    for posing, least in ((problem, 0.0), (none, 1e-9)):  # of the latter the first may be the best
        trial = first_trial(posing, Replay(products=2))
        likeliest = label_sets(posing, trial.lazy, trial.gains, 3, 12)[0].reshape(-1, 1)
        assert trial.residual < fitted_with(posing, trial.candidates, likeliest).value + least
    if "frozen" in entries:
        raised = pulls(starts.run_of(problem), public[own])
        first = label_sets(problem, public[own], raised, 3, 12)[0]
        assert torch.equal(first, torch.eye(3).double())


def test_outputs_rise_by_what_a_label_lacks() -> None:
    problem, x = posed(SHORT, None, trained(SHORT)), samples().double()
    run = starts.run_of(problem)
    shares = run.network(run.points[0], x).softmax(1).mean(0)
    torch.testing.assert_close(pulls(run, x), torch.eye(3).double() - shares)


def test_labels_of_one_output_are_signs() -> None:
    assert rows_of(torch.tensor([0, 1]), 1).tolist() == [[-1], [1]]


def test_a_run_with_choices_resumes_to_the_same_bits() -> None:
    problem = posed(Recipe(lr=0.3, steps=(2, 4)), LABELS, trained(RECIPE))
    kept: list[Checkpoint] = []
    run = partial(reconstruct, problem, 3, 0, Replay(products=20, trial=2), product_limit=120)
    whole = run(observe=lambda progress, seconds: kept.append(pack(progress, seconds)))
    middle = next(point for point in kept if point.record["rounds"] == 2)
    again = run(resume=middle)
    assert middle.record["best"] is not None
    assert again.recipe == whole.recipe
    assert torch.equal(again.samples, whole.samples)
