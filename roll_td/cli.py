"""The command line: `roll-td check`, `run` and `submit CONFIG`, with key=value overrides, and
`roll-td report`, `replay`, `status`, `logs` and `cancel RUN_DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roll_td.config.base import JobSize, WorkerConfig
from roll_td.config.classes import check_class
from roll_td.config.device_memory import memory_by_device, memory_problems, memory_table
from roll_td.config.load import Checked, check_config
from roll_td.config.replay import record_path, write_replay_config
from roll_td.config.schema import Problem
from roll_td.placement import (
    RolePlacement,
    WorldLayout,
    place,
    placement_table,
    planned_places,
    world_layout,
)


@dataclass(frozen=True)
class Report:
    """What `check` finds."""

    size: JobSize | None
    """How many ranks to start; None if it can't be told."""
    table: str
    """The placement, then the memory of each role; empty if there is none."""
    warnings: tuple[str, ...]
    """What is allowed but slow, or can't be checked."""
    problems: tuple[Problem, ...]
    """What keeps the config from running."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0 if all is well, 1 for problems, 2 for wrong usage."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(argv)
    arguments = vars(parsed)
    # argparse takes no key=value that stands behind an option
    if "overrides" in arguments and all("=" in r and not r.startswith("-") for r in rest):
        arguments["overrides"] += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    command: Callable[..., int] = arguments.pop("command")
    return command(**arguments)


def check(config: str, overrides: Sequence[str], is_here: bool = True) -> Report:
    """Everything that can be told of a config without starting a rank. `is_here`: whether the job
    will see the files of this machine."""
    checked = check_config(config, overrides)
    further, unchecked = _further_problems(checked.roles)
    problems = [*checked.problems, *_class_problems(checked), *further]
    outside = [] if checked.config is None else checked.config.outside_problems()
    if is_here:
        problems += outside
    else:
        unchecked += [f"{problem} (or have it there)" for problem in outside]
    if checked.size is None:
        return Report(None, "", tuple(unchecked), tuple(problems))
    size = checked.size
    places = planned_places(size.num_nodes, size.num_gpus_per_node, size.num_cpu_ranks_per_node)
    layout = world_layout(places, size.num_nodes, size.num_gpus_per_node)
    placements, misplaced = _place_all(checked.roles, layout)
    warnings = [w for p in placements for w in p.warnings]
    tables = [placement_table(placements, layout)]
    if checked.config is not None and not misplaced:
        taken, unknown = memory_by_device(checked.config)
        tables += [memory_table(taken), *unknown]
        problems += memory_problems(checked.config, taken)
    table = "\n\n".join(table for table in tables if table)
    warnings = [*layout.warnings, *warnings, *unchecked]
    return Report(size, table, tuple(warnings), (*problems, *misplaced))


def _place_all(
    roles: Mapping[str, WorkerConfig], layout: WorldLayout
) -> tuple[list[RolePlacement], list[Problem]]:
    placements, problems = [], []
    for section, role in roles.items():
        try:
            placements.append(place(role.name or section, role, layout))
        except ValueError as error:
            rule, _, fix = str(error).partition("; ")
            problems.append(Problem(section, "", rule, fix))
    return placements, problems


def _class_problems(checked: Checked) -> list[Problem]:
    """Worker classes that are missing or can't be found."""
    problems = []
    for section, role in checked.roles.items():
        key, path = f"{section}.worker_cls", role.worker_cls
        if not path and not checked.roles_are_final:
            continue
        if not path:
            fix = "set the dotted path of the Worker class"
            problems.append(Problem(key, "", "is missing", fix))
            continue
        try:
            check_class(path)
        except ValueError as error:
            rule, _, fix = str(error).rpartition("; ")
            problems.append(Problem(key, repr(path), rule, fix))
    return problems


def _further_problems(roles: Mapping[str, WorkerConfig]) -> tuple[list[Problem], list[str]]:
    """Of the arguments that roles give to engines; and of which roles it can't be told."""
    problems, unchecked = [], []
    for section, role in roles.items():
        found = [] if role.strategy_args is None else role.strategy_args.further_problems()
        key = f"{section}.strategy_args.strategy_config"
        if found is None:
            unchecked.append(
                f"{key}: the engine's arguments are not checked, as it is not installed here"
            )
        problems += [problem.under(key) for problem in found or []]
    return problems, unchecked


def _check(config: str, overrides: list[str]) -> int:
    report = check(config, overrides)
    if report.table:
        print(report.table)
    if report.size is not None:
        hedge = "as far as the config can be read, " if report.problems else ""
        print(f"\n{hedge}{_ranks_to_start(report.size)}")
    for warning in report.warnings:
        print(f"warning: {warning}")
    if report.problems:
        print(f"\n{_problem_text(config, report.problems)}")
    return 1 if report.problems else 0


def _run(config: str, overrides: list[str]) -> int:
    report = check(config, overrides)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if report.problems or report.size is None:
        print(_problem_text(config, report.problems), file=sys.stderr)
        return 1
    if report.size.num_nodes > 1:
        print(
            f"num_nodes={report.size.num_nodes}: run starts the ranks of one machine; use "
            f"roll-td submit, torchrun or srun. {_ranks_to_start(report.size)}",
            file=sys.stderr,
        )
        return 2
    from launch.local import run_local

    return run_local(config, overrides, report.size.ranks_per_node)


def _submit(config: str, overrides: list[str], nodes: int | None, **options: Any) -> int:
    if nodes is not None:
        overrides = [*overrides, f"num_nodes={nodes}"]
    from launch.submit import sees_this_machine, submit_with

    report = check(config, overrides, sees_this_machine(options["to"]))
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if report.problems:
        print(_problem_text(config, report.problems), file=sys.stderr)
        return 1
    return _told("submit", lambda: submit_with(config, overrides, **options))


def _of_job(command: str, run_dir: str) -> int:
    from launch import submit

    functions = {"status": submit.status, "logs": submit.logs, "cancel": submit.cancel}
    return _told(command, lambda: functions[command](run_dir))


def _told(command: str, action: Callable[[], None]) -> int:
    try:
        action()
    except (ValueError, ImportError) as error:
        print(f"roll-td {command}: {error}", file=sys.stderr)
        return 1
    return 0


def _report(run_dir: str) -> int:
    from roll_td.report.page import write_report

    return _told("report", lambda: print(write_report(Path(run_dir))))


def _replay(run_dir: str, step: int, sample: int | None) -> int:
    try:
        config = str(write_replay_config(run_dir, step, sample))
        if sample is not None:
            from roll_td.pipelines.recording import Record

            Record.load(record_path(run_dir, step)).check_sample(sample)
    except ValueError as error:
        print(f"roll-td replay: {error}", file=sys.stderr)
        return 1
    report = check(config, [])
    if report.problems:
        print(_problem_text(config, report.problems), file=sys.stderr)
        return 1
    from launch.local import run_local

    return run_local(config, [], 1)


def _ranks_to_start(size: JobSize) -> str:
    total = size.num_nodes * size.ranks_per_node
    nodes = f"{size.ranks_per_node} on each of {size.num_nodes} nodes: "
    return (
        f"ranks to start: {total} ({nodes if size.num_nodes > 1 else ''}"
        f"{size.num_gpus_per_node} device and {size.num_cpu_ranks_per_node} CPU ranks a node)"
    )


def _problem_text(config: str, problems: Sequence[Problem]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n".join([f"{config}: {count}", *(f"  {problem}" for problem in problems)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="roll-td", description="Pipelines on torch.distributed")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, text in (
        ("check", _check, "print the placement and every problem of a config; starts nothing"),
        ("run", _run, "check a config, then start its ranks on this machine"),
        ("submit", _submit, "check a config, then hand its ranks to a scheduler"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="changes to the config"
        )
        command.set_defaults(command=function)
        if name == "submit":
            _add_submit_options(command)
    of_run: tuple[tuple[str, Callable[[str], int], str], ...] = (
        ("report", _report, "make a page about a run, going on or ended: RUN_DIR/report.html"),
        ("status", partial(_of_job, "status"), "print the state of the job of a run"),
        ("logs", partial(_of_job, "logs"), "print the logs of the job of a run"),
        ("cancel", partial(_of_job, "cancel"), "end the job of a run"),
    )
    for name, action, text in of_run:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("run_dir", metavar="RUN_DIR", help="such as runs/tiny")
        command.set_defaults(command=action)
    text = "do a recorded step of a run again, in one process, and print where numbers differ"
    of_what = "; of RLVR, fine-tuning, DPO and distillation, one that record_steps has kept"
    command = commands.add_parser("replay", help=text, description=text + of_what)
    command.add_argument("run_dir", metavar="RUN_DIR", help="such as runs/tiny")
    command.add_argument("--step", type=int, required=True, metavar="N", help="as in metrics.jsonl")
    command.add_argument(
        "--sample",
        type=int,
        metavar="ID",
        help="of this answer, row or pair alone, by its sample_id",
    )
    command.set_defaults(command=_replay)
    return parser


def _add_submit_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--to", required=True, metavar="WHERE", help="slurm, or torchx: and one of its schedulers"
    )
    command.add_argument("--dry-run", action="store_true", help="print what would be submitted")
    command.add_argument("--nodes", type=int, metavar="N", help="the same as num_nodes=N")
    command.add_argument("--partition", help="of Slurm; the cluster's default unless given")
    command.add_argument(
        "--time", metavar="D-HH:MM:SS", help="time limit; the scheduler's default unless given"
    )
    command.add_argument(
        "--lead",
        dest="lead_s",
        type=int,
        metavar="SECONDS",
        help="how long before the time limit a checkpoint is made and the job queued again; "
        "120 unless given",
    )
    command.add_argument(
        "--cpus-per-rank", type=int, metavar="N", help="CPU cores of each rank; 1 unless given"
    )
    command.add_argument("--mem-gb", type=float, metavar="GB", help="memory of each node")
    command.add_argument(
        "--devices",
        choices=("gpu", "cpu"),
        help="what a device rank gets: a GPU, unless given, or CPU cores alone",
    )
    command.add_argument(
        "--torchrun",
        type=int,
        dest="torchrun_restarts",
        metavar="RESTARTS",
        help="start the ranks by torchrun, which starts them again so often when one fails",
    )
    command.add_argument(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="environment of the ranks"
    )
    command.add_argument(
        "--option",
        action="append",
        default=[],
        dest="options",
        metavar="NAME[=VALUE]",
        help="an option of the scheduler itself, such as account=me or exclusive for sbatch",
    )


if __name__ == "__main__":
    sys.exit(main())
