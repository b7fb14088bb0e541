"""The same study on both engines: fed the same rewards, verl's scheduler decides as TRL's."""

import decisions


def test_verl_decides_what_trl_decided(whole):
    assert decisions.decisions(whole.events) == decisions.expected()
