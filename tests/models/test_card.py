"""Data cards: what a file may say of the inputs, what follows from it, and what is refused."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from exhume.equation.domain import Box, Sphere, SphereInBox
from exhume.errors import InputError
from exhume.models.card import DataCard, read_card


def test_a_card_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "card.yaml"
    with pytest.raises(InputError, match="no such file"):
        read_card(file)
    file.write_text("{shape: [3, 4, 5], range: [0, 9], mean: [1, 2, 3], norm: sqrt_d, classes: 9}")
    card = read_card(file)
    assert card == DataCard((3, 4, 5), (0, 9), (1, 2, 3), 1.0, "sqrt_d", 9)
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
        ("range: [0, 1]", "no shape"),
        ("shape: [3, 32, 32", "YAML"),
        ("shape: !!python/object/apply:os.getcwd []", "YAML"),
        ("shape: [3, -1]", "shape: expected"),
        ("shape: [3, true]", "shape: expected"),
        ("{shape: [3], scale: 2}", "unknown entry 'scale'"),
        ("{shape: [3], range: [1, 0]}", "range: expected"),
        ("{shape: [3], range: [0, .inf]}", "range: expected"),
        ("{shape: [3, 2, 2], mean: [1, 2]}", "mean: expected a number, or one for each of 3"),
        ("{shape: [4, 4], mean: [1, 2, 3, 4]}", "mean: expected a number, got"),
        ("{shape: [4], mean: [1, 2, 3]}", "mean: expected a number, or one for each of 4 columns"),
        ("{shape: [2], range: [[0, 1], [3, 2]]}", "range: expected a number above 3"),
        ("{shape: [3], range: [[0, 1], [2, 3]]}", "range: expected"),
        ("{shape: [2, 2], range: [[0, 1], [2, 3]]}", "range: expected"),
        ("{shape: [2], columns: [a]}", "columns: expected one name for each entry"),
        ("{shape: [2], columns: [a, a]}", "columns: expected one name for each entry"),
        ("{shape: [2], columns: [a, 3]}", "columns: expected one name for each entry"),
        ("{shape: [2, 2], columns: [a, b]}", "columns: expected one name for each entry"),
        ("{shape: [3], norm: 1" + "0" * 400 + "}", "norm: expected a number above 0"),
        ("{shape: [3], std: 0}", "std: expected"),
        ("{shape: [3], norm: unit}", "norm: expected"),
        ("{shape: [3], classes: many}", "classes: expected"),
    ],
    ids=repr,
)
def test_a_card_that_cannot_be(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        read_card(tmp_path / "card.yaml")
    assert str(caught.value).startswith(str(tmp_path / "card.yaml"))


def test_pixels_and_inputs_are_each_others_inverse() -> None:
    card = DataCard((2, 3, 3), range=(0, 100), mean=(10, 20), std=(2, 4))
    display, box = card.display, card.domain()
    assert display is not None and isinstance(box, Box)
    assert tuple(display.shift) == pytest.approx((0.1, 0.2))  # (inputs · std + mean)/100
    assert tuple(display.scale) == pytest.approx((0.02, 0.04))
    low, high = box.bounds.value.reshape(2, 2, 3, 3)
    assert (low[1] + 5).abs().max() < 1e-6 > (high[1] - 20).abs().max()
    assert DataCard((4,), range=(0, 1)).display is None


def test_rows_of_a_table_have_columns_of_their_own() -> None:
    card = DataCard((2,), ((18, 90), (0, 1)), (50, 0.5), (10, 0.25), columns=("age", "ill"))
    box = card.domain()
    assert isinstance(box, Box)
    torch.testing.assert_close(box.bounds.value.tolist(), [[-3.2, -2.0], [4.0, 2.0]])
    assert card.display is None and card.table is not None
    names, values = card.table
    assert names == ("age", "ill")
    assert values.to_pixels(torch.tensor([[1.0, -1.0]])).tolist() == [[60.0, 0.25]]
    known = ("the range of each column (0 to 90)", "shift and scale of the values")
    assert card.knows == (*known, "the names of the columns")
    assert DataCard.of(yaml.safe_load(yaml.safe_dump(asdict(card)))) == card  # as in config.yaml
    assert DataCard((2,), norm=3).table is None is DataCard((2, 2), range=(0, 1)).table
    assert DataCard((2,), range=(0, 1)).table[0] == ("1", "2")


def test_norm_and_range_are_both_kept_if_they_meet() -> None:
    card = DataCard((1, 4, 4))
    assert card.domain() == Sphere() and card.display is None and card.knows == ()
    assert "norm √d" in card.assumes[0]
    assert DataCard((4,), norm=3).domain() == Sphere(3)
    both = DataCard((4, 4), range=(-2, 2), norm="sqrt_d").domain()
    assert isinstance(both, SphereInBox) and both.name == "sphere of radius √d ∩ box [-2, 2]"
    for ends, norm in (((0, 0.5), "sqrt_d"), ((0.5, 1), 0.1)):
        with pytest.raises(InputError, match="no input of norm"):
            DataCard((4, 4), range=ends, norm=norm).domain()
