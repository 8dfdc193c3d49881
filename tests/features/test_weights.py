"""Where V comes from: a seed, a tensor or a file give the same numbers however they are read."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from exhume.errors import InputError
from exhume.features.weights import TILE, Mapped, Seeded, blocks, materialise
from problems import close, gaussian


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 600), st.integers(0, 600), st.integers(30, 700))
def test_seeded_numbers_do_not_depend_on_how_they_are_read(a: int, b: int, size: int) -> None:
    start, stop = sorted((a, b))
    v = Seeded(600, 3, seed=5)
    whole = v.rows(0, 600)
    assert torch.equal(v.rows(start, stop), whole[start:stop])
    read = [v.rows(part.start, part.stop) for part in blocks(600, size)]
    assert torch.equal(torch.cat(read), whole)
    assert torch.equal(materialise(v, size).tensor, whole)


def test_seeded_entries_are_independent_normals_of_variance_one_over_d() -> None:
    d = 50
    v = Seeded(4 * TILE, d, seed=3).rows(0, 4 * TILE).double() * math.sqrt(d)
    assert stats.kstest(v.flatten().numpy(), "norm").pvalue > 1e-3
    tiles = v.reshape(4, -1)
    other = Seeded(TILE, d, seed=4).rows(0, TILE).double().reshape(1, -1) * math.sqrt(d)
    correlations = torch.cat([tiles, other]) @ torch.cat([tiles, other]).T / tiles.shape[1]
    assert (correlations - torch.eye(5)).abs().max() < 5 * math.sqrt(2 / tiles.shape[1])
    gram = v.T @ v / len(v)
    assert (gram - torch.eye(d)).abs().max() < 5 * math.sqrt(2 / len(v))


def test_seed_zero_is_frozen() -> None:
    v = Seeded(TILE + 1, 3, seed=0)
    first = [[-0.08621105, -0.79230708, 0.00454071], [-0.01342794, -0.04608301, 0.40077439]]
    close(v.rows(0, 2), torch.tensor(first), 1e-6)
    next_tile = [[-0.83697569, 0.79243547, -1.01824534]]
    close(v.rows(TILE, TILE + 1), torch.tensor(next_tile), 1e-6)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray])
def test_mapped_reads_what_was_saved(layout: Callable[..., np.ndarray], tmp_path: Path) -> None:
    v = gaussian(11, 4).numpy()
    np.save(tmp_path / "v.npy", layout(v))
    mapped = Mapped(tmp_path / "v.npy", dtype=torch.float64)
    assert mapped.shape == (11, 4)
    assert torch.equal(mapped.rows(3, 9), torch.from_numpy(v[3:9]))
    assert mapped.to(torch.device("cpu"), torch.float32).rows(0, 1).dtype == torch.float32


def truncated(path: Path) -> None:
    np.save(path, np.ones((30, 4)))
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda path: None, "cannot be read"),
        (truncated, "cannot be read"),
        (lambda path: path.write_text("not numbers"), "cannot be read"),
        (lambda path: np.save(path, np.ones(5)), "expected a matrix"),
        (lambda path: np.save(path, np.array([[1j]])), "expected a matrix"),
        (lambda path: np.save(path, np.array([[object()]]), allow_pickle=True), "cannot be read"),
    ],
)
def test_a_bad_file_is_named_before_any_work(
    write: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "v.npy")
    with pytest.raises(InputError, match=rf"v\.npy: {words}"):
        Mapped(tmp_path / "v.npy")


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="seed: expected a whole number of at least 0"):
        Seeded(3, 3, seed=-1)
