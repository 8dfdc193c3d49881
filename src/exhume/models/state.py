"""State dicts from files that nobody vouches for: tensors are read, nothing is ever executed.

What was read has a SHA-256: whoever reads the result of an audit can tell of which files it is.
"""

import hashlib
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exhume.errors import InputError, listed
from exhume.files import digest_of, read_json, read_tensors, regular
from exhume.models.pretrained import CONFIG, is_pretrained, pretrained_weights

StateDict = dict[str, Tensor]  # parameters and buffers by name, as of `module.state_dict()`
StateOrFile = Mapping[str, Tensor] | Path | str  # a state dict, or the file that holds one

# In the place of initial weights: the last layer began at zero, and nothing else was trained
ZERO_HEAD = "zero-head"
SAFE, PICKLED = ".safetensors", (".pt", ".pth", ".bin", ".ckpt")
WHOLE = ("model.safetensors", "pytorch_model.bin")  # of a folder; the first that is there is read
INDEX = "model.safetensors.index.json"
WRAPPERS = ("state_dict", "model_state_dict", "model")
COMPILED = "_orig_mod."  # what torch.compile adds to names, anywhere
COUNTER = "num_batches_tracked"
INSTEAD = "save the state dict alone: torch.save(model.state_dict(), …), or a safetensors file"


@dataclass(frozen=True, eq=False)
class Saved:
    """Weights, the precisions in which they were stored, and the words for where they were."""

    tensors: StateDict
    dtypes: frozenset[torch.dtype]
    source: str

    @classmethod
    def read(cls, state: StateOrFile | None, word: str) -> "Saved":
        """Read a state dict, or its file; `word` says which one it is in errors."""
        if isinstance(state, Path | str):
            source, tensors = str(state), read_state(Path(state))
        elif isinstance(state, Mapping) and all(isinstance(x, Tensor) for x in state.values()):
            source, tensors = word, {name: tensor.cpu() for name, tensor in state.items()}
        else:
            kind = type(state).__name__
            raise InputError(f"{word}: expected a state dict, or a file with one, got a {kind}.")
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        return cls(tensors, frozenset(dtypes), source)

    def fitted(self, module: nn.Module, partial: bool = False) -> "Saved":
        """Return what fits a module: tied weights under one name, and its own unsaved buffers."""
        try:
            tensors = fit_state(self.tensors, module, self.source, partial)
        except InputError as error:
            if not is_pretrained(self.source):
                raise
            try:  # transformers may have other names for them than its files
                named = pretrained_weights(Path(self.source))
            except InputError:
                raise error from None
            tensors = fit_state(named, module, self.source, partial)
        saved = module.state_dict()
        tensors |= {name: b.detach() for name, b in module.named_buffers() if name not in saved}
        own = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        return replace(self, tensors={name: tensors[name] for name in own if name in tensors})


def read_state(path: Path) -> StateDict:
    """Return the tensors of a checkpoint, on the CPU.

    The path is a file of safetensors; one of torch.save that holds a state dict, bare or under one
    of WRAPPERS; or a folder with one of WHOLE, or with shards of safetensors and their index.
    """
    path = _whole(path) or path
    suffix = path.suffix.lower()
    if path.is_dir():
        state = _read_shards(path)
    elif suffix == SAFE:
        state = read_tensors(path)
    elif suffix in PICKLED:
        state = _unwrapped(_load(regular(path)), path)
    else:
        known = ", ".join((SAFE, *PICKLED))
        regular(path)
        raise InputError(f"{path}: is no checkpoint by its name; expected one of {known}.")
    if not state:
        raise InputError(f"{path}: holds no tensors; {INSTEAD}.")
    size = sum(file.stat().st_size for file in state_files(path))
    for name, tensor in state.items():
        dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
        if not dense or tensor.device.type != "cpu":
            raise InputError(f"{path}: tensor {name!r} is quantised, sparse or without values.")
        if tensor.numel() * tensor.element_size() > size:  # as one number can be shown many times
            shape = tuple(tensor.shape)
            raise InputError(f"{path}: tensor {name!r} of shape {shape} is larger than its file.")
    return {name: tensor.detach() for name, tensor in state.items()}


def state_files(path: Path) -> list[Path]:
    """Return the files that `read_state` reads for a path: itself, or those of a folder."""
    if (whole := _whole(path)) is not None or not path.is_dir():
        return [whole or path]
    return [path / INDEX, *(path / file for file in sorted(set(_shards(path).values())))]


def _whole(folder: Path) -> Path | None:
    """Return the one file of a folder that has all of its tensors, if there is such a file."""
    names = WHOLE[:1] if (folder / INDEX).is_file() else WHOLE
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_shards(folder: Path) -> StateDict:
    """Return the tensors of a folder as Hugging Face writes large ones."""
    shards, state = _shards(folder), StateDict()
    for file in sorted(set(shards.values())):
        names = tuple(name for name in shards if shards[name] == file)
        found = read_tensors(folder / file, names)
        state |= {name: found[name] for name in names}
    return state


def _shards(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by the index of a folder."""
    index = folder / INDEX
    if not index.is_file():
        known = ", ".join((*WHOLE, INDEX))
        raise InputError(f"{folder}: holds none of {known}; name the file itself.")
    content = read_json(index)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
        raise InputError(f"{index}: is damaged; expected a 'weight_map' from names to files.")
    if outside := [file for file in shards.values() if Path(file).name != file]:
        raise InputError(f"{index}: names {outside[0]!r}, which is not a file of this folder.")
    return shards


def _load(path: Path) -> Any:
    """Return what torch.save wrote, as far as it is tensors and plain containers."""
    try:
        zipped = _is_archive(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols; what cannot be read is an error
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except InputError:
        raise
    except Exception as error:  # a damaged file can break the reader anywhere
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and foreign:
            raise InputError(
                f"{path}: holds more than tensors ({foreign[1]}), which could run code; {INSTEAD}."
            ) from error
        known = isinstance(error, OSError | RuntimeError | zipfile.BadZipFile)
        reason = f" ({str(error).splitlines()[0][:120]})" if known and str(error) else ""
        raise InputError(
            f"{path}: cannot be read as what torch.save writes{reason}; copy it, or {INSTEAD}."
        ) from error


def _is_archive(path: Path) -> bool:
    """Return whether a file is a zip archive, as torch writes today; refuse code and bombs."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        raise InputError(f"{path}: is a TorchScript archive, which holds code; {INSTEAD}.")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise InputError(f"{path}: holds compressed entries, which can fill the memory; {INSTEAD}.")
    return True


def _unwrapped(content: Any, path: Path) -> StateDict:
    for _ in range(3):  # wrappers in wrappers
        inner = [content.get(key) for key in WRAPPERS] if isinstance(content, Mapping) else []
        content = next((part for part in inner if isinstance(part, Mapping)), content)
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise InputError(f"{path}: holds a {kind}, expected a dict of tensors; {INSTEAD}.")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise InputError(f"{path}: entry {name!r} is a {kind}, expected a tensor; {INSTEAD}.")
    return dict(content)


def fit_state(
    state: Mapping[str, Tensor], module: nn.Module, source: str, partial: bool = False
) -> StateDict:
    """Return the parameters and buffers of a module, under its own names, from a state dict.

    Half precision becomes float32, float64 and integers stay. A prefix that all names have is
    dropped, and that of a part of the module is added, if the names fit so. Tied parameters
    may be stored once. Where `partial`, some of the tensors will do; `source` is where they come
    from, for errors.
    """
    own = {name: x for name, x in module.state_dict().items() if isinstance(x, Tensor)}
    needed = {name for name in own if name.rpartition(".")[2] != COUNTER}

    def strangers(names: Mapping[str, Tensor]) -> int:
        return len(needed - names.keys()) + len(names.keys() - own.keys())

    given = min((_with_tied(names, module) for names in _renamed(state, module)), key=strangers)
    missing = [name for name in own if name in needed - given.keys()]
    unexpected = [name for name in given if name not in own]
    other = [name for name in own if name in given and given[name].shape != own[name].shape]
    some = partial and len(missing) < len(needed)
    if unexpected or other or (missing and not some):
        shape, was = ({name: tuple(w.shape) for name, w in x.items()} for x in (own, given))
        faults = {
            "missing": [f"{name} {shape[name]}" for name in missing],
            "unexpected": [f"{name} {was[name]}" for name in unexpected],
            "of another shape": [f"{n}, expected {shape[n]}, found {was[n]}" for n in other],
        }
        found = "; ".join(f"{kind}: {listed(items, 3)}" for kind, items in faults.items() if items)
        raise InputError(
            f"{source}: is of another architecture than the factory's model; {found}. Name the "
            "factory, and its arguments, of the model that was trained."
        )
    return {
        name: _usable(given.get(name, x).detach(), x, name, source)
        for name, x in own.items()
        if name not in missing
    }


def _renamed(state: Mapping[str, Tensor], module: nn.Module) -> Iterator[StateDict]:
    """Yield the state under its own names, without what wrappers add, and as that of a part."""
    names = dict(state)
    yield names
    bare = {name.replace(COMPILED, ""): tensor for name, tensor in names.items()}
    if len(bare) == len(names):  # else two names would become one
        yield (names := bare)
    for part, _ in module.named_children():  # a backbone without its head, say
        yield {f"{part}.{name}": tensor for name, tensor in names.items()}
    for _ in range(4):  # wrappers in wrappers
        prefixes = {name.partition(".")[0] for name in names if "." in name}
        if len(prefixes) != 1 or not all("." in name for name in names):
            return
        yield (names := {name.partition(".")[2]: tensor for name, tensor in names.items()})


def _with_tied(state: StateDict, module: nn.Module) -> StateDict:
    """Return the state with tied tensors under all their names, where the file has one only."""
    tied = module.state_dict(keep_vars=True)
    stored = {id(tied[name]): state[name] for name in reversed(tied) if name in state}
    return {name: stored[id(x)] for name, x in tied.items() if id(x) in stored} | state


def _usable(tensor: Tensor, own: Tensor, name: str, source: str) -> Tensor:
    """Return a tensor of the module's kind, in float32 or float64 if it is of floats."""
    floats = tensor.is_floating_point()
    if floats != own.is_floating_point() or tensor.is_complex() != own.is_complex():
        kinds = f"{tensor.dtype}, but the factory's model has {own.dtype}"
        raise InputError(f"{source}: tensor {name!r} is {kinds}.")
    if floats and tensor.dtype != torch.float64:
        tensor = tensor.float()
    if not tensor.isfinite().all():
        raise InputError(
            f"{source}: tensor {name!r} holds NaN or infinite entries; use an earlier checkpoint."
        )
    return tensor


def check_pair(
    initial: Mapping[str, Tensor], trained: Mapping[str, Tensor], before: str, after: str
) -> None:
    """Refuse weights before and after training that cannot be of one model, or are the same."""
    if only := [name for name in (*initial, *trained) if (name in initial) != (name in trained)]:
        where = before if only[0] in initial else after
        raise InputError(f"{before} and {after}: tensor {only[0]!r} is in {where} only.")
    if other := [name for name, w in initial.items() if w.shape != trained[name].shape]:
        first, second = (tuple(state[other[0]].shape) for state in (initial, trained))
        shapes = f"has shape {first} in the first and {second} in the second"
        raise InputError(f"{before} and {after}: tensor {other[0]!r} {shapes}.")
    if all(bool((w == trained[name]).all()) for name, w in initial.items()):
        raise InputError(f"{before} and {after}: nothing was trained: they hold the same weights.")


@dataclass(frozen=True)
class Input:
    """An input has a role, the name of its file (None for what was in memory) and a SHA-256."""

    role: str
    file: str | None
    sha256: str


def inputs(given: Mapping[str, object]) -> tuple[Input, ...]:
    """Return the entries of what was given by role, without what is None.

    A role has a file, a folder of weights, a state dict, a tensor, or a factory by its name.
    """
    entries: list[Input] = []
    for role, part in given.items():
        tensors = {role: part} if isinstance(part, Tensor) else part
        if isinstance(tensors, Mapping):
            entries.append(Input(role, None, digest_of_tensors(tensors)))
        elif isinstance(part, Path | str):
            files = state_files(part) if isinstance(part, Path) else _source_files(part)
            entries += [Input(role, file.name, digest_of(file)) for file in files]
    return tuple(entries)


def _source_files(model: str) -> list[Path]:
    """Return the file of a factory that was imported, or the configuration of a folder."""
    where = model.rpartition(":")[0]
    file = getattr(sys.modules.get(where), "__file__", None) or where
    file = Path(model, CONFIG) if is_pretrained(model) else Path(file)
    return [file] if file.is_file() else []


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors: of their names, kinds, shapes and bytes, by name.

    Example:
        >>> one = {"a": torch.zeros(2), "b": torch.ones(1)}
        >>> digest_of_tensors(one) == digest_of_tensors(dict(reversed(one.items())))
        True
        >>> digest_of_tensors(one) == digest_of_tensors(one | {"a": torch.zeros(2, 1)})
        False
    """
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
