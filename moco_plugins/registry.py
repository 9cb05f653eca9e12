"""MMEngine imports this module when it meets the scope ``moco_plugins``; nothing else does."""

from .hooks.activation import activate

activate("mmengine")
