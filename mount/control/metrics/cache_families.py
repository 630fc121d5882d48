"""The metrics of what a cache is for: hits, misses and what they are of."""

from typing import Final

from mount.control.metrics.family import counter as _counter
from mount.control.metrics.family import gauge as _gauge

_OF_A_DIRECTORY: Final = "cache.directories.*"
_OF_A_MODEL: Final = "cache.models.*"
_OF_AN_AGE: Final = "cache.tier_behind.ages.*"

CACHE_FAMILIES: Final = (
    _counter("hits", f"{_OF_A_DIRECTORY}.hits", "Blocks opened to be read", "directory"),
    _counter("misses", f"{_OF_A_DIRECTORY}.misses", "Lookups that found nothing", "directory"),
    _counter(
        "loaded_bytes", f"{_OF_A_DIRECTORY}.loaded_bytes", "Sizes of blocks opened", "directory"
    ),
    _counter(
        "stored_blocks", f"{_OF_A_DIRECTORY}.stored_blocks", "Blocks that became whole", "directory"
    ),
    _counter("stored_bytes", f"{_OF_A_DIRECTORY}.stored_bytes", "What they hold", "directory"),
    _counter(
        "directory_evicted_blocks",
        f"{_OF_A_DIRECTORY}.evicted_blocks",
        "Blocks evicted from there",
        "directory",
    ),
    _counter(
        "directory_evicted_bytes",
        f"{_OF_A_DIRECTORY}.evicted_bytes",
        "Freed by evicting from there",
        "directory",
    ),
    _counter("evicted_blocks", "cache.evicted.*.blocks", "Blocks evicted", "reason"),
    _counter("evicted_bytes", "cache.evicted.*.bytes", "Freed by eviction", "reason"),
    _counter("model_hits", f"{_OF_A_MODEL}.hits", "Blocks of the model opened", "model"),
    _counter("model_misses", f"{_OF_A_MODEL}.misses", "Lookups that found nothing", "model"),
    _counter("model_loaded_bytes", f"{_OF_A_MODEL}.loaded_bytes", "Sizes of them", "model"),
    _counter("model_stored_blocks", f"{_OF_A_MODEL}.stored_blocks", "Blocks stored", "model"),
    _counter("model_stored_bytes", f"{_OF_A_MODEL}.stored_bytes", "What they hold", "model"),
    _counter("model_evicted_blocks", f"{_OF_A_MODEL}.evicted_blocks", "Blocks evicted", "model"),
    _counter("model_evicted_bytes", f"{_OF_A_MODEL}.evicted_bytes", "Freed by that", "model"),
    _gauge(
        "age_at_eviction_seconds",
        "cache.age_at_eviction.*",
        "Time since the last use of evicted blocks: p10, p50 and p90",
        "percentile",
    ),
    _gauge(
        "missed_after_eviction_seconds",
        "cache.missed_after_eviction.*",
        "From an eviction to the next miss of that name: p10, p50 and p90",
        "percentile",
    ),
    _counter(
        "returned_misses",
        f"{_OF_AN_AGE}.missed",
        "Lookups that missed only because the block was evicted here, so long ago or less",
        "age",
    ),
    _counter(
        "returned_stores",
        f"{_OF_AN_AGE}.stored_again",
        "Evicted blocks that were stored again, and not looked up",
        "age",
    ),
    _counter(
        "returned_bytes",
        f"{_OF_AN_AGE}.read_bytes",
        "What both hold: to be read from a tier behind",
        "age",
    ),
    _gauge(
        "tier_behind_bytes",
        f"{_OF_AN_AGE}.held_bytes",
        "What a tier would hold that keeps evicted blocks for so long",
        "age",
    ),
    _gauge(
        "predicted_hit_ratio",
        "cache.curve.*.hit_rate",
        "Hit rate that a pool of so many times the size would have had",
        "factor",
    ),
    _counter(
        "device_written_bytes",
        "cache.device.written_bytes",
        "Written to the block device below the pool, by whomever",
    ),
    _gauge(
        "device_endurance_left_ratio",
        "cache.device.endurance_left",
        "What is left of the writes that the drive's maker promises",
    ),
    _gauge(
        "device_endurance_left_bytes",
        "cache.device.endurance_left_bytes",
        "The same in bytes, by what the drives tell of their wear",
    ),
    _gauge("uptime_seconds", "cache.uptime_s", "Since the server started"),
)
