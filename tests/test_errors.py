"""One tree of errors, each also a built-in kind; what users catch today they can catch tomorrow."""

import inspect

import pytest

import rollwise
from rollwise import errors

TREE = {
    "ConfigError": (ValueError,),
    "InexactSettingError": (ValueError, errors.ConfigError),
    "ProtocolError": (RuntimeError,),
    "RewardError": (RuntimeError,),
    "RolloutError": (ValueError,),
    "StateError": (ValueError,),
    "VersionError": (RuntimeError, ImportError),
}


def test_the_tree_is_complete():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert classes == {"RollwiseError", *TREE}


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_ours_and_a_builtin_kind(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.RollwiseError)
    for kind in TREE[name]:
        assert issubclass(error, kind)
        with pytest.raises(kind, match="^value 3$") as caught:
            raise error("value 3")
        assert isinstance(caught.value, errors.RollwiseError)
    assert issubclass(error, (ValueError, TypeError, RuntimeError))


@pytest.mark.parametrize("name", ["RollwiseError", *TREE])
def test_each_error_is_public_and_says_what_it_is_for(name):
    assert getattr(rollwise, name) is getattr(errors, name)
    assert name in rollwise.__all__
    assert len(getattr(errors, name).__doc__) > 20


def test_the_root_alone_is_no_builtin_kind():
    """`except ValueError` must not catch what is none."""
    assert not issubclass(errors.RollwiseError, (ValueError, TypeError, RuntimeError))
    assert not issubclass(errors.ProtocolError, ValueError)
    assert not issubclass(errors.StateError, RuntimeError)
