"""Local crops of multi-crop in SwAV and DINO, as in their papers; the other methods say that they have no use for them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("lightly")

from moco_lightly.methods.clusters import SwAV
from moco_lightly.methods.teachers import DINO

from moco_plugins.backbones import build_backbone
from moco_plugins.hooks import manager as plugins

torch.set_num_threads(1)


def crops(count=2, n=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(n, 3, size, size, generator=generator) for size in [32, 32, *[16] * count]]


def built(kind, **options):
    torch.manual_seed(0)
    backbone, width = build_backbone("convnet", 3, 32)
    return kind(backbone, width, **options)


def test_swav_predicts_both_assignments_from_each_local_crop():
    # Section 3.2: only the two large views are assigned to prototypes; all crops predict the assignments of the others.
    model = built(SwAV, hidden_dim=16, projection_dim=8, prototypes=12, queue_size=0).eval()
    views = crops()
    logits = [model.prototypes(torch.nn.functional.normalize(model.encoder(view), dim=1)) for view in views]
    expected = model.criterion(logits[:2], logits[2:], None)
    assert torch.allclose(model(views), expected.squeeze(), atol=1e-4)
    assert not torch.allclose(model(views), model(views[:2]), atol=1e-4)


def test_dino_teaches_large_views_alone_and_asks_the_student_about_all():
    # Section 3.1: the loss runs over pairs of a large view of the teacher's and any other view of the student's.
    model = built(DINO, hidden_dim=16, projection_dim=24, bottleneck_dim=8).eval()
    views = crops()
    teacher = [model.teacher(view) for view in views[:2]]
    student = [model.encoder(view) for view in views]
    center = model.criterion.center.clone()
    expected = 0.0
    for i, t in enumerate(teacher):
        target = torch.softmax((t - center[0]) / 0.04, dim=1)
        for j, s in enumerate(student):
            if i != j:
                expected = expected - (target * torch.log_softmax(s / 0.1, dim=1)).sum(1).mean() / 6
    assert float(model(views)) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("name", ["swav", "dino"])
def test_they_train(name):
    model = built(plugins.method_factory(name), hidden_dim=16, projection_dim=8).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(crops()).backward()
        optimizer.step()
    assert model.steps == 2


@pytest.mark.parametrize("name", ["simclr", "byol", "simsiam", "barlow-twins", "vicreg"])
def test_others_say_so(name):
    with pytest.raises(TypeError, match=r"views is 4 views.*local crops.*MoCo, SwAV and DINO"):
        built(plugins.method_factory(name))(crops())
