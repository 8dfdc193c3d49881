"""A model you fine-tuned: public weights, an ordinary rate, features that moved. All comes back.

What is known is the recipe, as whoever trained a model knows it; the run itself is the equation.
"""

import copy

import torch
from torch import nn

import exhume
from exhume.recipes import from_optimizer

# A base that others trained on their own digits, and four digits of yours.
every = exhume.data.load("digits", samples=1000, classes="all")
x, y = every.inputs.float(), every.targets.argmax(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 40), nn.GELU(), nn.Linear(40, 10))
optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[:500]), y[:500]).backward()
    optimizer.step()
before, private, labels = copy.deepcopy(model.state_dict()), x[500:504], y[500:504]

optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for _ in range(20):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(private), labels).backward()
    optimizer.step()
moved = (model[0].weight - before["0.weight"]).norm() / before["0.weight"].norm()
print(f"the first layer moved by {moved:.0%}: this training was not lazy")

# The auditor has both sets of weights, the recipe, and digits of the same kind; no labels.
found = exhume.audit(
    model,
    before,
    model.state_dict(),
    input_shape=(64,),
    samples=4,
    premise="replay",
    recipe=from_optimizer(optimizer, steps=20),
    public=x[504:],
    range=[float(x.min()), float(x.max())],
    device="cpu",
)
print(f"{found.found.outcome.value}, residual {found.found.residual:.1e}")
score = exhume.evaluate.score(found.samples, private.double())
print(f"recovered {score.recovered:.0%}, exact {score.exact:.0%}, mean error {score.error:.1e}")
