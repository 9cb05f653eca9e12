"""MoCo in a lightly pipeline: lightly's data set and transform, our module or loss. MNIST digits, or CIFAR-10 from disk.

python recipes/lightly/moco.py                  Lightning: about 40 s on two CPU cores, kNN accuracy 0.93 (untrained: 0.89)
python recipes/lightly/moco.py --devices 2      the same, distributed
python recipes/lightly/moco.py --loop           lightly's plain training loop, with MoCoLoss in place of its NTXentLoss
"""

import argparse
import copy

import pytorch_lightning as pl
import torch
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import update_momentum
from lightly.transforms import MoCoV2Transform
from lightly.utils.dist import print_rank_zero
from moco_lightly import MoCoLoss, MoCoModule
from moco_lightly.data import lightly_datasets

from moco_plugins.backbones import build_backbone
from moco_plugins.evaluation import extract_features, knn_accuracy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="mnist5k", choices=["mnist5k", "cifar10"])
parser.add_argument("--data-root", help="where CIFAR-10 is; default: data")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--loop", action="store_true")
args = parser.parse_args()
pl.seed_everything(0)
if args.data == "mnist5k":  # digits have no colours, and a mirrored 2 is no 2
    digits = {"cj_prob": 0, "random_gray_scale": 0, "gaussian_blur": 0, "hf_prob": 0, "normalize": None}
    transform = MoCoV2Transform(28, min_scale=0.4, rr_prob=1, rr_degrees=20, **digits)
    backbone, width = build_backbone("convnet", channels=1, image_size=28)
else:
    transform = MoCoV2Transform(32, cj_strength=0.5, gaussian_blur=0, normalize=None)
    backbone, width = build_backbone("resnet18-cifar", image_size=32)
train, test = lightly_datasets(args.data, transform, args.data_root)
loader = torch.utils.data.DataLoader(train, batch_size=128 // args.devices, shuffle=True)
queue, dim, lr = 1024, 64, 2e-3
if args.loop:
    encoder = torch.nn.Sequential(backbone, MoCoProjectionHead(width, width, dim))
    key_encoder = copy.deepcopy(encoder).requires_grad_(False)
    criterion = MoCoLoss(temperature=0.1, memory_bank_size=(queue, dim))
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, epochs=args.epochs, steps_per_epoch=len(loader))
    for _ in range(args.epochs):
        for (x_query, x_key), _, _ in loader:
            update_momentum(encoder, key_encoder, m=0.99)
            loss = criterion(encoder(x_query), key_encoder(x_key).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # now the keys enter the queue
            schedule.step()
else:
    options = {"optimizer": "adamw", "lr": lr, "scale_lr": False, "warmup_epochs": args.epochs / 5}
    model = MoCoModule(backbone, width, "v2", queue, dim, momentum=0.99, temperature=0.1, **options)
    pl.Trainer(max_epochs=args.epochs, devices=args.devices, logger=False).fit(model, loader)
features = [extract_features(backbone, data.dataset.images) for data in (train, test)]
print_rank_zero(f"kNN accuracy {knn_accuracy(*features[0], *features[1]):.3f}")
