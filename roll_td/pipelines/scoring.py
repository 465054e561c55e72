"""What answers are worth: roles of the job that judge are asked, then the role with the rewards."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from roll_td.columns import object_column
from roll_td.config.data import DataConfig
from roll_td.config.judges import JudgeConfig, asking
from roll_td.config.reward_settings import REPLY, JudgeSettings, fields_of
from roll_td.config.rewards import tag_of
from roll_td.data.encode import Tokens, encode
from roll_td.data.read import BadRow
from roll_td.metrics import Metric, Sum, merge_metrics
from roll_td.models import load_tokenizer
from roll_td.protocol import DataProto
from roll_td.rewards.llm_judge import question, score_in
from roll_td.runtime.cluster import Cluster

logger = logging.getLogger(__name__)


class RoleJudge:
    """A role that is asked in the words of a template, as often as it takes to get a score."""

    def __init__(self, name: str, cluster: Cluster, config: JudgeConfig, tokenizer: Any) -> None:
        self.name, self.cluster, self.config = name, cluster, config
        self._tokenizer = tokenizer
        has_template = tokenizer.chat_template is not None
        self._data = DataConfig(
            train="questions.jsonl",  # read by nobody
            prompt_key="question",
            template="chat" if has_template else "none",
            max_length=config.max_length,
        )

    def replies(
        self, batch: DataProto, settings: JudgeSettings, seed: int
    ) -> tuple[list[str | None], dict[str, Metric]]:
        """A reply (B) to a question about each answer, by its columns that the template names and
        its sample_id; the last one where none has a score, None where the question has no tokens
        or more than max_length. And how many questions were asked, anew, and in vain."""
        names = fields_of(settings.template)
        rows = zip(*(batch[name] for name in names), strict=True)
        asked = [{"question": question(settings.template, row)} for row in rows]
        tokens = encode(asked, self._data, self._tokenizer, "prompts")
        bad = [one for one in tokens if isinstance(one, BadRow)]
        if bad:
            text = "%d of %d questions to the judge %s are not asked: the first %s"
            logger.warning(text, len(bad), len(tokens), self.name, bad[0])
        found: list[str | None] = [None] * len(batch)
        ids = {row: one.ids for row, one in enumerate(tokens) if isinstance(one, Tokens)}
        left = list(ids)
        attempts = settings.attempts if self.config.generation.temperature else 1
        counts = {"questions": len(left), "asked_again": 0, "without_score": 0}
        for attempt in range(attempts):
            if not left:
                break
            counts["asked_again"] += len(left) if attempt else 0
            prompts = _prompts([ids[row] for row in left])
            prompts.update({"sample_id": batch["sample_id"][left]})
            # apart from those of the answers, and from attempt to attempt
            drawn = _number(seed, self.name, attempt)
            texts = self.cluster.generate(prompts, self.config.generation, drawn)["response"]
            for row, text in zip(left, texts, strict=True):
                found[row] = str(text)
            left = [row for row in left if not _has_score(str(found[row]), settings)]
        counts["without_score"] = len(left)
        return found, {f"judge/{self.name}/{what}": Sum(n) for what, n in counts.items()}


class Scorer:
    """Adds to answers what they are worth. Without a role `reward` nothing."""

    def __init__(
        self, config: Any, reward: Cluster | None, clusters: Mapping[str, Cluster]
    ) -> None:
        """`config`: of a pipeline with rewards and judges; `clusters`: those of its judges, by the
        names that config.judges has."""
        self._reward, self._rewards, self._seed = reward, config.rewards, config.seed
        self._judges = {
            name: RoleJudge(name, clusters[name], role, load_tokenizer(role.model or config.model))
            for name, role in config.judges.items()
        }
        self._asking = asking(config.rewards)

    @property
    def judges(self) -> list[Cluster]:
        """The roles that judge."""
        return [judge.cluster for judge in self._judges.values()]

    def __call__(self, batch: DataProto) -> dict[str, Metric]:
        """Add the columns of RewardWorker.compute_rewards to answers with sample_id and the object
        columns of rewards; what the rewards tell of them. With judges also what they have replied,
        as REPLY."""
        if self._reward is None:
            return {}
        metrics = self._ask(batch) if self._judges else {}
        rewards = self._reward.compute_rewards(DataProto(None, batch.non_tensor_batch))
        batch.update(rewards)
        metrics |= rewards.meta_info["metrics"]
        return metrics

    def _ask(self, batch: DataProto) -> dict[str, Metric]:
        domains = batch["domain"] if "domain" in batch else [None] * len(batch)
        tags = [tag_of(self._rewards, domain) for domain in domains]
        replies: list[str | None] = [None] * len(batch)
        found: list[dict[str, Metric]] = []
        for tag, (_, settings) in self._asking.items():
            rows = [row for row, its in enumerate(tags) if its == tag]
            if rows:
                judge = self._judges[str(settings.role)]
                texts, metrics = judge.replies(batch[rows], settings, self._seed)
                found.append(metrics)
                for row, text in zip(rows, texts, strict=True):
                    replies[row] = text
        batch.update(DataProto(None, {REPLY: object_column(REPLY, replies)}))
        return merge_metrics(found)


def _prompts(rows: Sequence[NDArray[np.int32]]) -> DataProto:
    """Tokens as a batch to be answered."""
    ids = [torch.from_numpy(row).long() for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return DataProto({"input_ids": pad_sequence(ids, batch_first=True), "lengths": lengths})


def _number(*of: object) -> int:
    """A seed that follows from all of these."""
    return int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:4], "little") >> 1


def _has_score(reply: str, settings: JudgeSettings) -> bool:
    bounds = {"lowest": settings.lowest, "highest": settings.highest}
    try:
        score_in(reply, pattern=settings.pattern, **bounds)
    except ValueError:
        return False
    return True
