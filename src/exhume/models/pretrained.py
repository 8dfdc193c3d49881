"""Models from folders as `save_pretrained` and timm write them: config.json beside the weights.

The library whose folder it is makes the model, from its own classes; no code in the folder is run.
"""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from exhume.errors import InputError, quoted
from exhume.files import read_json
from exhume.models.factory import nothing_left_behind

CONFIG = "config.json"
OWN = {"local_files_only": True, "trust_remote_code": False}  # nothing is fetched, no code is run
# Entries by which transformers' models take other models, from elsewhere, into themselves
ELSEWHERE = ("backbone", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone")
# Parts of the names of timm's arguments by which weights are read, from files and from addresses
READING = ("pretrained", "checkpoint", "cache_dir")


def is_pretrained(model: str | None) -> bool:
    """Return whether a name is that of a folder with a config.json."""
    return model is not None and (Path(model) / CONFIG).is_file()


def load_pretrained(folder: Path) -> nn.Module:
    """Return the model that a folder's config.json describes, with weights of no meaning.

    Nothing is fetched: from here on Hugging Face's hub is offline for this process.
    """
    file, config = folder / CONFIG, _config(folder)
    name = config.get("architecture")
    if isinstance(name, str):
        if ":" in name:
            raise InputError(
                f"{file}: architecture {name!r} is an address, expected a name of timm."
            )
        arguments, make = _timm_arguments(config, file), _library("timm", file).create_model
        made = _called(lambda: make(name, pretrained=False, **arguments), file)
    else:
        cls, read = _class(folder), _library("transformers", file).AutoConfig.from_pretrained
        made = _called(lambda: cls(read(str(folder), **OWN)), file)
    if not isinstance(made, nn.Module):
        raise InputError(f"{file}: became a {type(made).__name__}, expected a torch.nn.Module.")
    return made


def pretrained_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a folder by the names that transformers gives them in its modules.

    Those in the file may be others, of an earlier version. What the file lacks is left out.
    """
    cls: Any = _class(folder)
    _library("transformers", folder / CONFIG).utils.logging.disable_progress_bar()
    told = OWN | {"use_safetensors": True, "output_loading_info": True}
    model, notes = _called(lambda: cls.from_pretrained(str(folder), **told), folder / CONFIG)
    missing = set(notes["missing_keys"])
    return {name: x.detach() for name, x in model.state_dict().items() if name not in missing}


def _config(folder: Path) -> dict[str, Any]:
    """Return a folder's configuration, unless that would have something fetched."""
    config, file = read_json(folder / CONFIG), folder / CONFIG
    if not isinstance(config, dict):
        words = "expected the configuration of a model, as save_pretrained has"
        raise InputError(f"{file}: {words}.")
    if named := sorted(key for key, value in _entries(config) if key in ELSEWHERE and value):
        words = f"takes another model into this one ({', '.join(named)}), which may be fetched"
        raise InputError(f"{file}: {words}; name a factory of your own.")
    return config


def _entries(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield every entry of a configuration, those of its parts too."""
    if isinstance(config, dict):
        yield from config.items()
    for part in config.values() if isinstance(config, dict) else config:
        if isinstance(part, dict | list):
            yield from _entries(part)


def _class(folder: Path) -> type:
    """Return the class of transformers that a configuration names."""
    file, named = folder / CONFIG, _config(folder).get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise InputError(f"{file}: names no architecture; name a factory, and give --trained.")
    cls = getattr(_library("transformers", file), named[0], None)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise InputError(f"{file}: transformers has no model {named[0]!r}; name a factory.")
    return cls


def _timm_arguments(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return what timm's folders say besides the name: plain values, and none that is read from."""
    more = config.get("model_args")
    known = {key: value for key, value in config.items() if key in ("num_classes", "global_pool")}
    known |= more if isinstance(more, dict) else {}
    for key, value in known.items():
        parts = value if isinstance(value, list) else [value]
        plain = all(part is None or isinstance(part, str | int | float) for part in parts)
        if not plain or any(word in key for word in READING):
            words = "expected plain values that say how the model is built"
            raise InputError(f"{file}: has the argument {key!r}; {words}. Name a factory.")
    return known


def _library(name: str, file: Path) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported: nothing is fetched
    try:
        return importlib.import_module(name)
    except ImportError as error:
        way = f"install {name}, or name a factory of your own and give the folder as --trained"
        raise InputError(f"{file}: is a configuration of {name}; {way}.") from error


def _called(make: Any, file: Path) -> Any:
    try:
        with nothing_left_behind():
            return make()
    except Exception as error:
        raise InputError(f"{file}: cannot be made into a model ({quoted(error)}).") from error
