"""What commands refuse: exit code 2, a sentence that names the fault, and nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from commands import exhume_, tree
from exhume.auditing.folder import CANDIDATES, CONFIG, RESULT
from exhume.models.folder import CARD, INITIAL, TRAINED, TRUTH

KKT = "--architecture kkt_mlp --classes parity --samples 4 --widths 30"
OWN = "audit --model m:f --trained t.pt"


@pytest.fixture
def bench(workshop: Path, tmp_path: Path) -> Path:
    """A copy of the workshop, to be damaged."""
    shutil.copytree(workshop, tmp_path / "bench")
    return tmp_path / "bench"


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """A command that must end with code 2 and one paragraph, and write nothing."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> str:
        before = tree(tmp_path)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ending:
            exhume_(*words)
        assert ending.value.code == 2
        said = capsys.readouterr()
        assert said.err.startswith("exhume: ") and said.err.endswith("\n")
        assert "\n\n" not in said.err and "Traceback" not in said.err
        assert tree(tmp_path) == before
        return said.err

    return call


@pytest.mark.parametrize(
    ("command", "named"),
    [
        # Victims
        ("victim sphere --width 9", "width 9|10"),
        ("victim sphere --width 0", "width 0"),
        ("victim sphere --samples 0", "samples"),
        ("victim sphere --samples -3", "samples|-3"),
        ("victim sphere --dim 0", "dim"),
        ("victim sphere --activation swish", "swish|relu"),
        ("victim sphere --activation polynomial:a,b", "polynomial|a,b"),
        ("victim sphere --ridge -1", "ridge|-1"),
        ("victim sphere --loss logistic", "ridge"),
        ("victim sphere --ratio -1", "ratio"),
        ("victim sphere --seed -1", "seed"),
        ("victim sphere --data-seed -1", "seed"),
        ("victim imagenet", "imagenet|digits|sphere"),
        ("victim cifar10", "cifar10|EXHUME_DATA"),
        ("victim digits --samples 100000", "100000|digits"),
        ("victim digits --classes [3]", "3|digits"),
        ("victim digits --classes [3,33]", "33|digits"),
        ("victim faces --classes parity", "faces|random"),
        ("victim digits --samples 3 --architecture mlp", "widths|mlp needs"),
        ("victim digits --samples 3 --architecture resnet", "width|resnet needs"),
        ("victim digits --samples 3 --architecture resnet --ratio 3", "ratio|resnet|blocks"),
        ("victim digits --samples 3 --architecture vit --patch 3", "patch|8×8"),
        ("victim digits --samples 3 --architecture two_layer --ridge 1", "ridge|two_layer"),
        ("victim digits --samples 3 --architecture two_layer --momentum 2", "momentum"),
        ("victim digits --samples 3 --architecture two_layer --batch 2", "batch|sgd"),
        ("victim digits --samples 3 --optimizer adam", "optimizer|random_features"),
        ("victim digits --samples 3 --loss cross_entropy", "cross_entropy|logistic"),
        ("victim digits --samples 3 --device abacus", "abacus"),
        (f"victim sphere {KKT}", "[−1, 1]|images"),
        (f"victim digits {KKT} --normalise", "[−1, 1]|--normalise"),
        (f"victim digits {KKT} --centre all", "[−1, 1]|--centre"),
        (f"victim digits {KKT} --loss squared", "margin|logistic|squared"),
        (f"victim digits {KKT} --loss cross_entropy", "margin|logistic|cross_entropy"),
        (f"victim digits {KKT} --decay 1 --loss cross_entropy", "decay|squared"),
        (f"victim digits {KKT} --decay -1", "decay|above 0"),
        (f"victim digits {KKT} --level 2", "level"),
        (f"victim digits {KKT} --until 1e-3", "until|kkt_mlp|level"),
        (f"victim digits {KKT} --classes vehicles", "vehicles|cifar10"),
        ("victim sphere --out @/run", "@/run"),
        ("victim sphere --out @/run/config.yaml", "config.yaml"),
        ("victim sphere --out @/run/config.yaml/model", "config.yaml"),
        # Audits
        ("audit --samples 4", "--model"),
        ("audit nowhere", "nowhere"),
        (f"audit @/model/{CARD}", CARD),
        ("audit @", CARD),
        ("audit @/model --samples 0", "samples|0"),
        ("audit @/model --samples -3", "samples|-3"),
        ("audit @/model --method magic", "magic|exhume|iurada2025"),
        ("audit @/model --method iurada2025", "samples"),
        ("audit @/model --device abacus", "abacus|cpu"),
        ("audit @/model --device cuda:99", "cuda:99"),
        ("audit @/model --device meta", "meta"),
        ("audit @/model --resume", "new|resume"),
        ("audit @/model --seed -1", "seed"),
        ("audit @/model --time-limit -1", "time"),
        ("audit @/model --product-limit 0", "product_limit|at least 1"),
        ("audit @/model --initial i.pt", "initial|is a model folder"),
        ("audit @/model --head 3", "head|is a model folder"),
        ("audit @/model --input-shape 4,5", "card|is a model folder"),
        ("audit @/model --point final", "random-features"),
        ("audit @/model --samples 4 --out @/run", "--resume"),
        ("audit @/model --samples 4 --out @/run --resume", "complete"),
        (f"audit @/model --samples 4 --out @/run/{CONFIG}", CONFIG),
        (f"audit @/model --samples 4 --out @/run/{CONFIG}/run", CONFIG),
        (f"{OWN} --card c.yaml --range 0,1", "card"),
        (f"{OWN} --card c.yaml", "c.yaml: no such file"),
        (f"{OWN} --classes 3", "--input-shape"),
        (f"{OWN}", "input_shape"),
        ("audit m:f", "is a factory|--trained"),
        ("audit @/margin --samples 4 --method loo2023", "loo2023|premise change|haim2022"),
        ("audit @/margin --samples 4 --method tansley2026", "tansley2026|sphere|box"),
        ("audit @/margin --samples 4 --method haim2022 --premise decay", "haim2022|buzaglo2023"),
        ("audit @/margin --samples 4 --method haim2022 --premise change", "haim2022|loo2023"),
        ("audit @/margin --samples 4 --parameters last", "premise margin|leave out|change"),
        ("audit @/margin --samples 4 --point both --premise decay", "premise decay|leave out"),
        ("audit @/margin --method haim2022", "number of samples"),
        ("audit @/margin --method buzaglo2023", "number of samples"),
        ("audit @/margin --method shen2026", "number of samples"),
        # Scores and reports
        (f"score @/run --truth @/images/{TRUTH}", f"64|20|{TRUTH}"),
        ("score @/run --truth @/nowhere.safetensors", "nowhere.safetensors"),
        (f"score @/run --truth @/model/{TRAINED}", f"model/{TRAINED}"),
        (f"score @/run --truth @/model/{CARD}", f"model/{CARD}"),
        ("score nowhere", "nowhere"),
        ("score @", "@"),
        ("report nowhere", "nowhere"),
        ("report @", "@"),
        # Theory
        ("identify", "--model"),
        ("identify m:f", "is a factory|--trained"),
        ("identify @/model", "network"),
        ("identify @/margin --arguments {}", "arguments|is a model folder"),
        ("bound m:f", "is a factory|--trained"),
        ("demo --out @", "@|not an earlier demo"),
    ],
)
def test_what_cannot_be(
    command: str,
    named: str,
    workshop: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("EXHUME_DATA", raising=False)
    words = command.replace("@", str(workshop)).split()
    if words[0] in ("victim", "audit") and "--out" not in words:
        words += ["--out", "new"]
    said = refused(*words)
    assert all(word.replace("@", str(workshop)) in said for word in named.split("|"))


def test_a_folder_of_data_without_the_set(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXHUME_DATA", str(tmp_path))
    said = refused("victim", "cifar10", "--out", "new")
    assert str(tmp_path) in said and "cifar10.npz" in said


# Damaged files


def in_file(file: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A change to a tensor of a model."""

    def damage(model: Path) -> None:
        tensor = load_file(model / file)[name]
        save_file({name: change(tensor).contiguous()}, model / file)

    return damage


def in_card(**changes: Any) -> Any:
    """A change to the card."""

    def damage(model: Path) -> None:
        card = json.loads((model / CARD).read_text())
        (model / CARD).write_text(json.dumps({**card, **changes}))

    return damage


def as_bytes(file: str, change: Callable[[bytes], bytes]) -> Any:
    def damage(model: Path) -> None:
        (model / file).write_bytes(change((model / file).read_bytes()))

    return damage


def missing(file: str) -> Any:
    return lambda model: (model / file).unlink()


def spoiled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One entry replaced."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[7] = value
        return tensor

    return change


def mapped(array: Callable[[np.ndarray], np.ndarray]) -> Any:
    """The first layer in a .npy file instead, with a change."""

    def damage(model: Path) -> None:
        np.save(model / "v.npy", array(load_file(model / INITIAL)["first"].numpy()))
        in_card(first={"source": "map", "file": "v.npy"})(model)

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (in_file(TRAINED, "last", spoiled(torch.nan)), ["NaN"]),
        (in_file(TRAINED, "last", spoiled(torch.inf)), ["infinite"]),
        (in_file(TRAINED, "last", spoiled(torch.nan)), [TRAINED]),
        (in_file(TRAINED, "last", torch.zeros_like), ["zero"]),
        (in_file(INITIAL, "first", spoiled(torch.inf)), ["first layer"]),
        (in_file(INITIAL, "first", spoiled(torch.nan)), ["first layer"]),
        (in_file(TRAINED, "last", lambda t: t[:-1]), [TRAINED, "(479, 1)", "480"]),
        (in_file(TRAINED, "last", lambda t: t.repeat(1, 2)), [TRAINED, "(480, 2)"]),
        (in_file(TRAINED, "last", lambda t: t[:, 0]), [TRAINED, "(480,)"]),
        (in_file(INITIAL, "first", lambda t: t[:-1]), [INITIAL, "(479, 20)"]),
        (in_file(INITIAL, "first", lambda t: t[:, :-1]), [INITIAL, "(480, 19)"]),
        (in_file(INITIAL, "first", lambda t: t.flatten()), [INITIAL]),
        (in_file(INITIAL, "first", lambda t: t[:, :, None]), [INITIAL]),
        (in_file(INITIAL, "first", torch.zeros_like), ["first"]),
        (in_card(shape=[21]), ["21", "20"]),
        (in_card(dim=21), ["20", "21"]),
        (in_card(width=481), ["481"]),
        (in_card(width="wide"), [CARD, "wide"]),
        (in_card(kind="transformer"), [CARD, "random_features"]),
        (in_card(activation="swish"), ["swish"]),
        (in_card(shape=[-4, -5]), ["shape"]),
        (in_card(shape=[4, 5], display="loud"), ["display"]),
        (in_card(first={"source": "seed", "seed": -1}), ["seed"]),
        (in_card(first={"source": "cloud"}), ["cloud"]),
        (missing(CARD), [CARD]),
        (missing(TRAINED), [TRAINED]),
        (missing(INITIAL), [INITIAL]),
        (as_bytes(TRAINED, lambda b: b[:-100]), [TRAINED]),
        (as_bytes(TRAINED, lambda b: b[:20]), [TRAINED]),
        (as_bytes(TRAINED, lambda _: b""), [TRAINED]),
        (as_bytes(INITIAL, lambda b: b[:-100]), [INITIAL]),
        (as_bytes(CARD, lambda b: b[:-30]), [CARD, "JSON"]),
        (as_bytes(CARD, lambda _: b"\xff\xfe"), [CARD, "JSON"]),
        (as_bytes(CARD, lambda _: b"[]"), [CARD]),
        (mapped(lambda v: v[:-1]), ["v.npy", "(479, 20)"]),
        (mapped(lambda v: v.ravel()), ["v.npy", "(9600,)"]),
        (mapped(lambda v: v * np.where(np.arange(20) == 3, np.float32(np.nan), 1)), ["NaN"]),
        (mapped(lambda v: v.astype(str)), ["v.npy"]),
    ],
)
def test_a_damaged_model(
    damage: Callable[[Path], None], named: list[str], bench: Path, refused: Callable[..., str]
) -> None:
    damage(bench / "stored")
    said = refused("audit", bench / "stored", "--samples", 4, "--out", "new")
    assert all(word in said for word in named)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (missing(RESULT), "--resume"),
        (missing(CANDIDATES), CANDIDATES),
        (missing(CONFIG), CONFIG),
        (as_bytes(RESULT, lambda b: b[:-10]), RESULT),
        (as_bytes(CONFIG, lambda b: b"model: {"), CONFIG),
    ],
    ids=range(5),
)
def test_a_damaged_run(
    damage: Callable[[Path], None], named: str, bench: Path, refused: Callable[..., str]
) -> None:
    damage(bench / "run")
    assert named in refused("score", bench / "run", "--truth", bench / "model" / TRUTH)
    if named == RESULT:
        assert RESULT in refused("report", bench / "run")


def test_a_truth_that_is_cut_short(bench: Path, refused: Callable[..., str]) -> None:
    as_bytes(TRUTH, lambda b: b[:-10])(bench / "model")
    assert TRUTH in refused("score", bench / "run", "--truth", bench / "model" / TRUTH)


def test_a_model_that_has_vanished(bench: Path, refused: Callable[..., str]) -> None:
    run = yaml.safe_load((bench / "run" / CONFIG).read_text())
    shutil.move(bench / "model", bench / "moved")
    (bench / "run" / CONFIG).write_text(yaml.safe_dump({**run, "model": str(bench / "model")}))
    said = refused("score", bench / "run", "--truth", bench / "moved" / TRUTH)
    assert str(bench / "model") in said
    assert str(bench / "model") in refused("score", bench / "run")
