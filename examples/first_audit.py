"""Train a model on twenty digits, dig them out of its weights, and see how well it went."""

import exhume

data = exhume.data.load("digits", samples=20, seed=0, classes=[3, 8])
width = 5 * data.dim * data.samples  # five equations for each unknown
victim = exhume.victims.random_features(data, width=width, activation="relu", seed=0)

# The attack is given the weights. The number of samples is left out: it is found.
result = exhume.reconstruct(victim.problem, seed=0)
print(f"{result.outcome.value}: {len(result.samples)} candidates, residual {result.residual:.1e}")

# Only now the truth.
score = exhume.evaluate.score(result.samples, victim.truth)
chance = exhume.evaluate.chance(victim.truth, candidates=len(result.samples))
print(f"recovered {score.recovered:.0%}, exact {score.exact:.0%}, mean error {score.error:.1e}")
print(f"the nearest other digit is {chance.neighbour['error']:.2f} away")
