"""ONNX of the encoder: images (N, C, H, W) -> features (N, D), or with the head -> projections; N is free."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import torch
from torch import nn

from ..sizes import sides
from .fitting import fit_head
from .formats import Format
from .heads import form_of
from .weights import Weights


def write(weights: Weights, path: Path, part: str) -> None:
    """Build the network in eval mode and export it; the exporter is torch's."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "moco-plugins[onnx]"', name=error.name
        ) from error
    model, width = weights.build_backbone()
    if part == "encoder":
        model = nn.Sequential(model, _head(weights, width))
    network = weights.architecture
    assert network is not None  # build_backbone needs it
    images = torch.zeros(2, network.channels, *sides("image_size", network.image_size))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (images,),
            str(path),
            input_names=["images"],
            output_names=["features" if part == "backbone" else "projections"],
            dynamic_shapes=({0: torch.export.Dim("N", min=1)},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _head(weights: Weights, width: int) -> nn.Module:
    from ..core.variants import projection_head

    form = form_of(weights.projector)
    if form is None:
        raise ValueError("these weights have no projection head; --part backbone exports the backbone alone")
    head = projection_head(width, form.hidden_dim, form.out_dim, form.layers, form.batch_norm)
    head.load_state_dict(fit_head(weights.projector, head.state_dict(), "projector"))
    return head


FORMATS = {"onnx": Format("ONNX of the encoder", write=write, parts=("backbone", "encoder"))}
