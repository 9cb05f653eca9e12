# MoCo v2 (Chen et al. 2020, arXiv:2003.04297). As v1, with section 3's MLP head, stronger views, T 0.2 and cosine schedule.
# The paper's linear probe of this backbone (table 1, 200 epochs): 67.5 % top-1.
_base_ = ["./_base_/imagenet.py"]
model = dict(
    type="moco_plugins.MoCo",
    variant="v2",  # K 65536, D 128, m 0.999, T 0.2, head of two layers, shuffled BatchNorm
    backbone=dict(type="moco_plugins.Backbone", name="resnet50"),
)
train_cfg = dict(by_epoch=True, max_epochs=200)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.03, momentum=0.9, weight_decay=1e-4))
param_scheduler = dict(type="CosineAnnealingLR", T_max=200, by_epoch=True)
auto_scale_lr = dict(base_batch_size=256)
