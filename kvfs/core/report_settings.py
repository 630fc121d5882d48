"""The settings of a mount's log, metrics and events."""

from dataclasses import dataclass

from kvfs.core.setting_values import setting


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """A part of ``Settings``, which is too long for one file."""

    log_file: str = setting("", "not set: syslog or the journal, else /var/log/kvfs/NAME.log")
    log_level: str = setting(
        "info",
        "starts, stops and refusals are worth a line each; requests are not",
        choices=("debug", "info", "warning", "error", "off"),
    )
    log_lines_per_minute: int = setting(
        20, "of each kind, so that a repeated error does not fill the journal", low=1, high=60_000
    )

    metrics_socket_mode: int = setting(
        0o666,
        "for every user of the host: metrics hold counts and paths, and no block data",
        unit="octal",
        low=0o600,
        high=0o666,
    )
    metrics_port: int | None = setting(
        None,
        "not set: only the socket /run/kvfs/NAME.metrics; a port of 127.0.0.1 for scrapers that "
        "know no sockets",
        low=1,
        high=65_535,
    )
    metrics_textfile: str = setting(
        "", "not set; a path that ends in .prom, where node_exporter's textfile collector looks"
    )
    metrics_textfile_s: float = setting(
        15.0, "interval of that file: as often as scrapers usually ask", unit="s", low=1, high=3600
    )
    events_socket_mode: int = setting(
        0o600,
        "for root and the server's own user: events hold names of blocks, which tell what is asked",
        unit="octal",
        low=0o600,
        high=0o666,
    )
