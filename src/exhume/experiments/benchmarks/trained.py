"""Trained networks: what their last layers, or all their parameters, give back."""

from dataclasses import replace
from functools import partial

from exhume.device import usable_device
from exhume.experiments.benchmarks.common import Watch, attacked, drawn, heading, say, show, trained
from exhume.experiments.cells.attack import SUBSPACE, Attack

COLUMNS = (
    "case: {case} | seed: {seed} | n: {samples} | ratio: {equations:.2f} | "
    "training: {training[loss]:.0e}, {training[steps]} steps, {training[seconds]:.0f} s | "
    "|ΔW₁|/|W₁|: {training[laziness][first]:.1e} | attack: {attack} | attack (s): {seconds:.1f} | "
    "outcome: {outcome} | recovered: {recovered:.0%} | exact: {exact:.0%} | error: {error:.1e} | "
    "residual: {residual:.1e} | floor: {floor:.1e}"
)

BOTH = ("exhume", SUBSPACE)
two_layer = partial(Attack, architecture="two_layer", products=None)
digits = partial(two_layer, data="digits", samples=20)
narrow = partial(two_layer, dim=20, samples=5, activation="gelu", lazy=100.0, until=1e-8)
images = partial(Attack, data="cifar10", dtype="float32", until=1e-7, products=None)
resnet = partial(images, architecture="resnet", samples=10)
vit = partial(images, architecture="vit", samples=10, until=1e-6)
classes = partial(images, architecture="two_layer", samples=100, classes="all", ratio=4.0)

# What a case is called, what its attack is called, and the cell; ratios say how wide it is.
CASES: dict[str, list[tuple[str, str, Attack]]] = {
    "digits": [
        (f"width {ratio:g}dn", name, digits(classes="parity", ratio=ratio, method=name))
        for ratio in (4.0, 1.0, 0.5)
        for name in BOTH
    ],
    "losses": [
        (f"{loss}, p_L = {ratio:g}dn", name, digits(loss=loss, ratio=ratio, method=name))
        for loss in ("logistic", "cross_entropy")
        for ratio in (2.0, 5.0, 20.0)
        for name in BOTH
    ],
    "blocks": [
        ("width 60, gelu", f"{block} parameters", narrow(block=block, ratio=ratio))
        for block, ratio in (("last", 0.6), ("all", 12.6))
    ],
    "cifar10": [("two-layer, p_L = 4dn", name, classes(method=name)) for name in BOTH],
    "resnet": [("residual, 6270 channels", "exhume", resnet(ratio=10.001))],
    "vit": [
        ("vision transformer", block, vit(block=block, ratio=ratio))
        for block, ratio in (("last", 256 / 30_720), ("all", 52.38))
    ],
}


def networks(
    cases: tuple[str, ...] = ("digits",),
    seeds: int = 5,
    first_seed: int = 0,
    limit: float = 60.0,
    device: str = "auto",
) -> None:
    """Recover samples from trained networks.

    Args:
        cases: digits (two layers, widths 4dn, dn and dn/2, full space and subspace), losses
            (logistic and cross-entropy at several ratios), blocks (all parameters against the
            last layer), cifar10 (two layers, 10 classes, n = 100), resnet, vit (n = 10).
        seeds: how many, for the cases that are small.
        first_seed: of model and attack.
        limit: most seconds an attack.
        device: where to run.
    """
    chosen = drawn(seeds, first_seed, cases, CASES)
    device = usable_device(device)
    heading("networks", device)
    for name in cases:
        rows, last = [], None
        for seed in chosen if name in ("digits", "losses", "blocks") else chosen[:1]:
            for case, attack, unseeded in CASES[name]:
                cell = replace(unseeded, seed=seed)
                if replace(cell, method="exhume") != last:  # else the same victim, attacked again
                    victim, last = trained(cell, device), replace(cell, method="exhume")
                watch = None if device == "cpu" else Watch(victim.truth.inputs)
                row = attacked(cell, victim, device, limit, watch)
                rows.append(row | {"case": case, "attack": attack})
                found = f"recovered {row['recovered']:.0%} in {row['seconds']:.1f} s"
                say(f"  {case} seed {seed} {attack}: {found}")
        show(COLUMNS, rows)
