"""How long a run may be: the same number of epochs or images for all, or of encoder passes or seconds for each."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SettingsError

KINDS = ("epochs", "images", "passes", "seconds")


@dataclass(frozen=True)
class Budget:
    """An amount of something: ``epochs``, ``images``, encoder ``passes`` (images, forward and backward) or ``seconds``."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "seconds=60".

        Raises:
            SettingsError: an unknown kind, or not a positive number.
        """
        kind, _, amount = text.partition("=")
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if kind not in KINDS or not value > 0:
            raise SettingsError(
                f"--budget {text!r}: write one of {', '.join(KINDS)}, = and a positive number: seconds=60"
            )
        return cls(kind, value)

    @property
    def per_method(self) -> bool:
        """Whether methods get different numbers of epochs."""
        return self.kind in ("passes", "seconds")
