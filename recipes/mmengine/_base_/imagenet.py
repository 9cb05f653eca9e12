# ImageNet-1k from a folder with train/ and val/, one folder for each class inside; checkpoints and log.
custom_imports = dict(imports=["moco_plugins"], allow_failed_imports=False)
train_dataloader = dict(
    batch_size=32,
    num_workers=8,
    drop_last=True,
    persistent_workers=False,  # workers seeded anew each epoch: a resumed run sees the same views
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(
        type="moco_plugins.ImageFolder",
        root="data/imagenet",
        split="train",
        pipeline=[dict(type="moco_plugins.TwoViews", variant="v2", image_size=224)],
    ),
)
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=3),
    logger=dict(type="LoggerHook", interval=100),
)
env_cfg = dict(cudnn_benchmark=True)
randomness = dict(seed=0)
