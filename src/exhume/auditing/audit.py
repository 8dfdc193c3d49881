"""Auditing a model of one's own: a module and its weights after training, and mostly before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exhume.auditing import evidence
from exhume.auditing.folder import Event, Opened, Recorder, Settings, method_of, run
from exhume.device import usable_device
from exhume.equation.problem import Premise, Problem, ThreatModel
from exhume.errors import InputError
from exhume.features.network import Network, Weights, moved
from exhume.files import read_json
from exhume.methods import Reconstruction, check_numbers, reconstruct
from exhume.models.card import DataCard, read_card
from exhume.models.factory import load_factory
from exhume.models.folder import CARD, read_model
from exhume.models.formulation import DRIFT, LAZY, needed, network_problem, weights_problem
from exhume.models.premises import check_whole, doubts, premise_named
from exhume.models.prepare import Prepared, prepare
from exhume.models.state import check_pair, fit_state, read_state

ZERO_HEAD = "zero-head"
"""In the place of initial weights: the last layer began at zero, and nothing else was trained."""

CPU = torch.device("cpu")

State = Mapping[str, Tensor] | Path | str
"""A state dict, or the file that holds one."""


@dataclass(frozen=True, eq=False)
class Audit:
    """What an audit found.

    Attributes:
        samples: candidates (n, *shape), float64 on the CPU.
        found: the same with coefficients, residual, outcome and cost.
        problem: what the attack was given.
        claims: what may be claimed without the truth.
        limits: what may not.
        changes: what was changed in the copy of the model that was attacked.
        warnings: what weakens the attack's premise.
    """

    samples: Tensor
    found: Reconstruction
    problem: Problem
    claims: list[str]
    limits: list[str]
    changes: tuple[str, ...]
    warnings: tuple[str, ...]

    def images(self) -> Tensor:
        """The candidates as pixels from 0 to 1, (n, *shape)."""
        display, shape = self.problem.display, self.problem.shape
        if display is None:
            raise InputError(
                "card: does not say how inputs become pixels; give a shape of two sizes or three, "
                "and the range of the pixels, or their mean and std."
            )
        each = (-1, *(1 for _ in shape[1:])) if len(shape) == 3 else (-1,)
        shift, scale = (
            torch.tensor(value, dtype=torch.float64).reshape(each)
            for value in (display.shift, display.scale)
        )
        return (self.samples * scale + shift).clamp(0, 1)


def audit(
    model: nn.Module | str,
    initial: State | None,
    trained: State,
    input_shape: tuple[int, ...] | None = None,
    parameters: str | None = None,
    point: str | None = None,
    method: str = "exhume",
    samples: int | None = None,
    seed: int = 0,
    head: str | None = None,
    card: DataCard | Path | str | None = None,
    arguments: dict[str, Any] | None = None,
    rank: int | str | None = None,
    time_limit: float | None = None,
    product_limit: int | None = None,
    device: str = "auto",
    out: Path | str | None = None,
    show: Callable[[Event], None] | None = None,
    premise: Premise | str = Premise.CHANGE,
) -> Audit:
    """Recover training samples from the weights of a model before and after training.

    With the premise margin or decay the trained weights will do.

    Args:
        model: a module, whose own weights are not used, or a factory, "package.module:factory".
        initial: state dict before training, or its file; some of its tensors may do. "zero-head"
            where the last layer began at zero and nothing else was trained. None where the premise
            is margin or decay.
        trained: state dict after training, or its file.
        input_shape: of one input, unless the card has it.
        parameters: the block that is attacked: `last` (if None), `first`, `all`, or names and
            patterns.
        point: where features are taken: initial, final, midpoint or both. The midpoint if None;
            where initial weights are missing, final.
        method: its name, one of `exhume.methods.METHODS`.
        samples: how many training samples there are; found if None.
        seed: of everything random.
        head: name of the last linear layer; found if None.
        card: what is known of the inputs, or a YAML file with it.
        arguments: of the factory.
        rank: of the subspace of tansley2026: a number, gap, energy, or count (as many as samples).
        time_limit: seconds after which the best so far is taken.
        product_limit: passes over the features' derivative after which it is: a budget that, unlike
            seconds, is the same on every machine.
        device: auto, cpu, cuda, …
        out: folder for a run as `exhume audit` leaves it. It can be scored later if model and
            weights were named, not given: then they can be opened again.
        show: called with each event.
        premise: why the weights hold the samples. `change`: training moved them along the samples'
            gradients. `margin`: it went on with a logistic or cross-entropy loss until their
            direction no longer changed, and the network is homogeneous in them. `decay`: it came
            to rest under weight decay. For the last two, all trained weights are the target, and
            there is no choice of parameters and point.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 1))
        >>> before = {name: w.clone() for name, w in model.state_dict().items()}
        >>> x = torch.tensor([[1.0, 1.0, -1.0]])
        >>> model(x).backward()
        >>> after = {name: w - 1e-5 * w.grad for name, w in model.named_parameters()}
        >>> found = audit(model, before, after, (3,), samples=1, device="cpu")
        >>> bool((found.samples - x).norm() < 0.1)
        True
    """
    check_numbers(samples, seed, time_limit, product_limit)
    premise = premise_named(premise)
    told = _card(card, input_shape)
    settings = Settings(
        model=None,
        samples=samples,
        seed=seed,
        method=method,
        time_limit=time_limit,
        product_limit=product_limit,
        device=usable_device(device),
        parameters=parameters,
        point=point,
        rank=rank,
        head=head,
        card=told,
        arguments=arguments if isinstance(model, str) else None,
        premise=premise.value,
    )
    module = load_factory(model, arguments) if isinstance(model, str) else model
    opened = open_network(module, initial, trained, told, parameters, point, head, premise=premise)
    opened = _doubted(opened, samples)
    if out is None:
        found = reconstruct(
            opened.problem.to(settings.device),
            samples,
            seed,
            method_of(settings, opened.problem),
            time_limit,
            Recorder(show).observe,
            product_limit=product_limit,
        )
    else:
        before = str(initial) if isinstance(initial, str | Path) else None
        if isinstance(model, str) and isinstance(trained, str | Path) and (before or not initial):
            named = replace(settings, model=model, initial=before, trained=str(trained))
            settings = absolute(named)
        found, _ = run(settings, opened, Path(out), show=show)
    return Audit(
        samples=found.samples.reshape(-1, *told.shape),
        found=found,
        problem=opened.problem,
        claims=evidence.claims(opened.problem, found),
        limits=evidence.limits(opened.problem, found),
        changes=opened.changes,
        warnings=opened.warnings,
    )


def _card(card: DataCard | Path | str | None, shape: tuple[int, ...] | None) -> DataCard:
    shape = None if shape is None else tuple(shape)
    if isinstance(card, Path | str):
        return read_card(Path(card), shape)
    if card is not None:
        if shape not in (None, card.shape):
            raise InputError(f"card: has shape {card.shape}, but input_shape is {shape}.")
        return card
    if shape is None:
        raise InputError("input_shape: give the shape of one input, such as (3, 32, 32).")
    return DataCard(shape)


def problem_of(settings: Settings, check: bool = True) -> Opened:
    """The model that settings name, as a problem.

    Args:
        settings: of an audit.
        check: compare derivatives with finite differences; an audit that is over did.
    """
    if settings.model is None:
        raise InputError(
            "the model of this run was a module in memory, and cannot be opened again; name a "
            "factory and files of weights, or go on in Python with what exhume.audit returned."
        )
    if settings.trained is not None:
        if settings.card is None:
            raise InputError(
                "the shape of one input is needed: give --input-shape, such as 3,32,32, or --card."
            )
        opened = open_network(
            load_factory(settings.model, settings.arguments),
            settings.initial,
            settings.trained,
            settings.card,
            settings.parameters,
            settings.point,
            settings.head,
            check,
            premise_named(settings.premise or Premise.CHANGE),
        )
        return _doubted(opened, settings.samples)
    folder = Path(settings.model)
    if ":" in settings.model and not folder.exists():
        raise InputError(
            f"model {settings.model!r}: is a factory; give its weights with --trained and "
            "--initial (which --premise margin and decay do without)."
        )
    for word in ("initial", "arguments", "head", "card"):
        if getattr(settings, word) is not None:
            raise InputError(
                f"{word}: {folder} is a model folder, which has its own; leave it out, or name a "
                "factory with --model and its weights with --trained."
            )
    problem = read_model(folder, settings.parameters, settings.point, settings.premise)
    if problem.premise is not Premise.CHANGE:
        return _doubted(Opened(problem, "all", "final"), settings.samples)
    network = read_json(folder / CARD)["kind"] == "network"
    point = settings.point or ("midpoint" if network else None)
    return Opened(problem, settings.parameters or "last", point)


def _doubted(opened: Opened, samples: int | None) -> Opened:
    """The same with a warning for each thing that speaks against the premise."""
    return replace(opened, warnings=(*opened.warnings, *doubts(opened.problem, samples)))


def absolute(settings: Settings) -> Settings:
    """The same with files named so that they are found from anywhere."""
    model, initial, trained = settings.model, settings.initial, settings.trained
    if model is not None and trained is None:
        model = str(Path(model).resolve())
    elif model is not None:
        where, colon, name = model.rpartition(":")
        if where.endswith(".py") or "/" in where:
            model = f"{Path(where).resolve()}{colon}{name}"
    if initial not in (None, ZERO_HEAD):
        initial = str(Path(initial).resolve())
    if trained is not None:
        trained = str(Path(trained).resolve())
    return replace(settings, model=model, initial=initial, trained=trained)


def open_network(
    model: nn.Module,
    initial: State | None,
    trained: State,
    card: DataCard,
    parameters: str | None = None,
    point: str | None = None,
    head: str | None = None,
    check: bool = True,
    premise: Premise = Premise.CHANGE,
) -> Opened:
    """A module and its weights as a problem.

    Args:
        model: prepared as a copy; its own weights are not used.
        initial: state dict before training, or its file; "zero-head"; or None, which the premise
            change refuses with what each weight would unlock.
        trained: state dict after training, or its file.
        card: what is told of the inputs.
        parameters: see `network_problem`; the last layer if None.
        point: likewise; the midpoint if None, or final where initial weights are missing.
        head: name of the last linear layer; found if None.
        check: compare derivatives with finite differences.
        premise: margin and decay take all trained weights, and no initial ones.
    """
    if premise is not Premise.CHANGE:
        check_whole(premise, parameters, point)
        _check_initial(premise, initial)
    prepared = prepare(model, card.shape, head, check)
    _check_classes(card, prepared.outputs)
    network = Network(prepared.module, card.shape, prepared.outputs, prepared.head)
    after = _Weights.read(trained, "trained weights", prepared.module)
    if premise is not Premise.CHANGE:
        return _open_weights(network, prepared, after, card, premise, initial is not None)
    before = _before(initial, trained, after, network)
    missing = [name for name in after.tensors if name not in before.tensors]
    frozen = not missing and _frozen(network, before, after)
    parameters = parameters or "last"
    lacking = [n for n in needed(network, after.tensors, parameters, "midpoint") if n in missing]
    point = point or ("final" if lacking or frozen else "midpoint")
    if initial == ZERO_HEAD and (parameters, point) != ("last", "final"):
        raise InputError(
            f"{ZERO_HEAD}: says that only the last layer was trained, and features did not move; "
            "leave out the parameters and the point."
        )
    wanted = needed(network, after.tensors, parameters, point)
    if absent := [name for name in wanted if name in missing]:
        raise InputError(
            f"{before.source}: lacks {_listed(absent)}, which parameters {parameters!r} at the "
            f"point {point!r} need. {_unlocks(network, after.tensors)}"
        )
    stored = before.dtypes | after.dtypes
    dtype = torch.float64 if torch.float64 in stored else torch.float32
    problem = network_problem(
        network,
        moved(before.tensors, CPU, dtype),
        moved(after.tensors, CPU, dtype),
        parameters,
        point,
        card.domain(),
        card.display,
    )
    coarsest = max(stored, key=_eps)
    problem = replace(
        problem,
        resolution=problem.resolution * (_eps(coarsest) / _eps(dtype)) ** 2,
        drift=0.0 if frozen and parameters == "last" else problem.drift,
        threat_model=_threat_model(card, frozen, initial == ZERO_HEAD, missing),
    )
    warnings = [*prepared.warnings, *_rounding(problem, coarsest)]
    if lacking and point == "final":
        warnings.append(
            f"Initial weights of {_listed(lacking)} are missing: features are taken at the trained "
            "weights, from which they may have moved."
        )
    return Opened(
        problem, parameters, point, prepared.changes, tuple(warnings), prepared.derivative_error
    )


def _open_weights(
    network: Network,
    prepared: Prepared,
    after: "_Weights",
    card: DataCard,
    premise: Premise,
    given: bool,
) -> Opened:
    """Trained weights as a problem; `given` if initial weights were too."""
    dtype = torch.float64 if torch.float64 in after.dtypes else torch.float32
    told = card.range is not None or card.norm is not None
    problem = weights_problem(
        network,
        moved(after.tensors, CPU, dtype),
        premise,
        card.domain() if told else None,
        card.display,
        card.knows,
    )
    coarsest = max(after.dtypes, key=_eps)
    finer = (_eps(coarsest) / _eps(dtype)) ** 2
    problem = replace(problem, resolution=problem.resolution * finer)
    warnings = [*prepared.warnings, *_rounding(problem, coarsest)]
    if given:
        warnings.append(
            "Initial weights were given, and are not used: with the premise "
            f"{premise.value} the trained weights themselves are the target."
        )
    return Opened(
        problem, "all", "final", prepared.changes, tuple(warnings), prepared.derivative_error
    )


def _check_initial(premise: Premise, initial: State | None) -> None:
    if isinstance(initial, str) and initial == ZERO_HEAD:
        raise InputError(
            f"{ZERO_HEAD}: says that only the last layer was trained, but the premise "
            f"{premise.value} that all of them were; leave one out."
        )


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _rounding(problem: Problem, stored: torch.dtype) -> list[str]:
    """Refuse weights of which too much was rounded away, and warn of half precision."""
    kind = str(stored).removeprefix("torch.")
    if problem.resolution > DRIFT:
        raise InputError(
            f"weights: are stored in {kind}, and rounding to that is about "
            f"{problem.resolution:.1e} of what training changed, squared, where {DRIFT:g} is the "
            "most an attack can do with; save them with more digits, or choose other parameters."
        )
    if torch.finfo(stored).bits >= 32:
        return []
    return [
        f"Weights are stored in {kind}: rounding alone leaves a relative residual of about "
        f"{problem.resolution:.1e}, and samples with a smaller trace are lost."
    ]


@dataclass(frozen=True, eq=False)
class _Weights:
    """Weights that fit a module: parameters and buffers, tied ones under one name, and where from.

    Buffers that no state dict holds are the module's own.
    """

    tensors: dict[str, Tensor]
    dtypes: set[torch.dtype]  # of floating-point numbers, as they were stored
    source: str

    @classmethod
    def read(cls, state: State, word: str, module: nn.Module, partial: bool = False) -> "_Weights":
        if isinstance(state, Path | str):
            source, tensors = str(state), read_state(Path(state))
        elif isinstance(state, Mapping) and all(isinstance(x, Tensor) for x in state.values()):
            source, tensors = word, {name: tensor.cpu() for name, tensor in state.items()}
        else:
            raise InputError(
                f"{word}: expected a state dict, as model.state_dict() gives it, or the path of a "
                f"file with one, got a {type(state).__name__}."
            )
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        fitted = fit_state(tensors, module, source, partial)
        stored = module.state_dict()
        fitted |= {n: b.detach() for n, b in module.named_buffers() if n not in stored}
        own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        return cls({name: fitted[name] for name in own if name in fitted}, dtypes, source)

    def with_zero(self, head: str) -> "_Weights":
        """The same with a last layer of zeros."""
        prefix = f"{head}." if head else ""
        zeros = {
            name: torch.zeros_like(self.tensors[name])
            for name in (f"{prefix}weight", f"{prefix}bias")
            if name in self.tensors
        }
        return replace(self, tensors=self.tensors | zeros, source=ZERO_HEAD)


def _check_classes(card: DataCard, outputs: int) -> None:
    if card.classes is not None and card.classes != outputs and (card.classes, outputs) != (2, 1):
        raise InputError(
            f"card: says {card.classes} classes, but the model has {outputs} outputs; mend the "
            "card, or name the factory, and its arguments, of the model that was trained."
        )


def _before(initial: State | None, trained: State, after: _Weights, network: Network) -> _Weights:
    """The weights before training, as far as they are known."""
    if initial is None:
        raise InputError(
            "initial weights: none were given, and with the premise change every method starts "
            f"from what training changed. {_unlocks(network, after.tensors)}"
        )
    if initial == ZERO_HEAD:
        return after.with_zero(network.head)
    before = _Weights.read(initial, "initial weights", network.module, partial=True)
    if isinstance(initial, Mapping) and isinstance(trained, Mapping):
        _check_copied(initial, trained)
    shared = {name: after.tensors[name] for name in before.tensors}
    check_pair(before.tensors, shared, before.source, after.source)
    return before


def _check_copied(initial: Weights, trained: Weights) -> None:
    """Refuse two state dicts that are windows on the same memory."""
    if all(
        name in trained and w.data_ptr() == trained[name].data_ptr() for name, w in initial.items()
    ):
        raise InputError(
            "initial weights: are in the same memory as the trained ones, so that training "
            "overwrote them; keep copy.deepcopy(model.state_dict()) before training."
        )


def _frozen(network: Network, before: _Weights, after: _Weights) -> bool:
    """Whether nothing but the head changed."""
    prefix = f"{network.head}." if network.head else ""
    head = {f"{prefix}weight", f"{prefix}bias"}
    return all(
        torch.equal(w.double(), after.tensors[name].double())
        for name, w in before.tensors.items()
        if name not in head
    )


def _threat_model(card: DataCard, frozen: bool, zero_head: bool, missing: list[str]) -> ThreatModel:
    knows = ["the trained weights", "the architecture", *card.knows]
    if not zero_head:
        knows.insert(0, "some of the initial weights" if missing else "the initial weights")
    assumes = LAZY
    if zero_head:
        assumes = "the last layer began at zero, and nothing else was trained"
    elif frozen:
        assumes = "training followed the gradient of the loss in the last layer"
    return ThreatModel(tuple(knows), (assumes, *card.assumes))


def _unlocks(network: Network, trained: Weights) -> str:
    """What each of the initial weights would make possible."""
    head, first = network.head_weight, network.first_dense(trained)
    both = "" if first in (None, head) else f" {head} and {first} unlock tansley2026 too."
    return (
        f"The initial {head} unlocks exhume and iurada2025 on the last layer, with features at the "
        f"trained weights (point final).{both} All initial weights unlock the points initial, "
        "midpoint and both, and other blocks of parameters. If the last layer began at zero and "
        f"nothing else was trained, give {ZERO_HEAD} in their place. Two premises need no initial "
        "weights: --premise margin, if the network is homogeneous in its weights and was trained "
        "to the margin with a logistic or cross-entropy loss, and --premise decay, if it came to "
        "rest under weight decay."
    )


def _listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
