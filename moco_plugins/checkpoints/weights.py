"""What a checkpoint holds, under this project's names, whatever format it had."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..sizes import Size
from . import fitting
from .architectures import Architecture
from .heads import form_of

if TYPE_CHECKING:
    from ..core.moco import MoCo

_PARTS = ("backbone", "projector", "predictor", "key_backbone", "key_projector")


@dataclass(frozen=True)
class Weights:
    """The weights of a backbone and what MoCo has around it.

    Attributes:
        format: the name of the format they came in.
        backbone: the query backbone's tensors, under the names of the library that ``architecture`` is of (where it is not
            known: of the file); without a classifier.
        projector, predictor: of the heads, under the names of an ``nn.Sequential`` (0.weight, ...); empty where there is none.
        key_backbone, key_projector: the key encoder's.
        queue: keys (K, D), or None; ``queue_ptr`` is the row that is written next, ``queue_filled`` counts the real keys.
        steps: optimiser steps so far, or None where the file does not say.
        architecture: the network, or None where it is not known.
        left: names in the file that have no place here, such as a classifier's.
        notes: what whoever uses them should know.
        about: what else the file says: epoch, mean and std of the images, and the like.
    """

    format: str
    backbone: dict[str, Tensor] = field(repr=False)
    projector: dict[str, Tensor] = field(default_factory=dict, repr=False)
    predictor: dict[str, Tensor] = field(default_factory=dict, repr=False)
    key_backbone: dict[str, Tensor] = field(default_factory=dict, repr=False)
    key_projector: dict[str, Tensor] = field(default_factory=dict, repr=False)
    queue: Tensor | None = field(default=None, repr=False)
    queue_ptr: int = 0
    queue_filled: int | None = None
    steps: int | None = None
    architecture: Architecture | None = None
    left: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that the file has, of backbone, projector, predictor, key encoder, queue, steps."""
        held = [name for name in ("backbone", "projector", "predictor") if getattr(self, name)]
        held += ["key encoder"] if self.key_backbone else []
        held += ["queue"] if self.queue is not None else []
        return (*held, *(["steps"] if self.steps is not None else []))

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts of a MoCo that the file does not have; a predictor is only missed in MoCo v3, a queue in the others."""
        form = form_of(self.projector)
        v3 = bool(self.predictor) or (form is not None and form.batch_norm)
        wanted = ("projector", "key encoder", "predictor" if v3 else "queue", "steps")
        return tuple(part for part in wanted if part not in self.parts)

    def describe(self) -> str:
        """Say in lines what was found: format, architecture, parts with sizes, what is missing, what is left out."""
        lines = [f"format        {self.format}", f"architecture  {self.architecture or 'not known (--arch names it)'}"]
        for part in _PARTS:
            state = getattr(self, part)
            if state:
                count = sum(value.numel() for value in state.values())
                lines.append(
                    f"{part.replace('_', ' '):<14}{len(state)} tensors, {count:,} numbers{_widths(part, state)}"
                )
        if self.queue is not None:
            filled = "" if self.queue_filled in (None, len(self.queue)) else f", {self.queue_filled} of them filled"
            lines.append(f"queue         {self.queue.shape[0]} keys of {self.queue.shape[1]}{filled}")
        if self.steps is not None:
            lines.append(f"steps         {self.steps}")
        lines += [
            f"{name:<14}{value}" for name, value in self.about.items() if isinstance(value, (str, int, float, list))
        ]
        if self.missing:
            lines.append(f"not there     {', '.join(self.missing)}")
        if self.left:
            more = f" and {len(self.left) - 6} more" if len(self.left) > 6 else ""
            lines.append(f"left out      {', '.join(self.left[:6])}{more}")
        return "\n".join(lines + [f"note          {note}" for note in self.notes])

    def with_architecture(self, name: str) -> Weights:
        """Say what network the backbone is of, where it was not recognised; ``name`` as ``build_backbone`` takes it.

        Raises:
            ValueError, LookupError: the network has other tensors, or is not known.
        """
        known = self.architecture
        if known is not None and known.name.removeprefix("timm/") == name.removeprefix("timm/"):
            return dataclasses.replace(self, architecture=dataclasses.replace(known, name=name))
        first = next((value for value in self.backbone.values() if value.ndim == 4), None)
        channels = first.shape[1] if first is not None and first.shape[1] <= 4 else 3
        named = dataclasses.replace(self, architecture=Architecture(name, channels, known.image_size if known else 224))
        named.build_backbone()
        return named

    def build_backbone(self, image_size: Size | None = None, interpolate: bool = False) -> tuple[nn.Module, int]:
        """Build the backbone with its weights; return it with the width of its features.

        Args:
            image_size: of a network with position embeddings, if other than that of the file.
            interpolate: resize position embeddings to ``image_size`` (bicubic); without it another size is an error.

        Raises:
            ValueError: the architecture is not known, or does not fit.
        """
        if self.architecture is None:
            raise ValueError(
                f"the architecture of these {self.format} weights is not recognised from names such as "
                f"{', '.join(list(self.backbone)[:3])}; name it: --arch, or weights.with_architecture(name)"
            )
        model, width = self.architecture.build(image_size)
        self.load_backbone_into(model, interpolate)
        return model, width

    def load_into(self, moco: MoCo, interpolate: bool = False) -> tuple[str, ...]:
        """Load all that the file has into ``moco``: backbone, heads, key encoder, queue and steps.

        The backbone may call its parts as torchvision, timm or a framework of a loaded plugin does. Where the file has no key
        encoder, it becomes a copy of the query encoder. Nothing is changed if something does not fit.

        Returns:
            The names of ``left``, and the parts that the file has and this MoCo has not.

        Raises:
            ValueError: something does not fit; the message says what differs.
        """
        return fitting.load_into(self, moco, interpolate)

    def load_backbone_into(self, module: nn.Module, interpolate: bool = False) -> None:
        """Load the backbone alone into ``module``, which may call its parts as in :meth:`load_into`.

        Raises:
            ValueError: it does not fit; the message says what differs.
        """
        state = fitting.fit(self.backbone, module.state_dict(), "backbone", interpolate)
        module.load_state_dict(state, strict=False)  # num_batches_tracked may be missing in old files

    def build_moco(self, **options: Any) -> MoCo:
        """Build the MoCo that these weights are of and load them; ``options`` are those of :class:`moco_plugins.MoCo`.

        Heads, queue and variant are those of the file; what it does not hold (T, momentum) is the variant's.
        """
        from ..core.moco import MoCo

        backbone, width = self.build_backbone(options.pop("image_size", None), options.pop("interpolate", False))
        moco = MoCo(backbone, width, **{**self._moco_options(), **options})
        self.load_into(moco)
        return moco

    def _moco_options(self) -> dict[str, Any]:
        head, predictor = form_of(self.projector), form_of(self.predictor)
        options: dict[str, Any] = {}
        if self.queue is not None:
            options["queue_size"] = len(self.queue)
        if head is None:
            return options
        options |= {
            "projection_dim": head.out_dim,
            "projection_layers": head.layers,
            "head_batch_norm": head.batch_norm,
        }
        if head.layers > 1:
            options["hidden_dim"] = head.hidden_dim
        if predictor is not None:
            return {"variant": "v3" if predictor.last_norm else "v3-resnet", **options}
        return {"variant": "v1" if head.layers == 1 else "v2", **options}


def _widths(part: str, state: Mapping[str, Tensor]) -> str:
    form = form_of(state) if part in ("projector", "predictor", "key_projector") else None
    if form is None:
        return ""
    norm = ", BatchNorm" if form.batch_norm else ""
    return f" ({form.layers} layers, {form.hidden_dim} wide, out {form.out_dim}{norm})"
