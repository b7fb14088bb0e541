import pytest

from rollwise.errors import ConfigError
from rollwise.simulation.spec import Simulation


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": ()}, r"seeds is \[\]; give at least one whole number"),
        ({"seeds": (0, -1)}, r"seeds is \[0, -1\]; give at least one whole number, each 0 or more"),
        ({"methods": {}}, "methods is empty; name at least one of .*belief"),
    ],
)
def test_a_simulation_of_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Simulation(**settings)
