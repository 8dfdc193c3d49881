"""Steps of runs side by side, by one program, and of the same runs alone."""

from dataclasses import replace

import pytest
import torch
from recipe_problems import KINDS, Oracle, spot

from exhume.methods.descent import STRIDE, Descent, Moments, advanced, smoothed
from exhume.methods.penalised import Descending
from exhume.methods.penalties import Hyperparameters, loss_at
from exhume.methods.progress import pack, unpack
from nets import by_torch
from problems import gaussian


def settings_by_run(there: Oracle) -> list[Hyperparameters]:
    """Three, with all that may differ between runs of one recipe."""
    each = ((1.0, 0.0, 5.0), (0.3, 1.0, 19.0), (2.0, 0.5, 80.0))
    return [
        replace(
            there.settings,
            rate=factor * there.settings.rate,
            multiplier_rate=factor * there.settings.multiplier_rate,
            threshold=threshold,
            sharpness=lambda step, least=sharpness: least + step / 10,
        )
        for factor, threshold, sharpness in each
    ]


def runs_from(there: Oracle) -> list[Descent]:
    """Three, of which one has taken steps and another has a pace and shares of its own."""
    place, chosen = there.place, there.settings
    runs = [
        Descent(replace(place, candidates=c * place.candidates), Moments.at_rest(place, chosen), *t)
        for c, t in ((1.0, (0, 1.0, 1.0)), (0.5, (1, 1.0, 1.0)), (0.1, (2, 1.0, 1.0)))
    ]
    runs[1] = replace(runs[1], pace=0.5, place=replace(runs[1].place, shares=place.shares.flip(0)))
    return [*runs[:2], advanced(there.problem, [chosen], runs[2:], 7)[0]]


@pytest.mark.parametrize("kind", [*KINDS, "layers"])
def test_runs_side_by_side_are_the_runs_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = spot("one" if kind == "layers" else kind)
    if kind == "layers":  # not all of them are attacked
        features = replace(there.problem.features, block=("1.weight", "5.weight", "5.bias"))
        target = gaussian(features.width, 1, seed=3)
        there = replace(there, problem=replace(there.problem, features=features, target=target))
    chosen, runs = settings_by_run(there), runs_from(there)
    alone = [
        advanced(there.problem, [c], [run], 13)[0] for c, run in zip(chosen, runs, strict=True)
    ]
    together = [advanced(there.problem, chosen, runs, 13)]
    monkeypatch.setattr("exhume.features.runs.TOGETHER", 2 * there.problem.features.width)
    together.append(advanced(there.problem, chosen, runs, 13))
    by_autograd = replace(there.problem, features=by_torch(there.problem.features))
    together.append(advanced(by_autograd, chosen, runs, 13))
    for one, *others in zip(alone, *together, strict=True):
        for other in others:
            torch.testing.assert_close(other.memory, one.memory)
            assert other.residual == pytest.approx(one.residual)
            assert (other.steps, other.moments.clock) == (one.steps, one.moments.clock)
    for one, run in zip(chosen, alone, strict=True):
        end = loss_at(smoothed(there.problem, one, run.steps), one, run.place)
        assert run.residual == pytest.approx(end.relative)
    assert alone[2].steps == 20 and not torch.equal(
        alone[0].place.candidates, runs[0].place.candidates
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_replays_what_a_cpu_computes(kind: str) -> None:
    there = spot(kind)
    chosen, near = settings_by_run(there), there.problem
    first, *others = runs_from(there)
    begun = Descending(seed=0, samples=None, state=first, beside=tuple(others))
    far = near.to("cuda", torch.float64)
    runs, elsewhere = begun.runs, unpack(far, pack(begun, 0.0)).runs
    for _ in range(3):  # recorded, then replayed
        runs = advanced(near, chosen, runs, STRIDE)
        elsewhere = advanced(far, chosen, elsewhere, STRIDE)
        for run, other in zip(runs, elsewhere, strict=True):
            torch.testing.assert_close(other.memory, run.memory, check_device=False)
            assert other.residual == pytest.approx(run.residual)
