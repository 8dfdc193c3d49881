"""Models from folders as `save_pretrained` and timm write them: config.json beside the weights.

The library whose folder it is makes the model, from its own classes; no code in the folder is run.
"""

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from exhume.errors import InputError, quoted
from exhume.files import read_json
from exhume.models.factory import nothing_left_behind

CONFIG = "config.json"
OWN = {"local_files_only": True, "trust_remote_code": False}  # nothing is fetched, no code is run


def is_pretrained(model: str | None) -> bool:
    """Return whether a name is that of a folder with a config.json."""
    return model is not None and (Path(model) / CONFIG).is_file()


def load_pretrained(folder: Path) -> nn.Module:
    """Return the model that a folder's config.json describes, with weights of no meaning."""
    file, config = folder / CONFIG, _config(folder)
    name = config.get("architecture")
    if isinstance(name, str):
        make, arguments = _library("timm", file).create_model, _timm_arguments(config)
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
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        words = "expected the configuration of a model, as save_pretrained has"
        raise InputError(f"{folder / CONFIG}: {words}.")
    return config


def _class(folder: Path) -> type:
    """Return the class of transformers that a configuration names."""
    file, named = folder / CONFIG, _config(folder).get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise InputError(f"{file}: names no architecture; name a factory, and give --trained.")
    cls = getattr(_library("transformers", file), named[0], None)
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise InputError(f"{file}: transformers has no model {named[0]!r}; name a factory.")
    return cls


def _timm_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return what timm's folders say besides the name of the architecture."""
    more = config.get("model_args")
    known = {key: value for key, value in config.items() if key in ("num_classes", "global_pool")}
    return known | (more if isinstance(more, dict) else {})


def _library(name: str, file: Path) -> Any:
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
