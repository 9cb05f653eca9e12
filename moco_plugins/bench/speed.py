"""``moco-plugins speed``: what MoCo's own parts cost on this machine, beside the plain formula and other libraries.

Contenders run in turn, again and again, and ratios are taken within a turn: so a machine that is slow for a moment is
slow for all. The median ratio is reported, of fewer turns where they take long: three at least. Rows are printed as they
are measured, in a minute or two in all.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.infonce import info_nce
from ..core.key_queue import KeyQueue
from ..core.moco import MoCo
from ..core.momentum import ema
from ..hooks import manager as plugins
from ..steps.pairing import pair_parameters
from .plain_losses import LOSSES, loss_steps, masked_steps
from .speed_views import view_contenders

#: (N, K, D, dtype) of loss + enqueue; the first is the paper's.
SHAPES = [
    (256, 65536, 128, torch.float32),
    (64, 65536, 128, torch.float32),
    (256, 4096, 128, torch.float32),
    (1024, 65536, 256, torch.float32),
    (256, 65536, 96, torch.float32),
    (256, 60000, 128, torch.float32),
    (256, 65536, 128, torch.bfloat16),
]
TEMPERATURE = 0.2
#: Seconds of one comparison, and the turns it has however long these take.
PATIENCE, FEWEST = 4.0, 3
Row = tuple[str, str, str]
#: A step that takes (query, key); queries carry a gradient.
Step = Callable[[Tensor, Tensor], object]


def paired(contenders: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Time the contenders in turn: name -> seconds of each turn, after a first that does not count.

    After :data:`PATIENCE` seconds there are no more turns than :data:`FEWEST`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    begun = time.perf_counter()
    for turn in range(turns + 1):
        if turn > FEWEST and time.perf_counter() - begun > PATIENCE:
            break
        for name, contender in contenders.items():
            start = time.perf_counter()
            contender()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], name: str, reference: str) -> float:
    """Median over the turns of time(name) / time(reference)."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference], strict=True))


def loss_contenders(
    n: int, size: int, dim: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> dict[str, Callable[[], object]]:
    """Forward, backward and enqueue: ours, the plain formula, the limit, and what the adapters' libraries do."""
    queue = KeyQueue(size, dim).to(device)
    bank = queue.keys.to(dtype) if dtype != queue.keys.dtype else queue.keys

    def ours(query: Tensor, key: Tensor) -> None:
        info_nce(query, key, bank, TEMPERATURE).backward()
        queue.enqueue(key)

    plain = bank.T.clone()  # the authors' layout, (D, K)

    def textbook(query: Tensor, key: Tensor) -> None:
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ plain.clone().detach()], 1) / TEMPERATURE
        F.cross_entropy(logits, torch.zeros(n, dtype=torch.long, device=device)).backward()
        plain[:, :n] = key.T[:, :size]

    def limit(query: Tensor, key: Tensor) -> None:
        with torch.no_grad():
            (query @ bank.T) @ bank

    steps: dict[str, Step] = {"moco-plugins": ours, "plain formula": textbook, "two products": limit}
    if dtype == torch.float32:
        for _, adapter in plugins.adapters().values():
            build = adapter.baselines.get("queue_loss")
            if build is not None and (rival := build(size, dim, TEMPERATURE, device)) is not None:
                steps[adapter.framework] = rival

    def with_data(step: Step) -> Callable[[], object]:
        query = F.normalize(torch.randn(n, dim, device=device), dim=1).to(dtype).requires_grad_()
        key = F.normalize(torch.randn(n, dim, device=device), dim=1).to(dtype)
        return lambda: step(query, key)

    return {name: with_data(step) for name, step in steps.items()}


def ema_contenders(module: nn.Module) -> dict[str, Callable[[], object]]:
    """The momentum update of ``module``: ours, one flat lerp of as many bytes, torch's and the adapters' libraries'."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    key = copy.deepcopy(module)
    flat_q = torch.cat([p.detach().flatten() for p in module.parameters()])
    flat_k = flat_q.clone()

    def ours() -> None:
        pairs = pair_parameters(module, key)
        ema([k for _, _, k in pairs], [q for _, q, _ in pairs], 0.999)

    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    contenders: dict[str, Callable[[], object]] = {
        "moco-plugins": ours,
        "one flat lerp": lambda: flat_k.lerp_(flat_q, 0.001),
        "torch.optim.swa_utils": lambda: averaged.update_parameters(module),
    }
    for _, adapter in plugins.adapters().values():
        build = adapter.baselines.get("ema")
        if build is not None and (rival := build(module, copy.deepcopy(module), 0.999)) is not None:
            contenders[adapter.framework] = rival
    return contenders


def step_overhead(n: int = 32, size: int = 65536, image_size: int = 224, turns: int = 5) -> float:
    """Return what MoCo adds to a ResNet-18 step beyond its encoders' own work, as a fraction of that work.

    A whole step is timed against a bare one (the query's forward and backward, the key's forward), both with SGD.
    """
    import torchvision

    backbone = torchvision.models.resnet18()
    backbone.fc = nn.Identity()
    moco = MoCo(backbone, 512, queue_size=size, shuffle_bn=False)
    query, key = copy.deepcopy(moco.query_encoder), copy.deepcopy(moco.key_encoder)
    views = [torch.randn(n, 3, image_size, image_size) for _ in range(2)]
    optimizer = torch.optim.SGD(moco.parameters(), 0.01)
    bare_optimizer = torch.optim.SGD(query.parameters(), 0.01)

    def ours() -> None:
        optimizer.zero_grad()
        moco(views).backward()
        optimizer.step()

    def bare() -> None:
        bare_optimizer.zero_grad()
        with torch.no_grad():
            target = key(views[1])
        (query(views[0]) * target).sum().backward()
        bare_optimizer.step()

    return ratio(paired({"ours": ours, "bare": bare}, turns), "ours", "bare") - 1


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing on stderr, from C++ either: torch's profiler tells there of GPUs that nobody asked for."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def extra_peak_bytes(step: Callable[[], object]) -> int:
    """Return how far memory allocated by torch on the CPU rises above its start while ``step`` runs."""
    from torch.profiler import ProfilerActivity, profile

    step()
    with _silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    level, peak = 0, 0
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0]
    for event in sorted(memory, key=lambda event: event["ts"]):
        level += event["args"]["Bytes"]
        peak = max(peak, level)
    return peak


def loss_rows(n: int, size: int, dim: int, turns: int) -> Iterator[Row]:
    """The other losses against their plain formulas, and what leaving out false negatives costs."""
    shape = f"N={n} K={size} D={dim}"
    masked = masked_steps(n, size, dim, TEMPERATURE)
    cost = ratio(paired(masked, turns), "moco-plugins", "without a mask")
    yield f"false negatives left out {shape}", "ours / without a mask", f"{cost:.2f}"
    share = extra_peak_bytes(masked["moco-plugins"]) / (size * dim * 4)
    yield f"false negatives left out {shape}", "moco-plugins: extra memory / queue", f"{share:.2f}"
    for name in LOSSES:
        seconds = paired(loss_steps(name, n, size, dim, TEMPERATURE), max(FEWEST, turns // 3))
        yield f"{name} {shape}", "plain formula", f"{ratio(seconds, 'plain formula', 'moco-plugins'):.2f}"


def table(turns: int, quick: bool, device: str) -> Iterator[Row]:
    """Measure: rows of (what, against what, how many times ours)."""
    yield from view_rows(turns, quick, device)
    for n, size, dim, dtype in SHAPES[:1] if quick else SHAPES:
        contenders = loss_contenders(n, size, dim, dtype, device)
        seconds = paired(contenders, turns)
        what = f"loss + enqueue N={n} K={size} D={dim} {str(dtype).removeprefix('torch.')}"
        for name in list(contenders)[1:]:
            yield what, name, f"{ratio(seconds, name, 'moco-plugins'):.2f}"
        if device == "cpu" and size == 65536 and dtype == torch.float32:
            for name, contender in contenders.items():
                share = extra_peak_bytes(contender) / (size * dim * 4)
                yield what, f"{name}: extra memory / queue", f"{share:.2f}"
    if device == "cpu":
        yield from loss_rows(*SHAPES[0][:3], turns)
    import torchvision

    contenders = ema_contenders(torchvision.models.resnet50().to(device))
    seconds = paired(contenders, turns)
    for name in list(contenders)[1:]:
        yield "momentum update of a ResNet-50", name, f"{ratio(seconds, name, 'moco-plugins'):.2f}"
    if device == "cpu":
        added = step_overhead(n=8 if quick else 32, turns=3 if quick else 7)
        yield "what MoCo adds to a ResNet-18 step", "bare encoders", f"{100 * added:+.1f} %"


def view_rows(turns: int, quick: bool, device: str) -> list[Row]:
    """Two views of a batch, on one core and where there is one on the device, beside those of other libraries."""
    rows, threads = list[Row](), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size, source, count in ((32, (32, 32), 256), (224, (400, 500), 16)):
            contenders = view_contenders(size, source, count // 4 if quick else count, device)
            seconds = paired(contenders, min(turns, 7))
            what, ours, *others = f"two views, {size} px from {source[1]} x {source[0]}, one core", *contenders
            rows += [(what, f"{name} / {ours}", f"{ratio(seconds, name, ours):.2f}") for name in others]
    finally:
        torch.set_num_threads(threads)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``moco-plugins speed``."""
    parser = argparse.ArgumentParser("moco-plugins speed", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=15, help="timed turns of each contender (default 15)")
    parser.add_argument("--quick", action="store_true", help="one shape and smaller batches: under a minute")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    print(f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads; time of others / ours\n")
    for what, name, value in table(arguments.turns, arguments.quick, arguments.device):
        print(f"{what:56} {name:38} {value:>8}", flush=True)
    return 0
