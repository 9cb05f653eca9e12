# ImageNet-1k from a folder with train/ and val/, one folder for each class inside; checkpoints and log.
custom_imports = dict(imports=["moco_plugins"], allow_failed_imports=False)
views = dict(type="moco_plugins.TwoViews", variant="v2", image_size=224)
model = dict(data_preprocessor=dict(type="moco_plugins.DataPreprocessor", views=views))
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
        # Cut out in the workers and handed on as bytes; the preprocessor does the rest on the device, batch by batch.
        pipeline=[dict(views, finish=False)],
    ),
)
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=3),
    logger=dict(type="LoggerHook", interval=100),
)
env_cfg = dict(cudnn_benchmark=True)
randomness = dict(seed=0)
