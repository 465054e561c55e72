"""What every role with a model has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from roll_td.checkpoint.random_state import load_random_state, save_random_state
from roll_td.config.base import BaseConfig
from roll_td.models import load_model
from roll_td.runtime.dispatch import Dispatch, register, register_request
from roll_td.runtime.worker import Worker
from roll_td.strategies import states
from roll_td.strategies.base import ModelProvider
from roll_td.strategies.factory import create_strategy


class ModelWorker(Worker):
    """A worker whose strategy holds a model."""

    model_provider: ModelProvider = staticmethod(load_model)
    """What makes the model."""
    _staged: Mapping[str, memoryview] = {}
    """Files of the checkpoint that is being made."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: BaseConfig) -> None:
        """Make the strategy that the role's config names, and its model."""
        super().initialize(pipeline_config)
        self.strategy = create_strategy(worker=self)
        self.strategy.initialize(self.model_provider)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def do_checkpoint(self, folder: str) -> None:
        """Write the strategy's state, and this rank's random states, to the role's folder; where
        checkpoints are asynchronous a strategy that can only stages its state for
        write_checkpoint.

        ValueError if the folder that the driver has made is not there.
        """
        if not Path(folder).is_dir():
            raise ValueError(
                f"{folder} is not there on {self.context.host}: ranks on several nodes write one "
                "checkpoint; set output_dir to a folder on a file system that they share"
            )
        config = self.pipeline_config
        is_asynchronous = config is not None and config.asynchronous_checkpoints
        if is_asynchronous and hasattr(self.strategy, "stage_checkpoint"):
            self._staged = self.strategy.stage_checkpoint()
        else:
            with _told_of_space(folder):
                self.strategy.save_checkpoint(Path(folder))
        save_random_state(self._random_file(folder))

    @register_request
    def write_checkpoint(self, folder: str) -> None:
        """Write what do_checkpoint has staged, beside other work."""
        staged, self._staged = self._staged, {}
        with _told_of_space(folder):
            states.write(Path(folder), staged)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Take over what do_checkpoint wrote, on any number of ranks."""
        self.strategy.load_checkpoint(Path(folder))
        own = self._random_file(folder)
        if own.exists():  # fewer ranks may have written it; commands seed themselves anyway
            load_random_state(own)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, clear_cache=True)
    def offload_states(self) -> None:
        """Move all that the strategy holds to host memory, until load_states."""
        self.strategy.offload_states()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_states(self) -> None:
        """Move it back, bit-equal."""
        self.strategy.load_states()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, folder: str) -> None:
        """Write model and tokenizer as transformers loads them."""
        self.strategy.export_hf(Path(folder))

    def _random_file(self, folder: str) -> Path:
        return Path(folder) / f"random_{self.rank}.json"


@contextmanager
def _told_of_space(folder: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        # torch's own error is no Exception, and of a full disk it says nothing
        free_mb = shutil.disk_usage(folder).free / 1e6
        error.add_note(f"writing {folder} failed; {free_mb:.0f} MB are free there")
        raise
