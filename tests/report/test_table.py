"""Rows of a table in the report: values under their columns, beside the truth, with differences."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from exhume import DataCard, data, report
from exhume.auditing.folder import MATCHED
from exhume.evaluate.runs import score_run
from runs import make_run, result_of

PATIENTS = DataCard(
    (3,),
    range=((18, 90), (40, 120), (0, 1)),
    mean=(50, 75, 0.5),
    std=(10, 12, 0.5),
    columns=("age", "weight <kg>", "ill"),
)
VALUES = torch.tensor([[60.0, 87.0, 1.0], [40.0, 99.0, 0.0]], dtype=torch.float64)


def inputs(values: Tensor) -> Tensor:
    return PATIENTS.table[1].to_inputs(values)


def lines(page: str) -> list[list[str]]:
    """The words of every line of the table of samples."""
    (section,) = re.findall(r'<section id="gallery">.*?</section>', page, re.DOTALL)
    rows = re.findall(r"<tr>(.*?)</tr>", section, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    return [[re.sub("<.*?>", "", cell) for cell in row] for row in cells]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    found = inputs(VALUES.flip(0) + torch.tensor([0.5, 0.0, 0.0]))
    config = {"model": None, "card": asdict(PATIENTS)}
    return make_run(tmp_path / "run", found, config, result_of(2, (3,)))


def test_candidates_are_values_in_the_units_of_the_data(run: Path) -> None:
    table = lines(report.write(run).read_text())
    assert table[0] == ["Row", "", "age", "weight &lt;kg&gt;", "ill"]
    assert sorted(row[1:] for row in table[1:]) == [
        ["found", "40.5", "99", "0"],
        ["found", "60.5", "87", "1"],
    ]


def test_truth_and_difference_stand_beside_what_was_found(run: Path, tmp_path: Path) -> None:
    truth = data.from_arrays(inputs(VALUES), torch.ones(2), normalise=False, standardise=False)
    data.save(truth, tmp_path / "truth")
    score_run(run, tmp_path / "truth")
    assert (run / MATCHED).exists()
    table = lines(report.write(run).read_text())
    assert [row[1] for row in table[1:4]] == ["true", "found", "difference"]
    assert [row[0] for row in table[1:]] == ["1", "", "", "2", "", ""]
    for line, values in ((1, (60, 87, 1)), (2, (60.5, 87, 1)), (3, (0.5, 0, 0))):
        shown = [float(word.replace("\xa0", "").partition("×")[0]) for word in table[line][2:]]
        assert shown[0] == pytest.approx(values[0], rel=1e-3)
        assert line == 3 or shown == pytest.approx(values, rel=1e-3)
    redacted = report.write(run, redact=True).read_text()
    assert lines(redacted) == [] and "60.5" not in redacted


def test_a_wide_table_is_cut(tmp_path: Path) -> None:
    card = DataCard((50,), range=(0, 1))
    samples = torch.rand(70, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    config = {"model": None, "card": asdict(card)}
    run = make_run(tmp_path / "run", samples, config, result_of(70, (50,)))
    page = report.write(run).read_text()
    assert "10 more rows and 10 more columns are left out" in page
    assert len(lines(page)) == 61 and len(lines(page)[0]) == 42
