"""`python -m roll_td CONFIG key=value …`: one rank of a job; which one, the environment tells."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from roll_td.config.classes import import_class
from roll_td.config.load import load
from roll_td.config.schema import ConfigError
from roll_td.distributed.world import World, read_world
from roll_td.runtime.failure import Cause, end_process, say, write_error_file
from roll_td.runtime.notices import hold_notices
from roll_td.runtime.process import die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; the exit status is 2 for a config or an environment that can't be read."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # before torch is imported
    parser = argparse.ArgumentParser(prog="python -m roll_td", description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config")
    arguments = parser.parse_args(argv)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        world = read_world(os.environ)
        hold_notices(os.environ)
    except ValueError as error:
        return _refuse(f"roll-td: {error}", None)
    die_with_parent(world)
    _set_up_logging(world)
    try:
        config = load(arguments.config, arguments.overrides)
        pipeline_cls = import_class(str(config.pipeline_cls))
    except ConfigError as error:
        return _refuse(f"roll-td: {error}", world)
    except ValueError as error:
        return _refuse(f"roll-td: pipeline_cls={config.pipeline_cls!r}: {error}", world)
    except Exception as error:  # the rank's edge: importing ran the user's code
        cause = Cause.of(error, "exception", world.rank, method=f"loading {arguments.config}")
        return _refuse(cause.render(), world)

    from roll_td.runtime.job import run_job

    return run_job(world, pipeline_cls, config)


def _refuse(text: str, world: World | None) -> int:
    if world is None or world.world_size == 1:
        write_error_file(text, full=True)
        say(text)
    else:
        from roll_td.runtime.rendezvous import refuse

        refuse(world, text)
    return 2


def _set_up_logging(world: World) -> None:
    form = f"[%(asctime)s rank {world.rank} %(levelname)s %(name)s] %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, datefmt="%H:%M:%S")


if __name__ == "__main__":
    end_process(main())
