"""Environments by name, and their data sets."""

import json

import numpy as np
import pytest

from rollwise.errors import ConfigError
from rollwise.tasks import levels
from rollwise.tasks.frozen_lake import FrozenLake


def test_the_sides_are_disjoint_and_the_rows_can_be_played():
    splits = levels.load_dataset(FrozenLake(), num_train=120, num_test=30, levels=["4x4", "5x5"])
    train, test = splits["train"], splits["test"]
    assert (len(train), len(test)) == (120, 30)
    assert train.column_names == ["prompt", "prompt_id", "task", "level", "spec"]
    assert sorted(train["level"]) == ["4x4"] * 60 + ["5x5"] * 60
    ids = [*train["prompt_id"], *test["prompt_id"]]
    assert len(set(ids)) == 150
    lake = FrozenLake()
    for row in test:
        spec = json.loads(row["spec"])
        assert levels.is_held_out(spec)
        assert row["prompt_id"] == levels.prompt_id("frozen_lake", spec)
        assert row["prompt"] == [
            {"role": "system", "content": lake.instructions},
            {"role": "user", "content": lake.begin(spec, 0).text},
        ]
    assert not any(levels.is_held_out(json.loads(spec)) for spec in train["spec"])


def test_seeds():
    def ids(seed):
        splits = levels.load_dataset(FrozenLake(), 40, 10, seed, levels=["5x5"])
        return list(splits["train"]["prompt_id"]), list(splits["test"]["prompt_id"])

    assert ids(0) == ids(0)
    assert ids(0)[0] != ids(1)[0]
    assert ids(0)[1] == ids(1)[1]


def test_ids_do_not_depend_on_the_order_of_a_spec():
    assert levels.prompt_id("a", {"x": 1, "y": 2}) == levels.prompt_id("a", {"y": 2, "x": 1})
    assert levels.prompt_id("a", {"x": 1}) != levels.prompt_id("b", {"x": 1})


def test_plain_prompts_and_pictures():
    lake = FrozenLake(picture=True)
    splits = levels.load_dataset(lake, 4, 2, levels=["4x4"], as_messages=False, with_instructions=False)
    row = splits["train"][0]
    observation = lake.begin(json.loads(row["spec"]), 0)
    assert row["prompt"] == observation.text + "\n"
    (image,) = row["images"]
    assert np.array_equal(np.asarray(image), observation.images[0])
    assert levels.first_prompt(lake, observation, as_messages=False).startswith(lake.instructions + "\n\n")


def test_a_level_that_is_exhausted_is_said_to_be():
    with pytest.raises(ConfigError, match="'2x2' is exhausted: 9 levels wanted"):
        levels.load_dataset(FrozenLake(), 9, 0, levels=["2x2"])


@pytest.mark.parametrize("name", levels.ENVIRONMENTS)
def test_every_environment_can_be_made(name, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "one"}\n')
    settings = {"corpus": str(tmp_path / "corpus.jsonl")} if name == "search_qa" else {}
    environment = levels.make_environment(name, **settings)
    assert environment.name == name
    assert environment.instructions


def test_wrong_names_and_settings_are_refused():
    with pytest.raises(ConfigError, match="frozen_lake"):
        levels.make_environment("frozen_lak")
    with pytest.raises(ConfigError, match="nosuchmodule"):
        levels.make_environment("nosuchmodule:Thing")
    with pytest.raises(ConfigError, match="LanguageEnvironment"):
        levels.make_environment("collections:OrderedDict")
    with pytest.raises(ConfigError, match="slipery"):
        levels.make_environment("frozen_lake", slipery=True)
    with pytest.raises(ConfigError, match="levels is empty"):
        levels.load_dataset(FrozenLake(), 1, 1, levels=[])
    with pytest.raises(ConfigError, match="the number of levels is -1; it must be 0 or more"):
        levels.load_dataset(FrozenLake(), -1, 1)
