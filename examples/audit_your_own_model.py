"""Audit a model of your own: its weights before and after training are what the attack sees."""

import copy
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import exhume


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))


if __name__ == "__main__":
    # Ten digits, pixels from 0 to 1, normalised as usual; a plain classifier, trained as usual.
    digits = load_digits()
    pixels, y = torch.tensor(digits.images[:10]) / 16, torch.tensor(digits.target[:10])
    x = ((pixels - 0.305) / 0.376).float()
    torch.manual_seed(0)
    model = network()
    before = copy.deepcopy(model.state_dict())  # a copy: training overwrites the original
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1000):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()

    # The audit is told the weights, what is known of any input, and how many samples there were.
    card = exhume.DataCard(shape=(8, 8), range=(0, 1), mean=0.305, std=0.376)
    found = exhume.audit(model, before, model.state_dict(), card=card, samples=10)
    print(f"{found.found.outcome.value}, residual {found.found.residual:.1e}")
    for sentence in (*found.claims, *found.limits, *found.changes, *found.warnings):
        print("-", sentence)
    pictures = found.images()  # (10, 8, 8), pixels from 0 to 1

    # Only with the truth at hand: how much of it came back?
    score = exhume.evaluate.score(found.samples.flatten(1), x.flatten(1))
    off = (pictures[score.matched] - pixels).abs().max()
    print(f"recovered {score.recovered:.0%}, mean error {score.error:.1e}")
    print(f"the pixel that is most off is off by {off:.2f}")

    # The same from the command line: see the README.
    folder = Path("runs/own")
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(before, folder / "before.pt")
    torch.save(model.state_dict(), folder / "after.pt")
    inputs, targets = x.flatten(1).double(), nn.functional.one_hot(y).double()
    normalised = exhume.data.Transform(shift=0.305, scale=0.376)
    truth = exhume.data.Data(inputs, targets, (8, 8), "my digits", normalised)
    exhume.data.save(truth, folder / "truth.safetensors")
