"""What is MMEngine's own in the engine `mmengine`; what all engines must do is in test_every_adapter.py."""

from __future__ import annotations

import pytest

pytest.importorskip("mmengine")

from jobs import build, loader_of, train


def test_nothing_is_printed(tmp_path, capfd):
    train("mmengine", tmp_path, build())
    out, err = capfd.readouterr()
    assert out == ""
    assert "INFO" not in err


def test_accumulated_iterations_go_on_over_the_end_of_an_epoch(tmp_path):
    model = build(queue_size=60)
    steps, outcome = train(
        "mmengine", tmp_path, model, loader=loader_of(batch_size=32), epochs=3, options={"accumulative_counts": 2}
    )
    assert [step for step, _ in steps] == list(range(1, 9))  # 15 iterations, the last step of one
    assert outcome.steps == model.steps == model.total_steps == 8


def test_what_the_engine_cannot_do_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"num_nodes=2.*torchrun --nnodes=2"):
        train("mmengine", tmp_path, build(), num_nodes=2)
    with pytest.raises(ValueError, match="precision='16-mixed' on cpu"):
        train("mmengine", tmp_path, build(), precision="16-mixed")
