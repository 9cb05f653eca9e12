"""lightly's published MoCo example and ours, side by side: same data, batches, initial weights; step by step in turn.

    python tests/benchmarks/side_by_side_lightly.py                          a small convnet on digits, until it has learned
    python tests/benchmarks/side_by_side_lightly.py --backbone resnet18 --steps 5 --queue 65536 --dim 128

The first row is lightly's ``examples/pytorch/moco.py`` as it stands: its heads, its loss with memory bank, its momentum
update, SGD. The second is :class:`moco_plugins.MoCo` with the same settings, which leaves BatchNorm unsplit as lightly does.
The third has our defaults for BatchNorm. Memory is what a step allocates on top of what is there before it.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.backbones import build_backbone
from moco_plugins.core.views import AffineViews
from moco_plugins.data import datasets
from moco_plugins.evaluation import extract_features, knn_accuracy

LEARNING_RATE, MOMENTUM = 0.06, 0.996  # the example's


class LightlyExample(nn.Module):
    """The model of lightly's examples/pytorch/moco.py."""

    def __init__(self, backbone: nn.Module, width: int, queue: int, dim: int, temperature: float) -> None:
        super().__init__()
        self.backbone, self.projection_head = backbone, MoCoProjectionHead(width, width, dim)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(temperature, memory_bank_size=(queue, dim))

    def loss(self, views: list[Tensor], momentum: float) -> Tensor:
        """One step of the example's loop, up to the loss."""
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = views
        query = self.projection_head(self.backbone(x_query).flatten(start_dim=1))
        key = self.projection_head_momentum(self.backbone_momentum(x_key).flatten(start_dim=1)).detach()
        return self.criterion(query, key)


@dataclass
class Contender:
    """Something to train, and what was measured of it."""

    name: str
    model: nn.Module
    loss: Callable[[list[Tensor], float], Tensor]
    backbone: nn.Module
    seconds: list[float] = field(default_factory=list)
    mib: float = 0.0
    last_loss: float = float("nan")

    def __post_init__(self) -> None:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE)

    def step(self, views: list[Tensor], momentum: float) -> None:
        """Take one training step."""
        loss = self.loss(views, momentum)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.last_loss = loss.item()


def contenders(args: argparse.Namespace, channels: int) -> list[Contender]:
    """Build all from the same initial weights and the same initial queue."""
    torch.manual_seed(args.seed)
    backbone, width = build_backbone(args.backbone, channels=channels, image_size=28)
    backbones = [copy.deepcopy(backbone).to(args.device) for _ in range(3)]
    example = LightlyExample(backbones[0], width, args.queue, args.dim, args.temperature).to(args.device)
    found = [Contender("lightly's example", example, example.loss, backbones[0])]
    for name, shuffle, net in (("ours", False, backbones[1]), ("ours, BatchNorm split", "auto", backbones[2])):
        moco = MoCo(
            net,
            width,
            queue_size=args.queue,
            projection_dim=args.dim,
            temperature=args.temperature,
            momentum=lambda step, total: cosine_schedule(min(step, args.steps), args.steps + 1, MOMENTUM, 1.0),
            shuffle_bn=shuffle,
        ).to(args.device)
        for ours, theirs in zip(
            moco.query_encoder.projector.parameters(), example.projection_head.parameters(), strict=True
        ):
            ours.data.copy_(theirs)
        moco.queue.keys.copy_(example.criterion.memory_bank.bank)
        found.append(Contender(name, moco, lambda views, momentum, moco=moco: moco(views), net))
    return found


def allocated_mib(contender: Contender, views: list[Tensor], momentum: float) -> float:
    """The most that a step has allocated at one time on top of what was there before, in MiB."""
    if views[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        contender.step(views, momentum)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        contender.step(views, momentum)
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak / 2**20


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print the table, return its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist5k", help="a data set by name, of grey images")
    parser.add_argument("--backbone", default="convnet")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--queue", type=int, default=4096, help="the example's: 4096")
    parser.add_argument("--dim", type=int, default=128, help="the example's: 128")
    parser.add_argument("--temperature", type=float, default=0.5, help="the example's: NTXentLoss's default, 0.5")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    args = parser.parse_args(arguments)

    train, test = datasets.DATASETS[args.data](None)
    make_views, generator = AffineViews(), torch.Generator().manual_seed(args.seed)
    rivals = contenders(args, train.channels)
    bank = extract_features(rivals[0].backbone, train), extract_features(rivals[0].backbone, test)
    untrained = knn_accuracy(*bank[0], *bank[1])
    for step in range(args.steps):
        rows = torch.randperm(len(train), generator=generator)[: args.batch_size]
        views = [view.to(args.device) for view in make_views(train.images[rows])]
        momentum = cosine_schedule(step, args.steps + 1, MOMENTUM, 1.0)
        # In turn, and each first as often as last: what disturbs the machine disturbs all alike.
        for rival in rivals if step % 2 else reversed(rivals):
            if step == 1:
                rival.mib = allocated_mib(rival, views, momentum)
                continue
            start = time.perf_counter()
            rival.step(views, momentum)
            if step:
                rival.seconds.append(time.perf_counter() - start)
    table = []
    for rival in rivals:
        features = extract_features(rival.backbone, train), extract_features(rival.backbone, test)
        ratios = [a / b for a, b in zip(rivals[0].seconds, rival.seconds, strict=True)]
        table.append(
            {
                "name": rival.name,
                "images_per_second": args.batch_size / statistics.median(rival.seconds),
                "speed_against_lightly": statistics.median(ratios),
                "step_mib": rival.mib,
                "loss": rival.last_loss,
                "knn_top1": knn_accuracy(*features[0], *features[1]),
            }
        )
    if args.json:
        print(json.dumps(table))
    else:
        print(
            f"{args.backbone}, batch {args.batch_size}, queue {args.queue} x {args.dim}, {args.steps} steps, {args.device}"
        )
        print(f"{'':24}{'images/s':>10}{'speed':>8}{'MiB/step':>10}{'loss':>8}{'kNN':>8}   (untrained {untrained:.3f})")
        for row in table:
            print(
                f"{row['name']:24}{row['images_per_second']:10.0f}{row['speed_against_lightly']:8.2f}"
                f"{row['step_mib']:10.1f}{row['loss']:8.3f}{row['knn_top1']:8.3f}"
            )
    return table


if __name__ == "__main__":
    main()
