"""What a test could leave behind: mounts, and loop devices."""

from pathlib import Path


def mounts_under(places: tuple[str, ...]) -> set[str]:
    """Return the mountpoints below *places*."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {path for line in lines if (path := line.split()[4]).startswith(places)}


def loops_under(places: tuple[str, ...]) -> set[str]:
    """Return the loop devices over a file below *places*, with that file."""
    found = set()
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            path = backing.read_text().strip()
        except OSError:
            continue  # detached meanwhile
        if path.startswith(places):
            found.add(f"{backing.parts[3]}: {path}")
    return found
