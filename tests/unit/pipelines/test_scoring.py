"""What answers are worth; the roles are stood in for, rewards are the real ones."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_td.config.judges import JudgeConfig
from roll_td.config.model import GenerationConfig, ModelConfig
from roll_td.config.rewards import RewardArgs
from roll_td.metrics import Sum
from roll_td.models import load_tokenizer
from roll_td.pipelines.scoring import Scorer
from roll_td.protocol import DataProto
from roll_td.rewards.judge import Judge

MODEL = ModelConfig(
    config={"model_type": "qwen3"},
    tokenizer=str(Path(__file__).parents[3] / "configs" / "sft" / "tiny" / "tokenizer"),
)
TOKENIZER: Any = load_tokenizer(MODEL)
ASKED = {"pattern": r"(\d+)$", "role": "strict"}


class Rewards:
    """A reward role in this process."""

    def __init__(self, rewards: Any) -> None:
        self.judge = Judge(rewards, 1, logging.getLogger("reward.0"))

    def compute_rewards(self, data: DataProto) -> DataProto:
        assert data.batch is None, "rewards see no tensors"
        verdict = self.judge.score(data.non_tensor_batch)
        scores = torch.tensor(verdict.scores)
        return DataProto({"scores": scores}, meta_info={"metrics": verdict.metrics})


class Model:
    """A judge that replies to the question about sample i what `says` has for it, in turn."""

    def __init__(self, says: dict[int, list[str]]) -> None:
        self.says, self.questions, self.seeds = says, [], []
        self.questions: list[dict[int, str]]
        self.seeds: list[int]

    def generate(self, data: DataProto, generation: GenerationConfig, seed: int) -> DataProto:
        ids = data["sample_id"].tolist()
        rows = zip(data["input_ids"], data["lengths"].tolist(), strict=True)
        texts = [TOKENIZER.decode(row[:length]) for row, length in rows]
        self.questions.append(dict(zip(ids, texts, strict=True)))
        self.seeds.append(seed)
        return DataProto(None, {"response": [self.says[i].pop(0) for i in ids]})


def scorer(
    rewards: dict[str, Any], judges: dict[str, Model], temperature: float = 1.0, **given: Any
) -> Scorer:
    made = {tag: RewardArgs(**args) for tag, args in rewards.items()}
    role = JudgeConfig(generation=GenerationConfig(temperature=temperature), **given)
    config = SimpleNamespace(rewards=made, judges=dict.fromkeys(judges, role), model=MODEL, seed=3)
    clusters: Any = judges
    reward: Any = Rewards(made)
    return Scorer(config, reward, clusters)


def answers(*texts: str, **columns: Any) -> DataProto:
    ids = torch.arange(len(texts)) + 7
    return DataProto({"sample_id": ids}, {"response": list(texts), **columns})


def llm_judge(template: str, on_error: str = "fail", **settings: Any) -> dict[str, Any]:
    given = {**ASKED, "template": template, **settings}
    return {"name": "llm_judge", "settings": given, "on_error": on_error}


def test_scores_are_added_to_answers() -> None:
    rows = answers("a", "b", ground_truth=["a", "a"])
    told = scorer({"default": {"name": "exact_match"}}, {})(rows)
    assert rows["scores"].tolist() == [1.0, 0.0]
    assert told["reward/default/exact_match"] == 0.5 and "judge_reply" not in rows


def test_without_a_reward_there_are_none() -> None:
    rows, config = answers("a"), SimpleNamespace(rewards={}, judges={}, seed=1)
    assert Scorer(config, None, {})(rows) == {} and "scores" not in rows


def test_each_domain_asks_its_judge_in_its_own_words() -> None:
    strict, mild = Model({7: ["x 3"], 9: ["5"]}), Model({8: ["10"]})
    made = scorer(
        {
            "sums": llm_judge("{ground_truth}={response}?"),
            "words": llm_judge("Rate {response}", role="mild", highest=20),
            "default": {"name": "exact_match"},
        },
        {"strict": strict, "mild": mild},
    )
    domain, truth = ["sums", "words", "sums", "other"], ["1", "2", "3", "d"]
    rows = answers("a", "b", "c", "d", domain=domain, ground_truth=truth)
    told = made(rows)
    assert rows["scores"].tolist() == pytest.approx([0.3, 0.5, 0.5, 1.0])
    assert rows["judge_reply"].tolist() == ["x 3", "10", "5", None]
    (first,), (second,) = strict.questions, mild.questions
    whole = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "3=c?"}], tokenize=False, add_generation_prompt=True
    )
    assert first[9] == whole and "1=a?" in first[7] and "Rate b" in second[8]
    assert told["judge/strict/questions"] == Sum(2) and told["judge/mild/questions"] == Sum(1)
    assert told["reward/words/llm_judge"] == 0.5


def test_without_a_score_it_is_asked_again_with_other_random_numbers() -> None:
    model = Model({7: ["5"], 8: ["eh", "11", "7"], 9: ["", "", ""]})
    made = scorer({"default": llm_judge("{response}", "skip", attempts=3)}, {"strict": model})
    rows = answers("a", "b", "c")
    told = made(rows)
    assert rows["scores"].tolist() == pytest.approx([0.5, 0.7, math.nan], nan_ok=True)
    assert [sorted(asked) for asked in model.questions] == [[7, 8, 9], [8, 9], [8, 9]]
    assert len(set(model.seeds)) == 3 and 3 not in model.seeds
    counts = {name: told[f"judge/strict/{name}"] for name in ("asked_again", "without_score")}
    assert counts == {"asked_again": 4, "without_score": 1}
    assert told["reward/default/llm_judge/errors"] == 1
    again = Model({7: ["1"]})
    scorer({"default": llm_judge("{response}")}, {"strict": again})(answers("a"))
    assert again.seeds == model.seeds[:1], "the same run asks the same"


@pytest.mark.parametrize(("policy", "score"), [("skip", math.nan), ("zero", 0.0)])
def test_what_has_no_score_is_what_on_error_says(policy: str, score: float) -> None:
    """At temperature 0 it would say the same again."""
    made = scorer({"default": llm_judge("{response}", policy)}, {"strict": Model({7: ["no"]})}, 0)
    rows = answers("a")
    assert made(rows)["judge/strict/asked_again"] == 0
    assert rows["scores"].tolist() == pytest.approx([score], nan_ok=True)
    failing = scorer({"default": llm_judge("{response}")}, {"strict": Model({7: ["no"]})}, 0)
    with pytest.raises(RuntimeError, match=r"no score in the reply 'no'[^\n]*$"):
        failing(answers("a"))


def test_a_question_that_is_too_long_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    model = Model({7: ["9"]})
    rewards = {"default": llm_judge("{response}", "zero")}
    made = scorer(rewards, {"strict": model}, max_length=60)
    rows = answers("a", "b" * 60)
    assert made(rows)["judge/strict/questions"] == 1
    assert rows["scores"].tolist() == pytest.approx([0.9, 0.0])
    assert "1 of 2 questions to the judge strict are not asked: the first has" in caplog.text
    assert "more than max_length" in caplog.text and "could not be asked" in caplog.text
    none = answers("c" * 60)
    made(none)
    assert none["scores"].tolist() == [0.0] and len(model.questions) == 1
