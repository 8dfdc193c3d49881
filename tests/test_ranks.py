"""Several ranks: the result is that of one process, and one that dies loses nothing.

Ranks are processes here, which meet on this machine through gloo as those of torchrun do.
"""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from commands import exhume_, names, result_of
from exhume import ranks
from exhume.auditing.folder import CANDIDATES, CHECKPOINT
from exhume.cli import main
from exhume.equation.problem import Premise
from exhume.errors import InputError
from exhume.methods import reconstruct
from exhume.solvers import Outcome
from nets import by_torch, make
from problems import gaussian, make_features, make_problem
from rank_tasks import (
    MODEL,
    PROBLEMS,
    RUN,
    attacked,
    audited,
    on_ranks,
    refused,
    resumed,
    signalled,
    solved,
)

CLOSE = 1e-4  # of the norm of a candidate, as far as another order of sums may move it


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_find_what_one_process_finds(count: int, tmp_path: Path) -> None:
    assert on_ranks(count, tmp_path, solved) == [0] * count
    for name in PROBLEMS:
        alone = attacked(name)
        assert alone.outcome is (Outcome.BUDGET if name == "iurada2025" else Outcome.CONVERGED)
        every = [torch.load(tmp_path / f"{name}-{rank}") for rank in range(count)]
        assert all(torch.equal(found, every[0]) for found in every)
        assert near(every[0], alone.samples)


def near(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).norm(dim=1) < CLOSE * other.norm(dim=1)).all())


def test_what_ends_a_run_loses_nothing_and_other_ranks_go_on(tmp_path: Path) -> None:
    model = "--dim", 20, "--samples", 4, "--ratio", 6, "--out", tmp_path / MODEL
    exhume_("victim", "sphere", *model)
    audited(tmp_path, "--out", tmp_path / "alone")
    ended = "a rank has ended, or cannot be reached"
    kept = []
    for name, whom, codes, rank, said in [
        ("SIGKILL", "1", [2, -signal.SIGKILL], 0, ended),
        ("SIGINT", "012", [130, 130, 130], 0, "interrupted; go on with the same command"),
        ("SIGKILL", "0", [-signal.SIGKILL, 2], 1, ended),
    ]:
        assert on_ranks(len(codes), tmp_path, signalled, name, *whom) == codes
        assert said in (tmp_path / f"said-{rank}").read_text()
        kept.append((tmp_path / RUN / CHECKPOINT).read_bytes())
    assert len(set(kept)) == len(kept)  # each went on
    assert on_ranks(3, tmp_path, resumed) == [0, 0, 0]
    assert names(tmp_path / RUN) == names(tmp_path / "alone")
    one, other = (load_file(tmp_path / name / CANDIDATES) for name in (RUN, "alone"))
    assert near(one["samples"], other["samples"])
    result, alone = result_of(tmp_path / RUN), result_of(tmp_path / "alone")
    assert result["verdict"] == alone["verdict"] == "reconstructed"
    assert result["device_name"] == alone["device_name"] + ", 3 ranks"
    # V comes from a seed, of which all but the first, who judges, draw their own rows alone
    drawn = [torch.load(tmp_path / f"drawn-{rank}") for rank in (1, 2)]
    assert drawn == [[(160, 320)], [(320, 480)]]


def test_what_one_rank_lacks_the_first_says_for_all(tmp_path: Path) -> None:
    exhume_("victim", "sphere", "--dim", 5, "--samples", 2, "--ratio", 6, "--out", tmp_path / MODEL)
    assert on_ranks(2, tmp_path, refused) == [2, 2]
    said = [(tmp_path / f"said-{rank}").read_text() for rank in (0, 1)]
    assert said[0].startswith("exhume: rank 1: /model") and said[1] == ""
    assert not (tmp_path / RUN).exists()


def test_what_cannot_be_spread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make("mlp").problem("all")
    monkeypatch.setattr(ranks, "count", lambda: 2)
    for method, premise in ("tansley2026", "change"), ("exhume", "margin"), ("exhume", "replay"):
        told = replace(problem, premise=Premise(premise))
        with pytest.raises(InputError, match=f"{method} with premise {premise} runs on one only"):
            reconstruct(told, 2, method=method)
    with pytest.raises(InputError, match="cannot be spread over ranks"):
        replace(problem, features=by_torch(problem.features)).spread()
    with pytest.raises(InputError, match="2 are more than the 1 rows"):
        make_problem(make_features(3, 1, "tanh"), gaussian(1, 1)).spread()


def test_other_commands_run_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        main(["score", "run"])


@pytest.mark.parametrize(("beside", "backend"), [("1", "cpu:gloo,cuda:nccl"), ("2", "gloo")])
def test_ranks_that_share_a_gpu_meet_through_gloo(
    beside: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, **options: object) -> None:
        raise RuntimeError(f"asked for {name}.")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", refuse)
    with pytest.raises(ConnectionError, match=f"asked for {backend}[.)]"), ranks.joined():
        pass
