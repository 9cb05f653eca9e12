"""Other people's checkpoints, in and out.

    from moco_plugins.checkpoints import convert, load
    weights = load("checkpoint_0199.pth.tar")  # format, architecture, parts: print(weights.describe())
    backbone, feature_dim = weights.build_backbone()
    weights.load_into(moco)  # backbone, heads, key encoder, queue, steps
    convert("checkpoint_0199.pth.tar", "backbone.pth", to="torchvision")

A plugin adds a format with the hook ``moco_checkpoint_formats``: see :class:`Format`.
"""

from .architectures import Architecture
from .converting import convert
from .dialects import Dialect
from .foreign import load_foreign_checkpoint, translate
from .formats import Format
from .loading import load
from .reading import Content
from .weights import Weights

__all__ = [
    "Architecture",
    "Content",
    "Dialect",
    "Format",
    "Weights",
    "convert",
    "load",
    "load_foreign_checkpoint",
    "translate",
]
