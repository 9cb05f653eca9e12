"""MoCo in plain torch on 5000 MNIST digits: about 20 s on two CPU cores, kNN accuracy 0.94 (untrained: 0.89)."""

import argparse

import torch

from moco_plugins import MoCo, TwoViews, datasets
from moco_plugins.backbones import build_backbone
from moco_plugins.evaluation import extract_features, knn_accuracy
from moco_plugins.views import AffineViews

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="mnist5k", help="cifar10, say: in colour, with the views of the paper")
parser.add_argument("--data-root", help="where it is")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(0)
train, test = datasets.DATASETS[args.data](args.data_root)
backbone, feature_dim = build_backbone("convnet", train.channels, train.image_size)
moco = MoCo(backbone, feature_dim, queue_size=1024, projection_dim=64, momentum=0.99, temperature=0.1)
optimizer = torch.optim.AdamW(moco.parameters(), lr=2e-3, weight_decay=0.05)
loader = torch.utils.data.DataLoader(train, batch_size=128, shuffle=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.epochs * len(loader))
views = TwoViews("v2", train.image_size, mean=(), std=()) if train.channels == 3 else AffineViews()  # of whole batches


def knn():
    return knn_accuracy(*extract_features(backbone, train), *extract_features(backbone, test))


print(f"untrained: kNN accuracy {knn():.3f}")
for epoch in range(args.epochs):
    for images, _ in loader:
        loss = moco(views(images))  # the key encoder and the queue follow the optimiser by themselves
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.2f}, kNN accuracy {knn():.3f}", flush=True)
