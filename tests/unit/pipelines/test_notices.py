"""What a pipeline does after a notice of its launcher, in a job of threads."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll_td.runtime.driver import current_driver
from roll_td.runtime.notices import Stopped
from tests.unit.pipelines.test_checkpoints import Config, Pipeline, job, run, saved

_ = job  # its fixture

Event = Callable[[], None]


def give_notice() -> None:
    current_driver().notices.append(signal.SIGUSR2)


class Noticed(Pipeline):
    """Is given notice in a step: before, while or after do_checkpoint looks."""

    def __init__(self, config: Config, when: str, step: int) -> None:
        super().__init__(config)
        self.when, self.at = when, step

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)
        self._now("before")

    def state_dict(self) -> dict[str, Any]:
        self._now("while saving")
        return super().state_dict()

    def do_checkpoint(self, global_step: int, is_last: bool | None = None) -> None:
        super().do_checkpoint(global_step, is_last)
        self._now("after")

    def _now(self, when: str) -> None:
        if (when, self.global_step) == (self.when, self.at):
            give_notice()


def stop(folder: Path, when: str, step: int, **given: Any) -> tuple[Noticed, str]:
    """A run that a notice has stopped, and what it says."""
    config = Config(output_dir=str(folder), exp_name="exp", num_gpus_per_node=2, **given)
    pipeline = Noticed(config, when, step)
    try:
        with pytest.raises(Stopped) as stopped:
            pipeline.run()
    finally:
        pipeline.close()
        current_driver().notices.clear()
    return pipeline, str(stopped.value)


@pytest.mark.parametrize(
    ("when", "done", "steps"),
    [("before", 4, [4, 10]), ("while saving", 5, [4, 5, 10]), ("after", 5, [4, 5, 10])],
)
def test_after_a_notice_the_step_is_saved_and_the_run_ends_and_resumes_exactly(
    when: str, done: int, steps: list[int], tmp_path: Path
) -> None:
    whole = run(tmp_path, "whole", save_steps=1)
    stopped, text = stop(tmp_path, when, 3, save_steps=4)
    assert text == f"stopped by SIGUSR2 after {done} steps"
    assert stopped.did == list(range(done)) and max(saved(tmp_path)) == done
    resumed = run(tmp_path)
    assert resumed.did == list(range(done, 10)) and resumed.seen == whole.seen
    assert sorted(saved(tmp_path)) == steps
    expected = saved(tmp_path, "whole")
    assert all(weights == expected[step] for step, weights in saved(tmp_path).items())


def test_a_notice_in_the_last_step_leaves_what_follows_the_loop_to_the_next_start(
    tmp_path: Path,
) -> None:
    assert stop(tmp_path, "before", 9)[1] == "stopped by SIGUSR2 after 10 steps"
    assert sorted(saved(tmp_path)) == [10]
    assert run(tmp_path).did == []


def test_a_notice_that_has_come_before_the_first_step_ends_the_run_there(tmp_path: Path) -> None:
    run(tmp_path, save_steps=5, dies_at=7)
    give_notice()
    pipeline, text = stop(tmp_path, "never", 0)
    assert (pipeline.did, text) == ([], "stopped by SIGUSR2 after 5 steps")
    run(tmp_path)
    give_notice()
    assert run(tmp_path).did == [], "there is nothing to stop"
    current_driver().notices.clear()


def test_a_pipeline_that_makes_no_checkpoints_ends_after_its_step(tmp_path: Path) -> None:
    class Bare(Pipeline):
        def run(self) -> None:
            for step in self.steps(10):
                self.did.append(step)
                if step == 2:
                    give_notice()

    pipeline = Bare(Config(output_dir=str(tmp_path), exp_name="exp", num_gpus_per_node=2))
    with pytest.raises(Stopped, match="after 3 steps"):
        pipeline.run()
    pipeline.close()
    assert pipeline.did == [0, 1, 2]
    assert not (tmp_path / "exp" / "checkpoints").exists()


def test_restarts_that_get_nowhere_end(tmp_path: Path) -> None:
    run(tmp_path, save_steps=4, dies_at=5)
    for restart in range(1, 4):
        current_driver().restarts = restart
        run(tmp_path, save_steps=4, dies_at=5)
    current_driver().restarts = 4
    with pytest.raises(ValueError, match="started again 3 times from step 4"):
        run(tmp_path, save_steps=4)
    current_driver().restarts = 0
    assert run(tmp_path, save_steps=4).did == [4, 5, 6, 7, 8, 9]
    current_driver().restarts = 99
    assert run(tmp_path, save_steps=4).did == [], "a run that has finished says so"
