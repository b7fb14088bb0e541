import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rollwise.errors import ConfigError  # noqa: E402
from rollwise.tasks import pretrain as module  # noqa: E402
from rollwise.tasks.arithmetic import DEFAULT_LEVELS, build_tokenizer, held_out_problems, model_path  # noqa: E402
from rollwise.tasks.pretrain import accuracy_by_level, build_model, digit_doubt, pretrain, sample_rewards  # noqa: E402


@pytest.fixture(scope="module")
def shipped():
    return transformers.AutoModelForCausalLM.from_pretrained(model_path())


def mean(values):
    return sum(values) / len(values)


def test_shipped_model_leaves_room_to_learn(shipped):
    problems = held_out_problems()
    sampled = accuracy_by_level(shipped, problems, num_samples=4)
    assert set(sampled) == set(DEFAULT_LEVELS)
    assert 0.28 < mean(sampled.values()) < 0.45
    assert sampled["sort-3"] > 0.75  # solved, nearly
    assert sampled["add-5"] < 0.1  # hopeless
    assert sum(0.15 < a < 0.8 for a in sampled.values()) >= 4  # and some between
    assert (
        mean(accuracy_by_level(shipped, problems, num_samples=1, temperature=0).values()) > 0.6
    )  # slips, not ignorance


def test_about_half_of_the_groups_have_zero_variance(shipped):
    rewards_PG = sample_rewards(shipped, held_out_problems(), num_samples=8)
    assert 0.35 < mean([len(set(rewards_G)) == 1 for rewards_G in rewards_PG]) < 0.65


def test_shipped_record_agrees_with_the_model(shipped):
    record = json.loads((model_path() / "pretrain.json").read_text(encoding="utf-8"))
    assert mean(accuracy_by_level(shipped, held_out_problems()).values()) == pytest.approx(
        record["held_out_accuracy"], abs=0.04
    )
    assert record["seed"] == 0


def test_pretrain_is_deterministic_and_saves_what_loads(tmp_path):
    calls = []

    def note(*progress):
        calls.append(progress)

    threads, state = torch.get_num_threads(), torch.get_rng_state()
    folders = [pretrain(tmp_path / str(i), seed=3, steps=3, num_threads=1, on_progress=note) for i in range(2)]
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (transformers.AutoModelForCausalLM.from_pretrained(f).state_dict() for f in folders)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [c[:2] for c in calls] == [(1, 3), (2, 3), (3, 3)] * 2
    assert calls[:3] == calls[3:]
    assert [c[3] is None for c in calls[:3]] == [True, True, False]
    assert calls[2][2] < calls[0][2]

    tokenizer = transformers.AutoTokenizer.from_pretrained(folders[0])
    assert tokenizer("S1=")["input_ids"] == build_tokenizer()("S1=")["input_ids"]
    record = json.loads((folders[0] / "pretrain.json").read_text(encoding="utf-8"))
    assert (record["seed"], record["steps"], record["num_threads"]) == (3, 3, 1)
    assert set(record["held_out_accuracy_by_level"]) == set(DEFAULT_LEVELS)


@pytest.mark.slow
def test_pretrain_stops_once_the_target_is_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "EVAL_EVERY", 2)
    monkeypatch.setattr(module, "accuracy_by_level", lambda *_, **__: {"sort-4": 0.3, "add-2": 0.5})
    for target, last_step in ((0.4, 2), (0.5, 5), (None, 5)):
        steps = []
        pretrain(tmp_path, steps=5, target_accuracy=target, on_progress=lambda step, *_, into=steps: into.append(step))
        assert steps[-1] == last_step
        assert json.loads((tmp_path / "pretrain.json").read_text(encoding="utf-8"))["steps"] == last_step


def test_another_seed_gives_other_weights():
    weights = [build_model(seed).model.embed_tokens.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert sum(p.numel() for p in build_model().parameters()) < 150_000


def test_doubt_grows_with_the_answer():
    doubts = [digit_doubt(n) for n in range(1, 9)]
    assert doubts[:3] == [0.0] * 3
    assert doubts == sorted(doubts)
    assert 0.8 < (1 - 0.9 * digit_doubt(4)) ** 4 < 0.95
    assert (1 - 0.9 * digit_doubt(8)) ** 8 < 0.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"steps": 801}, "steps is 801"),
        ({"target_accuracy": 0.0}, "target_accuracy is 0.0"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"levels": ["sort-9"]}, "unknown level"),
    ],
)
def test_arguments_out_of_range(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        pretrain(tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()
