"""The SFT role's loss and validation columns, with a strategy of plain tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from roll_td import DataProto, WorkerConfig
from roll_td.plan import default_plan, local
from roll_td.workers.sft import SFTWorker


class Table:
    """A strategy whose output_tensor is a table of log-probs (b, T)."""

    def __init__(self) -> None:
        self.saved: list[str] = []

    def op_compute_language_loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -output[labels != -100].sum()

    def op_compute_log_probs(self, output: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return output

    def save_checkpoint(self, folder: Path) -> None:
        self.saved.append(f"saved {folder.name}")

    def load_checkpoint(self, folder: Path) -> None:
        self.saved.append(f"loaded {folder.name}")


@pytest.fixture
def worker() -> SFTWorker:
    made = SFTWorker(WorkerConfig(world_size=1))
    made.strategy = Table()
    return made


def batch(labels: list[list[int]], tokens: float) -> DataProto:
    made: Any = DataProto({"labels": torch.tensor(labels), "input_ids": torch.tensor(labels)})
    made.plan = local(default_plan(len(labels), 1, None, {"tokens": tokens}), 0)
    return made


LABELS = [[-100, 5, 6, -100], [-100, -100, 7, 8]]
OUTPUT = torch.tensor([[9.0, -1.0, -2.0, 9.0], [9.0, -torch.inf, -4.0, -8.0]])


def test_the_loss_is_this_parts_share_of_the_steps_mean(worker: SFTWorker) -> None:
    loss, metrics = worker.loss_func(batch(LABELS, tokens=60), OUTPUT)
    assert loss.item() == pytest.approx(15 / 60) and not metrics


def test_h03_nothing_to_learn_is_a_loss_of_zero(worker: SFTWorker) -> None:  # H03
    loss, _ = worker.loss_func(batch([[-100, -100]], tokens=0), torch.zeros(1, 2))
    assert loss.item() == 0.0


def test_rows_have_their_summed_loss_and_their_tokens(worker: SFTWorker) -> None:
    columns = worker.row_losses(batch(LABELS, tokens=4), OUTPUT)
    assert columns["loss"].tolist() == [3.0, 12.0], "what is not wanted is no NaN either"
    assert columns["tokens"].tolist() == [2, 2]


def test_a_checkpoint_holds_the_strategys_state_and_the_ranks_draws(
    worker: SFTWorker, tmp_path: Path
) -> None:
    worker.do_checkpoint(str(tmp_path))
    drawn = torch.rand(3)
    worker.load_checkpoint(str(tmp_path))
    assert torch.equal(torch.rand(3), drawn)
    (tmp_path / "random_0.json").unlink()
    worker.load_checkpoint(str(tmp_path))  # as of fewer ranks
    name = tmp_path.name
    assert worker.strategy.saved == [f"saved {name}", f"loaded {name}", f"loaded {name}"]


def test_a_folder_that_only_the_driver_sees_is_refused(worker: SFTWorker, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone is not there on .* file system that they share"):
        worker.do_checkpoint(str(tmp_path / "gone"))
    assert not worker.strategy.saved


def test_a_write_that_fails_says_how_much_room_there_is(worker: SFTWorker, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")

    worker.strategy.save_checkpoint = fail
    with pytest.raises(RuntimeError, match="unexpected pos") as caught:
        worker.do_checkpoint(str(tmp_path))
    assert caught.value.__notes__[0].startswith(f"writing {tmp_path} failed; ")
