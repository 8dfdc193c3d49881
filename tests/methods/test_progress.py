"""Every method goes on from a checkpoint to the same bits; a damaged one is refused."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import getitem
from typing import Any

import pytest
import torch
from recipe_problems import combined, haim, net_of, posed, watched, weights_of

from exhume import data, victims
from exhume.equation.coefficients import Rule
from exhume.equation.problem import Premise, Problem
from exhume.errors import InputError
from exhume.methods import Buzaglo2023, Exhume, Haim2022, Iurada2025, Loo2023, Shen2026, reconstruct
from exhume.methods.progress import Checkpoint, Method, Progress, pack, unpack
from exhume.methods.stationary import Stationary
from exhume.solvers import Outcome, State
from problems import case

SHORT: dict[str, Any] = {"steps": 55, "trials": 3, "probe": 2.5}
GENTLE = Buzaglo2023(rate=0.01, scale=0.1, multiplier_rate=0.01, **SHORT)  # published: too far
SPLIT = Shen2026(Iurada2025(rate=1.0, steps=400), every=70, rule="adaptive")
LEAD = Buzaglo2023(rate=1e-3, multiplier_rate=1e-4)
SHARP = Stationary(recipe=LEAD, leads=2, lead=5.0, trials=4, steps=3, sharpness=(20.0, 40.0))


def random_features() -> Problem:
    return case(20, 4, 2.5, seed=2, dtype=torch.float32).problem


def few() -> Problem:
    return victims.random_features(data.sphere(8, 4), 36).problem


stuck = partial(combined, activation="tanh")  # four samples, of which two candidates have to do
RUNS: dict[str, tuple[Callable[[], Problem], str | Method, int | None]] = {
    "exhume": (random_features, "exhume", 4),
    "exhume, number unknown": (random_features, "exhume", None),
    "exhume, giving up": (few, Exhume(patience=1, trial=15), 4),
    "exhume, softly": (random_features, Exhume(many=4), 4),
    "exhume at the margin": (lambda: weights_of(Premise.MARGIN), SHARP, 3),
    "exhume at the margin of several": (lambda: weights_of(Premise.MARGIN, 3), SHARP, 3),
    "exhume with decay": (lambda: weights_of(Premise.DECAY), SHARP, None),
    "iurada2025": (random_features, Iurada2025(steps=30), 4),
    "tansley2026": (lambda: victims.two_layer(data.sphere(20, 4), 200).problem, "tansley2026", 4),
    "haim2022": (lambda: posed(net_of(1), Rule.MARGIN), Haim2022(**SHORT), 3),
    "haim2022, starts": (lambda: posed(net_of(1), Rule.MARGIN), Haim2022(starts=3, **SHORT), 3),
    "buzaglo2023": (lambda: posed(net_of(3), Rule.MARGIN), Buzaglo2023(**SHORT), 3),
    "buzaglo2023, free": (lambda: posed(net_of(2), Rule.FREE), GENTLE, 3),
    "loo2023": (lambda: posed(net_of(2), Rule.FREE), Loo2023(**SHORT), 3),
    "shen2026": (stuck, Shen2026(haim(230), every=70, rule="adaptive"), 1),
    "shen2026, forgetting": (stuck, Shen2026(haim(230), every=70), 1),
    "shen2026, tuned": (combined, Shen2026(Haim2022(**SHORT), every=20), 2),
    "shen2026 of iurada2025": (lambda: case(8, 6, 6.0, "relu+tanh", seed=1).problem, SPLIT, 2),
}


def bits(found: Any) -> dict[str, Any]:
    """All of a result but the seconds, such that == compares its bits."""
    listed = {"samples": found.samples.tolist(), "coefficients": found.coefficients.tolist()}
    return vars(found) | listed | {"seconds": 0.0}


def through_a_file(progress: Progress) -> Checkpoint:
    packed = pack(progress, 5.0)
    tensors = {name: tensor.clone() for name, tensor in packed.tensors.items()}
    return replace(packed, tensors=tensors, record=json.loads(json.dumps(packed.record)))


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_to_the_same_bits(name: str) -> None:
    pose, method, samples = RUNS[name]
    problem = pose()
    whole, moves = watched(problem, samples, method)
    assert len(moves) > 5
    assert "giving up" not in name or whole.outcome is Outcome.STALLED
    phases, counts = [p.phase for p in moves], [len(p.candidates) for p in moves]
    stops = {0, len(moves) // 2, len(moves) - 2} | {phases.index(phase) for phase in set(phases)}
    if "margin" in name:
        led = [p for p in moves if p.phase == "lead"]
        assert len(led) > 1 and not any(run.diverged for p in led for run in p.runs)
    if name.startswith("shen2026"):
        assert counts[-1] > counts[0] or "tuned" in name
        stops = {counts.index(counts[-1]), len(moves) // 2}
    for stop in stops:
        resumed = reconstruct(problem, samples, 0, method, resume=through_a_file(moves[stop]))
        assert bits(resumed) == bits(whole), f"interrupted at move {stop} of {len(moves)}"
        assert resumed.seconds >= 5


def test_the_seed_decides_and_nothing_else() -> None:
    for name in ("exhume", "haim2022"):
        pose, method, samples = RUNS[name]
        results = []
        for state, seed in ((1, 5), (2, 5), (2, 6)):
            torch.manual_seed(state)
            results.append(reconstruct(pose(), samples, seed, method, product_limit=300))
        assert bits(results[0]) == bits(results[1])
        assert not torch.equal(results[0].samples, results[2].samples)


@dataclass(frozen=True, eq=False, kw_only=True)
class Example(Progress):
    state: State
    nothing: float | None = None
    infinite: float = math.inf
    table: tuple[tuple[float, ...], ...] = ((1.0, math.nan), (0.1 + 0.2, 3.0))
    pair: tuple[torch.Tensor, str] | None = None


def example() -> tuple[Problem, Example]:
    problem, pair = random_features(), (torch.arange(3), "word")
    state = Iurada2025().init(problem, 3, 0).state
    return problem, Example(seed=2**62, samples=None, state=state, pair=pair)


def test_every_kind_of_field_comes_back() -> None:
    problem, before = example()
    after = unpack(problem, through_a_file(before))
    assert type(after) is Example and type(after.state) is type(before.state)
    assert after.nothing is None and after.infinite == math.inf and after.seed == 2**62
    assert math.isnan(after.table[0][1]) and after.table[1] == before.table[1]
    assert after.pair[0].tolist() == [0, 1, 2] and after.pair[1] == "word"
    assert torch.equal(after.candidates, before.candidates) and after.residual == before.residual
    with pytest.raises(TypeError, match=r"infinite.*cannot hold a complex"):
        pack(replace(before, infinite=1j), 0.0)


def test_a_damaged_checkpoint_is_refused() -> None:
    problem, progress = example()
    for (*above, name), value, words in (
        (("class",), "Path", "Path is not what belongs there"),
        (("state", "class"), "Example", "Example is not what belongs there"),
        (("state", "steps"), "many", "'many'"),
        (("outcome",), "perfect", "perfect"),
        (("samples",), 1.5, "1.5"),
        (("extra",), 1, "other fields"),
        (("seed",), None, "None"),
        (("pair",), [{"tensor": "nowhere"}, "word"], "nowhere"),
        (("state", "fit"), {"fit": [{"tensor": "pair.0"}, None]}, ""),
    ):
        checkpoint = replace(through_a_file(progress), source="run/checkpoint")
        reduce(getitem, above, checkpoint.record)[name] = value
        with pytest.raises(InputError, match=f"run/checkpoint: cannot be used.*{words}"):
            unpack(problem, checkpoint)
