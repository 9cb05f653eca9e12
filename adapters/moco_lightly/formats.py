"""Checkpoints of lightly's MoCo: its example and its ImageNet benchmark; and what lightly-train exports."""

from __future__ import annotations

import re

from moco_plugins.checkpoints import Content, Format, Weights

#: Query backbone and head, key backbone and head: the example's, then the benchmark's.
LAYOUTS = (
    ("backbone.", "projection_head.", "backbone_momentum.", "projection_head_momentum."),
    ("backbone.", "projection_head.", "key_backbone.", "key_projection_head."),
)
#: lightly-train's wrappers around torchvision's and timm's models, inside an embedding model or not.
_WRAPPED = re.compile(r"(?:.*\.)?(?:wrapped_model\._|_)(?:model|features)\.(?=[^.]+\.)")


def read(content: Content) -> Weights | None:
    """A Lightning checkpoint, or a state dict, of lightly's MoCo. It has no queue; classifiers beside it are left out."""
    layout = next((layout for layout in LAYOUTS if content.has(*layout)), None)
    if layout is None:
        return None
    step = content.raw.get("global_step")
    backbone, projector, key_backbone, key_projector = (content.take(prefix) for prefix in layout)
    return Weights(
        "",
        backbone,
        projector,
        key_backbone=key_backbone,
        key_projector=key_projector,
        steps=step if isinstance(step, int) else None,
        about={"epoch": content.raw["epoch"]} if isinstance(content.raw.get("epoch"), int) else {},
        notes=("lightly's checkpoints hold no queue: it starts fresh, and the loss is off until it has been refilled",),
    )


def read_train(content: Content) -> Weights | None:
    """The state dict of lightly-train's wrapped or embedding model; that of the model itself is the library's."""
    prefixes = {found[0] for name in content.state if (found := _WRAPPED.match(name))}
    if len(prefixes) != 1:
        return None
    return Weights("", content.take(prefixes.pop()))


FORMATS = {
    "lightly": Format("lightly's MoCo: example and ImageNet benchmark", read),
    "lightly-train": Format("lightly-train's exported models", read_train),
}
