"""The bars that the core is held to, measured on this machine: ``python tests/benchmarks/core.py``. Not a test.

Run it on a machine that does nothing else. Each line: what, measured, bar.
"""

import sys

import torch
import torchvision

from moco_plugins.bench import speed

TURNS = 15


def main() -> int:
    missed = 0

    def line(what: str, value: float, bar: float, at_most: bool) -> None:
        nonlocal missed
        holds = value <= bar if at_most else value >= bar
        missed += not holds
        print(f"{'ok  ' if holds else 'MISS'} {what:62} {value:8.2f}   {'<=' if at_most else '>='} {bar}", flush=True)

    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for n, size, dim, dtype in speed.SHAPES:
        contenders = speed.loss_contenders(n, size, dim, dtype)
        seconds = speed.paired(contenders, TURNS)
        shape = f"N={n} K={size} D={dim} {str(dtype).removeprefix('torch.')}"
        first = (n, size, dim, dtype) == speed.SHAPES[0]
        if first:
            line(f"{shape}: lightly / ours", speed.ratio(seconds, "lightning", "moco-plugins"), 3, False)
            line(f"{shape}: ours / two products", speed.ratio(seconds, "moco-plugins", "two products"), 1.1, True)
            share = speed.extra_peak_bytes(contenders["moco-plugins"]) / (size * dim * 4)
            line(f"{shape}: extra memory / queue", share, 0.1, True)
        line(f"{shape}: plain formula / ours", speed.ratio(seconds, "plain formula", "moco-plugins"), 1, False)

    contenders = speed.ema_contenders(torchvision.models.resnet50())
    seconds = speed.paired(contenders, TURNS)
    line("EMA of a ResNet-50: ours / one flat lerp", speed.ratio(seconds, "moco-plugins", "one flat lerp"), 1.25, True)
    for rival in ("lightning", "mmengine", "torch.optim.swa_utils"):
        line(f"EMA of a ResNet-50: {rival} / ours", speed.ratio(seconds, rival, "moco-plugins"), 1, False)
    line("added to a ResNet-18 step, percent", 100 * speed.step_overhead(), 3, True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
