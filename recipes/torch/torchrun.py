"""MoCo on two processes: torchrun --standalone --nproc_per_node=2 recipes/torch/torchrun.py; 2 epochs: kNN 0.92."""

import argparse

import torch
import torch.distributed as dist

from moco_plugins import MoCo, datasets
from moco_plugins.backbones import build_backbone
from moco_plugins.evaluation import extract_features, knn_accuracy
from moco_plugins.views import AffineViews

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs

dist.init_process_group()  # NCCL for tensors on GPUs, gloo for others
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(dist.get_rank())  # views of its own for each; weights and queue are the first one's
train, test = datasets.DATASETS["mnist5k"](None)
backbone, feature_dim = build_backbone("convnet", channels=1, image_size=28)
moco = MoCo(backbone, feature_dim, queue_size=1024, projection_dim=64, momentum=0.99, temperature=0.1).to(device)
model = torch.nn.parallel.DistributedDataParallel(moco)
optimizer = torch.optim.AdamW(moco.parameters(), lr=2e-3, weight_decay=0.05)
share = torch.utils.data.DistributedSampler(train, drop_last=True)
loader = torch.utils.data.DataLoader(train, 128 // dist.get_world_size(), sampler=share, drop_last=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(loader))
views = AffineViews()
for epoch in range(epochs):
    share.set_epoch(epoch)
    for images, _ in loader:
        loss = model(views(images.to(device)))  # the queue takes the keys of all processes
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    if dist.get_rank() == 0:
        knn = knn_accuracy(*extract_features(backbone, train), *extract_features(backbone, test))
        print(f"epoch {epoch + 1}: loss {loss.item():.2f}, kNN accuracy {knn:.3f}", flush=True)
dist.destroy_process_group()
