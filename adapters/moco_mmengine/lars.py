"""LARS under the name that MMEngine's registry has for it."""

from moco_plugins.core.lars import LARS

__all__ = ["LARS"]
