"""The covariance of photographs, against the matrix itself."""

import torch

from exhume.search.photographs import photographs
from problems import gaussian


def test_the_filter_is_that_of_the_matrix() -> None:
    rows, noise = gaussian(3, 60), torch.tensor([0.0, 0.3, 5.0]).double()
    images, eye = photographs((3, 4, 5), rows), torch.eye(60).double()
    assert images is not None
    covariance = images.power(eye, 1.0)
    torch.testing.assert_close(covariance.trace(), eye.trace())  # so that noise is a share of it
    for x, ratio, filtered in zip(rows, noise, images.filtered(rows, noise), strict=True):
        slow = covariance @ torch.linalg.solve(covariance + ratio * eye, x)
        torch.testing.assert_close(filtered, slow)
