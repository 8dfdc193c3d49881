"""V is never stored: it is regenerated from its seed, block by block, whenever it is needed."""

from exhume.data import sphere
from exhume.equation.objective import fitted, gradient
from exhume.features.weights import Seeded
from exhume.models.folder import random_features_problem
from exhume.victims import random_features

data = sphere(dim=200, samples=10, seed=0)
victim = random_features(data, width=20_000, seed=3)

# What an auditor would write: the trained last layer, and the seed of the first.
problem = random_features_problem(
    Seeded(20_000, 200, seed=3), "relu", victim.problem.target, (200,)
)
point = fitted(problem, data.inputs)
print(f"residual at the training data {point.value:.1e}")
print(f"gradient there {gradient(problem, point).norm():.1e}")
