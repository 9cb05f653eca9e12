# MoCo v3 with ResNet-50 (Chen, Xie & He 2021, arXiv:2104.02057). Settings of the authors' 300-epoch run (CONFIG.md of
# facebookresearch/moco-v3): LARS, rate 0.3 x batch / 256, weight decay 1e-6, warm-up of 10 epochs, m from 0.99 to 1, T 1,
# heads of two layers, crops from 0.2; linear probe 72.8 % top-1. They
# multiply the loss by 4T; LARS does not see the scale of a loss, so here it is left out.
_base_ = ["./_base_/imagenet.py"]
epochs, warmup = 300, 10
views = dict(type="moco_plugins.TwoViews", variant="v3", image_size=224, min_scale=0.2)
model = dict(
    type="moco_plugins.MoCo",
    variant="v3-resnet",  # no queue: the other keys of the batch; symmetric; projection and prediction head; T 1
    backbone=dict(type="moco_plugins.Backbone", name="resnet50"),
    data_preprocessor=dict(views=views),
)
train_dataloader = dict(
    batch_size=512,
    dataset=dict(pipeline=[dict(views, finish=False)]),
)
train_cfg = dict(by_epoch=True, max_epochs=epochs)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    loss_scale="dynamic",
    optimizer=dict(type="moco_plugins.LARS", lr=4.8, momentum=0.9, weight_decay=1e-6),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=1e-4, by_epoch=True, end=warmup, convert_to_iter_based=True),
    dict(
        type="CosineAnnealingLR",
        T_max=epochs - warmup,
        by_epoch=True,
        begin=warmup,
        end=epochs,
        convert_to_iter_based=True,
    ),
]
sync_bn = "torch"
auto_scale_lr = dict(base_batch_size=4096)
