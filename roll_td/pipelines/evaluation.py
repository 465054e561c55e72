"""What a model in training answers to prompts, and what the answers score."""

from __future__ import annotations

from typing import Any

from roll_td.config.evaluation import EvaluatedConfig
from roll_td.config.rewards import check_domains
from roll_td.data.loader import load_data
from roll_td.metrics import Metric, under
from roll_td.pipelines import outcomes
from roll_td.pipelines.answering import answers, numbered
from roll_td.pipelines.scoring import Scorer
from roll_td.runtime.cluster import Cluster


class Evaluation:
    """All prompts of a config, answered by the weights that actor_infer has."""

    def __init__(
        self,
        config: EvaluatedConfig,
        tokenizer: Any,
        actor_infer: Cluster,
        reward: Cluster,
        *judges: Cluster,
    ) -> None:
        """The roles of the config, judges in its order. ConfigError for a domain without a reward,
        and as load_data."""
        assert config.prompts is not None, "without prompts there is nothing to answer"
        data = load_data(config.prompts, tokenizer, "prompts", config.batch_size, config.seed)
        self._rows, self._actor_infer = data.train.rows, actor_infer
        if "domain" in data.train.kept:
            check_domains(config.rewards, data.train.kept["domain"])
        reward.check_golds(data.train.kept, blocking=False)  # it logs what it finds
        self._scorer = Scorer(config, reward, dict(zip(config.judges, judges, strict=True)))
        self._validation, self._seed = config.validation, config.seed + 1

    def __call__(self) -> dict[str, Metric]:
        """As outcomes.validation_metrics, and what the rewards tell; by the same random numbers
        each time."""
        prompts = numbered(self._rows, 0, len(self._rows))
        batch = answers(self._actor_infer, prompts, self._validation.generation, self._seed).get()
        told = under("val", self._scorer(batch))
        return outcomes.validation_metrics(batch, self._validation) | told
