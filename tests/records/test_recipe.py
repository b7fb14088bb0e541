import os

import pytest

from rollwise.records.recipe import read_recipe
from rollwise.usage import UsageError


def test_fields_are_read_as_yaml(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("learning_rate: 1.0e-4\nreward_funcs: [arithmetic]\n")
    assert read_recipe(path) == {"learning_rate": 1e-4, "reward_funcs": ["arithmetic"]}


def test_an_empty_recipe_has_no_fields(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("# all defaults\n")
    assert read_recipe(path) == {}


def test_env_goes_into_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLWISE_TEST_VARIABLE", "before")
    path = tmp_path / "r.yaml"
    path.write_text("env:\n  ROLLWISE_TEST_VARIABLE: 3\nseed: 1\n")
    assert read_recipe(path) == {"seed": 1}
    assert os.environ["ROLLWISE_TEST_VARIABLE"] == "3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "is not valid YAML"),
        ("- seed\n", "must hold one 'field: value' per line"),
        ("just words\n", "must hold one 'field: value' per line"),
        ("1: 2\n", "must hold one 'field: value' per line"),
        ("env: 3\n", "env must map names"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(text, message, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_recipe(path)


def test_a_folder_or_a_missing_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "r.yaml"):
        with pytest.raises(UsageError, match="no recipe file"):
            read_recipe(path)
