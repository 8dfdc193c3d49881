"""Linear solutions that begin with what earlier ones found."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exhume.solvers.levenberg_marquardt import (
    KEPT,
    Pair,
    conjugate_gradients,
    deflated,
    newest,
    normalised,
)


def system(size: int, seed: int = 0) -> Tensor:
    """A positive definite matrix with eigenvalues from 1 to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    return basis * torch.logspace(0, 4, size, dtype=torch.float64) @ basis.T


def same(rows: Tensor) -> Tensor:
    return rows


@given(kept=st.integers(1, 12), repeated=st.booleans(), damping=st.sampled_from([0.0, 3.0]))
def test_it_inverts_on_the_span_and_is_positive_definite(
    kept: int, repeated: bool, damping: float
) -> None:
    matrix, every = system(12), torch.eye(12, dtype=torch.float64)
    pairs = [normalised(q[None], q[None] @ matrix) for q in every[:kept]]
    pairs += pairs if repeated else []  # directions that say nothing new do no harm
    inverse = deflated(same, pairs, lambda rows: damping * rows, same)
    dense = torch.cat([inverse(row[None]) for row in every])
    damped = matrix + damping * every
    for direction, _ in pairs:
        assert torch.allclose(direction @ damped @ dense, direction, atol=1e-6)
    assert torch.allclose(dense, dense.T, atol=1e-8)
    assert torch.linalg.eigvalsh(dense).min() > 0


def test_a_system_that_was_solved_takes_one_product_again_and_one_that_resembles_it_few() -> None:
    size = 60
    matrix, right = system(size), torch.ones(1, size, dtype=torch.float64)
    pairs: list[Pair] = []

    def noted(rows: Tensor) -> Tensor:
        pairs.append(normalised(rows, rows @ matrix))
        return rows @ matrix

    first, used = conjugate_gradients(noted, right, same, 1e-8, 400)
    inverse = deflated(same, newest(pairs), torch.zeros_like, same)
    again, once = conjugate_gradients(lambda q: q @ matrix, right, inverse, 1e-6, 400)
    assert torch.allclose(first, again, rtol=1e-3, atol=1e-6) and once == 1
    other = matrix + 1e-3 * system(size, 2)
    alone = conjugate_gradients(lambda q: q @ other, right, same, 1e-8, 400)[1]
    helped = conjugate_gradients(lambda q: q @ other, right, inverse, 1e-8, 400)[1]
    assert 2 * helped < min(alone, used)


def test_the_newest_are_kept() -> None:
    pairs = [(torch.full((1, 2), float(k)), torch.zeros(1, 2)) for k in range(KEPT + 5)]
    kept = newest(pairs)
    assert len(kept) == KEPT and float(kept[-1][0][0, 0]) == KEPT + 4
    assert newest([]) == ()


def test_a_direction_that_the_matrix_does_not_see_is_left_out() -> None:
    unseen = normalised(torch.ones(1, 2), torch.zeros(1, 2))
    inverse = deflated(same, [unseen], torch.zeros_like, same)
    assert torch.equal(inverse(torch.ones(1, 2)), torch.ones(1, 2))
