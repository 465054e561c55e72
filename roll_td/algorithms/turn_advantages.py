"""Advantages of turns, see `turns`. Columns, and what becomes of what is masked or has no score, as
in `advantages`. Discounts count turns, not tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from roll_td.algorithms.advantages import everywhere, outcomes_and_mask
from roll_td.algorithms.masking import keep
from roll_td.algorithms.rewards_shaping import in_groups, normalise
from roll_td.algorithms.turns import turn_sums, turns


def turn_reinforce(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_id: Tensor,
    *,
    gamma: float,
    baseline: str,
) -> dict[str, Tensor]:
    """The rewards of a turn and of those still to come, discounted by gamma for each turn between,
    less a baseline, for every token of the turn.

    baseline: the mean of these returns over the group: "rows", every row weighing the same;
    "turns", every turn; or "none". A row that is alone in its group has none.
    """
    _, mask = outcomes_and_mask(token_level_rewards, response_mask)
    turn = turns(mask)
    returns, exists = _returns(token_level_rewards, mask, turn, gamma)
    lengths = exists.sum(-1)
    valid = mask.any(-1)
    count, mean_length, _ = in_groups(lengths.float(), valid, group_id)
    totals = returns.sum(-1)
    if baseline == "turns":
        mean = in_groups(totals.float(), valid, group_id)[1] / mean_length.clamp(min=1)
    elif baseline == "rows":
        mean = in_groups((totals / lengths.clamp(min=1)).float(), valid, group_id)[1]
    else:
        mean = torch.zeros_like(totals)
    centred = returns - torch.where(count > 1, mean, 0.0)[:, None]
    return {"advantages": keep(centred.gather(1, turn), mask).float()}


def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_id: Tensor,
    state_id: Tensor,
    *,
    gamma: float,
    turn_weight: float,
    scale: str,
    ddof: int,
) -> dict[str, Tensor]:
    """Advantage of the row in its group + turn_weight · that of the turn among the turns of the
    group that began in the same state (GiGPO, arXiv:2505.10978, equations 3 to 8).

    state_id: int64 (B, T), at the first token of a turn a number of the state that the policy
    answered there; the same number in a group is the same state. Of a row it is the sum of rewards
    that is compared, of a turn the rewards of it and of those to come, discounted by gamma for each
    turn between; a turn that shares its state with no other has no part of its own. scale: what
    both are divided by: "group", the standard deviation with ddof, or "none".
    """
    outcomes, mask = outcomes_and_mask(token_level_rewards, response_mask)
    how = {"mean": "group", "std": scale, "ddof": ddof}
    of_rows = normalise(outcomes, mask.any(-1), group_id, **how)  # type: ignore[arg-type]
    turn = turns(mask)
    returns, exists = _returns(token_level_rewards, mask, turn, gamma)
    starts = mask & (turn != torch.nn.functional.pad(turn[:, :-1], (1, 0)))
    states = returns.new_zeros(returns.shape, dtype=torch.long)
    states = states.scatter_add(1, turn, keep(state_id, starts))
    keys = torch.stack([group_id[:, None].expand_as(states), states], -1)[exists]
    _, among = torch.unique(keys, dim=0, return_inverse=True)
    of_turns = returns.float()[exists]
    always = torch.ones_like(among, dtype=torch.bool)
    compared = torch.zeros_like(returns, dtype=torch.float32)
    compared[exists] = normalise(of_turns, always, among, **how)  # type: ignore[arg-type]
    both = everywhere(of_rows, mask) + turn_weight * keep(compared.gather(1, turn), mask)
    return {"advantages": both}


def _returns(rewards: Tensor, mask: Tensor, turn: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """The rewards of each turn and of those to come, float64 (B, T + 1), 0 for a turn that isn't;
    and which turns are, bool, by the number of the turn."""
    of_turns = turn_sums(keep(rewards, mask).double(), turn)
    numbers = torch.arange(of_turns.shape[1], device=mask.device)
    exists = (numbers > 0) & (numbers <= turn.amax(-1, keepdim=True))
    running = torch.zeros_like(of_turns[:, 0])
    steps = []
    for reward in reversed(of_turns.T.contiguous()):
        running = reward + gamma * running
        steps.append(running)
    return keep(torch.stack(steps[::-1]).T, exists), exists
