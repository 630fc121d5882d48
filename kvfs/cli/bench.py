"""``kvfs bench``: compare a mount with a plain directory, on the user's own drive."""

import argparse
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvfs.cli.arguments import size_of
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import UsageError
from kvfs.core.settings import Settings

if TYPE_CHECKING:
    from kvfs.bench.comparison import ComparisonOutcome, ComparisonPlan
    from kvfs.bench.output import Output
    from kvfs.cli.parser import Subparsers

#: What --data-path takes.
DATA_PATHS: Final = Settings.__dataclass_fields__["data_path"].metadata["choices"]


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser, and those of its own verbs."""
    parser = add_verb(
        subparsers,
        "bench",
        lambda _: 0,
        summary="compare a mount with a plain directory",
        description="Measure what a KV cache does: storing, loading, looking up and deleting "
        "blocks.",
        example="kvfs bench compare --self-contained",
    )
    nested = parser.add_subparsers(metavar="WHAT", required=True)
    _configure_compare(nested)
    add_verb(
        nested,
        "jobs",
        run_jobs,
        summary="list the jobs that --jobs chooses from",
        description="List every job; * marks those of a run without --full or --jobs.",
        example="kvfs bench jobs",
    )


def _configure_compare(nested: "Subparsers") -> None:
    parser = add_verb(
        nested,
        "compare",
        run_compare,
        summary="run jobs on both in alternating pairs",
        description="Run jobs on a kvfs mount and in a directory of another file system, in "
        "alternating pairs.\nBoth should be on equal drives; --self-contained makes both in memory "
        "(needs root).",
        example="kvfs bench compare --mount /kv --baseline /mnt/xfs --plot bench.svg",
    )
    add, default = parser.add_argument, "(default %(default)s)"
    add("--mount", metavar="DIR", help="a directory on the kvfs mount")
    add("--baseline", metavar="DIR", help="a directory on the file system to compare with")
    add("--self-contained", action="store_true", help="make both, and take them down again")
    add("--device-size", metavar="SIZE", default="4G", help=f"of each device made {default}")
    add("--backing", metavar="DIR", default="/dev/shm", help=f"where they lie {default}")
    add("--data-path", choices=DATA_PATHS, default="auto", help="fail unless the mount has it")
    add("--jobs", metavar="NAMES", default="", help="only these, e.g. 'store-*,load-4m-2t-*'")
    add("--full", action="store_true", help="run every job, which takes an hour")
    add("--pairs", metavar="N", type=int, default=9, help=f"pairs of runs per job {default}")
    add("--set-ups", metavar="N", type=int, default=3, help=f"make both N times {default}")
    add("--data", metavar="SIZE", help="bytes of blocks a side holds at a time (default 1G)")
    add("--quick", action="store_true", help="a short trial: its figures mean little")
    add("--json", metavar="FILE", help="write everything measured to FILE, or - for stdout")
    add("--plot", metavar="FILE", help="write a picture (SVG)")


def run_jobs(_: argparse.Namespace) -> int:
    """Print the names of all jobs."""
    from kvfs.bench.jobs import all_jobs, default_jobs

    usual = set(default_jobs())
    for job in all_jobs():
        print(f"{'*' if job in usual else ' '} {job.name}")
    return 0


def run_compare(args: argparse.Namespace) -> int:
    """Find or make both sides, run the jobs, show and write the results."""
    from kvfs.bench.comparison import ComparisonPlan, join, split_pairs
    from kvfs.bench.jobs import QUICK, Effort, select_jobs
    from kvfs.bench.output import Output

    patterns = [name.strip() for name in args.jobs.split(",") if name.strip()]
    jobs = select_jobs(patterns, full=args.full)
    effort = QUICK if args.quick else Effort()
    if (data_bytes := size_of(args.data, "--data")) is not None:
        effort = effort._replace(data_bytes=data_bytes)
    if min(args.pairs, args.set_ups) < 1:
        raise UsageError("--pairs and --set-ups must be at least 1")
    with Output(args.json, args.plot) as output:
        output.begin(len(jobs) * args.pairs)
        outcomes = [
            _one_set_up(args, ComparisonPlan(jobs, effort, pairs, args.data_path), output)
            for pairs in split_pairs(args.pairs, args.set_ups if args.self_contained else 1)
        ]
        outcome = join(outcomes)
        output.show(outcome.runs, outcome.setting)
    return 0


def makes_both(args: argparse.Namespace, verb: str) -> bool:
    """Whether both sides are to be made. Raises UsageError, NotRoot."""
    if not args.self_contained:
        if not (args.mount and args.baseline):
            raise UsageError("give --mount DIR and --baseline DIR, or --self-contained")
        return False
    if args.mount or args.baseline:
        raise UsageError("--self-contained makes both: leave out --mount and --baseline")
    need_root(f"kvfs {verb} --self-contained")
    return True


def _one_set_up(
    args: argparse.Namespace, plan: "ComparisonPlan", output: "Output"
) -> "ComparisonOutcome":
    """Find or make both sides, and run the plan's pairs."""
    from kvfs.bench.comparison import check_places, compare
    from kvfs.bench.self_made import Places, self_made

    with ExitStack() as stack:
        if makes_both(args, "bench"):
            device_bytes = size_of(args.device_size, "--device-size") or 0
            places = stack.enter_context(
                self_made(device_bytes, args.backing, args.data_path, output.say, output.fill)
            )
        else:
            places = Places(args.baseline, args.mount)
        check_places(places, plan)
        return compare(places, plan, output)
