"""MoCo's loss with its queue: the public name of :mod:`moco_plugins.core.queue_loss`."""

from .core.queue_loss import QueueLoss

__all__ = ["QueueLoss"]
