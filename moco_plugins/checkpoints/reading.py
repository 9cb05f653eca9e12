"""Files as they lie on disk, read so that nothing in them is executed and nothing is taken on trust.

Pickles are read by torch's ``weights_only`` unpickler. What a file declares is compared with what it holds before memory is
taken; a file that is cut off or of another kind gives one sentence.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


@dataclass
class Content:
    """What a file holds.

    Attributes:
        raw: all of it, as it was saved.
        state: the tensors in it by name, from the place where most formats have them; DDP's ``module.`` is taken off.
        about: what stands beside the tensors as text: a folder's config.json, the metadata of FILE.safetensors, and FILE.json.
        kind: "torch", "safetensors", "pickle" (plain, of numpy arrays) or "folder" (Hugging Face).
    """

    raw: Mapping[str, Any]
    kind: str = "torch"
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = _tensors(self.raw)
        self._taken: set[str] = set()

    def has(self, *prefixes: str) -> bool:
        """Whether there are tensors under each of these prefixes."""
        return all(any(name.startswith(prefix) for name in self.state) for prefix in prefixes)

    def take(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a prefix, without it; they count as read."""
        names = [name for name in self.state if name.startswith(prefix)]
        self._taken.update(names)
        return {name.removeprefix(prefix): self.state[name] for name in names}

    def pop(self, name: str) -> Tensor | None:
        """One tensor, or None; it counts as read."""
        self._taken.add(name)
        return self.state.get(name)

    @property
    def left(self) -> tuple[str, ...]:
        """The names that nobody has taken."""
        return tuple(name for name in self.state if name not in self._taken)


def _tensors(raw: Mapping[str, Any]) -> dict[str, Tensor]:
    found: Any = raw
    for key in ("state_dict", "model", "model_state_dict", "teacher", "module"):
        if isinstance(raw.get(key), Mapping) and any(isinstance(value, Tensor) for value in raw[key].values()):
            found = raw[key]
            break
    names = [name for name, value in found.items() if isinstance(value, Tensor) and isinstance(name, str)]
    wrapped = bool(names) and all(name.startswith("module.") for name in names)
    plain = {name: (name.removeprefix("module.") if wrapped else name).replace("_orig_mod.", "") for name in names}
    return {plain[name]: found[name] for name in names}  # _orig_mod: of torch.compile


def read(path: str | Path, trust: bool = False, harmless: Sequence[Any] = ()) -> Content:
    """Read a checkpoint.

    Args:
        path: of the file, or of a folder that ``save_pretrained`` or ``moco-plugins pretrain`` wrote.
        trust: unpickle anything, code included. For files of known origin.
        harmless: what the unpickler may build besides tensors, as for ``torch.serialization.add_safe_globals``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read; the message has the reason and the cure.
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with path.open("rb") as file:
        start = file.read(16)
    if start[8:9] == b"{" or (path.suffix == ".safetensors" and start[:4] != _ZIP):
        return _safetensors(path)
    if path.suffix == ".pkl" and start[:1] == _PICKLE and not trust:
        return Content(_arrays(path), "pickle")
    if start[:4] == _ZIP or start[:1] == _PICKLE:
        content = Content(_torch(path, trust, harmless))
        _check_sizes(path, content.state)
        return content
    if start == b"":
        raise ValueError(f"{path}: the file is empty")
    raise ValueError(
        f"{path}: it is no checkpoint (a file that torch.save or safetensors wrote, or a folder of save_pretrained)"
        + (
            ": it is the note that stands for a file in Git LFS; fetch the file"
            if start.startswith(b"version https")
            else ""
        )
    )


def _torch(path: Path, trust: bool, harmless: Sequence[Any]) -> Mapping[str, Any]:
    _check_archive(path)
    try:
        with warnings.catch_warnings(), _allowed(harmless):
            warnings.simplefilter("ignore")
            with path.open("rb") as file:  # of a path torch believes the suffix, whatever the file is
                raw = torch.load(file, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from error
    except Exception as error:
        raise ValueError(f"{path}: the file is damaged or cut off ({type(error).__name__}: {_line(error)})") from error
    if isinstance(raw, torch.nn.Module):
        raw = raw.state_dict()
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}: it holds a {type(raw).__name__}, not a state dict or a checkpoint with one")
    return raw


@contextlib.contextmanager
def _allowed(harmless: Sequence[Any]) -> Iterator[None]:
    before = torch.serialization.get_safe_globals()  # the context would take these away when it ends
    with torch.serialization.safe_globals([thing for thing in harmless if thing not in before]):
        yield


def _refusal(path: Path, error: Exception) -> str:
    text = str(error)
    found = re.search(r"(?:GLOBAL|class|type) (\w+(?:\.\w+)+)", text)
    if "weights_only" not in text and "Unsupported" not in text and found is None:
        return f"{path}: the file is damaged or cut off ({_line(error)})"
    what = f" ({found[1]})" if found else ""
    return (
        f"{path}: it holds more than tensors and numbers{what}, which may run code when it is read. If you trust where it "
        "comes from, read it with --trust (trust=True)"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _check_archive(path: Path) -> None:
    """torch's archives are not compressed: what they declare to hold is not more than the file."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        declared = sum(part.file_size for part in archive.infolist())
    size = path.stat().st_size
    if declared > size:
        raise ValueError(f"{path}: it declares {declared} bytes and has {size}: no file of torch.save does")


def _check_sizes(path: Path, state: Mapping[str, Tensor]) -> None:
    for name, value in state.items():
        if value.layout is torch.strided and value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(
                f"{path}: {name} declares shape {tuple(value.shape)}, of which the file does not hold the numbers"
            )


def _safetensors(path: Path) -> Content:
    safe_open, error_type = need_safetensors()
    try:
        with safe_open(path, framework="pt") as file:  # checks offsets and sizes against the file first
            about: dict[str, Any] = dict(file.metadata() or {})
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (error_type, OSError, ValueError) as error:
        raise ValueError(f"{path}: the file is damaged or cut off ({_line(error)})") from error
    beside = path.with_suffix(".json")  # as ``moco-plugins pretrain`` writes it
    if beside.is_file():
        about = {**_json(beside), **about}
    return Content(state, "safetensors", about)


def need_safetensors() -> tuple[Any, type[Exception]]:
    """Return ``safe_open`` and the error it raises, or say how to install it."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'safetensors is not installed: pip install "moco-plugins[safetensors]"', name="safetensors"
        ) from error
    return safe_open, SafetensorError


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: it is not JSON ({_line(error)})") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: it holds a {type(read).__name__}, not an object")
    return read


def _folder(path: Path) -> Content:
    """Hugging Face's ``save_pretrained`` (config.json and weights, in one file or in shards), or of ``pretrain``."""
    if (path / "weights.safetensors").is_file():
        return _safetensors(path / "weights.safetensors")
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: a folder without config.json; Hugging Face's save_pretrained writes one")
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        files = [name] if (path / name).is_file() else []
        if not files and index.is_file():
            files = sorted(set(_json(index).get("weight_map", {}).values()))
        if not files:
            continue
        state: dict[str, Any] = {}
        for file in files:
            if Path(file).name != file:
                raise ValueError(f"{index}: it names {file}, which is not in the folder")
            state |= read(path / file).raw
        return Content(state, "folder", _json(path / "config.json"))
    raise ValueError(f"{path}: there are no weights in it (model.safetensors or pytorch_model.bin)")


class _ArraysOnly(pickle.Unpickler):
    """Builds numpy arrays of plain numbers, and what Python itself writes without a name; nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        import collections

        import numpy as np

        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar"):
            rebuild = np.array(0.0).__reduce__()[0] if name == "_reconstruct" else np.float64(0.0).__reduce__()[0]
            return rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("_codecs", "encode"):  # how protocol 2 spells bytes
            return _encode
        raise pickle.UnpicklingError(f"class {module}.{name}: Unsupported")


def _encode(text: str, encoding: str) -> bytes:
    return text.encode("latin1" if encoding == "latin1" else "utf-8")


def _arrays(path: Path) -> Mapping[str, Any]:
    """A plain pickle of numpy arrays, such as detectron2's model zoo has."""
    import numpy as np

    try:
        with path.open("rb") as file:
            raw = _ArraysOnly(file, encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path, error)) from error
    except Exception as error:
        raise ValueError(f"{path}: the file is damaged or cut off ({type(error).__name__}: {_line(error)})") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"{path}: it holds a {type(raw).__name__}, not a mapping of weights")
    held = raw.get("model", raw)
    if not isinstance(held, Mapping):
        raise ValueError(f"{path}: its model is a {type(held).__name__}, not a mapping of weights")
    arrays = {
        k: torch.from_numpy(np.array(v)) for k, v in held.items() if isinstance(v, np.ndarray) and v.dtype != object
    }
    return {**raw, "model": arrays}
