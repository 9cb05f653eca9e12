"""The image files below a folder: as their owner sees them, in one walk, without opening any."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

from .arrays import DataNotFoundError
from .telling import Told

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp"),
    *(".tif", ".tiff", ".gif", ".ppm", ".pgm", ".pnm", ".npy"),
)
#: What operating systems, archives and storage boxes put beside images; names with a dot in front are hidden as well.
_HIDDEN = ("__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")


class Listing(NamedTuple):
    """Files below a folder, by name: their names from there on with ``/``, sizes in bytes, times of change in ns.

    ``hidden``: images in hidden parts, which are left out; ``repeated``: folders that links lead to a second time.
    """

    root: Path
    names: list[str]
    sizes: list[int]
    changed: list[int]
    hidden: int = 0
    repeated: tuple[str, ...] = ()

    def select(self, keep: list[int]) -> Listing:
        """Some of the files."""
        names, sizes, changed = self.names, self.sizes, self.changed
        return self._replace(
            names=[names[i] for i in keep], sizes=[sizes[i] for i in keep], changed=[changed[i] for i in keep]
        )


def list_images(root: Path) -> Listing:
    """List the images below ``root``, upper or lower case suffix.

    Links are followed, and carry their own names. Each folder is read once, where it lies highest: a loop of links ends.

    Raises:
        DataNotFoundError: a folder cannot be listed.
    """
    found: list[tuple[list[str], int, int]] = []
    hidden, repeated, said = 0, [], Told(f"listing images in {root}")
    waiting = deque([(str(root), "", False)])
    seen = {_identity(os.stat(root), str(root))}
    while waiting:
        folder, prefix, concealed = waiting.popleft()
        try:
            with os.scandir(folder) as entries:
                below = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise DataNotFoundError(f"data: {folder} cannot be listed ({error.strerror}); make it readable") from error
        for entry in below:
            out_of_sight = concealed or entry.name.startswith(".") or entry.name in _HIDDEN
            if entry.is_dir():
                if out_of_sight and entry.is_symlink():
                    continue
                identity = _identity(os.stat(entry.path), entry.path)
                if identity in seen:
                    repeated.append(prefix + entry.name)
                    continue
                seen.add(identity)
                waiting.append((entry.path, f"{prefix}{entry.name}/", out_of_sight))
            elif entry.name.lower().endswith(SUFFIXES):
                if out_of_sight:
                    hidden += 1
                    continue
                try:
                    about = entry.stat()
                    found.append(((prefix + entry.name).split("/"), about.st_size, about.st_mtime_ns))
                except OSError:  # a link to nothing: a damaged file like others
                    found.append(((prefix + entry.name).split("/"), -1, 0))
        said(len(found))
    found.sort()
    return Listing(
        root,
        ["/".join(parts) for parts, _, _ in found],
        [size for _, size, _ in found],
        [changed for _, _, changed in found],
        hidden,
        tuple(repeated),
    )


def _identity(about: os.stat_result, path: str) -> object:
    return (about.st_dev, about.st_ino) if about.st_ino else os.path.realpath(path)
