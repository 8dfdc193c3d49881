"""Victims: models to attack, trained here so that the truth is known."""

from exhume.victims.margin import kkt_mlp
from exhume.victims.polynomial import labellings, polynomial
from exhume.victims.random_features import random_features
from exhume.victims.training import Training
from exhume.victims.victim import Victim, mlp, resnet, two_layer, vit

__all__ = [
    "Training",
    "Victim",
    "kkt_mlp",
    "labellings",
    "mlp",
    "polynomial",
    "random_features",
    "resnet",
    "two_layer",
    "vit",
]
