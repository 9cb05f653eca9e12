"""Data sets by name, and what holds them: the public names of :mod:`moco_plugins.data`."""

from .data.arrays import DataNotFoundError, ImageArray
from .data.datasets import DATASETS, DEFAULT_ROOT, ROOT_VARIABLE, digits, mnist5k
from .data.splits import stratified_split, to_learn_from, train_test

__all__ = [
    "DATASETS",
    "DEFAULT_ROOT",
    "ROOT_VARIABLE",
    "DataNotFoundError",
    "ImageArray",
    "digits",
    "mnist5k",
    "stratified_split",
    "to_learn_from",
    "train_test",
]
