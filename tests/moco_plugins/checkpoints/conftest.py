"""Two small networks, and their weights in the authors' format."""

import layouts
import pytest
import torch


@pytest.fixture(scope="module")
def networks():
    torch.manual_seed(0)
    networks = {"resnet": layouts.bare_resnet(), "vit": layouts.vit()}
    layouts.trained(*networks.values())
    return networks


@pytest.fixture(scope="module")
def files(networks, tmp_path_factory):
    """The weights of both networks in the authors' format."""
    folder = tmp_path_factory.mktemp("files")
    paths = {}
    for name, network in networks.items():
        paths[name] = folder / f"{name}.pth.tar"
        torch.save({"state_dict": layouts.prefixed("module.encoder_q.", network), "epoch": 1}, paths[name])
    return paths
