# MoCo v1 (He et al. 2020, arXiv:1911.05722). Settings of section 3.3 and 4.1: 8 GPUs with 32 images each, SGD 0.03, weight
# decay 1e-4, 200 epochs, rate divided by 10 at epochs 120 and 160. The paper's linear probe of this backbone: 60.6 % top-1.
_base_ = ["./_base_/imagenet.py"]
views = dict(type="moco_plugins.TwoViews", variant="v1", image_size=224)
model = dict(
    type="moco_plugins.MoCo",
    variant="v1",  # K 65536, D 128, m 0.999, T 0.07, a linear head, shuffled BatchNorm
    backbone=dict(type="moco_plugins.Backbone", name="resnet50"),
    data_preprocessor=dict(views=views),
)
train_dataloader = dict(dataset=dict(pipeline=[dict(views, finish=False)]))
train_cfg = dict(by_epoch=True, max_epochs=200)
optim_wrapper = dict(optimizer=dict(type="SGD", lr=0.03, momentum=0.9, weight_decay=1e-4))
param_scheduler = dict(type="MultiStepLR", milestones=[120, 160], gamma=0.1, by_epoch=True)
auto_scale_lr = dict(base_batch_size=256)
