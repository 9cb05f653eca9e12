"""MoCoModule starts from a checkpoint of any known format, lightly's and lightly-train's among them."""

import layouts
import pytest
import torch
from moco_lightly import lightning_module_class

from moco_plugins.checkpoints import load


def test_init_takes_any_format_and_is_no_hyper_parameter(tmp_path):
    torch.manual_seed(0)
    layout = layouts.moco("v2")
    torch.save(layout.content, tmp_path / "authors.pth.tar")
    build = lightning_module_class("pytorch_lightning")
    options = {"image_size": 64, "queue_size": 32, "projection_dim": 16}
    module = build("resnet18", init=str(tmp_path / "authors.pth.tar"), **options)
    assert "init" not in module.hparams
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(module.eval()(x), layout.query_features(x), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(module.moco.key_encoder(x), layout.key(x), atol=1e-6, rtol=1e-6)
    assert torch.equal(module.moco.queue.keys, layout.queue)
    with pytest.raises(ValueError, match=r"queue.keys is \(32, 16\) there and \(64, 16\) here"):
        build("resnet18", init=str(tmp_path / "authors.pth.tar"), **{**options, "queue_size": 64})


def test_a_checkpoint_of_mocomodule_is_read(tmp_path):
    module = lightning_module_class("pytorch_lightning")("resnet18-cifar", image_size=32, queue_size=16)
    torch.save(
        {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams), "epoch": 1, "global_step": 3},
        tmp_path / "module.ckpt",
    )
    weights = load(tmp_path / "module.ckpt")
    assert weights.format == "moco-plugins"
    assert (weights.architecture.name, weights.architecture.image_size) == ("resnet18-cifar", 32)
    moco = weights.build_moco()
    for name, value in module.moco.state_dict().items():
        assert torch.equal(moco.state_dict()[name], value), name


@pytest.mark.parametrize("wrap", ["wrapped_model._features.", "_features.", "_model.", "model.wrapped_model._model."])
def test_what_lightly_train_exports(wrap):
    """Names as lightly-train 0.16 gives its wrappers (at 8f5a75c): of the whole embedding model, or of the wrapper."""
    net = layouts.bare_resnet()
    state = layouts.prefixed(wrap, net)
    weights = load(state)
    assert weights.format == "lightly-train"
    assert weights.architecture.name == "resnet18"
    assert torch.equal(weights.backbone["layer4.1.bn2.weight"], net.layer4[1].bn2.weight)
