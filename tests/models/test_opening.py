"""Opening a model with its weights: the problem it poses, by each premise, and what is refused."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import exhume
from exhume import data
from exhume.auditing.settings import Settings
from exhume.equation.domain import Box, Sphere, SphereInBox
from exhume.equation.objective import fitted
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.evaluate import residual_at_truth, wrong_prior
from exhume.features.gradient import ParameterGradients
from exhume.features.modules import LastLayer
from exhume.features.network import moved
from exhume.methods.tansley2026 import reduced
from exhume.models import architectures
from exhume.models.card import DataCard
from exhume.models.folder import CARD as FILE
from exhume.models.folder import INITIAL, read_model
from exhume.models.formulation import BOUNDED, degree, doubts, weights_problem
from exhume.models.opening import Opened, Source, open_model
from exhume.search.subspace import estimate
from exhume.victims import Victim, kkt_mlp, two_layer
from lazy import Lazy, dense
from nets import make
from odd_modules import Written
from problems import gaussian

CARD, TOLD = DataCard((4, 4), norm="sqrt_d"), DataCard((8, 8))


@pytest.fixture(scope="module")
def known() -> Lazy:
    return Lazy(dense, (4, 4))


def opened_(known: Lazy, parameters: str | None = None, **given: Any) -> Opened:
    source = {"model": known.model, "initial": known.initial, "trained": known.trained}
    return open_model(Source(**{**source, "card": CARD, **given}), parameters)


def test_an_opened_network_says_what_it_is_and_the_module_is_left_alone(known: Lazy) -> None:
    before = copy.deepcopy(known.model.state_dict())
    known.model.train()
    opened = opened_(known)
    opened_(known, card=replace(CARD, classes=2))  # two classes may share one output
    assert known.model.training
    assert all(torch.equal(w, before[name]) for name, w in known.model.state_dict().items())
    assert (opened.parameters, opened.point) == ("last", "midpoint")
    assert opened.derivative_error is not None and opened.derivative_error < 1e-6
    problem, threat = opened.problem, opened.problem.threat_model
    assert problem.target.shape == (600, 1) and problem.target.dtype == torch.float64
    assert problem.drift > 0 and problem.first_layer is not None
    assert {"the initial weights", "the norm of the inputs (√d)"} <= set(threat.knows)
    assert "lazy" in threat.assumes[0]


def test_one_precision_for_all_weights_and_the_coarser_one_for_rounding(known: Lazy) -> None:
    single = torch.device("cpu"), torch.float32
    initial, trained = (moved(state, *single) for state in (known.initial, known.trained))
    mixed = opened_(known, initial=initial).problem
    assert mixed.target.dtype == mixed.features.dtype == torch.float64
    plain = opened_(known, initial=initial, trained=trained).problem
    assert mixed.resolution == pytest.approx(plain.resolution, rel=1e-3)


def test_a_frozen_backbone_leaves_no_drift(known: Lazy) -> None:
    probe = {**known.initial, "3.weight": known.trained["3.weight"]}
    frozen, zero = (opened_(known, trained=probe, initial=x) for x in (known.initial, "zero-head"))
    assert frozen.problem.drift == 0 and frozen.point == zero.point == "final"
    assert frozen.problem.first_layer is None
    assert "last layer" in frozen.problem.threat_model.assumes[0]
    assert "began at zero" in zero.problem.threat_model.assumes[0]
    assert torch.equal(zero.problem.target, probe["3.weight"].T)
    assert opened_(known, "all", trained=probe).problem.drift > 0


def test_tied_weights_and_unsaved_buffers() -> None:
    def hidden(self: Any, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) + self.offset

    parts = {name: nn.Linear(16, 16) for name in ("first", "second", "head")}
    model = Written(lambda self, x: self.head(hidden(self, x)), **parts)
    parts["second"].weight = parts["first"].weight
    model.register_buffer("offset", torch.full((16,), 0.1), persistent=False)
    initial = copy.deepcopy(model.state_dict())
    trained = {name: w + 0.01 for name, w in initial.items()}
    source = Source(model, trained, initial, DataCard((16,), norm=4))
    problem = open_model(source, point="both").problem
    features, x = problem.features, torch.randn(2, 16)
    assert isinstance(features, LastLayer)
    model.load_state_dict(trained)
    rows = features.network.hidden(features.points[1], x)
    assert torch.allclose(rows, hidden(model, x), atol=1e-6)
    assert "second.weight" not in features.points[0]
    assert problem.to("cpu", torch.float64).features.linearize(x).gram().shape == (4, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda k: {"initial": k.model.state_dict(), "trained": k.model.state_dict()}, "memory"),
        (lambda k: {"initial": k.model}, "expected a state dict"),
        (lambda k: {"initial": copy.deepcopy(k.trained)}, "nothing was trained"),
        (lambda k: {"initial": {}}, "another architecture"),
        (lambda k: {"trained": {"3.weight": k.trained["3.weight"]}}, "another architecture"),
        (lambda k: {"initial": "nowhere.pt"}, "nowhere.pt"),
        (lambda k: {"trained": Path("nowhere.safetensors")}, "nowhere.safetensors"),
        (lambda k: {"model": k.trained}, "torch.nn.Module"),
        (lambda k: {"head": "0"}, "head"),
    ],
)
def test_what_is_no_model_with_its_weights(
    change: Callable[[Lazy], dict[str, Any]], words: str, known: Lazy
) -> None:
    with pytest.raises(InputError, match=words):
        opened_(known, **change(known))


@pytest.fixture(scope="module")
def victim() -> Victim:
    known = data.load("digits", 4, classes="parity", centre="pixels")
    return kkt_mlp(known, (30,), steps=400)


@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [
        ("mlp", {"widths": [5], "activation": "relu", "bias": False}, 2),
        ("mlp", {"activation": "relu", "bias": "first"}, 3),
        ("mlp", {"activation": "relu", "bias": True}, None),
        ("mlp", {"activation": "tanh", "bias": False}, None),
        ("resnet", {}, None),
        ("vit", {}, None),
    ],
    ids=str,
)
def test_the_degree_is_the_number_of_layers_unless_biases_bends_or_paths_spoil_it(
    name: str, sizes: dict[str, Any], layers: int | None
) -> None:
    net = make(name, **sizes)
    features = weights_problem(net.network, net.trained, Premise.MARGIN).features
    inputs = gaussian(6, net.network.dim)
    found, missed = degree(features, inputs)
    if layers is None:
        assert 1e-3 < missed <= 1
    else:
        assert found == pytest.approx(layers, abs=1e-9) and missed < 1e-12
    assert isinstance(features, ParameterGradients)
    zero = {key: torch.zeros_like(w) for key, w in net.trained.items()}
    found, missed = degree(replace(features, points=(zero,)), inputs)
    assert found != found and missed == 1


def test_what_the_initial_weights_left_is_a_lower_bound_of_the_residual(victim: Victim) -> None:
    lazy = two_layer(victim.truth, 40, loss="logistic", steps=200)
    for word in ("margin", "decay"):
        problem = lazy.posed(premise=word)
        (sentence,) = doubts(problem, 4)
        assert f"contradict the premise {word}" in sentence and "initial weights" in sentence
        assert problem.first_layer is not None
        beyond = torch.linalg.svdvals(problem.first_layer.trained.double())[4:].square().sum()
        share = float(beyond / problem.target.double().square().sum())
        assert f"{share:.1e}" in sentence and share > 0.1
        assert residual_at_truth(problem.to("cpu", torch.float64), victim.truth) > share - 1e-9
        assert doubts(problem, None) == ()
    assert doubts(lazy.problem, 4) == doubts(victim.problem, 4) == ()
    assert doubts(victim.posed(premise="decay"), 4) == ()


def test_deep_biases_are_doubted_under_the_margin_alone() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 1))
    rank_two = (gaussian(20, 2) @ gaussian(2, 64)).float()  # two samples explain it
    source = Source(net, {**net.state_dict(), "1.weight": rank_two}, card=TOLD)
    (sentence,) = open_model(source, premise="margin", samples=2).warnings
    assert "not homogeneous" in sentence and "Biases in deeper layers" in sentence
    assert open_model(source, premise="decay", samples=2).warnings == ()


def at_rest(victim: Victim, card: DataCard = TOLD, **more: Any) -> Opened:
    asked = {word: more.pop(word) for word in ("parameters", "point", "target") if word in more}
    premise = more.pop("premise", Premise.MARGIN)
    sizes = {"shape": [8, 8], "outputs": 1, "widths": [30], "bias": "first"}
    given = {"trained": dict(victim.trained), **more}
    source = Source(architectures.build("mlp", sizes), card=card, **given)
    return open_model(source, premise=premise, **asked)


def test_trained_weights_alone_are_the_target(victim: Victim) -> None:
    opened = at_rest(victim)
    assert (opened.parameters, opened.point, opened.warnings) == ("all", "final", ())
    problem, posed = opened.problem, victim.problem
    assert problem.premise is Premise.MARGIN and torch.equal(problem.target, posed.target)
    assert problem.resolution == posed.resolution and problem.domain.name == "box [-1, 1]"
    assert problem.threat_model.knows == ("the trained weights", "the architecture")
    assert problem.threat_model.assumes[1:] == (BOUNDED,)
    x = victim.truth.inputs.float()
    assert torch.allclose(*(p.features.linearize(x).gram() for p in (problem, posed)))
    half = at_rest(victim, trained={name: w.half() for name, w in victim.trained.items()})
    assert half.problem.resolution == pytest.approx(0.1 * torch.finfo(torch.half).eps ** 2)
    assert "float16" in half.warnings[0]
    for asked in ({"target": "weights"}, {"premise": Premise.DECAY}):
        (sentence,) = at_rest(victim, initial="nowhere.pt", **asked).warnings
        assert "are not used" in sentence
    card = replace(TOLD, range=(0, 1), mean=0.5)
    told = at_rest(victim, card).problem
    assert told.domain.name == "box [-0.5, 0.5]" and told.display == card.display
    assert told.threat_model.knows[2:] == card.knows and len(told.threat_model.assumes) == 1
    assert at_rest(victim, replace(TOLD, norm=3)).problem.domain == Sphere(3)
    span = replace(problem, domain=Sphere())
    assert span.first_layer is not None
    assert reduced(span, estimate(span.first_layer, 4)).premise is Premise.MARGIN


def test_initial_weights_make_the_change_the_target_of_the_margin(
    victim: Victim, tmp_path: Path
) -> None:
    """θ − θ₀, with θ₀ beside it; labels and margins are still those of the outputs, Φθ = L f."""
    initial, trained = dict(victim.initial), victim.trained
    opened = at_rest(victim, initial=initial)
    problem, x = opened.problem, victim.truth.inputs
    change = torch.cat([(w - initial[name]).flatten() for name, w in trained.items()])
    start = torch.cat([w.flatten() for w in initial.values()])
    assert opened.target == "change" and problem.premise is Premise.MARGIN
    assert problem.start is not None
    assert torch.equal(problem.target[:, 0], change) and torch.equal(problem.start[:, 0], start)
    assert problem.threat_model.knows[0] == "the initial weights"
    whole = at_rest(victim).problem
    share = 2 * whole.target.square().sum() / change.square().sum()
    assert problem.resolution == pytest.approx(whole.resolution * share.item(), rel=1e-4)
    fit = fitted(problem.to("cpu", torch.float64), x)
    network = problem.features.network if isinstance(problem.features, ParameterGradients) else None
    assert network is not None
    outputs = network(trained, x.float())[:, 0].double()
    assert fit.slack is not None and (fit.coefficients[:, 0] * outputs >= 0).all()
    margins = (fit.slack.deviation + 1) / outputs.abs()
    assert torch.allclose(margins, margins[:1].expand_as(margins), rtol=1e-4)
    held = at_rest(victim, initial=initial, premise=Premise.DECAY, target="change").problem
    assert held.start is not None
    some = at_rest(victim, initial={"3.weight": initial["3.weight"]}).problem
    first = trained["1.weight"].flatten()
    assert torch.equal(some.target[: len(first), 0], first)
    folder = tmp_path / "margin"
    victim.save(folder)
    assert read_model(folder).start is None
    posed = victim.posed(premise="margin", target="change")
    assert torch.equal(read_model(folder, target="change").target, posed.target)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": "change"}, "initial weights: none given; the target is what training changed"),
        ({"target": "all"}, "target: expected one of weights, change"),
        ({"premise": Premise.CHANGE, "target": "weights"}, "target: premise change: is about"),
        ({"parameters": "last"}, "takes all trained weights.*leave out"),
        ({"point": "midpoint"}, "takes all trained weights.*leave out"),
        ({"initial": "zero-head"}, "zero-head: says that only the last layer"),
        ({"premise": Premise.CHANGE}, "--premise margin, if .* homogeneous .* --premise decay"),
        ({"premise": "rest"}, "premise: expected one of change, margin, decay, replay, got 'rest'"),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_premise(more: dict[str, Any], words: str, victim: Victim) -> None:
    with pytest.raises(InputError, match=words):
        at_rest(victim, **more)


def test_a_folder_has_the_premise_of_its_training(victim: Victim, tmp_path: Path) -> None:
    folder = tmp_path / "margin"
    victim.save(folder)
    problem, change = read_model(folder), read_model(folder, premise="change")
    assert problem.premise is Premise.MARGIN and torch.equal(problem.target, victim.problem.target)
    assert change.premise is Premise.CHANGE and change.target.shape == (30, 1)
    assert read_model(folder, premise="decay").rule is not problem.rule
    opened = Settings(str(folder), 4).open()
    assert (opened.parameters, opened.point, opened.warnings) == ("all", "final", ())
    with pytest.raises(InputError, match="or give the premise change"):
        Settings(str(folder), 4, point="midpoint").open()
    assert Settings(str(folder), 4, point="both", premise="change").open().point == "both"
    shutil.move(folder / INITIAL, tmp_path)  # is needed for the change alone
    assert torch.equal(read_model(folder).target, problem.target)
    with pytest.raises(InputError, match=INITIAL):
        read_model(folder, premise="change")
    shutil.move(tmp_path / INITIAL, folder)
    card = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**card, "training": {"premise": 3}}))
    with pytest.raises(InputError, match=r"card.json: is damaged; premise: expected one of"):
        read_model(folder)
    del card["training"]
    (folder / FILE).write_text(json.dumps(card))
    assert read_model(folder).premise is Premise.CHANGE
    exhume.victims.random_features(data.sphere(8, 2), 60).save(tmp_path / "model")
    assert read_model(tmp_path / "model", premise="change").premise is Premise.CHANGE
    with pytest.raises(InputError, match="premise margin: is for networks"):
        read_model(tmp_path / "model", premise="margin")


def test_a_wrong_prior_moves_the_box_and_nothing_else() -> None:
    made = exhume.victims.random_features(data.sphere(6, 2), 30).problem
    for domain in (Box(-1, 1), SphereInBox(Sphere(3.0), Box(-1, 1))):
        other = wrong_prior(replace(made, domain=domain), 0.5)
        assert other.target is made.target and other.features is made.features
        assert other.domain.name == domain.name.replace("[-1, 1]", "[-0.5, 1.5]")
    with pytest.raises(InputError, match="sphere of radius √d"):
        wrong_prior(made, 0.5)
