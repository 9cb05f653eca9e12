"""A small config, and the command that trains it."""

import pytest

CONFIG = """
custom_imports = dict(imports=['moco_plugins'], allow_failed_imports=False)
model = dict(
    type='moco_plugins.MoCo', queue_size=100, projection_dim=16, momentum=0.9, metrics_interval=2,
    backbone=dict(type='moco_plugins.Backbone', name='convnet', channels=1, image_size=8))
train_dataloader = dict(
    dataset=dict(type='moco_plugins.digits', limit=120,
                 pipeline=[dict(type='moco_plugins.TwoViews', variant='v2', image_size=8)]),
    batch_size=32, sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(
    dataset=dict(type='moco_plugins.digits', split='train+test', limit=60), batch_size=50,
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = [dict(type='moco_plugins.KNNMetric', k=5), dict(type='moco_plugins.LinearProbeMetric', strengths=[1.0])]
train_cfg = dict(by_epoch=True, max_epochs=3)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-3))
param_scheduler = dict(type='CosineAnnealingLR', T_max=20, by_epoch=False)
default_hooks = dict(logger=dict(type='LoggerHook', interval=2))
randomness = dict(seed=1)
log_level = 'WARNING'
"""


@pytest.fixture(scope="session")
def config():
    return CONFIG


@pytest.fixture
def train(tmp_path):
    def run(name, *options, config=CONFIG):
        path = tmp_path / f"{name}.py"
        path.write_text(config)
        work = tmp_path / name
        from moco_mmengine.train import main

        assert main([str(path), "--work-dir", str(work), *options]) == 0
        return work

    return run
