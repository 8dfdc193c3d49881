"""Before the run: what is counted, what would do better, and what is refused."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import exhume
from commands import exhume_, names
from exhume import data, victims
from exhume.auditing import forecast as forecasts
from exhume.auditing.folder import RunFolder
from exhume.auditing.forecast import Forecast, forecast, hours
from exhume.auditing.settings import Settings
from exhume.equation.problem import Premise
from exhume.models.opening import Opened
from problems import case

KNOWN = Opened(case(10, 4, 3.0).problem)


def told(opened: Opened = KNOWN, **settings: Any) -> Forecast:
    return forecast(Settings(**settings), opened)


def test_equations_and_unknowns_are_counted() -> None:
    (said,), hopeless = told(samples=4).said, told(samples=4).hopeless
    assert hopeless is None and said == (
        "4 samples of 10 entries are 40 unknowns, for which there are 116 equations at most: "
        "2.90 for each; the weights that are attacked could give up 12 samples at most"
    )
    assert told(samples=12).hopeless is None  # 0.9 for each, as the norm is known
    poor = told(samples=13).hopeless
    assert poor is not None and "0.82 equations for each unknown are too few" in poor
    assert "exhume bound" in poor and "--parameters" not in poor  # random features have no other
    assert told().said == ["the weights that are attacked could give up 12 samples at most"]
    several = Mock(spec=KNOWN.problem.features, outputs=3, width=120, dim=10)
    for premise, count in ((Premise.DECAY, 108), (Premise.MARGIN, 116)):  # one multiplier will do
        posed = Mock(target=KNOWN.problem.target, dim=10, features=several, premise=premise)
        posed.first_layer = None
        assert f"{count} equations at most" in told(Opened(posed), samples=4).said[0]


def test_what_has_equations_enough_is_named() -> None:
    made = victims.two_layer(data.sphere(30, 6), width=60, steps=20)
    last = told(Opened(made.posed("last", "midpoint"), point="midpoint"), samples=6)
    assert last.hopeless is not None and "0.30 equations" in last.hopeless
    assert "--parameters all has 9.97 for each" in last.hopeless
    assert "--method tansley2026, there are 1.50" in last.hopeless
    few = told(Opened(made.posed("all", "midpoint"), parameters="all"), samples=4)
    assert few.hopeless is None and "changed in 6 directions" in few.said[1]
    span = told(Opened(made.posed("last", "midpoint")), samples=6, method="tansley2026")
    assert span.hopeless is None and "6 samples of 6 entries" in span.said[0]
    every = told(Opened(made.posed("all", "midpoint"), parameters="all"), samples=6)
    assert every.hopeless is None and len(every.said) == 1
    counted = told(Opened(made.posed("last", "midpoint")))  # by the first layer's directions
    assert counted.hopeless is not None and "6 samples of 30" in counted.said[0]


def test_the_time_that_a_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (hours(Settings(samples=4), KNOWN.problem) or "").startswith("takes ")
    monkeypatch.setattr(forecasts, "_pace", lambda *_: 0.25)
    for words, expected in (
        ({}, "takes 80\xa0s to 10\xa0min, several times as long"),
        ({"product_limit": 100}, "about 20\xa0s"),
        ({"time_limit": 60}, "would take 80\xa0s to 10\xa0min, and ends after 1\xa0min"),
        ({"method": "iurada2025"}, "about 3\xa0h"),
    ):
        assert expected in (hours(Settings(samples=4, **words), KNOWN.problem) or "")
    monkeypatch.setattr(forecasts, "_pace", Mock(side_effect=MemoryError))
    assert hours(Settings(samples=4), KNOWN.problem) is None


def test_a_hopeless_run_needs_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exhume_(
        "victim", "sphere", "--dim", 10, "--samples", 20, "--ratio", 0.5, "--out", tmp_path / "v"
    )
    audit = "audit", tmp_path / "v", "--samples", 20, "--product-limit", 5, "--out", tmp_path / "r"
    with pytest.raises(SystemExit) as ended:
        exhume_(*audit)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not (tmp_path / "r").exists()
    assert "too few" in printed.err and "--anyway" in printed.err
    assert "before the run: 20 samples of 10 entries" in printed.out.replace("\n", " ")
    asked = {"samples": 20, "product_limit": 5, "controls": False}
    settings = Settings.told(model=str(tmp_path / "v"), **asked)
    RunFolder(tmp_path / "begun").begin(settings)
    exhume_(*audit[:-1], tmp_path / "begun", "--resume")  # which is never refused
    exhume_(*audit, "--anyway")
    assert "report.html" in names(tmp_path / "r") & names(tmp_path / "begun")
    assert "equations for each unknown are too few" in (tmp_path / "r/result.json").read_text()


def test_python_warns_and_does_not_refuse() -> None:
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 1))
    before = {name: w.clone() for name, w in model.state_dict().items()}
    model(torch.randn(6, 8)).square().sum().backward()
    after = {name: (w - 1e-3 * w.grad).detach() for name, w in model.named_parameters()}
    told = {"norm": "sqrt_d", "device": "cpu", "product_limit": 2, "samples": 6}
    found = exhume.audit(model, before, after, (8,), **told)
    assert "too few" in found.warnings[-1] and found.verdict == "cannot tell"
