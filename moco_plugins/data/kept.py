"""What is known of the files of a folder, kept for the next start, and checked against names, sizes and times then."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .listing import Listing
from .opening import decode
from .telling import Told

#: Where it is kept; else in the user's cache.
VARIABLE = "MOCO_PLUGINS_CACHE"
#: In place of a fingerprint: the file cannot be read.
DAMAGED = "damaged"
_FORMAT = 1


def cache_folder() -> Path:
    """``$MOCO_PLUGINS_CACHE``, or ``moco-plugins`` in the user's cache."""
    own = os.environ.get(VARIABLE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moco-plugins"


class Kept:
    """The list of a folder's files as it was at the last start, with their fingerprints where they were read.

    Nothing depends on it but time: where it cannot be read or written, everything is looked at anew.
    """

    def __init__(self, root: Path) -> None:
        self.path = cache_folder() / f"{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:24]}.json"
        self.files: dict[str, list[Any]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["format"] == _FORMAT:
                self.files = content["files"]

    def changes(self, listing: Listing) -> tuple[int, int, int]:
        """How many files have come, gone and changed since the last start; nothing at the first."""
        if not self.files:
            return 0, 0, 0
        known = self._known(listing)
        common = sum(name in self.files for name in listing.names)
        return len(listing.names) - common, len(self.files) - common, common - sum(one is not None for one in known)

    def _known(self, listing: Listing) -> list[str | None]:
        """The fingerprint of each file that is as it was ("" where it was not read), None for others."""
        found: list[str | None] = []
        for name, size, changed in zip(listing.names, listing.sizes, listing.changed, strict=True):
            old = self.files.get(name)
            found.append(old[2] if old is not None and old[:2] == [size, changed] else None)
        return found

    def read_all(self, listing: Listing) -> list[str]:
        """The fingerprint of each file; those that are not known are read, each once.

        Images of equal pixels have equal fingerprints, whatever their format.
        """
        marks = [mark or "" for mark in self._known(listing)]
        todo = [place for place, mark in enumerate(marks) if not mark]
        if not todo and len(marks) == len(self.files):  # all is as it was: nothing to keep
            return marks
        said = Told(f"reading each image in {listing.root} once, for copies and damage", len(todo))
        with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 1)) as pool:
            paths = (os.path.join(listing.root, listing.names[place]) for place in todo)
            for done, (place, mark) in enumerate(zip(todo, pool.map(fingerprint, paths), strict=True)):
                marks[place] = mark
                said(done)
        self.save(listing, marks)
        return marks

    def save(self, listing: Listing, marks: list[str] | None = None) -> None:
        """Keep a list for the next start."""
        if marks is None:
            marks = [mark or "" for mark in self._known(listing)]
        files = {
            name: [size, changed, mark]
            for name, size, changed, mark in zip(listing.names, listing.sizes, listing.changed, marks, strict=True)
        }
        if files == self.files:
            return
        self.files = files
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"format": _FORMAT, "files": files}), encoding="utf-8")
            os.replace(partial, self.path)
        except OSError:  # read-only or full: the next start takes as long as this one
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def fingerprint(path: str) -> str:
    """A hash of what an image shows, :data:`DAMAGED` where it cannot be read."""
    import numpy as np

    try:
        image = decode(path)
        if hasattr(image, "mode"):
            clear = "A" in image.mode or "a" in image.mode or "transparency" in image.info
            mode = "RGBA" if clear else "RGB"
            image = image if image.mode == mode else image.convert(mode)
            about, pixels = f"{mode} {image.size}", image.tobytes()
        else:
            about, pixels = f"{image.dtype} {image.shape}", np.ascontiguousarray(image).tobytes()
    except ImportError:
        raise
    except Exception:  # PIL raises whatever its decoders raise
        return DAMAGED
    return hashlib.blake2b(pixels, digest_size=12, key=hashlib.sha256(about.encode()).digest()).hexdigest()
