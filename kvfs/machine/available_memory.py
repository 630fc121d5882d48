"""How much memory the kernel could give away."""


def available_memory_bytes() -> int | None:
    """Return MemAvailable: free memory and what the kernel could reclaim; None if it says not."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None
