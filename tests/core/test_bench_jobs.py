"""The job list: which there are, what they are called, how much each does."""

import pytest

from kvfs.bench.jobs import (
    ODD_SIZES,
    THREADS,
    Effort,
    Job,
    JobKind,
    Mode,
    all_jobs,
    default_jobs,
    plan_work,
    select_jobs,
    size_name,
)
from kvfs.core.errors import UsageError
from kvfs.core.sizes import MIB
from kvfs.core.types import PAGE_BYTES


def test_names_are_unique_and_every_default_job_can_be_asked_for() -> None:
    names = [job.name for job in all_jobs()]
    assert len(names) == len(set(names))
    assert set(default_jobs()) <= set(all_jobs())


def test_the_default_run_holds_every_goal() -> None:
    goals = {job.name: job.goal.at_least for job in default_jobs() if job.goal}
    assert goals == {
        "load-32m-2t-buffered": 0.95,
        "load-32m-2t-direct": 0.95,
        "store-32m-2t-direct": 0.95,
        "store-32m-2t-buffered": 0.80,
        "load-4m-2t-buffered": 0.80,
        "load-4m-2t-direct": 0.90,
        "store-4m-2t-direct": 0.85,
        "store-4m-2t-buffered": 0.45,
        "stat-hit-1t": 0.85,
        "access-miss-1t": 0.85,
    }


def test_everything_covers_sizes_threads_and_modes() -> None:
    jobs = all_jobs()
    for kind in (JobKind.LOAD, JobKind.STORE):
        buffered = {
            (j.size_bytes, j.threads) for j in jobs if (j.kind, j.mode) == (kind, "buffered")
        }
        assert buffered == {
            (size, n) for size in (2 * MIB, 4 * MIB, 32 * MIB, *ODD_SIZES) for n in THREADS
        }


def test_o_direct_is_asked_only_for_whole_pages() -> None:
    direct = {job.size_bytes for job in all_jobs() if job.mode is Mode.DIRECT}
    assert direct
    assert all(size_bytes % PAGE_BYTES == 0 for size_bytes in direct)


def test_patterns_select_in_table_order() -> None:
    chosen = select_jobs(["store-4m-2t-*", "load-4m-2t-direct"], full=False)
    assert [job.name for job in chosen] == [
        "load-4m-2t-direct",
        "store-4m-2t-buffered",
        "store-4m-2t-direct",
    ]


def test_without_patterns_it_is_the_table_or_everything() -> None:
    assert select_jobs([], full=False) == default_jobs()
    assert select_jobs([], full=True) == all_jobs()


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(UsageError, match="'stroe-\\*'"):
        select_jobs(["load-*", "stroe-*"], full=False)


@pytest.mark.parametrize("job", all_jobs(), ids=lambda job: job.name)
def test_no_run_holds_more_than_the_data_set(job: Job) -> None:
    effort = Effort()
    work = plan_work(job, effort)
    assert work.blocks_per_thread >= 1
    assert work.passes >= 1
    assert work.blocks_per_thread * job.threads * job.size_bytes <= effort.data_bytes


def test_a_tiny_data_set_still_gives_every_thread_a_block() -> None:
    work = plan_work(Job(JobKind.STORE, 8, 32 * MIB), Effort(data_bytes=MIB))
    assert (work.blocks_per_thread, work.passes) == (1, 1)


def test_a_load_goes_over_its_blocks_until_its_bytes_are_moved() -> None:
    effort = Effort(data_bytes=64 * MIB, load_bytes=256 * MIB)
    work = plan_work(Job(JobKind.LOAD, 2, 4 * MIB), effort)
    assert (work.blocks_per_thread, work.passes) == (8, 4)
    assert work.operations(2) * 4 * MIB == effort.load_bytes


def test_a_cold_load_reads_each_block_once() -> None:
    assert plan_work(Job(JobKind.LOAD, 2, 4 * MIB, Mode.COLD), Effort()).passes == 1


@pytest.mark.parametrize(
    ("size_bytes", "name"), [(2 * MIB, "2m"), (32 * MIB, "32m"), (1_124_352, "1124352b")]
)
def test_sizes_are_named_exactly(size_bytes: int, name: str) -> None:
    assert size_name(size_bytes) == name


def test_a_data_set_of_small_blocks_has_so_many() -> None:
    for job in all_jobs():
        if job.kind is JobKind.STORE:
            work = plan_work(job, Effort(data_bytes=1 << 50))
            assert 1 <= work.blocks_per_thread * job.threads <= 4096
