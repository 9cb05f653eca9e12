"""What only a GPU can show; elsewhere skipped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moco_plugins import KeyQueue, MoCo, info_nce
from moco_plugins.core import attention

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_segments_join_to_the_whole():
    query, keys = torch.randn(5, 8), torch.randn(2048, 8)
    parts = [attention.attend(query, part) for part in keys.chunk(attention.segments(2048))]
    assert len(parts) == 4
    out, lse = attention.join_segments(torch.stack([o for o, _ in parts]), torch.stack([s for _, s in parts]))
    whole, total = attention.attend(query, keys)
    assert torch.allclose(out, whole, atol=1e-5)
    assert torch.allclose(lse, total, atol=1e-5)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 1000, 65536])
def test_fused_equals_dense(size, dtype):
    q, k, n = (F.normalize(torch.randn(rows, 128, device="cuda"), dim=1) for rows in (33, 33, size))
    found = []
    for implementation in ("fused", "dense"):
        kind = dtype if implementation == "fused" else torch.float32
        leaf = q.to(kind).requires_grad_()
        loss = info_nce(leaf, k.to(kind), n.to(kind), 0.2, implementation=implementation)
        loss.backward()
        found.append((loss.float(), leaf.grad.float()))
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2  # float32 products may run in TF32
    assert torch.allclose(found[0][0], found[1][0], rtol=tolerance)
    assert (found[0][1] - found[1][1]).norm() < tolerance * found[1][1].norm()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
def test_a_step_does_not_wait_for_the_device(dtype):
    moco = MoCo(nn.Sequential(nn.Flatten(), nn.Linear(48, 32)), 32, queue_size=1024, projection_dim=16).cuda()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    views = [torch.randn(16, 3, 4, 4, device="cuda") for _ in range(2)]

    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = moco(views)
        loss.backward()
        optimizer.step()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(moco.queue.filled) == 32
    assert moco.queue.keys.dtype == torch.float32


@needs_gpu
@pytest.mark.gpu
def test_the_ring_is_the_same_on_the_device():
    on_host, on_device = KeyQueue(7, 4, fill="empty"), KeyQueue(7, 4, fill="empty").cuda()
    for rows in (3, 9, 5, 1):
        keys = torch.randn(rows, 4)
        keys[0, 0] = torch.nan
        on_host.enqueue(keys)
        on_device.enqueue(keys.cuda())
    assert torch.allclose(on_host.keys, on_device.keys.cpu())
    assert int(on_host.ptr) == int(on_device.ptr)
