"""verl's data set as the scheduler knows it. Needs neither verl nor Ray."""

import types

import pytest

from rollwise import ConfigError
from rollwise.verl.prompts import Prompts
from rollwise.verl.settings import RollwiseSettings


class Table(dict):
    """Columns, as verl's data set has them."""

    @property
    def column_names(self):
        return list(self)

    def __len__(self):
        return len(next(iter(self.values())))


class DataSet(list):
    """Examples, and the columns that they come from."""

    def __init__(self, **columns):
        super().__init__({"example": i} for i in range(len(columns["prompt"])))
        self.dataframe = Table(columns)


def config(prompts):
    return types.SimpleNamespace(data=types.SimpleNamespace(train_batch_size=prompts, prompt_key="prompt"))


def made(dataset, prompts=2, allocation="pilot_commit", **block):
    return Prompts(dataset, config(prompts), RollwiseSettings.from_block({"allocation": {"name": allocation}, **block}))


def test_row_numbers_are_ids_and_a_digest_says_of_which_prompts():
    prompts = made(DataSet(prompt=["a", "bb", "c"]))
    assert prompts.ids == [0, 1, 2]
    assert prompts.examples([2, 0, 2]) == [{"example": 2}, {"example": 0}, {"example": 2}]
    assert prompts.digest() == made(DataSet(prompt=["a", "bb", "c"])).digest()
    assert prompts.digest() != made(DataSet(prompt=["bb", "a", "c"])).digest()


def test_ids_of_a_column_stay_when_rows_move():
    prompts = made(DataSet(prompt=["a", "bb"], key=["x", "y"]), prompt_id_column="key")
    assert prompts.ids == ["x", "y"]
    assert prompts.examples(["y"]) == [{"example": 1}]
    assert prompts.digest() is None


def test_only_belief_allocation_wants_to_know_which_prompts_are_alike():
    dataset = DataSet(prompt=["a", "bb", "c"], level=["hard", "easy", "hard"])
    by_level = made(dataset, allocation="belief", bucket_column="level").buckets
    assert by_level[0] == by_level[2] != by_level[1]
    by_length = made(dataset, allocation="belief").buckets
    assert by_length[0] == by_length[2] != by_length[1]
    assert made(dataset).buckets is None


def test_where_verls_data_loader_chooses_an_id_is_the_place_in_the_batch():
    prompts = made([{}, {}, {}], allocation="uniform")  # a data set without columns will do
    assert prompts.ids == [0, 1]
    assert not prompts.are_chosen
    assert prompts.digest() is None


def test_data_sets_that_cannot_serve_are_refused():
    with pytest.raises(ConfigError, match="the data set has 1 prompts, and data.train_batch_size is 2"):
        made(DataSet(prompt=["a"]))
    with pytest.raises(ConfigError, match="list has no `dataframe`.*allocation uniform"):
        made([{}, {}])
    with pytest.raises(ConfigError, match="'key'"):
        made(DataSet(prompt=["a", "b"]), prompt_id_column="key")
