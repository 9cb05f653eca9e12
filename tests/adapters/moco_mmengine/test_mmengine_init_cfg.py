"""``init_cfg=dict(type='Pretrained', checkpoint=FILE)`` of our types takes a checkpoint of any known format."""

import subprocess
import sys

import layouts
import more_layouts
import pytest
import torch
from mmengine.registry import MODELS

from moco_plugins.checkpoints import load


def config(path, **options):
    return {
        "type": "moco_plugins.MoCo",
        "backbone": {"type": "moco_plugins.Backbone", "name": "resnet18", "image_size": 64},
        "variant": "v2",
        "queue_size": 32,
        "projection_dim": 16,
        "hidden_dim": 24,
        "init_cfg": {"type": "Pretrained", "checkpoint": str(path)},
        **options,
    }


def test_every_format_is_taken_with_all_that_it_has(tmp_path):
    torch.manual_seed(0)
    layout = more_layouts.vissl()
    torch.save(layout.content, tmp_path / "vissl.torch")
    model = MODELS.build(config(tmp_path / "vissl.torch"))
    model.init_weights()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), layout.query_features(x), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(model.method.key_encoder(x), layout.key(x), atol=1e-6, rtol=1e-6)
    assert torch.equal(model.method.queue.keys, layout.queue)


def test_what_does_not_fit_is_an_error(tmp_path):
    torch.save(layouts.moco("v1").content, tmp_path / "v1.pth")
    model = MODELS.build(config(tmp_path / "v1.pth"))
    with pytest.raises(ValueError, match="do not fit this MoCo"):
        model.init_weights()


def test_a_checkpoint_of_the_runner_is_read_without_mmengine(tmp_path):
    """Its log history is of MMEngine's own class, which torch's unpickler does not know."""
    from mmengine.logging import MessageHub

    hub = MessageHub.get_instance("weights")
    hub.update_scalar("train/loss", 1.5)
    model = MODELS.build(config(tmp_path / "x.pth", init_cfg=None))
    content = {"meta": {"epoch": 1, "iter": 4}, "message_hub": hub.state_dict(), "state_dict": model.state_dict()}
    torch.save(content, tmp_path / "epoch_1.pth")
    weights = load(tmp_path / "epoch_1.pth")
    assert weights.format == "moco-plugins"
    assert weights.architecture.name == "resnet18"
    again = weights.build_moco(image_size=64)
    for name, value in model.method.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_method_without_keys_takes_the_backbone(tmp_path):
    pytest.importorskip("lightly")
    layout = layouts.moco("v2")
    torch.save(layout.content, tmp_path / "a.pth")
    made = config(tmp_path / "a.pth")
    model = MODELS.build({"type": "moco_plugins.SimCLR", "backbone": made["backbone"], "init_cfg": made["init_cfg"]})
    model.init_weights()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), layout.query_features(x), atol=1e-6, rtol=1e-6)


def test_the_log_history_is_read_where_mmengine_is_not_imported(tmp_path):
    from mmengine.logging import MessageHub

    hub = MessageHub.get_instance("alone")
    hub.update_scalar("train/loss", 1.5)
    state = layouts.mmselfsup_1x().content["state_dict"]
    torch.save({"meta": {}, "message_hub": hub.state_dict(), "state_dict": state}, tmp_path / "epoch_1.pth")
    code = (
        "import sys; sys.modules['mmengine'] = None; from moco_plugins.checkpoints import load;"
        f"print(load({str(tmp_path / 'epoch_1.pth')!r}).format)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "mmengine", done.stderr
