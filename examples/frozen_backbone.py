"""A frozen backbone and a linear head trained on top: the head alone gives the inputs back."""

import torch
from torch import nn

import exhume

private = exhume.data.load("digits", samples=10, classes="all")
x, y = private.inputs.float().reshape(10, 1, 8, 8), private.targets.argmax(1)

# In the place of a pretrained extractor: whatever it is, it did not change.
torch.manual_seed(0)
backbone = nn.Sequential(
    *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU()),
    *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(), nn.Flatten()),
)
head = nn.Linear(512, 10)
nn.init.zeros_(head.weight)
nn.init.zeros_(head.bias)
features = backbone(x).detach()
optimiser = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
for _ in range(20):
    for batch in torch.randperm(10).split(5):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(features[batch]), y[batch]).backward()
        optimiser.step()

# No initial weights are needed where the head began at zero. Features did not move, so the
# samples leave no residual of their own, and their number is found too.
model = nn.Sequential(backbone, head)
found = exhume.audit(model, "zero-head", model.state_dict(), input_shape=(1, 8, 8))
ratio = found.problem.ratio(len(found.samples))
print(f"{len(found.samples)} candidates, {ratio:.1f} equations for each unknown")
print(f"{found.found.outcome.value}, residual {found.found.residual:.1e}")
score = exhume.evaluate.score(found.samples.flatten(1), private)
print(f"recovered {score.recovered:.0%}, exact {score.exact:.0%}, mean error {score.error:.1e}")
