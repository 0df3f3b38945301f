"""A model as one file: its weights, and in the header of the file what it takes to build it again.

The file is a plain safetensors file. Its metadata holds `format` ("multihead"), `class` (such as "GPT") and `config`,
the arguments of the constructor as JSON. Nothing in it is executed when it is read.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from multihead.errors import bad_type, bad_value, is_int
from multihead.whole_files import write_whole

M = TypeVar("M", bound=nn.Module)

_MODULES = {"GPT": "multihead.models.gpt", "Translator": "multihead.models.translator"}
_LONGEST_HEADER = 100_000_000  # bytes, the bound of the format


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model as one safetensors file.

    It is written beside its place and then renamed: whatever happens meanwhile, at `path` there is the whole file or
    what was there before. Parameters that are shared by the model's form are stored once.

    Args:
        model: a GPT or a Translator, on any device and of any dtype.
        path: of the file. What is there already is replaced.

    Raises:
        TypeError: it is not one of these models.
        ValueError: its tensors are not those of its config, so that nothing could be built from the file.
        OSError: it can't be written.
        ImportError: safetensors is not installed.
    """
    name = type(model).__name__
    if name not in _MODULES or not isinstance(getattr(model, "config", None), dict):
        raise bad_type("model", f"one of {', '.join(_MODULES)}", model, "A file says by name what to build from it.")
    metadata = {"format": "multihead", "class": name, "config": json.dumps(model.config)}
    planned = _planned(type(model), model.config)
    # What shares its numbers by hand alone is stored for itself: nothing in the file says that it shares them.
    names = {*_stored(model), *_stored(planned)}
    named = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in names}
    _check_fit(planned, named, "model")
    tensors: dict[str, Tensor] = {}
    places: set[int] = set()  # in memory, of what is stored so far
    for name, tensor in named.items():
        plain = tensor.detach().contiguous()
        place = plain.untyped_storage().data_ptr()
        tensors[name] = plain.clone() if place in places else plain
        places.add(place)
    write(tensors, path, metadata)


def write(tensors: dict[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
    """Write contiguous tensors that share no memory as a safetensors file: beside its place, then renamed.

    Raises:
        OSError: it can't be written.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()

    def save_file(beside: Path) -> None:
        try:
            safetensors.torch.save_file(tensors, beside, metadata=metadata)
        except safetensors.SafetensorError as error:  # how it tells of a full disk too
            raise OSError(str(error)) from None

    write_whole(Path(path), save_file)


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name, on the CPU.

    Raises:
        ValueError: the file is damaged.
        OSError: it can't be read.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path, device="cpu")
    except safetensors.SafetensorError as error:
        raise _unfit(path, "a safetensors file", f"a damaged one ({error})", "Copy or download it again.") from None
    return tensors


def load(path: str | os.PathLike[str], *, device: torch.device | str = "cpu", kind: type[M] | None = None) -> M:
    """The model that `save` wrote, in the dtypes that it had, in training mode as any new module.

    Args:
        path: of the file.
        device: where its parameters go.
        kind: the class that it has to be of; None for any.

    Raises:
        ValueError: the file is no safetensors file, cut off, damaged, of something else, or its tensors do not fit its
            config.
        OSError: it can't be read.
        ImportError: safetensors is not installed.
    """
    _safetensors()  # whose absence is told before anything about the file
    path = Path(path)
    metadata = read_metadata(path)
    name, config = _described(path, metadata)
    if kind is not None and kind.__name__ != name:
        raise _unfit(path, f"a file of {kind.__name__}", f"one of {name}")
    tensors = read(path)
    model = _built(path, name, config, tensors)
    for own, tensor in _stored(model).items():
        # A copy: a file's tensors lie in it, at addresses for which products round otherwise, and it may change.
        tensor.data = tensors[own].clone()
    return cast(M, model.to(device))


def _built(path: Path, name: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> nn.Module:
    """The model of a file's config, once it is clear that the file's tensors are its own: so a config can't ask for
    more memory or time than the file is worth."""
    made_by: Any = getattr(importlib.import_module(_MODULES[name]), name)
    for argument in ("layers", "decoder_layers"):
        count = config.get(argument)
        if is_int(count) and count > len(tensors):
            raise _unfit(path, f"tensors of {argument}={count}", f"{len(tensors)} in all")
    try:
        planned = _planned(made_by, config)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        told = str(error).partition("\n")[0]
        raise _unfit(path, f"a config that {name} takes", f"one that it refuses ({told})") from None
    _check_fit(planned, tensors, str(path))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # its first weights are drawn, and thrown away
        return made_by(**config)


def _planned(made_by: Any, config: Any) -> nn.Module:
    """The model of a config without numbers: what it takes no memory to build."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return made_by(**config)


def _check_fit(model: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Raises where these are not a model's tensors, by the names of `state_dict`, those that are shared once."""
    own = _stored(model)
    missing, unexpected = [name for name in own if name not in tensors], [name for name in tensors if name not in own]
    if missing or unexpected:
        got = [f"without {_some(missing)}"] if missing else []
        got += [f"with {_some(unexpected)} besides"] if unexpected else []
        raise _unfit(where, f"the tensors of {type(model).__name__}", f"them {' and '.join(got)}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise _unfit(where, f"{name} of shape {tuple(own[name].shape)}", tuple(tensor.shape))
        if tensor.is_floating_point() != own[name].is_floating_point():
            raise _unfit(where, f"{name} of a dtype like {own[name].dtype}", tensor.dtype)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """What the header of a safetensors file says besides its tensors, once it is clear that the file is whole.

    Raises:
        ValueError: the file is no safetensors file, or cut off.
        OSError: it can't be read.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        start = file.read(1)
        if size < 9 or start != b"{" or length > _LONGEST_HEADER:
            raise _unfit(path, "a safetensors file", f"another, of {size} bytes", "Check the path.")
        header = start + file.read(length - 1)
    if size < 8 + length:
        raise _cut_off(path, size, f"the header alone ends at {8 + length}")
    try:
        described: Any = json.loads(header)
        metadata = described.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError
        end = 8 + length + max((entry["data_offsets"][1] for entry in described.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise _unfit(path, "a safetensors file", "one whose header can't be read", "Check the path.") from None
    if size < end:
        raise _cut_off(path, size, f"its tensors end at {end}")
    if size != end:
        raise _unfit(path, "a safetensors file", f"{size} bytes, but its tensors end at {end}", "Copy it again.")
    return metadata


def _described(path: Path, metadata: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """The class and the config that a header names."""
    if metadata.get("format") != "multihead":
        instead = "Published weights are read by GPT.from_gpt2 and GPT.from_llama."
        raise _unfit(path, "a file that multihead has saved", "a safetensors file of something else", instead)
    name = metadata.get("class", "")
    if name not in _MODULES:
        raise _unfit(path, f"a file of {' or '.join(_MODULES)}", f"one of {name!r}")
    try:
        config: Any = json.loads(metadata["config"])
    except (KeyError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise _unfit(path, "a config in JSON in the file's header", "none that can be read")
    return name, config


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as state_dict names them, those that are shared once, and themselves, not copies."""
    seen: dict[int, str] = {}
    return {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if seen.setdefault(id(tensor), name) == name
    }


def _safetensors() -> Any:
    """The package, with its part for torch."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ModuleNotFoundError as missing:
        told = f"saving and loading models needs safetensors ({missing}). Next: pip install 'multihead[models]'"
        raise ImportError(told) from None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unfit(path: str | os.PathLike[str], expected: str, got: object, instead: str = "") -> ValueError:
    return bad_value(os.fspath(path), expected, got, "", instead)


def _cut_off(path: str | os.PathLike[str], size: int, why: str) -> ValueError:
    instead = "Copy or download it again."
    return bad_value(os.fspath(path), "a whole safetensors file", f"{size} bytes, but {why}", "It is cut off.", instead)
