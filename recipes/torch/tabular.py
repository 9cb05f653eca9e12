"""Tables: 1797 rows of 64 numbers, a fifth of them drawn anew for each view (SCARF, arXiv:2106.15147). About 10 s,
kNN accuracy 0.94 (untrained: 0.92)."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from moco_plugins import MoCo
from moco_plugins.evaluation import knn_accuracy

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=20)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
table = load_digits()
rows, labels = torch.tensor(table.data / 16, dtype=torch.float32), torch.tensor(table.target)
train, test = slice(0, 1437), slice(1437, None)


def view(batch):
    """Each number comes, with probability 0.2, from the same column of some other row."""
    others = rows[torch.randint(1437, batch.shape), torch.arange(batch.shape[1])]
    return torch.where(torch.rand_like(batch) < 0.2, others, batch)


network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128))
moco = MoCo(
    network, 128, queue_size=1024, projection_dim=64, momentum=0.99, queue_options={"columns": {"id": torch.long}}
)
optimizer = torch.optim.AdamW(moco.parameters(), lr=2e-3)


@torch.no_grad()
def knn():
    return knn_accuracy(moco.embed(rows[train]), labels[train], moco.embed(rows[test]), labels[test])


print(f"untrained: kNN accuracy {knn():.3f}")
for _ in range(epochs):
    for batch in torch.randperm(1437)[:1408].view(-1, 64):
        loss = moco([view(rows[batch]), view(rows[batch])], ids=batch)  # a row is no negative of itself
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"after {epochs} epochs: loss {loss.item():.2f}, kNN accuracy {knn():.3f}")
