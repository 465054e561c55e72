import torch

from roll_td.plan import level, local
from roll_td.protocol import DataProto
from roll_td.strategies.batches import Response, by_micro_batch, with_responses


def test_by_micro_batch_follows_the_plan_or_the_size_and_leaves_fillers_out():
    seen = []

    def columns(micro):
        seen.append(micro["x"].tolist())
        return {"double": micro["x"] * 2}

    batch = DataProto({"x": torch.arange(5)})
    out = by_micro_batch(batch, 2, torch.device("cpu"), columns)
    assert out["double"].tolist() == [0, 2, 4, 6, 8]
    assert seen == [[0, 1], [2, 3], [4]]
    seen.clear()
    plan = local(level([[[3, 1], [2]], [[0], [4], [5], [6]]], {}), 0)
    batch = DataProto({"x": torch.arange(7)}).select_idxs(list(plan.rows))
    batch.plan = plan
    assert by_micro_batch(batch, 1, torch.device("cpu"), columns)["double"].tolist() == [6, 2, 4]
    assert seen == [[3, 1], [2]]
    assert len(by_micro_batch(batch[:0], 1, torch.device("cpu"), columns)) == 0


def test_with_responses_widens_token_columns_and_repeats_the_others():
    batch = DataProto(
        {
            "input_ids": torch.tensor([[7, 8, 9], [5, 0, 0]]),
            "lengths": torch.tensor([3, 1]),
            "labels": torch.tensor([[7, 8, 9], [5, -100, -100]]),
            "group_id": torch.tensor([4, 6]),
        },
        {"prompt": ["p", "q"]},
        {"step": 3},
    )
    out = with_responses(
        batch,
        [
            Response([1, 2], [-0.5, -0.25], "length"),
            Response([], [], "length"),
            Response([0], [-1.0], "stop"),
            Response([3], [-2.0], "stop"),
        ],
        weight_version=6,
    )
    assert out["input_ids"].tolist() == [
        [7, 8, 9, 1, 2],
        [7, 8, 9, 0, 0],
        [5, 0, 0, 0, 0],
        [5, 3, 0, 0, 0],
    ]
    assert out["lengths"].tolist() == [5, 3, 2, 2]
    assert out["response_mask"].int().tolist() == [
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
    ]
    assert out["weight_version"].dtype == torch.int32
    assert torch.equal(out["weight_version"], out["response_mask"] * 6)
    assert out["infer_log_probs"].tolist()[::2] == [[0, 0, 0, -0.5, -0.25], [0, -1, 0, 0, 0]]
    assert out["labels"].tolist()[3] == [5, -100, -100, -100, -100]
    assert out["finish_reason"].tolist() == ["length", "length", "stop", "stop"]
    assert out["group_id"].tolist() == [4, 4, 6, 6]
    assert out["prompt"].tolist() == ["p", "p", "q", "q"]
    assert out.meta_info == {"step": 3}
    assert batch["input_ids"].shape == (2, 3)


def test_no_rows_give_no_rows_with_all_columns():
    empty = DataProto(
        {"input_ids": torch.zeros(0, 4, dtype=torch.long), "lengths": torch.zeros(0).long()}
    )
    out = with_responses(empty, [], 1)
    assert len(out) == 0
    assert set(out.keys()) == {
        "input_ids",
        "lengths",
        "response_mask",
        "infer_log_probs",
        "weight_version",
        "finish_reason",
    }
    assert [out["response_mask"].dtype, out["infer_log_probs"].dtype] == [torch.bool, torch.float32]
    joined = DataProto.concat([out, with_responses(empty, [], 1)])
    assert joined["input_ids"].shape == (0, 4)
