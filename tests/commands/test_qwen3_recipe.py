"""examples/qwen3_math.yaml, up to where the weights would be downloaded."""

from pathlib import Path

import datasets
import pytest

pytest.importorskip("trl")
pytest.importorskip("gymnasium")
pytest.importorskip("math_verify")

from rollwise.commands.arguments import parse_arguments
from rollwise.commands.train import build_trainer, load_sources
from rollwise.records.recipe import read_recipe
from rollwise.usage import UsageError

RECIPE = Path(__file__).parents[2] / "examples" / "qwen3_math.yaml"

#: Tables with the columns that these data sets have on the hub.
TABLES = {
    "agentica-org/DeepScaleR-Preview-Dataset": {
        "problem": [f"What is {i} + 1?" for i in range(40)],
        "answer": [str(i + 1) for i in range(40)],
        "solution": ["add"] * 40,
    },
    "HuggingFaceH4/MATH-500": {
        "problem": [f"Compute {i} halves." for i in range(250)],
        "answer": [rf"\frac{{{i}}}{{2}}" for i in range(250)],
        "level": [1 + i % 5 for i in range(250)],
    },
}


@pytest.fixture
def hub(monkeypatch):
    def load_dataset(hub_name, *, name, split):
        return datasets.Dataset.from_dict(TABLES[hub_name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def parsed(*flags):
    return parse_arguments(RECIPE, read_recipe(RECIPE), [*flags, "--bf16", "false", "--use_cpu", "true"])


def test_the_papers_settings_are_in_the_recipe():
    config = parsed().config
    replay = config.replay_settings()
    assert (replay.ratio, replay.alpha, replay.epsilon) == (0.5, 0.5, 1e-6)
    assert (replay.max_age_steps, replay.warmup_steps, replay.capacity_rollouts) == (10, 20, 30_000)
    assert (config.num_generations, config.learning_rate, config.beta) == (8, 1e-6, 0.0)
    assert (config.epsilon, config.epsilon_high, config.delta) == (0.2, 0.28, 10.0)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps * 8 == 256

    flags = "--replay_ratio 0 --allocation pilot_commit --num_generations 64 --pilot_rollouts 16 --pilot_prompts 384"
    batch = "--per_device_train_batch_size 16 --gradient_accumulation_steps 64"
    text = RECIPE.read_text()
    assert flags in text
    assert batch in text
    config = parsed(*flags.split(), *batch.split()).config
    settings = config.allocation_settings(None)
    assert (settings.pilot_rollouts, settings.commit_rollouts, settings.prompts_per_round) == (16, 48, 384)
    assert (settings.p_lower, settings.p_upper, settings.p_solve) == (0.125, 0.75, 1.0)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps * 8 == 128 * 64


def test_problems_and_rewards_are_loaded_and_the_weights_are_what_is_missing(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = parsed("--use_vllm", "false")
    train, test, rewards = load_sources(arguments)
    assert len(train) == 40
    assert len(test) == 200
    assert train[0]["prompt"][-1]["role"] == "user"
    assert "boxed" in str(train[0]["prompt"])
    assert {row["answer"] for row in train} == set(TABLES["agentica-org/DeepScaleR-Preview-Dataset"]["answer"])
    answer = train[0]["answer"]
    completions = [[{"role": "assistant", "content": text}] for text in (rf"\boxed{{{answer}}}", r"\boxed{-7}", "?")]
    assert rewards[0](completions=completions, answer=[answer] * 3) == [1.0, 0.0, 0.0]
    with pytest.raises(UsageError, match="model 'Qwen/Qwen3-4B-Base' cannot be loaded"):
        build_trainer(arguments, (train, test, rewards))


def test_other_problems_to_measure_on_are_refused_where_they_would_be_passed_over():
    from rollwise.commands.sources import load_problems

    arguments = parsed("--dataset_name", "arithmetic")
    with pytest.raises(UsageError, match="dataset_test_name is 'math500', which goes with mathematical problems"):
        load_problems(arguments.train, evaluate=True, seed=0)
