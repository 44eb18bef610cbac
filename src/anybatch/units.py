"""Bytes, bandwidths and times as people write them, for programs that read or print them."""

from anybatch.core.units import (
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
    parse_share,
    show_bytes,
    show_seconds,
)

__all__ = [
    "parse_bandwidth",
    "parse_bytes",
    "parse_seconds",
    "parse_share",
    "show_bytes",
    "show_seconds",
]
