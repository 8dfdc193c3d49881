"""Opening a module with its weights: the problem it poses, and what is refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exhume.errors import InputError
from exhume.features.last_layer import LastLayer
from exhume.models.card import DataCard
from exhume.models.opening import Opened, Source, open_model
from lazy import Lazy, dense

CARD = DataCard((4, 4), norm="sqrt_d")


@pytest.fixture(scope="module")
def known() -> Lazy:
    return Lazy(dense, (4, 4))


def opened_(
    known: Lazy, parameters: str | None = None, point: str | None = None, **given: Any
) -> Opened:
    source = {"model": known.model, "initial": known.initial, "trained": known.trained}
    return open_model(Source(**{**source, "card": CARD, **given}), parameters, point)


def test_an_opened_network_says_what_it_is_and_the_module_is_left_alone(known: Lazy) -> None:
    before = copy.deepcopy(known.model.state_dict())
    known.model.train()
    opened = opened_(known)
    assert known.model.training
    assert all(torch.equal(w, before[name]) for name, w in known.model.state_dict().items())
    assert (opened.parameters, opened.point) == ("last", "midpoint")
    assert opened.derivative_error is not None and opened.derivative_error < 1e-6
    problem = opened.problem
    assert problem.target.shape == (600, 1) and problem.target.dtype == torch.float64
    assert problem.drift > 0 and problem.first_layer is not None
    assert "the initial weights" in problem.threat_model.knows
    assert "the norm of the inputs (√d)" in problem.threat_model.knows
    assert "lazy" in problem.threat_model.assumes[0]


def test_one_precision_for_all_weights_and_the_coarser_one_for_rounding(known: Lazy) -> None:
    initial, trained = (
        {name: w.float() for name, w in state.items()} for state in (known.initial, known.trained)
    )
    mixed = opened_(known, point="initial", initial=initial).problem
    assert mixed.target.dtype == mixed.features.dtype == torch.float64
    plain = opened_(known, initial=initial, trained=trained).problem
    assert mixed.resolution == pytest.approx(plain.resolution, rel=1e-3)


def test_a_frozen_backbone_leaves_no_drift(known: Lazy) -> None:
    probe = {**known.initial, "3.weight": known.trained["3.weight"]}
    opened = opened_(known, trained=probe)
    assert opened.problem.drift == 0 and opened.point == "final"
    assert opened.problem.first_layer is None
    assert "last layer" in opened.problem.threat_model.assumes[0]
    zero = opened_(known, initial="zero-head", trained=probe)
    assert "began at zero" in zero.problem.threat_model.assumes[0] and zero.point == "final"
    assert torch.equal(zero.problem.target, probe["3.weight"].T)
    assert opened_(known, "all", trained=probe).problem.drift > 0


def test_some_initial_weights_will_do_for_features_at_the_trained_ones(known: Lazy) -> None:
    opened = opened_(known, initial={"3.weight": known.initial["3.weight"]})
    assert opened.point == "final" and "1.weight" in opened.warnings[0]
    assert "some of the initial weights" in opened.problem.threat_model.knows


class Tied(nn.Module):
    """Two layers with one weight, and a buffer that no state dict holds."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.full((16,), 0.1), persistent=False)
        self.head = nn.Linear(16, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)))) + self.offset

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.hidden(x))
        return result


def test_tied_weights_and_unsaved_buffers() -> None:
    model = Tied()
    initial = copy.deepcopy(model.state_dict())
    trained = {name: w + 0.01 for name, w in initial.items()}
    opened = open_model(Source(model, trained, initial, DataCard((16,))), point="both")
    features = opened.problem.features
    assert isinstance(features, LastLayer)
    x = torch.randn(2, 16)
    model.load_state_dict(trained)
    rows = features.network.hidden(features.points[1], x)
    assert torch.allclose(rows, model.hidden(x), atol=1e-6)
    assert "second.weight" not in features.points[0]
    everywhere = opened.problem.to("cpu", torch.float64)
    assert everywhere.features.linearize(x).gram().shape == (4, 4)


def test_two_classes_may_share_one_output(known: Lazy) -> None:
    for classes in (1, 2):
        opened_(known, card=replace(CARD, classes=classes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda k: {"initial": k.model.state_dict(), "trained": k.model.state_dict()}, "memory"),
        (lambda k: {"initial": k.trained}, "memory"),
        (lambda k: {"initial": k.model}, "expected a state dict"),
        (lambda k: {"initial": {"1.weight": 3.0}}, "expected a state dict"),
        (lambda k: {"initial": copy.deepcopy(k.trained)}, "nothing was trained"),
        (lambda k: {"initial": {}}, "another architecture"),
        (lambda k: {"initial": None}, "none were given"),
        (lambda k: {"initial": "zero-head", "point": "both"}, "leave out the parameters"),
        (
            lambda k: {"initial": {"3.weight": k.initial["3.weight"]}, "point": "initial"},
            "lacks 1.weight, 1.bias, which parameters 'last'",
        ),
        (lambda k: {"trained": {"3.weight": k.trained["3.weight"]}}, "another architecture"),
        (lambda k: {"initial": "nowhere.pt"}, "nowhere.pt"),
        (lambda k: {"trained": Path("nowhere.safetensors")}, "nowhere.safetensors"),
        (lambda k: {"model": k.trained}, "torch.nn.Module"),
        (lambda k: {"point": "middle"}, "middle"),
        (lambda k: {"head": "0"}, "head"),
        (lambda k: {"card": None}, "input_shape"),
        (lambda k: {"card": replace(CARD, classes=3)}, "3 classes, but the model has 1"),
    ],
    ids=range(17),
)
def test_what_is_no_model_with_its_weights(
    change: Callable[[Lazy], dict[str, Any]], words: str, known: Lazy
) -> None:
    with pytest.raises(InputError, match=words):
        opened_(known, **change(known))
