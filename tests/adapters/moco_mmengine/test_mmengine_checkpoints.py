"""Checkpoints: which are read, which are refused and what is said then."""

import argparse
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("mmengine")
pytest.importorskip("sklearn")

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:the features have collapsed")


def weights(work, name):
    return torch.load(work / name, weights_only=False)["state_dict"]


def test_a_checkpoint_of_another_model_is_refused(train):
    work = train("first", "--no-validate", "--cfg-options", "train_cfg.max_epochs=1")
    more = ["--resume", str(work / "epoch_1.pth"), "--no-validate", "--cfg-options"]
    with pytest.raises(ValueError, match=r"its queue has 100 keys and this one 50 \(queue_size=100"):
        train("queue", *more, "model.queue_size=50")
    with pytest.raises(ValueError, match=r"does not fit this model.*(lacks|shape)"):
        train("variant", *more, "model.variant=v1")
    with pytest.raises(ValueError, match=r"it has .*method\.queue"):
        train("method", *more, "model.type=moco_plugins.moco-v3", "model.queue_size=0", "model.hidden_dim=32")
    kept = train("newest", *more, "model.queue_size=50", "model.queue_resize=keep_newest", "train_cfg.max_epochs=2")
    assert weights(kept, "epoch_2.pth")["method.queue.keys"].shape == (50, 16)
    foreign = work / "foreign.pth"
    checkpoint = torch.load(work / "epoch_1.pth", weights_only=False)
    checkpoint["state_dict"] = {"moco.encoder.weight": torch.zeros(2)}
    torch.save(checkpoint, foreign)
    with pytest.raises(ValueError, match=r"no weight in common.*moco\.encoder\.weight"):
        train("foreign", "--resume", str(foreign), "--no-validate")
    torch.save({"state_dict": weights(work, "epoch_1.pth"), "pytorch-lightning_version": "2.6.6"}, foreign)
    with pytest.raises(ValueError, match=r"has state_dict, pytorch-lightning_version: MMEngine did not save it"):
        train("lightning", "--resume", str(foreign), "--no-validate")


class Surprise:
    def __reduce__(self):
        return (argparse.Namespace, ())


def test_a_checkpoint_that_could_run_code_needs_trust(train):
    work = train("first", "--no-validate", "--cfg-options", "train_cfg.max_epochs=1")
    checkpoint = torch.load(work / "epoch_1.pth")  # under torch's own default
    checkpoint["surprise"] = Surprise()
    torch.save(checkpoint, work / "odd.pth")
    again = ["--resume", str(work / "odd.pth"), "--no-validate", "--cfg-options", "train_cfg.max_epochs=2"]
    with pytest.raises(SystemExit, match=r"argparse\.Namespace.*--trust-checkpoint"):
        train("refused", *again)
    assert (train("trusted", "--trust-checkpoint", *again) / "epoch_2.pth").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(work / "odd.pth")


def test_the_door_that_lets_mmengines_log_in_lets_nothing_else_in(tmp_path):
    from moco_mmengine.checkpoints import _statistic

    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        _statistic(argparse.Namespace, "__init__")

    class Evil:
        def __reduce__(self):
            return (getattr, (Path, "home"))

    torch.save({"x": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "evil.pth")


def test_anybodys_runner_resumes_too(tmp_path, config):
    """Without our command or hook: a plain Runner of a config that names moco_plugins."""
    from mmengine.config import Config
    from mmengine.runner import Runner

    (tmp_path / "own.py").write_text(config)
    cfg = Config.fromfile(tmp_path / "own.py")
    cfg.merge_from_dict({"work_dir": str(tmp_path / "work"), "train_cfg.max_epochs": 1})
    Runner.from_cfg(cfg).train()
    cfg.merge_from_dict({"resume": True, "train_cfg.max_epochs": 2, "experiment_name": "again"})
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.model.method.steps == 8
    assert runner.model.method.total_steps == 8


def test_logs_of_both_numpys_are_read(tmp_path):
    """numpy 2 has renamed the module that rebuilds arrays; files keep the name of the numpy that wrote them."""
    from mmengine.logging import HistoryBuffer

    torch.save({"log": HistoryBuffer([1.0, 2.0], [1, 1]), "number": np.float64(3)}, tmp_path / "own.pth")
    own = "numpy._core." if int(np.__version__.split(".")[0]) >= 2 else "numpy.core."
    for core in ("numpy.core.", "numpy._core."):
        with zipfile.ZipFile(tmp_path / "own.pth") as old, zipfile.ZipFile(tmp_path / "new.pth", "w") as new:
            for name in old.namelist():
                data = old.read(name)
                new.writestr(name, data.replace(own.encode(), core.encode()) if name.endswith("data.pkl") else data)
        loaded = torch.load(tmp_path / "new.pth")
        assert loaded["log"].current() == 2.0
        assert loaded["number"] == 3
