"""The equation Δ ≈ Φ(X)ᵀA: the problem, where candidates may lie, coefficients and residual."""
