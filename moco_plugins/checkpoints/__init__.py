"""Other people's checkpoints, in and out.

    from moco_plugins.checkpoints import load
    weights = load("checkpoint_0199.pth.tar")  # format, architecture, parts: print(weights.describe())
    backbone, feature_dim = weights.build_backbone()
    weights.load_into(moco)  # backbone, heads, key encoder, queue, steps

A plugin adds a format with the hook ``moco_checkpoint_formats``: see :class:`Format`.
"""

from .architectures import Architecture
from .dialects import Dialect
from .foreign import load_foreign_checkpoint, translate
from .formats import Format
from .loading import load
from .reading import Content
from .weights import Weights

__all__ = ["Architecture", "Content", "Dialect", "Format", "Weights", "load", "load_foreign_checkpoint", "translate"]
