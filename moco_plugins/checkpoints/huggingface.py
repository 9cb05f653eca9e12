"""Hugging Face: folders of ``save_pretrained`` with a ResNet or a ViT, and folders that ``AutoModel.from_pretrained`` takes.

Nothing of transformers is imported; the names are those on disk, which all its versions read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from . import architectures
from .architectures import Architecture
from .dialects import Dialect, vit_rules
from .formats import Format
from .names import dialect_of, in_dialect, in_library_names
from .reading import Content, need_safetensors
from .weights import Weights

_LAYER = "encoder.stages.{i-1}.layers.{j}"
RESNET = Dialect(
    "Hugging Face",
    "resnet",
    (
        ("conv1.*", "embedder.embedder.convolution.*"),
        ("bn1.*", "embedder.embedder.normalization.*"),
        ("layer{i}.{j}.conv{k}.*", _LAYER + ".layer.{k-1}.convolution.*"),
        ("layer{i}.{j}.bn{k}.*", _LAYER + ".layer.{k-1}.normalization.*"),
        ("layer{i}.{j}.downsample.0.*", _LAYER + ".shortcut.convolution.*"),
        ("layer{i}.{j}.downsample.1.*", _LAYER + ".shortcut.normalization.*"),
    ),
    strips=("resnet.",),
)
_PARTS = ("query", "key", "value")
VIT = Dialect(
    "Hugging Face",
    "vit",
    vit_rules(
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        "embeddings.patch_embeddings.projection.*",
        "encoder.layer.{i}.layernorm_before.*",
        "encoder.layer.{i}.attention.output.dense.*",
        "encoder.layer.{i}.layernorm_after.*",
        "encoder.layer.{i}.intermediate.dense.*",
        "encoder.layer.{i}.output.dense.*",
        "layernorm.*",
    ),
    joined=(("blocks.{i}.attn.qkv.*", tuple(f"encoder.layer.{{i}}.attention.attention.{part}.*" for part in _PARTS)),),
    strips=("vit.",),
    drops=("pooler.",),
)
#: The names of the module itself since transformers 5.
VIT_MODULE = Dialect(
    "Hugging Face's module",
    "vit",
    vit_rules(
        "embeddings.cls_token",
        "embeddings.position_embeddings",
        "embeddings.patch_embeddings.projection.*",
        "layers.{i}.layernorm_before.*",
        "layers.{i}.attention.o_proj.*",
        "layers.{i}.layernorm_after.*",
        "layers.{i}.mlp.fc1.*",
        "layers.{i}.mlp.fc2.*",
        "layernorm.*",
    ),
    joined=(("blocks.{i}.attn.qkv.*", tuple(f"layers.{{i}}.attention.{part}_proj.*" for part in "qkv")),),
    strips=("vit.",),
    drops=("pooler.",),
)


def read(content: Content) -> Weights | None:
    """A folder with config.json; the pooler and the classifier are left out by name."""
    if content.kind != "folder":
        return None
    config = content.about
    kind = config.get("model_type")
    if kind not in ("resnet", "vit"):
        raise ValueError(f"model_type={kind!r} in config.json: Hugging Face's resnet and vit are known")
    inside = [name for name in content.state if name.startswith(f"{kind}.")]
    state = content.take(f"{kind}." if inside else "")
    if kind == "resnet" and config.get("downsample_in_bottleneck"):
        raise ValueError(
            "downsample_in_bottleneck=true in config.json: torchvision's and timm's ResNets have no such form"
        )
    activation = config.get("hidden_act", "gelu" if kind == "vit" else "relu")
    if activation not in ("gelu" if kind == "vit" else "relu"):
        raise ValueError(
            f"hidden_act={activation!r} in config.json: the networks here have gelu (vit) and relu (resnet)"
        )
    return Weights("", state, architecture=_network(config) if kind == "vit" else None)


def _network(config: Mapping[str, Any]) -> Architecture | None:
    """What the shapes do not tell: heads other than one for 64 numbers, and another epsilon of LayerNorm than timm's 1e-6."""
    options: dict[str, Any] = {}
    width, heads = config.get("hidden_size", 768), config.get("num_attention_heads", 12)
    if heads * 64 != width:
        options["num_heads"] = heads
    if (eps := config.get("layer_norm_eps", 1e-12)) != 1e-6:
        options["norm_eps"] = eps
    return Architecture("", options=options) if options else None


def write(weights: Weights, path: Path, part: str) -> None:
    """A folder with config.json and model.safetensors. A ViT's features are ``last_hidden_state[:, 0]``."""
    need_safetensors()
    from safetensors.torch import save_file

    named, _ = in_library_names(weights.backbone)
    spoken = dialect_of(named)
    if spoken is None:
        raise ValueError(
            f"Hugging Face folders are written of ResNets and ViTs; {weights.architecture or 'this'} is neither"
        )
    network = weights.architecture or architectures.guess(weights.backbone)
    if spoken.family == "resnet":
        config, state = _resnet_config(named), in_dialect(named, RESNET)
        if named["conv1.weight"].shape[-1] != 7:
            raise ValueError(
                "Hugging Face's ResNet has a stem of 7 x 7 with pooling; that of small images has no place in it"
            )
    else:
        state = in_dialect(named, VIT)
        config = _vit_config(in_library_names(named)[0] if spoken.name == "timm" else spoken.to_ours(named), network)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = {name: value.detach().contiguous().clone() for name, value in state.items()}
    save_file(state, path / "model.safetensors", {"format": "pt"})


def _resnet_config(state: Mapping[str, Tensor]) -> dict[str, Any]:
    depths = [len({name.split(".")[1] for name in state if name.startswith(f"layer{i}.")}) for i in range(1, 5)]
    last = "conv3" if "layer1.0.conv3.weight" in state else "conv2"
    second = state["layer1.0.conv2.weight"]
    if last == "conv3" and (
        second.shape[0] != second.shape[1] or second.shape[0] * 4 != state["layer1.0.conv3.weight"].shape[0]
    ):
        raise ValueError("Hugging Face's ResNet has neither groups nor wide bottlenecks; this one has")
    return {
        "architectures": ["ResNetModel"],
        "model_type": "resnet",
        "num_channels": state["conv1.weight"].shape[1],
        "embedding_size": state["conv1.weight"].shape[0],
        "hidden_sizes": [state[f"layer{i}.0.{last}.weight"].shape[0] for i in range(1, 5)],
        "depths": depths,
        "layer_type": "bottleneck" if last == "conv3" else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        "torch_dtype": str(state["conv1.weight"].dtype).removeprefix("torch."),
    }


def _vit_config(state: Mapping[str, Tensor], network: Architecture | None) -> dict[str, Any]:
    patches, width = state["patch_embed.proj.weight"], state["pos_embed"].shape[-1]
    options = network.options if network is not None else {}
    return {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        "hidden_size": width,
        "num_hidden_layers": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "num_attention_heads": options.get("num_heads", max(1, width // 64)),
        "intermediate_size": state["blocks.0.mlp.fc1.weight"].shape[0],
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": options.get("norm_eps", 1e-6),
        "image_size": math.isqrt(state["pos_embed"].shape[1] - 1) * patches.shape[-1],
        "patch_size": patches.shape[-1],
        "num_channels": patches.shape[1],
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "torch_dtype": str(patches.dtype).removeprefix("torch."),
    }


FORMATS = {
    "huggingface": Format("Hugging Face's folders (ResNet, ViT)", read, write=write, dialects=(RESNET, VIT, VIT_MODULE))
}
