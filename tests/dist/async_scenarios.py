"""A pipeline for test_async: it leaves in groups.jsonl which prompts each step has learnt from."""

from __future__ import annotations

import json

from roll_td.pipelines.rlvr import RLVRPipeline


class Recorded(RLVRPipeline):
    """Also the versions of the weights that made its tokens."""

    def rollout(self):
        batch = super().rollout()
        versions = batch["weight_version"][batch["response_mask"]].unique().tolist()
        groups = batch["group_id"].unique().tolist()
        line = {"step": self.global_step, "groups": groups, "versions": versions}
        with (self.run_dir / "groups.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return batch
