"""Numbers as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Write seconds as `48 s`, `1 min 12 s` or `2 h 05 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def share(part: float, whole: float) -> str:
    """Write `part` of `whole` as a percentage; a dash where there is nothing to divide by."""
    return f"{part / whole:.0%}" if whole else "-"
