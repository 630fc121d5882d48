"""``kvfs doctor``: check a mount and its machine for problems, each with its fix."""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.failures import one_line
from kvfs.cli.parser import add_verb
from kvfs.cli.tables import LEAST_COLUMNS, Column, columns_for_tables, headed, table_lines
from kvfs.client.control_socket import ServerGone, peer_pid
from kvfs.client.late_answer import WaitsForDevice
from kvfs.client.liveness import has_ended, was_killed
from kvfs.client.servers import (
    NextServerDue,
    ServerAnswer,
    answers_and_dead,
    complaint,
    mountpoint_behind,
)
from kvfs.core.errors import CommandError, NotMounted, NotRoot, SeriousFindings, ServeFailed
from kvfs.core.mount_name import name_of, socket_path
from kvfs.core.shown_names import printable
from kvfs.doctor.finding import Finding, Report, Severity, Verdict
from kvfs.machine.mount_table import kvfs_at, resolve_mountpoint

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers


#: States of proc_pid_stat(5): stopped by a signal, stopped by a debugger.
_STOPPED: Final = frozenset("Tt")
_COLUMNS: Final = (
    Column(right=True),
    *(Column("severity"), Column("check")),
    Column("problem", folds=True),
)


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "doctor",
        run,
        description="Check the mount at MOUNT (or all mounts) for problems: connectors that may "
        "keep more than the pool holds,\na pool in which nothing can be evicted, drives, memory, "
        "limits of the server, NFS. Each comes with the command that fixes it.\nMOUNT may also be "
        "an NFS mount. Changes nothing. Ends with exit code 19 when something serious is found,\n"
        "11 when nothing is mounted.",
        example="kvfs doctor /kv\n  kvfs doctor /kv --connector-config lmcache.yaml --json",
    )
    parser.add_argument("mountpoint", metavar="MOUNT", nargs="?")
    parser.add_argument(
        "--connector-limit",
        metavar="SIZE",
        action="append",
        default=[],
        help="how much a connector may keep there, e.g. 500G; may be given several times",
    )
    parser.add_argument(
        "--connector-config",
        metavar="FILE",
        action="append",
        default=[],
        help="a connector's settings: LMCache's YAML, an L2 adapter's JSON, VAR=VALUE lines; "
        "what running connectors were started with is found without it",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Gather, judge, print; raise SeriousFindings at the end."""
    from kvfs.doctor.examine import examine
    from kvfs.doctor.gather import gather

    mountpoints, silent = ([args.mountpoint], []) if args.mountpoint else _all_servers()
    reports = [report for answer in silent if (report := _report_of_silent(answer)) is not None]
    for mountpoint in mountpoints:
        try:
            facts = gather(mountpoint, args.connector_limit, args.connector_config)
        except (NotMounted, ServeFailed) as error:
            silent_one = report_of_silent(mountpoint, error)
            if silent_one is not None:
                reports.append(silent_one)
            elif args.mountpoint:
                raise
            else:  # it ended while the others were examined
                print(f"kvfs: {one_line(str(error))}", file=sys.stderr)
        else:
            reports.append(examine(facts))
    if args.json:
        shown = [as_json(report) for report in reports]
        print(json.dumps(shown[0] if args.mountpoint else shown, indent=2))
    else:
        for report in reports:
            _print(report)
    bad = [report.mountpoint for report in reports if report.worst is Severity.SERIOUS]
    if bad:
        sys.stdout.flush()
        raise SeriousFindings(f"serious findings at {', '.join(bad)}")
    if not reports:  # the reason is on standard error
        return silent[0].error.exit_code if silent and silent[0].error else NotMounted.exit_code
    return 0


def _all_servers() -> tuple[list[str], list[ServerAnswer]]:
    """Return the mountpoints of the servers that answer, and the answers of the others."""
    found = answers_and_dead()
    if not found:
        raise NotMounted("no kvfs is mounted")
    answered = [answer.status["mountpoint"] for answer in found if answer.error is None]
    return answered, [answer for answer in found if answer.error is not None]


def _report_of_silent(answer: ServerAnswer) -> Report | None:
    """Return a report about a server that does not answer; if none can be made, print why."""
    mountpoint = mountpoint_behind(answer.path)
    report = None
    if mountpoint and answer.error is not None and not isinstance(answer.error, NotRoot):
        report = report_of_silent(mountpoint, answer.error)
    if report is None:
        print(f"kvfs: {one_line(complaint(answer))}", file=sys.stderr)
    return report


def as_json(report: Report) -> dict[str, Any]:
    """Return *report* JSON-ready."""
    return {
        "mountpoint": report.mountpoint,
        "worst": report.worst.name.lower() if report.worst else None,
        "findings": [
            {
                "check": verdict.check,
                "severity": finding.severity.name.lower(),
                "problem": finding.problem,
                "fix": finding.fix,
            }
            for verdict in report.verdicts
            for finding in verdict.findings
        ],
        "passed": _passed(report),
        "undecided": _undecided(report),
    }


def _passed(report: Report) -> list[str]:
    return [one.check for one in report.verdicts if one.is_decided and not one.findings]


def _undecided(report: Report) -> list[str]:
    return [verdict.check for verdict in report.verdicts if not verdict.is_decided]


def _print(report: Report) -> None:
    """Print a table of the problems, worst first, then the commands, each on a line to copy."""
    found = [
        (verdict.check, finding) for verdict in report.verdicts for finding in verdict.findings
    ]
    found.sort(key=lambda row: -row[1].severity)
    if found:
        rows = [
            (str(number), finding.severity.name.lower(), check, printable(finding.problem))
            for number, (check, finding) in enumerate(found, start=1)
        ]
        heads, *lines = table_lines(_COLUMNS, rows, columns_for_tables(LEAST_COLUMNS))
        print(headed(printable(report.mountpoint)), headed(heads), *lines, "", sep="\n")
        for number, (_, finding) in enumerate(found, start=1):
            command, *remarks = map(printable, finding.fix.splitlines())
            print(f"{number:3}. {command}")
            for remark in remarks:
                print(f"     # {remark}")
        print()
    passed, undecided = _passed(report), _undecided(report)
    print(f"{printable(report.mountpoint)}: {len(passed)} checks passed", end="")
    print(f"; not decided: {', '.join(undecided)}" if undecided else "")


def report_of_silent(path: str, error: CommandError) -> Report | None:
    """Return a report about the kvfs mounted at *path*; asking its server ended with *error*.

    None if no kvfs is mounted. The time to look at the mount is bounded.
    """
    mountpoint = resolve_mountpoint(path)
    mount = kvfs_at(mountpoint)
    if mount is None:
        return None
    where, source = shlex.quote(mountpoint), shlex.quote(mount.source)
    server_pid = peer_pid(socket_path(name_of(mountpoint)))
    again = f"kvfs umount {where} && kvfs mount {source} {where}"
    kept = "with the same options; everything stored is still there"
    is_due = isinstance(error, NextServerDue)
    if server_pid > 0 and _state_of(server_pid) in _STOPPED:
        problem = f"the server, process {server_pid}, is stopped (SIGSTOP, a debugger): calls hang"
        fix = f"kill -CONT {server_pid}"
    elif isinstance(error, WaitsForDevice):
        problem, fix = f"calls hang: {error}", "dmesg --level=err,warn | tail"
    elif (
        isinstance(error, ServerGone)
        or (was_killed(server_pid) and not is_due)
        or has_ended(mountpoint)
    ):
        problem, fix = "the server is dead: every call fails", f"{again}\n{kept}"
    elif is_due:
        problem = "the server has died, and the next one does not serve yet: calls wait for it"
        fix = f"kvfs status {where}\nwait until it shows the mount; its log says what it waits for"
    else:
        problem = f"calls hang: {error}"
        fix = f"{f'kill -KILL {server_pid}; ' if server_pid > 0 else ''}{again}\n{kept}"
    finding = Finding(Severity.SERIOUS, problem, fix)
    return Report(mountpoint, (Verdict("server", (finding,), is_decided=True),))


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
