"""From rewards to advantages: how much better each token was than could be expected.

token_level_rewards: float32 (B, T). response_mask: bool (B, T), True for tokens of the policy that
count. group_id: int64 (B), rows of one prompt, in any order. What is masked, and any row with a
NaN reward (no score), gets advantage 0 and moves no other row's. The outcome of a row is the sum of
its token rewards. Each function returns columns: `advantages`, and what else it makes, float32
(B, T), 0 outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.masking import keep, whiten
from roll_td.algorithms.rewards_shaping import in_groups, normalise


def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_id: Tensor,
    *,
    scale: str,
    ddof: int,
) -> dict[str, Tensor]:
    """(outcome - mean of its group) / standard deviation, for every token of the row (GRPO,
    arXiv:2402.03300, section 4.1.2).

    scale: what the deviation is of: "group"; "none" for 1 (Dr. GRPO, arXiv:2503.20783); "batch".
    ddof: 1 for the sample's deviation, 0 for the population's. 0 where all outcomes of a group
    are equal, or there is one.
    """
    outcomes, mask = outcomes_and_mask(token_level_rewards, response_mask)
    advantages = normalise(outcomes, mask.any(-1), group_id, mean="group", std=scale, ddof=ddof)
    return {"advantages": everywhere(advantages, mask)}


def rloo(token_level_rewards: Tensor, response_mask: Tensor, group_id: Tensor) -> dict[str, Tensor]:
    """Outcome - mean of the others of its group, for every token of the row (REINFORCE
    leave-one-out, arXiv:2402.14740). 0 for a row that has no others."""
    outcomes, mask = outcomes_and_mask(token_level_rewards, response_mask)
    count, mean, _ = in_groups(outcomes, mask.any(-1), group_id)
    others = torch.where(count > 1, count / (count - 1).clamp(min=1), 0.0)
    return {"advantages": everywhere((outcomes - mean) * others, mask)}


def reinforce(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float
) -> dict[str, Tensor]:
    """The rewards still to come, discounted by gamma for each token of the policy between
    (Williams 1992, doi:10.1007/BF00992696). No baseline."""
    _, mask = outcomes_and_mask(token_level_rewards, response_mask)
    return {"advantages": _to_go(token_level_rewards, mask, gamma).float()}


def reinforce_pp(
    token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float
) -> dict[str, Tensor]:
    """As reinforce, then whitened over all tokens of the batch, sample deviation (REINFORCE++,
    arXiv:2501.03262)."""
    _, mask = outcomes_and_mask(token_level_rewards, response_mask)
    to_go = _to_go(token_level_rewards, mask, gamma)
    return {"advantages": whiten(to_go, mask, ddof=1).float()}


def reinforce_pp_baseline(
    token_level_rewards: Tensor, response_mask: Tensor, group_id: Tensor
) -> dict[str, Tensor]:
    """Outcome - mean of its group, for every token of the row, then whitened over all tokens of the
    batch, sample deviation (REINFORCE++-baseline, arXiv:2501.03262).

    A row that is alone in its group has no baseline: nothing is subtracted.
    """
    outcomes, mask = outcomes_and_mask(token_level_rewards, response_mask)
    count, mean, _ = in_groups(outcomes, mask.any(-1), group_id)
    centred = outcomes - torch.where(count > 1, mean, 0.0)
    return {"advantages": whiten(everywhere(centred, mask), mask, ddof=1)}


def gae(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    lam: float,
) -> dict[str, Tensor]:
    """Generalised advantages, and `returns` = advantages + values for the critic to learn
    (arXiv:1506.02438, equation 16), over the tokens of the policy alone.

    values: float32 (B, T), of the state before each token. Next to a token of the policy is the
    policy's next, whatever lies between; after the last the value is 0.
    """
    _, mask = outcomes_and_mask(token_level_rewards, response_mask)
    rewards, values = keep(token_level_rewards, mask).double(), keep(values, mask).double()
    advantages = _advantages(rewards, values, mask, gamma, lam)
    return {"advantages": advantages.float(), "returns": (advantages + values).float()}


def distillation(
    old_log_probs: Tensor, teacher_log_probs: Tensor, response_mask: Tensor, *, gamma: float
) -> dict[str, Tensor]:
    """log p_teacher - log p_student of each token that the student sampled, and with a gamma above
    0 of those of the policy after it, discounted.

    The log-prob's gradient times this, on average over what is sampled, is that of -KL(student ‖
    teacher): with gamma 0 of the next token's distributions, with gamma 1 of those of whole answers
    (on-policy distillation, Gu et al. 2024, arXiv:2306.08543, section 2.2). A penalty that is a
    function of the state alone has no such gradient.
    """
    return {"advantages": _to_go(teacher_log_probs - old_log_probs, response_mask, gamma).float()}


def outcomes_and_mask(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each row's rewards, float32 (B), and the mask (B, T) without rows that have none.

    In float32, as equal outcomes have an exact mean in float64 then: see in_groups.
    """
    rewards = keep(token_level_rewards, response_mask)
    scored = ~rewards.isnan().any(-1)
    mask = response_mask & scored[:, None]
    return keep(rewards, mask).double().sum(-1).float(), mask


def everywhere(of_rows: Tensor, mask: Tensor) -> Tensor:
    """A number per row (B) at each of its tokens, float32 (B, T)."""
    return keep(of_rows[:, None].float().expand(mask.shape), mask)


def _advantages(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalised advantages, float64 (B, T), of rewards and values that are 0 outside the mask."""
    columns = (table.T.contiguous() for table in (rewards, values, mask))
    following = running = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    steps = []
    for reward, value, here in reversed([*zip(*columns, strict=True)]):
        error = reward + gamma * following - value
        running = torch.where(here, error + gamma * lam * running, running)
        following = torch.where(here, value, following)
        steps.append(running)
    return keep(torch.stack(steps[::-1]).T, mask)


def _to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The rewards still to come, float64 (B, T): advantages over a critic that expects nothing."""
    rewards = keep(rewards, mask).double()
    return _advantages(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
