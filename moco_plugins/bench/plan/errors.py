"""What can be wrong with what was asked for."""

from __future__ import annotations


class SettingsError(ValueError):
    """Settings that cannot be carried out; the message names the option, its value and the cure."""


class MissingExtraError(ImportError):
    """The packages of an extra are not installed; the message has the pip command."""
