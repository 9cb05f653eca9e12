"""L2 normalisation that half precision and rows of zeros cannot break."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows (N, D) of unit length, in float32 at least; rows of zeros stay zero.

    ``F.normalize`` multiplies the gradient of such a row by 1e12, which half precision turns into infinity, and into NaN
    one layer further down. Here it passes unchanged.
    """
    with torch.autocast(rows.device.type, enabled=False):
        wide = rows.float() if rows.dtype in _HALF else rows
        norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        return wide / torch.where(norm > 1e-12, norm, 1.0)
