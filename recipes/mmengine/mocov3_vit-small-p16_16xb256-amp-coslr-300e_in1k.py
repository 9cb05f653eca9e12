# MoCo v3 with ViT-S/16 (Chen, Xie & He 2021, arXiv:2104.02057). Section 4 and the authors' CONFIG.md (facebookresearch/
# moco-v3): AdamW, rate 1.5e-4 x batch / 256, weight decay 0.1, 40 epochs of warm-up, 300 in all, m from 0.99 to 1, T 0.2,
# frozen patch projection; linear probe 73.2 % top-1. timm's ViT-S has 6 heads and learns its position embedding; the
# authors' has 12 and a fixed one.
_base_ = ["./_base_/imagenet.py"]
epochs, warmup = 300, 40
views = dict(type="moco_plugins.TwoViews", variant="v3", image_size=224)
model = dict(
    type="moco_plugins.MoCo",
    variant="v3",
    backbone=dict(type="moco_plugins.Backbone", name="timm/vit_small_patch16_224", image_size=224),
    data_preprocessor=dict(views=views),
)
train_dataloader = dict(
    batch_size=256,
    dataset=dict(pipeline=[dict(views, finish=False)]),
)
train_cfg = dict(by_epoch=True, max_epochs=epochs)
optim_wrapper = dict(
    type="AmpOptimWrapper",
    loss_scale="dynamic",
    optimizer=dict(type="AdamW", lr=2.4e-3, weight_decay=0.1),
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
