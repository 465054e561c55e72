"""Rollout only: a model answers a data set, the answers are scored and written to a file."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from roll_td.config.rewards import check_domains
from roll_td.config.rollout import RolloutConfig
from roll_td.data.loader import load_data
from roll_td.metrics import Metric
from roll_td.models import load_tokenizer
from roll_td.pipelines import outcomes
from roll_td.pipelines.answering import answers, numbered, start_roles
from roll_td.pipelines.base import BasePipeline
from roll_td.pipelines.scoring import Scorer
from roll_td.protocol import DataProto
from roll_td.rollout.scheduler import Scheduler

logger = logging.getLogger(__name__)
FILE = "answers.jsonl"
WRITTEN_OTHERWISE = {"prompt", "response", "finish_reason"}
"""Object columns that are not the data set's own."""


class RolloutPipeline(BasePipeline):
    """Roles: actor_infer, reward. A step answers batch_size prompts and writes the answers to
    answers.jsonl in the run directory, a line each, in the order of the prompts:

    prompt, response (texts), tokens (the response's), log_probs (of these, of the distribution
    sampled from), score (null: none) and scores of several reward functions, finish_reason,
    weight_version, row (number of the prompt), sample (number of the answer), and the columns that
    data.keep names.
    """

    def __init__(self, pipeline_config: RolloutConfig) -> None:
        super().__init__(pipeline_config)
        config = pipeline_config
        self.tokenizer: Any = load_tokenizer(config.model)
        data = load_data(config.data, self.tokenizer, "prompts", config.batch_size, config.seed)
        self.rows = data.train.rows
        if "domain" in data.train.kept:
            check_domains(config.rewards, data.train.kept["domain"])
        roles = [config.actor_infer, config.reward, *config.judges.values()]
        self.actor_infer, reward, *judges = start_roles(self, *roles)
        reward.check_golds(data.train.kept, blocking=False)  # it logs what it finds
        self.scorer = Scorer(config, reward, dict(zip(config.judges, judges, strict=True)))
        self.scheduler: Scheduler | None = None
        if config.scheduling.by_requests:
            generation, size = config.actor_infer.generation, config.batch_size
            self.scheduler = Scheduler(
                self.actor_infer, self, self.scorer, lambda rows: True, config.scheduling,
                generation, size, 0, config.seed, end=len(self.rows),
            )  # fmt: skip
        self.path = self.run_dir / FILE
        self.written_bytes = 0

    def run(self) -> None:
        """Answer, score and write, then tell what all of it says."""
        config = self.pipeline_config
        steps = math.ceil(len(self.rows) / config.batch_size)
        for step in self.steps(steps):
            batch, metrics = self.answered(step * config.batch_size, steps - step)
            self.write(batch)
            self.log([*metrics, outcomes.rollout_metrics(batch)])
            self.do_checkpoint(step)
        with self.path.open(encoding="utf-8") as file:
            found = outcomes.validation_metrics(summary(map(json.loads, file)), config.passes)
        self.log(found)
        print(table(found), flush=True)

    def answered(
        self, position: int, left: int
    ) -> tuple[DataProto, Sequence[Mapping[str, Metric]]]:
        """Scored answers to the batch of prompts that begins at this row, `left` more to come, it
        included; and what there is to tell of them."""
        config = self.pipeline_config
        if self.scheduler is not None:
            batch, _, _ = self.scheduler.batch(position, left)
            return batch, self.scheduler.metrics(batch)
        prompts = self.draw(position, min(config.batch_size, len(self.rows) - position))
        generation = config.actor_infer.generation
        batch = answers(self.actor_infer, prompts, generation, config.seed).get()
        return batch, [self.scorer(batch)]

    def draw(self, position: int, count: int) -> DataProto:
        """So many prompts from this row on."""
        return numbered(self.rows, position, count)

    def write(self, batch: DataProto) -> None:
        """Add the answers to the file, in the place of what a run that was stopped has left."""
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self.lines(batch))
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            if os.fstat(file.fileno()).st_size < self.written_bytes:
                raise ValueError(
                    f"{self.path} has lost answers since the checkpoint that the run goes on from; "
                    "put it back, or set resume=none to begin anew"
                )
            file.truncate(self.written_bytes)
            file.seek(self.written_bytes)
            file.write(lines.encode())
            file.flush()
            os.fsync(file.fileno())
            self.written_bytes = file.tell()

    def lines(self, batch: DataProto) -> Iterator[dict[str, Any]]:
        """What the file has of each answer."""
        scores = [name for name in batch.keys() if name.startswith("scores")]  # noqa: SIM118
        own = set(batch.non_tensor_batch) - WRITTEN_OTHERWISE
        for i, mask in enumerate(batch["response_mask"]):
            ids, length = batch["input_ids"][i], int(batch["lengths"][i])
            prompt = ids[: length - int(mask.sum())].tolist()
            text = self.tokenizer.decode(
                prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            values = {name: float(batch[name][i]) for name in scores}
            yield {
                "row": int(batch["group_id"][i]),
                "sample": int(batch["sample_id"][i]),
                "prompt": text,
                "response": batch["response"][i],
                "tokens": ids[mask].tolist(),
                "log_probs": batch["infer_log_probs"][i][mask].tolist(),
                **{n.replace("scores", "score"): _or_null(value) for n, value in values.items()},
                "finish_reason": batch["finish_reason"][i],
                "weight_version": int(batch["weight_version"][i].max()),
                **{name: batch[name][i] for name in sorted(own)},
            }

    def close(self) -> None:
        """Also end the engines."""
        if self.scheduler is not None:
            self.scheduler.close()
        super().close()

    def state_dict(self) -> dict[str, Any]:
        """How much of the file is written."""
        return {"written_bytes": self.written_bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict gave."""
        self.written_bytes = state["written_bytes"]


def summary(lines: Iterator[dict[str, Any]]) -> DataProto:
    """Of all answers in a file what outcomes.validation_metrics looks at."""
    kept = [
        (line["score"], line["row"], len(line["tokens"]), line["finish_reason"], line.get("domain"))
        for line in lines
    ]
    scores, rows, lengths, reasons, domains = zip(*kept, strict=True)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    values = torch.tensor([math.nan if score is None else score for score in scores])
    columns = {"scores": values, "group_id": torch.tensor(rows), "response_mask": mask}
    objects = {"finish_reason": list(reasons), "domain": list(domains)}
    return DataProto(columns, objects)


def table(found: Mapping[str, Metric]) -> str:
    """Scores and pass@k as text: a line for all, and for each domain where there are several."""
    cells: dict[str, dict[str, str]] = {}
    for key, value in found.items():
        _, *domain, column = key.split("/")
        if domain != ["response"]:
            cells.setdefault("/".join(domain) or "all", {})[column] = f"{value:.4f}"
    columns = list(cells["all"])
    rows = [["", *columns], *([name, *(own[c] for c in columns)] for name, own in cells.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value
