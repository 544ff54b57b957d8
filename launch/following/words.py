"""Numbers and times as a person reads them."""

import datetime

UNKNOWN = "–"


def duration(seconds: float | None) -> str:
    """Seconds as 45 s, 12 min, 3 h 05 min or 2 d 04 h."""
    if seconds is None:
        return UNKNOWN
    minutes, hours, days = (int(seconds) // length for length in (60, 3600, 86400))
    if days:
        return f"{days} d {hours % 24:02d} h"
    if hours:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{minutes} min {int(seconds) % 60:02d} s" if minutes else f"{int(seconds)} s"


def clock(time: datetime.datetime | None) -> str:
    """A time of day, in UTC."""
    return time.strftime("%H:%M:%S") if time else UNKNOWN


def moment(time: datetime.datetime | None) -> str:
    """A day and its time, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S") if time else UNKNOWN


def number(value: float | None, form: str = "") -> str:
    """A number in a format, such as `.4f`."""
    return UNKNOWN if value is None else format(value, form)


def percent(share: float | None) -> str:
    """A share as a whole percentage."""
    return UNKNOWN if share is None else f"{share:.0%}"


def snapshot(step: int | None) -> str:
    """A snapshot by its step."""
    return "none" if step is None else f"step {step}"
