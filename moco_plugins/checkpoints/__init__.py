"""Checkpoints of other people's code."""

from .formats import load_foreign_checkpoint, translate

__all__ = ["load_foreign_checkpoint", "translate"]
