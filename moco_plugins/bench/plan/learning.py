"""Which images are learnt from and which are judged on, where these are not the same set."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...data.splits import to_learn_from
from ...hooks import manager as plugins
from .data import Data, FolderOptions, load_data
from .errors import SettingsError
from .settings import Settings

#: Images that accuracy is measured with while a large set is pretrained on: a bank of so many, and so many to classify.
BANK, QUERIES = 50_000, 10_000


def data_of(settings: Settings) -> Data:
    """The data of a comparison: one set, or with ``evaluate_on`` one to learn from and one to judge on.

    Raises:
        SettingsError: the two do not go together, or there are no labels to judge by.
    """
    images = load_data(settings.data, settings.data_root, settings.image_size, settings.knn_k, settings.folder)
    if settings.evaluate_on is None:
        return images
    labelled = load_data(
        settings.evaluate_on, settings.data_root, images.image_size, settings.knn_k, _as_far_as_it_goes(settings)
    )
    if not labelled.labelled:
        raise SettingsError(
            f"--evaluate-on {settings.evaluate_on}: {labelled.notes[0]} It must have labels to judge by"
        )
    if labelled.channels != images.channels:
        raise SettingsError(
            f"--evaluate-on {settings.evaluate_on} has images of {labelled.channels} channels and --data {settings.data} of "
            f"{images.channels}: one backbone cannot take both"
        )
    notes = (*(note for note in images.notes if "accuracy is left out" not in note), *labelled.notes)
    return replace(
        labelled, mean=images.mean, std=images.std, notes=notes, more=everything(images.train), learnt_from=images.name
    )


def _as_far_as_it_goes(settings: Settings) -> FolderOptions:
    """The options of the folder that is judged on: channels and range as for the other; the groups are those of one."""
    if settings.evaluate_on in plugins.datasets():
        return FolderOptions()
    return replace(settings.folder, groups=None)


def everything(train: Any) -> Any:
    """All images of a training set: those that were held out of it, too, where it was cut by us."""
    whole = getattr(train, "whole", None)
    return to_learn_from(train if whole is None else whole)


def to_pretrain_on(data: Data) -> Data:
    """The data of a pretraining, which wants every image it can have.

    Without labels nothing has to be held out: all images are learnt from. With labels the test images stay apart, and of
    very large sets a part is judged on.
    """
    if data.more is not None:
        return data
    if not data.labelled:
        more = everything(data.train)
        return replace(data, train=_some(data.train, BANK), test=_some(data.test, QUERIES), more=more)
    if len(data.train) <= BANK and len(data.test) <= QUERIES:
        return data
    train, test = _some(data.train, BANK), _some(data.test, QUERIES)
    notes = (
        *data.notes,
        f"Accuracy is measured with {len(train)} of the {len(data.train)} training and {len(test)} of the {len(data.test)} "
        "test images.",
    )
    return replace(data, train=train, test=test, more=data.pretrain, notes=notes)


def _some(images: Any, most: int) -> Any:
    """At most so many images of a set, evenly from all of it."""
    if len(images) <= most or not hasattr(images, "subset"):
        return images
    return images.subset([i * len(images) // most for i in range(most)])
