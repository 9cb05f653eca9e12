"""What travels in a step with a queue shared out among two ranks: ``python tests/benchmarks/sharded_bytes.py``. Not a test.

Bytes a rank receives, from the tensors handed to torch.distributed, over the queries' own N R D numbers, for several K.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
N, D = 64, 128


def bytes_of_a_step(size: int) -> int:
    from moco_plugins import MoCo

    moco = MoCo(nn.Linear(16, 32), 32, queue_size=size, projection_dim=D, gather="sharded", shuffle_bn=False)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    received = 0
    gather, exchange = dist.all_gather, dist.all_to_all_single

    def counted_gather(rows, *args, **options):
        nonlocal received
        received += sum(row.numel() * row.element_size() for row in rows)
        return gather(rows, *args, **options)

    def counted_exchange(output, *args, **options):
        nonlocal received
        received += output.numel() * output.element_size()
        return exchange(output, *args, **options)

    for step in range(2):
        if step:  # the first one shares the queue out
            dist.all_gather, dist.all_to_all_single = counted_gather, counted_exchange
        try:
            moco([torch.randn(N, 16), torch.randn(N, 16)]).backward()
            optimizer.step()
        finally:
            dist.all_gather, dist.all_to_all_single = gather, exchange
    return received


if __name__ == "__main__":
    from ranks import Ranks

    with Ranks(2) as ranks:
        for size in (1024, 16384, 131072):
            counted = ranks.run(bytes_of_a_step, size)[0]
            print(f"K={size:7}: {counted} bytes, {counted / (N * 2 * D * 4):.2f} times N R D")
