"""The covariance of photographs, against the matrix itself."""

import torch

from exhume.search.photographs import photographs
from problems import gaussian


def test_the_filter_is_that_of_the_matrix() -> None:
    rows = gaussian(3, 60)
    images, eye = photographs((3, 4, 5), rows), torch.eye(60).double()
    assert images is not None
    covariance = images.power(eye, 1.0)
    torch.testing.assert_close(covariance.trace(), eye.trace())  # so that noise is a share of it
    for noise in (0.0, 0.3, 5.0):
        slow = covariance @ torch.linalg.solve(covariance + noise * eye, rows.T)
        torch.testing.assert_close(images.filtered(rows, noise), slow.T)
