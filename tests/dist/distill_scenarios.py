"""A pipeline that checks distillation of one recorded batch on any world, wherever the teacher is,
and fine-tuning on it."""

from __future__ import annotations

from dataclasses import replace

from any_world import Recording, check_different, check_same, each_world, on_any_world

from roll_td.config.base import StrategyArgs
from roll_td.config.distill import DistillConfig
from roll_td.config.functions import DIVERGENCES, DivergenceArgs
from roll_td.pipelines.answering import start_roles
from roll_td.pipelines.distill import DistillPipeline, common_vocabulary
from roll_td.runtime.together import homes, make_groups
from roll_td.runtime.transport import Group
from roll_td.workers.distill import StudentWorker, counted
from roll_td.workers.sft import SFTWorker


class RecordingStudent(Recording, StudentWorker):
    """Learns, and keeps its gradients."""


class RecordingSFT(Recording, SFTWorker):
    """Learns, and keeps its gradients."""


CUTS = (
    {"micro_batch_size": 1},
    {"micro_batch_size": 3, "packing": False},
    {"max_tokens_per_micro_batch": 40},
)


def comparisons(tokens):
    """Each divergence that has a name over the whole vocabulary and over the likeliest entries,
    with all else that a loss is made of in turn; then over the whole, and over as many entries."""
    for number, name in enumerate(DIVERGENCES):
        given = {"divergence": DivergenceArgs(name), "temperature": (1.0, 2.0)[number % 2]}
        given["learn_from"] = ("answers", "text")[number // 2 % 2]
        yield given | {"top_k": None, "cross_entropy_share": (0.0, 0.3)[number // 3 % 2]}
        yield given | {"top_k": 5, "renormalise": number % 3 > 0}
    yield {"top_k": None}
    yield {"top_k": tokens}


class OnAnyWorld(DistillPipeline):
    """One batch, and one step on it by each divergence, by students on 1, 2, 3 and 4 ranks, cut in
    three ways. Teachers have the same ranks, or others, or some of them; one is the config's own,
    by transformers."""

    def __init__(self, pipeline_config: DistillConfig):
        super().__init__(pipeline_config)
        student = pipeline_config.student
        by_fsdp = replace(
            pipeline_config.teacher,
            name="sharing",
            strategy_args=StrategyArgs("fsdp2_infer"),
            device_mapping=student.device_mapping,
            world_size=student.world_size,
        )
        self.students = on_any_world(self, student, "distill_scenarios.RecordingStudent", *CUTS)
        self.fine_tuned = on_any_world(
            self, replace(student, name="sft"), "distill_scenarios.RecordingSFT", *CUTS
        )
        self.sharing = on_any_world(self, by_fsdp, by_fsdp.worker_cls, {})
        apart = replace(by_fsdp, name="apart", device_mapping=[0, 1, 2], world_size=3)
        self.elsewhere = [self.teacher, *start_roles(self, apart)]
        self.vocabulary = common_vocabulary(self.tokenizer, self.tokenizer)
        for cluster in (*self.students, *self.sharing, *self.elsewhere):
            cluster.set_vocabulary(self.vocabulary)
        self.pipeline_config = replace(pipeline_config, top_k=None, teacher=by_fsdp)

    def run(self):
        config, batch, told, worst = self.pipeline_config, self.train_data.batch(0), [], 0.0
        for number, given in enumerate(comparisons(self.vocabulary)):
            self.pipeline_config = replace(config, **given)
            students = each_world(self.students, number)
            numbers, error = check_same(students, self.one_step, batch)
            told.append(numbers)
            worst = max(worst, error)
        for whole, all_entries in zip(*told[-2:], strict=True):
            assert abs(whole - all_entries) < 1e-5 * max(1, whole)
        check_different(told[:-1])
        _, error = check_same(self.fine_tuned, self.sft_step)
        worst = max(worst, error)
        print(f"RECORDED TEXT CHECKED, {len(told)} losses, worst error {worst:.1e}", flush=True)

    def one_step(self, student, batch):
        """What validation and a step tell. On one rank the student gets all from others, but where
        it shares the teacher's."""
        config, world = self.pipeline_config, student.world_size
        teacher = self.sharing[world - 1] if config.top_k is None else self.elsewhere[world % 2]
        for cluster in (student, teacher):
            cluster.initialize(config)
        self.trained, self.teacher = student, teacher
        self.group = Group(homes([teacher, student]), 60.0)
        make_groups([self.group])
        moved = self.ask_teacher(batch)["teacher_mb"]
        if config.top_k is None or world == 1:
            tokens = int(counted(batch, config.learn_from).sum())
            assert moved == 8e-6 * tokens * (config.top_k or 0)
        rows = student.val_step(batch)
        assert rows["tokens"].sum() == batch.plan.denominators["tokens"]
        metrics = student.train_step(batch).meta_info["metrics"]
        return [
            *(float(metrics[name]) for name in ("loss", "divergence", "grad_norm")),
            *(float(rows[name].sum()) for name in ("divergence", "cross_entropy")),
        ]

    def sft_step(self, actor):
        batch = self.train_data.batch(0)
        rows, metrics = actor.val_step(batch), actor.train_step(batch).meta_info["metrics"]
        loss = float(metrics["loss"])
        assert abs(loss - float(rows["loss"].sum() / rows["tokens"].sum())) < 1e-5
        return [loss, float(metrics["grad_norm"])]
