"""Every format of other people's MoCo: what the original computes, ours computes from its file, to 1e-6."""

import layouts
import more_layouts
import pytest
import torch
from torch import nn

from moco_plugins.checkpoints import convert, load

CASES = {
    "moco-v1": ("moco", lambda: layouts.moco("v1")),
    "moco-v2": ("moco", lambda: layouts.moco("v2")),
    "moco-v2-without-module": ("moco", lambda: layouts.moco("v2", module="")),
    "moco-v3-resnet": ("moco-v3", lambda: layouts.moco_v3("resnet")),
    "moco-v3-vit": ("moco-v3", lambda: layouts.moco_v3("vit")),
    "mmselfsup-0.x": ("mmengine", layouts.mmselfsup_0x),
    "mmselfsup-0.x-v3": ("mmengine", layouts.mmselfsup_0x_v3),
    "mmselfsup-1.x": ("mmengine", layouts.mmselfsup_1x),
    "solo-learn-mocov2plus": ("solo-learn", more_layouts.solo_learn),
    "solo-learn-cifar": ("solo-learn", lambda: more_layouts.solo_learn(cifar=True)),
    "solo-learn-mocov3": ("solo-learn", lambda: more_layouts.solo_learn("mocov3")),
    "vissl": ("vissl", more_layouts.vissl),
    "stable-pretraining": ("stable-pretraining", more_layouts.stable_pretraining),
    "lightly-benchmark": ("lightly", more_layouts.lightly_benchmark),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    torch.manual_seed(0)
    name, build = CASES[request.param]
    if name == "lightly":
        pytest.importorskip("lightly")
    layout = build()
    path = tmp_path_factory.mktemp("layout") / "checkpoint.pth"
    torch.save(layout.content, path)
    return name, layout, path


def same(ours, theirs, layout):
    images = torch.randn(3, 3, layout.size, layout.size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-6, rtol=1e-6)


def test_all_that_it_holds_is_read(case):
    name, layout, path = case
    weights = load(path)
    assert weights.format == name
    assert set(weights.left) == set(layout.left)
    moco = weights.build_moco(
        image_size=layout.size, **{k: v for k, v in layout.options.items() if k == "queue_size"}
    ).eval()
    same(moco.embed, layout.query_features, layout)
    same(moco.query_encoder, layout.query, layout)
    same(moco.key_encoder, layout.key, layout)
    if layout.predicted is not None:
        same(lambda x: moco.predictor(moco.query_encoder(x)), layout.predicted, layout)
        assert moco.variant == layout.options["variant"]
    if layout.queue is not None:
        assert torch.equal(moco.queue.keys, layout.queue)
        assert (int(moco.queue.ptr), int(moco.queue.filled)) == (layout.ptr, len(layout.queue))
    assert moco.steps == (layout.steps or 1)


def test_the_key_encoder_stays_its_own_when_training_goes_on():
    moco = load(layouts.moco("v2").content).build_moco(image_size=64, shuffle_bn=False)
    before = [p.clone() for p in moco.key_encoder.parameters()]
    moco([torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)])
    assert all(torch.equal(a, b) for a, b in zip(before, moco.key_encoder.parameters(), strict=True))


@pytest.mark.parametrize("to", ["moco", "mmengine", "safetensors"])
def test_a_round_trip_keeps_everything(case, to, tmp_path):
    _, _, path = case
    first = load(path)
    out = tmp_path / ("out.safetensors" if to == "safetensors" else "out.pth")
    convert(path, out, to, part="all")
    again = load(out)
    for part in ("backbone", "projector", "predictor", "key_backbone", "key_projector"):
        one, two = getattr(first, part), getattr(again, part)
        assert one.keys() == two.keys(), part
        assert all(torch.equal(value, two[key]) for key, value in one.items()), part
    assert (first.queue is None) == (again.queue is None)
    if first.queue is not None:
        assert torch.equal(first.queue, again.queue)
        assert first.queue_ptr == again.queue_ptr
    if to == "safetensors":
        assert again.steps == first.steps
        assert again.architecture == first.architecture
    elif to == "mmengine":
        assert again.steps == (first.steps or 0)


def test_a_young_queue_counts_its_real_keys():
    weights = load(more_layouts.stable_pretraining(filled=False).content)
    assert weights.queue_filled == 8
    assert "8 of them filled" in weights.describe()


def test_the_authors_loss_goes_on_where_it_was():
    """facebookresearch/moco's loss of a batch, from its file: its logits are [q k+, q queue] / T."""
    torch.manual_seed(0)
    layout = layouts.moco("v2")
    moco = load(layout.content).build_moco(image_size=64, temperature=0.07).eval()
    x_q, x_k = torch.randn(4, 3, 64, 64), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        q = nn.functional.normalize(layout.query(x_q), dim=1)
        k = nn.functional.normalize(layout.key(x_k), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ layout.content["state_dict"]["module.queue"]], 1) / 0.07
        theirs = nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        torch.testing.assert_close(moco([x_q, x_k]), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kind", "scale"), [("resnet", 4.0), ("vit", 0.8)])
def test_the_loss_of_v3_is_the_authors_over_4_t(kind, scale):
    """moco-v3 sums both directions of CrossEntropy times 2 T; the docstring of MoCo says how ours is scaled."""
    torch.manual_seed(0)
    layout = layouts.moco_v3(kind)
    moco = load(layout.content).build_moco(image_size=layout.size).eval()
    temperature = 1.0 if kind == "resnet" else 0.2
    a, b = (torch.randn(4, 3, layout.size, layout.size) for _ in range(2))

    def one(x_q, x_k):
        q = nn.functional.normalize(layout.predicted(x_q), dim=1)
        k = nn.functional.normalize(layout.key(x_k), dim=1)
        return nn.functional.cross_entropy(q @ k.T / temperature, torch.arange(4)) * 2 * temperature

    with torch.no_grad():
        torch.testing.assert_close(scale * moco([a, b]), one(a, b) + one(b, a), atol=1e-5, rtol=1e-5)


def test_the_small_vit_of_moco_v3_has_12_heads():
    """Shapes do not tell: timm's vit_small of the same shapes has 6, and other features."""
    with torch.device("meta"):
        state = layouts.timm.create_model("vit_small_patch16_224", num_classes=0).state_dict()
    state = {
        f"module.{name}": value
        for encoder in ("base_encoder", "momentum_encoder")
        for name, value in {f"{encoder}.{n}": v for n, v in state.items()}.items()
    }
    state["module.predictor.0.weight"] = torch.zeros(16, 16, device="meta")
    weights = load({"state_dict": state})
    assert weights.architecture.options == {"num_heads": 12}
    assert any("num_heads=12" in note for note in weights.notes)
    model, _ = weights.architecture.build()
    assert model.blocks[0].attn.num_heads == 12
    plain = layouts.timm.create_model("vit_small_patch16_224", num_classes=0, num_heads=12).eval()
    model.load_state_dict(plain.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), plain(images), atol=1e-5, rtol=1e-5)


def test_a_queue_of_another_size_is_refused_or_takes_the_newest_keys():
    layout = layouts.moco("v1")
    weights = load(layout.content)
    with pytest.raises(ValueError, match=r"queue.keys is \(32, 16\) there and \(8, 16\) here.*keep_newest"):
        weights.build_moco(queue_size=8)
    moco = weights.build_moco(queue_size=8, queue_resize="keep_newest")
    assert torch.equal(moco.queue.ordered(), layout.queue[:8])  # the rows before the pointer are the newest


def test_what_vissl_extracts(tmp_path):
    trunk = more_layouts.vissl().content["classy_state_dict"]["base_model"]["model"]["trunk"]
    for content in ({"model_state_dict": trunk}, dict(trunk)):
        weights = load(content)
        assert (weights.format, weights.architecture.name) == ("vissl", "resnet18")


def test_a_key_encoder_without_its_projector_is_refused():
    state = layouts.moco("v2").content["state_dict"]
    cut = {name: value for name, value in state.items() if not name.startswith("module.encoder_k.fc.")}
    with pytest.raises(ValueError, match="its key encoder is not whole"):
        load({"state_dict": cut})
