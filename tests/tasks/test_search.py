"""Searching a corpus, and answers that must match."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.errors import ConfigError
from rollwise.tasks.search import Corpus, SearchQA, exact_match, normalize_answer

PASSAGES = [
    {"id": 0, "title": "Rome", "text": "Rome is the capital of Italy, on the river Tiber."},
    {"id": 1, "title": "Paris", "text": "Paris is the capital of France, on the river Seine."},
    {"id": 2, "title": "Etna", "text": "A volcano of Sicily, 3,357 metres high in 2021."},
    {"id": 3, "title": "Seine", "text": "777 kilometres long, it flows into the English Channel."},
    {"id": 4, "title": "", "text": ""},
]
SPEC = {"question": "What is the capital of France?", "answers": ["Paris", "City of Paris"]}


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    return str(path)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("An apple, a pear and the plum.", "apple pear and plum"),
        ("U.S.A.", "usa"),
        ("theatre", "theatre"),
        ("14 December 1972 UTC", "14 december 1972 utc"),
        ("it's", "its"),
        ("'s-Hertogenbosch", "shertogenbosch"),
        ("Köln", "köln"),
        ("the", ""),
        ("a-b", "ab"),
        ("\tA\nB ", "b"),
    ],
)
def test_normalisation_has_squad_s_values(text, normal):
    assert normalize_answer(text) == normal


def test_any_of_several_answers_matches():
    answers = ["December 1972", "14 December 1972 UTC"]
    assert exact_match("the 14 december, 1972 UTC.", answers)
    assert exact_match("December 1972", answers)
    assert not exact_match("1972", answers)
    assert not exact_match("December 1972 AD", answers)


def test_bm25_finds_what_has_the_words(corpus_file):
    corpus = Corpus(corpus_file)
    assert len(corpus) == 5
    found = corpus.search("capital of France", 3)
    assert [passage.title for passage in found] == ["Paris", "Rome"]
    assert found[0].score > found[1].score > 0
    assert found[0].text == PASSAGES[1]["text"]
    assert {passage.title for passage in corpus.search("seine", 5)} == {"Seine", "Paris"}  # titles are searched, too
    assert corpus.search("capital", 1)[0].title in ("Rome", "Paris")
    for nothing in ("", "the of", "zeppelin", "\x00", "🦆"):
        assert corpus.search(nothing, 3) == []


def test_a_kept_index_gives_the_same_and_an_old_one_is_refused(corpus_file, tmp_path):
    folder = str(tmp_path / "index")
    made = Corpus(corpus_file, index_folder=folder).search("river capital", 4)
    assert Corpus(corpus_file, index_folder=folder).search("river capital", 4) == made
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text(json.dumps(PASSAGES[0]) + "\n")
    with pytest.raises(ConfigError, match="no index of this corpus"):
        Corpus(str(shorter), index_folder=folder)
    with pytest.raises(ConfigError, match="no index of this corpus"):
        Corpus(corpus_file, text_column="title", index_folder=folder)
    with pytest.raises(ConfigError, match="no index of this corpus"):
        Corpus(corpus_file, index_folder=str(shorter))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "shorter.jsonl"]


def test_an_index_that_cannot_be_written_whole_leaves_nothing(corpus_file, tmp_path, monkeypatch):
    import bm25s

    def half(self, folder, **kwargs):
        (Path(folder) / "half").write_text("x")
        raise OSError("no space left")

    monkeypatch.setattr(bm25s.BM25, "save", half)
    with pytest.raises(OSError, match="no space left"):
        Corpus(corpus_file, index_folder=str(tmp_path / "index"))
    assert not list(tmp_path.iterdir())


def test_parquet_and_other_columns(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "passages.parquet"
    pq.write_table(pa.table({"body": ["green apples", "red pears"], "head": ["one", "two"]}), path)
    (found,) = Corpus(str(path)).search("pears", 3)
    assert (found.title, found.text) == ("", "red pears")
    (found,) = Corpus(str(path), text_column="head", title_column="body").search("pears", 3)
    assert (found.title, found.text) == ("red pears", "two")
    with pytest.raises(ConfigError, match=r"no column 'tail' \(it has body, head\)"):
        Corpus(str(path), text_column="tail")


def test_what_is_no_corpus_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.jsonl"):
        Corpus(str(tmp_path / "no.jsonl"))
    with pytest.raises(ConfigError, match=r"is no \.jsonl"):
        Corpus(__file__)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Corpus(str(broken))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match=r"empty\.jsonl' has no passages: give a file with at least one row"):
        Corpus(str(empty))
    empty.write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl' cannot be read: .*no data"):
        Corpus(str(empty))


def test_an_episode(corpus_file):
    search = SearchQA(corpus=corpus_file, search_reward=-0.05, max_turns=3, max_passage_characters=20)
    assert search.begin(SPEC, 0).text == "Question: What is the capital of France?"
    turn = search.take_turn("I look it up. <search>capital France</search> <information>[1] Lyon</information>")
    assert (turn.reward, turn.done) == (-0.05, False)
    assert turn.observation.text == (
        "<information>\n[1] Paris: Paris is the capital\n[2] Rome: Rome is the capital \n</information>"
    )
    turn = search.take_turn("<search>zeppelin</search>")
    assert turn.observation.text == (
        "<information>\nNothing was found.\n</information>\nThis is your last turn: answer now."
    )
    turn = search.take_turn("<think><answer>Rome</answer></think><answer> the city of Paris </answer>")
    assert (turn.reward, turn.terminated, turn.is_success) == (1.0, True, True)


@pytest.mark.parametrize(
    ("answer", "reward", "done"),
    [
        ("<answer>Rome</answer>", 0.0, True),
        ("<answer>Paris</answer><answer>Rome</answer>", 1.0, True),
        ("<answer>Rome</answer><answer>Paris</answer>", 0.0, True),
        ("<search>Paris</search><answer>Paris</answer>", 0.0, False),
        ("</search><answer>Paris</answer>", 1.0, True),
        ("<search></search><answer>Paris</answer>", 1.0, True),
        ("Paris", -0.1, False),
        ("<answer>Paris", -0.1, False),
        ("<answer></answer>", -0.1, False),
        ("", -0.1, False),
    ],
)
def test_the_first_closed_tag_counts(corpus_file, answer, reward, done):
    search = SearchQA(corpus=corpus_file)
    search.begin(SPEC, 0)
    turn = search.take_turn(answer)
    assert (turn.reward, turn.done, turn.is_malformed) == (reward, done, reward == -0.1)


PIECES = ["<search>", "</search>", "<answer>", "</answer>", "Paris", "\n", "</think>", "capital", "\ud83e\udd86"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=30))
def test_no_text_breaks_an_episode(corpus_file, text):
    search = SearchQA(corpus=corpus_file)
    search.begin(SPEC, 0)
    turn = search.take_turn(text)
    assert turn.unscored is None
    assert turn.reward in (1.0, 0.0, -0.1)


def test_environments_share_one_corpus(corpus_file):
    assert SearchQA(corpus=corpus_file)._found is SearchQA(corpus=corpus_file, max_turns=2)._found


@pytest.mark.parametrize("spec", [{}, SPEC | {"question": ""}, SPEC | {"answers": "Paris"}, SPEC | {"answers": []}])
def test_a_wrong_spec_is_refused(corpus_file, spec):
    with pytest.raises(ConfigError, match="spec of search_qa"):
        SearchQA(corpus=corpus_file).begin(spec, 0)
