"""The embedded agents: their tokenizer, how they are warmed up, and what comes with the package."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gymnasium")

from rollwise import ConfigError  # noqa: E402
from rollwise.tasks import agents, fictions  # noqa: E402
from rollwise.tasks.conversation import TurnEncoder, join  # noqa: E402
from rollwise.tasks.countdown import evaluate_expression  # noqa: E402
from rollwise.tasks.environment import Observation  # noqa: E402
from rollwise.tasks.experts import _expressions, any_action, best_action  # noqa: E402
from rollwise.tasks.imitation import AGENTS, demonstrate, imitate, make_agent  # noqa: E402
from rollwise.tasks.levels import draw_specs, is_held_out, make_environment  # noqa: E402
from rollwise.tasks.search import exact_match  # noqa: E402

LAKE = {"map": "SFF/FHF/FFG"}


def lake(**settings):
    return make_environment("frozen_lake", explain_malformed=False, **settings)


def test_a_map_is_one_token_per_cell_and_a_move_is_one():
    tokenizer = agents.build_tokenizer()
    assert len(tokenizer("PFF\nFHF\nFFG")["input_ids"]) == 11
    assert len(tokenizer("left")["input_ids"]) == 1
    assert tokenizer.decode(tokenizer("up or leftover!")["input_ids"]) == "up or leftover!"
    assert len(tokenizer("leftover")["input_ids"]) == 8  # a move is a whole word
    assert tokenizer.decode(tokenizer("é")["input_ids"], skip_special_tokens=True) == ""


# --- encoding ----------------------------------------------------------------------------------------------------


def prompt_of(text):
    return [{"role": "system", "content": "the rules"}, {"role": "user", "content": text}]


def test_turns_continue_what_the_template_makes_of_the_whole_conversation():
    tokenizer = agents.build_tokenizer()
    encoder = TurnEncoder(tokenizer)
    pieces = [
        encoder.prompt(prompt_of("abc"), Observation("abc")),
        encoder.answer("left"),
        encoder.turn(Observation("def"), is_conversational=True),
    ]
    messages = [*prompt_of("abc"), {"role": "assistant", "content": "left"}, {"role": "user", "content": "def"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert join(pieces).ids == list(whole)


def test_an_answer_that_was_cut_off_is_ended_by_what_follows():
    tokenizer = agents.build_tokenizer()
    encoder = TurnEncoder(tokenizer)
    ended = encoder.turn(Observation("x"), is_conversational=True)
    cut = encoder.turn(Observation("x"), is_conversational=True, answer_ended=False)
    assert cut.ids == [tokenizer.eos_token_id, *ended.ids]
    plain = encoder.turn(Observation("x"), is_conversational=False, answer_ended=False)
    assert tokenizer.decode(plain.ids) == "</s>x\n"


def test_templates_that_write_a_line_break_after_an_answer_are_followed():
    tokenizer = agents.build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    piece = TurnEncoder(tokenizer).turn(Observation("x"), is_conversational=True)
    assert tokenizer.decode(piece.ids) == "\n[user]x</s>\n[assistant]"


def test_what_cannot_be_encoded_is_refused_with_what_to_do():
    encoder = TurnEncoder(agents.build_tokenizer())
    picture = Observation("abc", (np.zeros((64, 64, 3), np.uint8),))
    with pytest.raises(ConfigError, match="takes none; give a vision-language model"):
        encoder.prompt(prompt_of("abc"), picture)
    with pytest.raises(ConfigError, match="set as_messages to True"):
        encoder.prompt("abc", picture)
    with pytest.raises(ConfigError, match="does not show what its episode begins with"):
        encoder.prompt("something else", Observation("abc"))
    tokenizer = agents.build_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template; set its chat_template"):
        TurnEncoder(tokenizer).prompt(prompt_of("abc"), Observation("abc"))
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ConfigError, match="leaves out earlier answers"):
        TurnEncoder(tokenizer).turn(Observation("abc"), is_conversational=True)


# --- demonstrations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), [("frozen_lake", "4x4"), ("sokoban", "simple"), ("countdown", "numbers-4")])
def test_the_expert_solves_every_level(name, level):
    environment = make_environment(name, max_turns=40)
    rng = np.random.default_rng(0)
    for spec in draw_specs(environment, 12, seed=1, levels=[level], split="train"):
        environment.begin(spec, seed=0)
        for _ in range(40):
            turn = environment.take_turn(best_action(environment, rng))
            if turn.done:
                break
        assert turn.is_success


def test_the_expert_takes_a_shortest_way_and_any_of_them():
    environment = lake()
    found = set()
    for seed in range(20):
        environment.begin(LAKE, seed=0)
        rng, moves = np.random.default_rng(seed), []
        while True:
            moves.append(best_action(environment, rng))
            if environment.take_turn(moves[-1]).done:
                break
        found.add(tuple(moves))
    assert found == {("right", "right", "down", "down"), ("down", "down", "right", "right")}


@pytest.mark.parametrize("numbers", [[8, 3, 2], [5, 5, 1, 10]])
def test_expressions_are_worth_what_is_said_of_them(numbers):
    for text, value, _ in _expressions(tuple(numbers)):
        found = evaluate_expression(text)
        assert found is not None
        assert float(found[0]) == pytest.approx(value)
        assert found[1] == numbers


def test_the_solver_of_countdown_knows_every_answer():
    countdown = make_environment("countdown")
    countdown.begin({"numbers": [8, 3, 2], "target": 7}, seed=0)
    found = {best_action(countdown, np.random.default_rng(seed)) for seed in range(60)}
    assert found == {"8-3+2", "8+2-3", "2+8-3", "2-3+8", "8-(3-2)", "2-(3-8)", "8/2+3", "3+8/2"}
    assert {any_action(countdown, np.random.default_rng(seed)) for seed in range(60)} - found  # noise errs
    countdown.begin({"numbers": [1, 1], "target": 7}, seed=0)
    with pytest.raises(ConfigError, match=r"no expression of the numbers \[1, 1\] comes to 7"):
        best_action(countdown, np.random.default_rng(0))


def test_nobody_knows_an_environment_without_an_expert():
    with pytest.raises(ConfigError, match="no expert for CliffWalking"):
        best_action(make_environment("cliff_walking"), np.random.default_rng(0))


def test_demonstrations_mark_answers_and_nothing_else():
    tokenizer = agents.build_tokenizer()
    (shown,) = demonstrate(lake(), [LAKE], TurnEncoder(tokenizer), noise=0.0, seed=0)
    tokens = np.array(tokenizer.convert_ids_to_tokens(shown.piece.ids))
    answers = tokens[np.array(shown.is_answer)].tolist()
    assert answers[1::2] == ["</s>"] * 4
    assert set(answers[::2]) == {"right", "down"}
    assert shown.reward == 1.0
    noisy = demonstrate(lake(), [LAKE] * 60, TurnEncoder(tokenizer), noise=0.6, seed=0)
    assert 0.05 < np.mean([episode.reward for episode in noisy]) < 0.7
    with pytest.raises(ConfigError, match=r"noise is 1\.5"):
        demonstrate(lake(), [LAKE], TurnEncoder(tokenizer), noise=1.5, seed=0)


def test_single_turns_are_what_was_shown_with_the_right_answer():
    tokenizer = agents.build_tokenizer()
    shown = demonstrate(lake(max_turns=2), [LAKE] * 30, TurnEncoder(tokenizer), noise=1.0, seed=0)
    for episode in shown:
        texts = [tokenizer.decode(turn.piece.ids) for turn in episode.single_turns()]
        boards = [text.partition("<agent>")[0] for text in texts]
        assert boards == [
            part.partition("<agent>")[0] for part in tokenizer.decode(episode.piece.ids).split("</s>")[:2]
        ]
        for text, board in zip(texts, boards, strict=True):
            right = {"<user>FPF\nFHF\nFFG": ["right"], "<user>FFF\nPHF\nFFG": ["down"]}.get(board, ["right", "down"])
            assert text in [f"{board}<agent>{move}</s>" for move in right]
        for turn in episode.single_turns():
            assert turn.is_answer == [False] * (len(turn.piece.ids) - 2) + [True] * 2
    assert any("left</s>" in tokenizer.decode(episode.piece.ids) for episode in shown)  # which is never right


@pytest.mark.parametrize("picture", [False, True])
def test_imitation_learns_the_demonstrations(picture):
    processor = agents.build_processor() if picture else agents.build_tokenizer()
    build = agents.build_vision_agent if picture else agents.build_text_agent
    environment = lake(picture=picture, show_text=False)
    shown = demonstrate(environment, [{"map": "SF/HG"}] * 8, TurnEncoder(processor), noise=0.0, seed=0)
    losses = []
    imitate(
        build(0, hidden_size=32, num_layers=1),
        shown,
        steps=30,
        batch_size=8,
        learning_rate=1e-2,
        seed=0,
        on_step=lambda _, loss: losses.append(loss),
    )
    assert len(losses) == 30
    assert losses[-1] < 0.4 < 3 < losses[0]  # of answers of two tokens, of which one is a toss


def test_an_agent_is_made_the_same_again_and_loads(tmp_path, monkeypatch):
    monkeypatch.setitem(AGENTS, "frozen_lake", replace(AGENTS["frozen_lake"], num_demonstrations=8, batch_size=4))
    calls = []
    for name in ("one", "other"):
        make_agent("frozen_lake", tmp_path / name, seed=3, steps=1, on_progress=lambda *call: calls.append(call))
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "other")
    )
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert [call[:2] for call in calls] == [(0, 1), (1, 1)] * 2
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "one")
    text = "<user>PFF\nup<agent>left</s>"
    assert tokenizer(text)["input_ids"] == agents.build_tokenizer()(text)["input_ids"]
    assert tokenizer.chat_template == agents.build_tokenizer().chat_template
    assert json.loads((tmp_path / "one" / "pretrain.json").read_text("utf-8"))["agent"] == "frozen_lake"
    for arguments, message in (
        (("lake", tmp_path), "unknown agent 'lake'"),
        (("frozen_lake", tmp_path / "x"), "steps is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_agent(*arguments, steps=0)


def test_single_turns_come_first_and_then_whole_episodes(tmp_path, monkeypatch):
    few = replace(AGENTS["sokoban"], num_demonstrations=6, batch_size=4, hidden_size=16, num_layers=1)
    monkeypatch.setitem(AGENTS, "sokoban", replace(few, steps=10, turn_steps=8))
    seen = []

    def note(model, shown, **settings):
        seen.append(({len(demonstration.turns) for demonstration in shown}, settings["steps"]))
        imitate(model, shown, **settings)

    monkeypatch.setattr("rollwise.tasks.imitation.imitate", note)
    steps = []
    make_agent("sokoban", tmp_path, steps=5, on_progress=lambda step, total, loss: steps.append((step, total)))
    assert steps == [(step, 5) for step in range(6)]
    assert [count for _, count in seen] == [4, 1]
    assert seen[0][0] == {1}
    assert max(seen[1][0]) > 1
    record = json.loads((tmp_path / "pretrain.json").read_text("utf-8"))
    assert (record["steps"], record["turn_steps"]) == (5, 4)


# --- what comes with the package ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", agents.SHIPPED)
def test_shipped_agents_are_small_and_say_how_they_were_made(name):
    folder = agents.agent_path(name)
    record = json.loads((folder / "pretrain.json").read_text("utf-8"))
    assert record["agent"] == name
    settings = json.loads(json.dumps(AGENTS[name].__dict__ | {"settings": dict(AGENTS[name].settings)}))
    assert {key: record[key] for key in settings} == settings
    assert (folder / "model.safetensors").stat().st_size < 1_000_000
    assert (agents.load_processor(folder) is not None) == AGENTS[name].picture


def test_an_unknown_agent_is_said_how_to_make():
    with pytest.raises(ConfigError, match="rollwise pretrain OUTPUT_DIR --task lake"):
        agents.agent_path("lake")


# --- the embedded world --------------------------------------------------------------------------------------------


def test_every_question_can_be_answered_by_searching_and_not_otherwise():
    environment = make_environment("search_qa", corpus=str(fictions.corpus_path()), num_passages=1)
    rng = np.random.default_rng(0)
    for spec in fictions.questions()[:40]:
        first = environment.begin(spec, seed=0)
        assert spec["answers"][0] not in first.text
        found = environment.take_turn(best_action(environment, rng))
        assert spec["answers"][0] in found.observation.text.splitlines()[1]  # in the best passage
        assert environment.take_turn(best_action(environment, rng)).is_success
    assert len({row["question"] for row in fictions.questions()}) == len(fictions.questions()) == 800
    assert not exact_match("Arnova", ["Belmar"])


def test_every_word_of_the_world_is_one_token():
    tokenizer = agents.build_tokenizer(fictions.words())
    texts = [f"{row['title']}: {row['text']}" for row in fictions.passages()]
    texts += [row["question"] for row in fictions.questions()]
    lengths = {len(tokenizer(text)["input_ids"]) for text in texts}
    assert max(lengths) <= 40
    assert tokenizer.unk_token_id not in {token for text in texts for token in tokenizer(text)["input_ids"]}
    assert 40 < sum(map(is_held_out, fictions.questions())) < 160
