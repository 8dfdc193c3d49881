"""Counting equations against unknowns: from which width on a last layer can determine samples.

d is the dimension of an input, n the number of samples, m of outputs, `subspace` r (d if None);
`norm` says whether the norm of a sample is known, or leaves no trace (σ homogeneous).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import nn

from exhume.checks import whole_number
from exhume.errors import InputError
from exhume.features.network import named_block

# Where samples are known to lie: in r dimensions; in their own span, which the change of a dense
# first layer shows (r = min(n, d)); or anywhere
Where = int | Literal["span"] | None
# What an attacker may know without any prior: nothing, or what the first layer shows
PLACES: tuple[Where, Where] = (None, "span")


def unknowns(
    dim: int, samples: int, outputs: int = 1, subspace: Where = None, norm: bool = True
) -> int:
    """Return n(r − 1 + min(m, n)): what n samples and their coefficients are, as numbers.

    A sample on a sphere is r − 1 numbers. Beyond n outputs there is nothing new: ΦᵀA has rank n.

    Example:
        >>> unknowns(3072, 100), unknowns(3072, 100, subspace="span")
        (307200, 10000)
    """
    for name, value in (("dim", dim), ("samples", samples), ("outputs", outputs)):
        whole_number(name, value)
    return samples * (_rank(dim, samples, subspace) - norm + min(outputs, samples))


def equations(width: int, outputs: int, samples: int, rows: int = 1) -> int:
    """Return min(m, q)(p − q), q = n·k: what n samples with k rows each are tested by, at most.

    Coefficients take up the rest: each column of the target is to lie in the span of q rows.

    Example:
        >>> equations(51, outputs=10, samples=5), equations(51, outputs=1, samples=60)
        (230, 0)
    """
    taken = samples * rows
    return max(0, min(outputs, taken) * (width - taken))


def label_fitting(samples: int) -> int:
    """Return the least width that fits any labels, for any number of outputs: p = n.

    Iurada et al., "A Law of Data Reconstruction for Random Features (and Beyond)".
    """
    return whole_number("samples", samples)


def reconstruction(
    dim: int, samples: int, outputs: int = 1, subspace: Where = None, norm: bool = True
) -> int:
    """Return the least width at which the last layer has as many equations as there are unknowns.

    p·min(m, n) ≥ n(r − 1 + min(m, n)). For one output and r = d this is p = dn, the law of Iurada
    et al., which they prove up to logarithms (Theorem 1).
    """
    return -(-unknowns(dim, samples, outputs, subspace, norm) // min(outputs, samples))


def safe_width(
    dim: int, samples: int, outputs: int = 1, subspace: Where = None, norm: bool = True
) -> int:
    """Return the largest width whose last layer cannot determine all n samples, by the count alone.

    This is no guarantee: some samples may leak, priors and other layers make up for equations.
    """
    return reconstruction(dim, samples, outputs, subspace, norm) - 1


def most_samples(equations: int, dim: int, outputs: int = 1, subspace: Where = None) -> int:
    """Return the most samples that a last layer of p·m weights could determine, by the count.

    Example:
        >>> most_samples(3_072_000, 3072), most_samples(10_000, 3072, subspace="span")
        (1000, 100)
    """
    whole_number("equations", equations)
    whole_number("outputs", outputs)

    def fits(samples: int) -> bool:
        used = equations * min(outputs, samples) // outputs
        return used >= unknowns(dim, samples, outputs, subspace)

    return largest(fits, equations)


@dataclass(frozen=True)
class Block:
    """A block is parameters that an attack could use, with what they could give up at most."""

    name: str  # of a tensor; or `first layer`, `last layer`, `all`
    shape: tuple[int, ...] | None  # of the tensor; None for several together
    parameters: int  # how many numbers
    share: float  # of all parameters
    samples: int  # the most samples that they could determine, by the count alone
    spanned: int  # the same where the samples' span is known


def blocks(
    model: nn.Module | Mapping[str, Sequence[int]],
    dim: int,
    outputs: int = 1,
    head: str | None = None,
) -> tuple[Block, ...]:
    """Return what each tensor of a model could give up, then its first and last layer, and all.

    Any P parameters are P equations in n(r − 1 + m) unknowns; the weight of the last layer has
    `most_samples`. The head is the last layer's name, that of the last parameter if None.

    Example:
        >>> shapes = {"hidden.weight": (1000, 20), "head.weight": (1, 1000)}
        >>> [(block.name, block.samples) for block in blocks(shapes, dim=20)]
        [('hidden.weight', 1000), ('head.weight', 50), ('first layer', 1000), ('last layer', 50),
         ('all', 1050)]
    """
    whole_number("dim", dim)
    whole_number("outputs", outputs)
    if isinstance(model, nn.Module):
        model = {name: tuple(w.shape) for name, w in model.named_parameters()}
    shapes = {name: tuple(shape) for name, shape in model.items()}
    if not shapes or any(size < 1 for shape in shapes.values() for size in shape):
        raise InputError("model: has no parameters, or some without entries; nothing to count.")
    names = tuple(shapes)
    # the weight of the last layer, without its bias, which says nothing of inputs
    last = named_block(names, "last")[0] if head is None else f"{head}.weight".lstrip(".")
    if last not in names:
        raise InputError(f"head: no parameter {last!r}; there are {', '.join(names)}.")
    every = sum(prod(shape) for shape in shapes.values())

    def block(name: str, *members: str) -> Block:
        own = members or (name,)
        count = sum(prod(shapes[member]) for member in own)
        most = most_samples if own == (last,) else _most_in_block
        full, spanned = (most(count, dim, outputs, where) for where in PLACES)
        return Block(name, None if members else shapes[name], count, count / every, full, spanned)

    alone = tuple(block(name) for name in names)
    if len(alone) == 1:
        return alone
    together = {"first layer": named_block(names, "first"), "last layer": (last,), "all": names}
    return (*alone, *(block(name, *members) for name, members in together.items()))


def _most_in_block(parameters: int, dim: int, outputs: int, subspace: Where) -> int:
    """Return the largest n with P ≥ n(r − 1 + m)."""
    return largest(lambda n: parameters >= n * (_rank(dim, n, subspace) - 1 + outputs), parameters)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest n up to `most` that fits, where all smaller ones do; 0 if none."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not fits(n))


def _rank(dim: int, samples: int, subspace: Where) -> int:
    """Return r, the dimension of where samples lie."""
    if subspace is None:
        return dim
    if subspace == "span":
        return min(samples, dim)
    if not 1 <= subspace <= dim:
        raise InputError(f"subspace: expected a dimension from 1 to d = {dim}, got {subspace}.")
    return subspace
