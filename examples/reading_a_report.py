"""Read what an audit leaves: the same network, trained gently and roughly, and two verdicts."""

import copy
import json
import tempfile
from pathlib import Path

import torch
from torch import nn

import exhume
from exhume import report
from exhume.evaluate.runs import score_run


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 1))


def train(rate: float, data: exhume.data.Data, folder: Path) -> None:
    """Leave the weights before and after in a folder."""
    torch.manual_seed(0)
    model = network()
    torch.save(copy.deepcopy(model.state_dict()), folder / "before.pt")
    optimiser = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(500):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(data.inputs.float()), data.targets.float()).backward()
        optimiser.step()
    torch.save(model.state_dict(), folder / "after.pt")


def read(run: Path) -> None:
    """The two files of a run that matter, entry by entry."""
    # result.json holds what the attack knows by itself. The truth had no part in it.
    result = json.loads((run / "result.json").read_text())
    print(f"  outcome: {result['outcome']}. {result['sentence']}")
    print(f"  residual: {result['residual']:.1e} of the weights' change is not explained")
    print(f"  ratio: {result['problem']['ratio']:.1f} equations for each unknown")  # under 1: stop
    for word in ("knows", "assumes"):  # who could do this, and what the training must have been
        print(f"  {word}:", "; ".join(result["threat_model"][word]))
    for word in ("changes", "warnings"):  # what was done to the copy; what weakens the premise
        print(f"  {word}:", " ".join(result["prepared"][word]) or "none")
    print("  claims:", " ".join(result["claims"]))  # holds whatever the training data was
    print("  limits:", " ".join(result["limits"]))  # what the result does not show

    # score.json holds what only the owner of the training data can know.
    scored = json.loads((run / "score.json").read_text())
    print(f"  recovered: {scored['score']['recovered']:.0%}, {scored['score']['exact']:.0%} exact")
    print(f"  chance: the nearest other is {scored['chance']['neighbour']['error']:.2f} away")
    # The floor: what the samples themselves leave. No attack of this kind can be asked for less.
    print(f"  floor: {scored['residual_at_truth']:.1e}")
    print("  floor at each point:", {at: f"{v:.1e}" for at, v in scored["floors"].items()})
    print("  subspace:", scored["subspace"])  # is the samples' span in the first layer's change?
    print("  verdict:", scored["verdict"])  # who is to blame for what is missing


if __name__ == "__main__":
    data = exhume.data.load("digits", samples=6, classes=[3, 8])
    for rate in (0.002, 0.005):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            train(rate, data, folder)
            exhume.data.save(data, folder / "truth.safetensors")
            factory = f"{__file__}:network"  # named, not handed over, so that score can call it
            exhume.audit(
                factory,
                folder / "before.pt",
                folder / "after.pt",
                input_shape=(8, 8),
                samples=6,
                product_limit=1500,
                out=folder / "run",
            )
            score_run(folder / "run", folder / "truth.safetensors", factory)
            page = report.write(folder / "run")
            print(f"learning rate {rate}, as {page.name} tells it:")
            read(folder / "run")
