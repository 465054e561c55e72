"""What answers and their scores say, as metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.evaluation import pass_at_k
from roll_td.algorithms.masking import moments
from roll_td.algorithms.rewards_shaping import has_signal, in_groups
from roll_td.config.rlvr import ValidationConfig
from roll_td.metrics import Max, Mean, Metric, Sum
from roll_td.protocol import DataProto

COLUMNS = {"scores", "group_id", "response_mask", "finish_reason"}
"""What rollout_metrics looks at, scores if there are any."""


def rollout_metrics(batch: DataProto) -> dict[str, Metric]:
    """Of all that was sampled, whether it is learnt from or not: scores, if there are any, and
    lengths."""
    scores = _scores(batch) if "scores" in batch else {}
    return scores | _lengths(batch, "response")


def _scores(batch: DataProto) -> dict[str, Metric]:
    scores, group_id = batch["scores"], batch["group_id"]
    valid = ~scores.isnan()
    found = moments(scores, valid)
    signal = has_signal(scores, valid, group_id)
    groups = len(set(group_id.tolist()))
    with_signal = len(set(group_id[signal].tolist()))
    return {
        "reward/mean": Mean(found.mean, found.count),
        "reward/std": Mean(found.std(1), found.count),
        "reward/groups_with_signal": Mean(with_signal / max(groups, 1), groups),
        "reward/without_score": Sum(len(scores) - found.count),
    }


def validation_metrics(batch: DataProto, config: ValidationConfig) -> dict[str, Metric]:
    """Mean score and pass@k, of all and by domain where the data has several; lengths. Without
    scores these alone.

    An answer without a score counts nowhere, nor for pass@k a prompt with fewer than k scores.
    """
    if "scores" not in batch:
        return _lengths(batch, "val/response")
    found = _passes(batch, config, "val")
    domains = list(dict.fromkeys(batch["domain"])) if "domain" in batch else []
    if len(domains) > 1:
        for domain in domains:
            of_domain = torch.tensor([name == domain for name in batch["domain"]])
            found |= _passes(batch[of_domain], config, f"val/{domain}")
    return found | _lengths(batch, "val/response")


def _passes(batch: DataProto, config: ValidationConfig, prefix: str) -> dict[str, Metric]:
    scores = batch["scores"]
    valid = ~scores.isnan()
    of_all = moments(scores, valid)
    metrics: dict[str, Metric] = {f"{prefix}/score": Mean(of_all.mean, of_all.count)}
    right = (scores >= config.pass_score).float()
    samples, share, _ = in_groups(right, valid, batch["group_id"])
    first = _first_of_groups(batch["group_id"])
    samples, correct = samples[first].long(), (samples * share)[first].round().long()
    for k in config.pass_at:
        enough = samples >= k
        passed = pass_at_k(samples[enough], correct[enough], k=k)
        count = len(passed)
        metrics[f"{prefix}/pass@{k}"] = Mean(passed.sum().item() / max(count, 1), count)
    return metrics


def _first_of_groups(group_id: Tensor) -> Tensor:
    """The number of each group's first row."""
    first: dict[int, int] = {}
    for row, name in enumerate(group_id.tolist()):
        first.setdefault(name, row)
    return torch.tensor(list(first.values()), dtype=torch.long)


def _lengths(batch: DataProto, prefix: str) -> dict[str, Metric]:
    """Tokens of the answers, those cut off at the longest length too."""
    rows = len(batch)
    lengths = batch["response_mask"].sum(-1).double()
    cut = sum(reason == "length" for reason in batch["finish_reason"])
    return {
        f"{prefix}/length": Mean(lengths.mean().item(), rows),
        f"{prefix}/length_max": Max(lengths.max().item()),
        f"{prefix}/truncated": Mean(cut / rows, rows),
    }
