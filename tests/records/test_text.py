import pytest

from rollwise.records.text import duration, share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (72, "1 min 12 s"), (7500, "2 h 05 min")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_share():
    assert share(1, 4) == "25%"
    assert share(0, 0) == "-"
