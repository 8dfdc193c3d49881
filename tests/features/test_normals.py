"""Normal numbers that depend on seed, row and column alone."""

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

from exhume.features import normals as source
from exhume.features.normals import CALLS, LOW, ROWS, normals, philox, polar

CPU = torch.device("cpu")
KNOWN = [  # counter, key and words of the paper's own test
    ("00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("torch_too", [False, True])
@pytest.mark.parametrize(("given", "words"), KNOWN)
def test_philox_gives_the_known_answers(given: str, words: str, torch_too: bool) -> None:
    numbers = [int(word, 16) for word in given.split()]
    counter = [torch.tensor([x]) if torch_too else np.array([x], np.uint64) for x in numbers[:4]]
    got = philox(tuple(counter), (numbers[4], numbers[5]))
    assert [f"{int(word[0]):08x}" for word in got] == words.split()


def test_every_number_is_frozen_to_the_last_bit() -> None:
    drawn = normals(2**40 + 5, slice(0, 300), 70, CPU)
    found = hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
    assert found[:16] == "93c93c84ddf1d367"


def test_a_number_depends_on_seed_row_and_column_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = normals(5, slice(0, 700), 60, CPU)
    for start, stop, d in ((0, 1, 60), (127, 129, 7), (300, 700, 59), (9, 9, 3)):
        assert torch.equal(normals(5, slice(start, stop), d, CPU), whole[start:stop, :d])
    monkeypatch.setattr(source, "CELLS", 10**6)
    assert torch.equal(normals(5, slice(0, 700), 60, CPU), whole)
    half = normals(5, slice(0, 700), 60, CPU, torch.float16, scale=0.25)
    assert torch.equal(half, (whole * 0.25).half())
    far = 2**31  # rows and seeds of more bits than a float or an int has
    assert not torch.equal(normals(5, slice(far, far + 2), 60, CPU), whole[:2])
    assert not torch.equal(normals(5 + 2**32, slice(0, 2), 60, CPU), whole[:2])


def test_torch_makes_the_same_bits_as_numpy() -> None:
    words = philox((torch.arange(40), torch.arange(CALLS)[:, None], 0, 0), (5, 0))
    pairs = torch.stack([number for word in words for number in polar(word, 1.0)])
    assert torch.equal(pairs.reshape(-1, 40), normals(5, slice(0, ROWS), 40, CPU))


def test_radius_and_angle_are_those_of_box_and_muller() -> None:
    words = np.random.default_rng(0).integers(0, LOW, 10**5, np.uint64, endpoint=True)
    words[:3] = 0, 1, LOW
    x, y = (drawn.astype(np.float64) for drawn in polar(words, 1.0))
    single = (words.astype(np.float32) + np.float32(0.5)).astype(np.float64)
    r = np.sqrt(-2 * np.log(single / 2**32))
    angle = math.tau * (words * source.GOLDEN % 2**32) / 2**32
    assert (np.abs(x - r * np.cos(angle)) < 1e-6 * (1 + r)).all()
    assert (np.abs(y - r * np.sin(angle)) < 1e-6 * (1 + r)).all()
    assert r.max() > 6.7 and np.isfinite(x).all()


def test_tails_and_pairs_are_normal() -> None:
    drawn = normals(1, slice(0, 80 * ROWS), 200, CPU).double()
    count = drawn.numel()
    for most in (2.0, 3.0, 4.0):
        for tail in (drawn > most, drawn < -most):
            expected = count * stats.norm.sf(most)
            assert abs(tail.sum().item() - expected) < 5 * math.sqrt(expected)
    for power, mean, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((drawn**power).mean() - mean) < 5 * math.sqrt(spread / count)
    rows = drawn.reshape(80, ROWS // CALLS, -1)  # the eight numbers of a call, and their squares
    for together in (rows, rows.square() - 1):
        flat = together.transpose(0, 1).reshape(ROWS // CALLS, -1)
        products = flat @ flat.T / flat.shape[1]
        products.fill_diagonal_(0)
        assert products.abs().max() < 5 * 2 / math.sqrt(flat.shape[1])
