"""Audits in Python: data cards, opening a module with its weights, what comes back, run folders."""

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

import exhume
from exhume import data, report
from exhume.auditing.folder import CANDIDATES, CHECKPOINT, CONFIG, RESULT, RunFolder
from exhume.auditing.run import Event, run
from exhume.auditing.settings import Settings
from exhume.equation.domain import Box, Sphere, SphereInBox
from exhume.errors import InputError
from exhume.evaluate.runs import score_run
from exhume.features.last_layer import LastLayer
from exhume.models.card import DataCard, read_card
from exhume.models.opening import Opened, Source, open_model
from exhume.victims import two_layer

State = dict[str, Tensor]


# Data cards


def test_a_card_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    file.write_text(
        "shape: [3, 4, 5]\nrange: [0, 255]\nmean: [1, 2, 3]\nstd: [4, 5, 6]\nnorm: sqrt_d\n"
        "classes: 10\n"
    )
    card = read_card(file)
    assert card == DataCard((3, 4, 5), (0, 255), (1, 2, 3), (4, 5, 6), "sqrt_d", 10)
    assert (card.dim, len(card.knows), card.assumes) == (60, 4, ())
    assert read_card(file, (3, 4, 5)) == card
    with pytest.raises(InputError, match=r"card.yaml: has shape \[3, 4, 5\]"):
        read_card(file, (3, 5, 4))
    file.write_text("norm: 2.5\n")
    assert read_card(file, (7,)) == DataCard((7,), norm=2.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected entries"),
        ("- 3\n", "expected entries"),
        ("range: [0, 1]\n", "no shape"),
        ("shape: [3, 32, 32\n", "YAML"),
        ("shape: 12\n", "shape: expected"),
        ("shape: [3, -1]\n", "shape: expected"),
        ("shape: [3, true]\n", "shape: expected"),
        ("shape: [3]\nscale: 2\n", "unknown entry 'scale'"),
        ("shape: [3]\nrange: [1, 0]\n", "range: expected"),
        ("shape: [3]\nrange: [0, .inf]\n", "range: expected"),
        ("shape: [3]\nrange: 1\n", "range: expected"),
        ("shape: [3, 2, 2]\nmean: [1, 2]\n", "mean: expected a number, or one for each of 3"),
        ("shape: [4]\nmean: [1, 2, 3, 4]\n", "mean: expected a number, got"),
        ("shape: [3]\nmean: half\n", "mean: expected"),
        ("shape: [3]\nstd: 0\n", "std: expected"),
        ("shape: [3]\nnorm: -1\n", "norm: expected"),
        ("shape: [3]\nnorm: unit\n", "norm: expected"),
        ("shape: [3]\nclasses: many\n", "classes: expected"),
        ("shape: !!python/object/apply:os.getcwd []\n", "YAML"),
    ],
    ids=repr,
)
def test_a_card_that_cannot_be(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_card(tmp_path / "card.yaml")
    assert str(caught.value).startswith(str(tmp_path / "card.yaml"))


def test_a_card_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_card(tmp_path / "card.yaml")


def test_what_is_not_told_is_assumed() -> None:
    card = DataCard((1, 4, 4))
    assert card.domain() == Sphere() and card.display is None and card.knows == ()
    assert "norm √d" in card.assumes[0]
    assert DataCard((4,), norm=3).domain() == Sphere(3)
    assert DataCard((4,), norm=3).knows == ("the norm of the inputs (3)",)


def test_pixels_and_inputs_are_each_others_inverse() -> None:
    mean, std = torch.tensor([10.0, 20.0]), torch.tensor([2.0, 4.0])
    card = DataCard((2, 3, 3), range=(0, 100), mean=(10, 20), std=(2, 4))
    pixels = torch.linspace(0, 100, 18).reshape(2, 3, 3)
    inputs = (pixels - mean[:, None, None]) / std[:, None, None]
    display = card.display
    assert display is not None
    shift, scale = (torch.tensor(x)[:, None, None] for x in (display.shift, display.scale))
    assert torch.allclose(inputs * scale + shift, pixels / 100, atol=1e-6)
    box = card.domain()
    assert isinstance(box, Box)
    low, high = box.bounds.value.reshape(2, 2, 3, 3)
    assert torch.allclose(low[1], torch.full((3, 3), -5.0).double())
    assert torch.allclose(high[1], torch.full((3, 3), 20.0).double())
    assert DataCard((4,), range=(0, 1)).display is None


def test_norm_and_range_are_both_kept_if_they_meet() -> None:
    both = DataCard((4, 4), range=(-2, 2), norm="sqrt_d").domain()
    assert isinstance(both, SphereInBox) and both.name == "sphere of radius √d ∩ box [-2, 2]"
    for card in (
        DataCard((4, 4), range=(0, 0.5), norm="sqrt_d"),
        DataCard((4, 4), range=(0.5, 1), norm=0.1),
    ):
        with pytest.raises(InputError, match="no input of norm"):
            card.domain()


# Opening a module


def open_network(
    model: Any, initial: Any, trained: Any, card: DataCard, head: str | None = None, **asked: Any
) -> Opened:
    return open_model(Source(model, trained, initial, card, head=head), **asked)


class Known:
    """A dense network trained on samples that the tests know."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...], seed: int = 0):
        known = data.sphere(math.prod(shape), 3, seed)
        self.truth = known
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.model = make().double()
        self.initial: State = copy.deepcopy(dict(self.model.state_dict()))
        x = known.inputs.reshape(-1, *shape)
        optimiser = torch.optim.SGD(self.model.parameters(), lr=2e-3)
        for _ in range(300):
            optimiser.zero_grad()
            (self.model(x) - known.targets).square().mean().backward()
            optimiser.step()
        self.trained: State = copy.deepcopy(dict(self.model.state_dict()))

    def error(self, samples: Tensor) -> float:
        """The largest distance from a true sample to a candidate, over its norm."""
        x = self.truth.inputs
        return float((torch.cdist(x, samples.flatten(1)).amin(1) / x.norm(dim=1)).max())


def dense(width: int = 600) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))


@pytest.fixture(scope="module")
def known() -> Known:
    return Known(dense, (4, 4))


CARD = DataCard((4, 4), norm="sqrt_d")


def test_an_opened_network_says_what_it_is(known: Known) -> None:
    opened = open_network(known.model, known.initial, known.trained, CARD)
    assert (opened.parameters, opened.point) == ("last", "midpoint")
    assert opened.derivative_error is not None and opened.derivative_error < 1e-6
    problem = opened.problem
    assert problem.target.shape == (600, 1) and problem.target.dtype == torch.float64
    assert problem.drift > 0 and problem.first_layer is not None
    assert "the initial weights" in problem.threat_model.knows
    assert "the norm of the inputs (√d)" in problem.threat_model.knows
    assert "lazy" in problem.threat_model.assumes[0]


def test_the_module_and_the_state_dicts_are_left_alone(known: Known) -> None:
    before = copy.deepcopy(known.model.state_dict())
    known.model.train()
    open_network(known.model, known.initial, known.trained, CARD)
    assert known.model.training
    assert all(torch.equal(w, before[name]) for name, w in known.model.state_dict().items())


def test_one_precision_for_all_weights_and_the_coarser_one_for_rounding(known: Known) -> None:
    single = {name: w.float() for name, w in known.initial.items()}
    mixed = open_network(known.model, single, known.trained, CARD, point="initial").problem
    assert mixed.target.dtype == mixed.features.dtype == torch.float64
    plain = open_network(known.model, single, single_of(known.trained), CARD).problem
    assert mixed.resolution == pytest.approx(plain.resolution, rel=1e-3)


def single_of(state: State) -> State:
    return {name: w.float() for name, w in state.items()}


def test_a_frozen_backbone_leaves_no_drift(known: Known) -> None:
    probe = {**known.initial, "3.weight": known.trained["3.weight"]}
    opened = open_network(known.model, known.initial, probe, CARD)
    assert opened.problem.drift == 0 and opened.point == "final"
    assert opened.problem.first_layer is None
    assert "last layer" in opened.problem.threat_model.assumes[0]
    whole = open_network(known.model, known.initial, probe, CARD, parameters="all")
    assert whole.problem.drift > 0


def test_two_classes_may_share_one_output(known: Known) -> None:
    for classes in (1, 2):
        open_network(known.model, known.initial, known.trained, replace(CARD, classes=classes))
    with pytest.raises(InputError, match="3 classes, but the model has 1"):
        open_network(known.model, known.initial, known.trained, replace(CARD, classes=3))


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

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.second(torch.tanh(self.first(x)))) + self.offset
        result: Tensor = self.head(hidden)
        return result


def test_tied_weights_and_unsaved_buffers() -> None:
    model = Tied()
    initial = copy.deepcopy(model.state_dict())
    trained = {name: w + 0.01 for name, w in initial.items()}
    opened = open_network(model, initial, trained, DataCard((16,)), point="both")
    features = opened.problem.features
    assert isinstance(features, LastLayer)
    x = torch.randn(2, 16)
    model.load_state_dict(trained)
    expected = torch.tanh(model.second(torch.tanh(model.first(x)))) + model.offset
    rows = features.rows(features.points[1], x)[:, 0]
    assert torch.allclose(rows, expected, atol=1e-6)
    assert "second.weight" not in features.points[0]
    everywhere = opened.problem.to("cpu", torch.float64)
    assert everywhere.features.linearize(x).gram().shape == (4, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda k: {"initial": k.model.state_dict(), "trained": k.model.state_dict()}, "memory"),
        (lambda k: {"initial": k.trained}, "memory"),
        (lambda k: {"initial": k.model}, "expected a state dict"),
        (lambda k: {"initial": {"1.weight": 3.0}}, "expected a state dict"),
        (lambda k: {"initial": copy.deepcopy(k.trained)}, "nothing was trained"),
        (lambda k: {"initial": {}}, "another architecture"),
        (lambda k: {"trained": {"3.weight": k.trained["3.weight"]}}, "another architecture"),
        (lambda k: {"initial": "nowhere.pt"}, "nowhere.pt"),
        (lambda k: {"trained": Path("nowhere.safetensors")}, "nowhere.safetensors"),
        (lambda k: {"model": k.trained}, "torch.nn.Module"),
        (lambda k: {"point": "middle"}, "middle"),
        (lambda k: {"head": "0"}, "head"),
    ],
    ids=range(12),
)
def test_what_is_no_model_with_its_weights(
    change: Callable[[Known], dict[str, Any]], words: str, known: Known
) -> None:
    given = {"model": known.model, "initial": known.initial, "trained": known.trained}
    with pytest.raises(InputError, match=words):
        open_network(**{**given, "card": CARD, **change(known)})


# The function


def test_samples_come_back_in_their_shape(known: Known) -> None:
    shown: list[Event] = []
    result = exhume.audit(
        *(known.model, known.initial, known.trained),
        card=replace(CARD, mean=0.5, std=0.1),
        samples=3,
        device="cpu",
        show=shown.append,
    )
    assert result.samples.shape == (3, 4, 4) and result.samples.dtype == torch.float64
    assert known.error(result.samples) < 1e-2
    assert torch.equal(result.samples.flatten(1), result.found.samples)
    assert result.claims and result.limits and shown
    assert exhume.evaluate.score(result.found.samples, known.truth).recovered == 1
    images = result.images()
    assert torch.equal(images, (result.samples * 0.1 + 0.5).clamp(0, 1))


def test_channels_have_pixels_of_their_own() -> None:
    card = DataCard((2, 2, 4), mean=(0.2, 0.4), std=(0.1, 0.2))
    victim = Known(dense, (2, 2, 4))
    result = exhume.audit(
        victim.model, victim.initial, victim.trained, card=card, samples=3, time_limit=0, seed=1
    )
    mean, std = (torch.tensor(x, dtype=torch.float64)[:, None, None] for x in (card.mean, card.std))
    assert torch.allclose(result.images(), (result.samples * std + mean).clamp(0, 1))
    blank = exhume.audit(victim.model, victim.initial, victim.trained, (2, 2, 4), time_limit=0)
    with pytest.raises(InputError, match="pixels"):
        blank.images()


def test_the_subspace_and_its_rank(known: Known) -> None:
    def ranked(rank: int | str | None, **more: Any) -> int | None:
        options = {"samples": 3, "method": "tansley2026", "time_limit": 0, **more}
        given = (known.model, known.initial, known.trained, (4, 4))
        return exhume.audit(*given, rank=rank, device="cpu", **options).found.rank

    assert [ranked(rank) for rank in ("gap", "count", 5, None)] == [3, 3, 5, 3]
    for rank, more, words in [
        ("count", {"samples": None}, "count is the number of samples"),
        (3, {"method": "exhume"}, "takes none"),
        (99, {}, "rank: expected"),
        ("most", {}, "rank: expected"),
    ]:
        with pytest.raises(InputError, match=words):
            ranked(rank, **more)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "input_shape"),
        ({"card": CARD, "input_shape": (16,)}, "input shape was given as"),
        ({"input_shape": (4, 4), "samples": 0}, "samples"),
        ({"input_shape": (4, 4), "method": "magic"}, "magic"),
        ({"input_shape": (4, 4), "device": "abacus"}, "abacus"),
        ({"card": "nowhere.yaml"}, "nowhere.yaml"),
    ],
    ids=str,
)
def test_an_audit_that_cannot_be(options: dict[str, Any], words: str, known: Known) -> None:
    with pytest.raises(InputError, match=words):
        exhume.audit(known.model, known.initial, known.trained, **options)


# Run folders


def test_a_module_in_memory_leaves_a_run_that_can_be_read_but_not_opened(
    known: Known, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    given = (known.model, known.initial, known.trained)
    result = exhume.audit(*given, card=CARD, samples=3, out=out, device="cpu")
    assert known.error(result.samples) < 1e-2
    assert torch.equal(load_file(out / CANDIDATES)["samples"], result.found.samples)
    assert yaml.safe_load((out / CONFIG).read_text())["model"] is None
    assert report.write(out).exists()
    with pytest.raises(InputError, match="in memory"):
        RunFolder(out).settings.open()
    with pytest.raises(InputError, match="--truth"):
        score_run(out)
    data.save(known.truth, tmp_path / "truth.safetensors")
    with pytest.raises(InputError, match="no factory"):
        score_run(out, tmp_path / "truth.safetensors", "a:b")
    record = score_run(out, tmp_path / "truth.safetensors")
    assert record["score"]["recovered"] == 1 and "floors" not in record


NET = (
    "from torch import nn\nmodel = nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 1))"
)


def test_a_named_model_leaves_a_run_that_can_be_scored_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "net.py").write_text(NET)
    victim = Known(lambda: nn.Sequential(nn.Linear(16, 600), nn.ReLU(), nn.Linear(600, 1)), (16,))
    monkeypatch.chdir(tmp_path)
    torch.save(victim.initial, "before.pt")
    torch.save(victim.trained, "after.pt")
    data.save(victim.truth, "truth.safetensors")
    exhume.audit(
        "./net.py:model", "before.pt", Path("after.pt"), (16,), samples=3, out="run", device="cpu"
    )
    monkeypatch.chdir(tmp_path / "elsewhere")
    record = score_run(Path("../run"), Path("../truth.safetensors"), "../net.py:model")
    assert record["score"]["recovered"] == 1
    assert set(record["floors"]) == {"initial", "final", "midpoint", "both"}


def test_relative_names_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Settings("model").located()
    assert folder.model == str(tmp_path / "model") and folder.trained is None
    named = Settings("a/b.py:f", initial="zero-head", trained="t.pt").located()
    assert (named.model, named.initial) == (f"{tmp_path}/a/b.py:f", "zero-head")
    assert named.trained == str(tmp_path / "t.pt")
    assert Settings("package.b:f", trained="t.pt").located().model == "package.b:f"


def test_settings_survive_the_file_and_older_files_are_read(tmp_path: Path, known: Known) -> None:
    settings = Settings(
        *("f.py:make", 3, 1, "tansley2026", 2.5, 900, "cpu", "last", "both", "gap"),
        *("i.pt", "t.pt", {"width": 3}, "head"),
        DataCard((3, 2, 2), (0, 1), (0.1, 0.2, 0.3), 1.0, "sqrt_d", 2),
    )
    opened = open_network(known.model, known.initial, known.trained, CARD)
    small = replace(settings, time_limit=0.0)
    run(small, opened, tmp_path / "run")
    assert RunFolder(tmp_path / "run").settings == small
    old = {"model": "m", "samples": 4, "seed": 0, "method": "exhume"}
    assert Settings.of({**old, "time_limit": None, "device": "cpu"}) == Settings("m", 4)
    with pytest.raises(InputError, match="'speed'"):
        Settings.of({**old, "speed": 3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "two_layer"
    two_layer(data.sphere(10, 3), 120, until=1e-6).save(out)
    return out


@pytest.mark.parametrize("method", ["exhume", "tansley2026"])
def test_a_run_on_a_network_goes_on_where_it_was(
    method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exhume.auditing.run.EVENT_SECONDS", 0.0)
    settings = Settings(str(folder), 3, method=method, parameters="last", point="initial")
    opened = settings.open()
    assert (opened.parameters, opened.point) == ("last", "initial")
    events: list[Event] = []
    whole, _ = run(settings, opened, tmp_path / "whole", show=events.append)

    def interrupt(event: Event) -> None:
        if event.step >= events[len(events) // 2].step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, opened, tmp_path / "run", show=interrupt)
    assert (tmp_path / "run" / CHECKPOINT).exists()
    with pytest.raises(InputError, match="point"):
        run(replace(settings, point="final"), opened, tmp_path / "run", resume=True)
    found, result = run(settings, settings.open(), tmp_path / "run", resume=True)
    assert torch.equal(found.samples, whole.samples) and found.steps == whole.steps
    assert result["rank"] == (3 if method == "tansley2026" else None)
    stored = json.loads((tmp_path / "run" / RESULT).read_text())
    assert stored["prepared"] == {"changes": [], "warnings": [], "derivative_error": None}


def test_a_model_folder_has_its_own_weights(folder: Path) -> None:
    assert Settings(str(folder)).open().point == "midpoint"
    for word, value in {"head": "3", "initial": "i.pt", "card": CARD, "arguments": {}}.items():
        with pytest.raises(InputError, match=f"{word}: .* is a model folder"):
            replace(Settings(str(folder)), **{word: value}).open()
    with pytest.raises(InputError, match="--trained"):
        Settings("package.module:factory").open()


def test_a_rank_is_for_a_first_layer_that_moved() -> None:
    problem = exhume.victims.random_features(data.sphere(8, 2), 60).problem
    with pytest.raises(InputError, match="first layer"):
        Settings("m", 2, method="tansley2026", rank=2).recipe(problem)
    assert Settings("m", method="tansley2026").recipe(problem).name == "tansley2026"


def test_scoring_calls_no_factory_because_a_run_names_it(known: Known, tmp_path: Path) -> None:
    out, mark = tmp_path / "run", tmp_path / "mark"
    given = (known.model, known.initial, known.trained)
    exhume.audit(*given, card=CARD, samples=3, out=out, device="cpu", time_limit=1.0)
    hostile = f"from pathlib import Path\ndef make():\n    Path({str(mark)!r}).touch()"
    (tmp_path / "hostile.py").write_text(hostile)
    config = yaml.safe_load((out / CONFIG).read_text())
    config |= {"model": f"{tmp_path}/hostile.py:make", "trained": "t.pt", "initial": "i.pt"}
    (out / CONFIG).write_text(yaml.safe_dump(config))
    data.save(known.truth, tmp_path / "truth.safetensors")
    assert "verdict" not in score_run(out, tmp_path / "truth.safetensors")
    report.write(out)
    assert not mark.exists()
