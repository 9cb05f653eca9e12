# The authors' CIFAR-10 demonstration (moco_cifar10_demo.ipynb of facebookresearch/moco): one GPU, SGD 0.06, weight decay
# 5e-4, batch 512, 200 epochs, K 4096, m 0.99, T 0.1, BatchNorm split into 8 groups. It reports kNN 82.6 %; with
# symmetric=True 85.3 %. Its views have no blur; v2's have a mild one at this size.
# Data: python -c "from torchvision.datasets import CIFAR10; CIFAR10('data', download=True)"
custom_imports = dict(imports=["moco_plugins"], allow_failed_imports=False)
model = dict(
    type="moco_plugins.MoCo",
    variant="v1",
    queue_size=4096,
    momentum=0.99,
    temperature=0.1,
    bn_splits=8,
    backbone=dict(type="moco_plugins.Backbone", name="resnet18-cifar", image_size=32),
    data_preprocessor=dict(
        type="moco_plugins.DataPreprocessor",
        mean=[0.4914, 0.4822, 0.4465],
        std=[0.2023, 0.1994, 0.2010],
        # Of the whole batch at once, on the device.
        views=dict(type="moco_plugins.TwoViews", variant="v2", image_size=32, min_scale=0.08, mean=[], std=[]),
    ),
)
train_dataloader = dict(
    batch_size=512,
    num_workers=8,
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="moco_plugins.CIFAR10", split="train", root="data"),
)
val_dataloader = dict(
    batch_size=500,
    num_workers=4,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="moco_plugins.CIFAR10", split="train+test", root="data"),
)
val_evaluator = dict(type="moco_plugins.KNNMetric", k=200, temperature=0.1)
train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=20)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.06, momentum=0.9, weight_decay=5e-4))
param_scheduler = dict(type="CosineAnnealingLR", T_max=200, by_epoch=True)
default_hooks = dict(checkpoint=dict(type="CheckpointHook", interval=10, max_keep_ckpts=2))
auto_scale_lr = dict(base_batch_size=512)
randomness = dict(seed=0)
