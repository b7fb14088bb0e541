import pytest

from rollwise.commands.arguments import RecipeParser, parse_arguments
from rollwise.usage import UsageError

# The recipes use the name that all supported releases know; the newest deprecates it.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


@pytest.fixture
def parse(tmp_path):
    path = tmp_path / "demo.yaml"

    def parse(fields=(), *flags, **fixed):
        return parse_arguments(path, CPU | dict(fields), list(flags), **fixed)

    return parse


def test_the_defaults_measure_a_run_from_its_start(parse):
    train, config, model, _ = parse()
    assert train.dataset_name == "arithmetic"
    assert train.reward_funcs is None
    assert model.model_name_or_path == "arithmetic"
    assert config.output_dir == "runs/demo"
    assert config.run_name == "demo"
    assert config.eval_strategy == "steps"
    assert config.eval_on_start
    assert config.logging_steps == 1
    assert config.disable_tqdm
    assert config.report_to == []


def test_flags_override_the_recipe_and_fixed_values_override_both(parse):
    fields = {"learning_rate": 1e-4, "seed": 3, "replay_ratio": 0.5, "dataset_test_rows": 5}
    _, config, _, _ = parse(fields, "--seed", "4", "--replay-ratio", "0.25", "--max_steps=7", replay_ratio=0)
    assert (config.learning_rate, config.seed, config.replay_ratio, config.max_steps) == (1e-4, 4, 0.0, 7)


def test_a_run_is_named_by_its_recipe_or_its_name(parse):
    assert parse({"run_name": "first"}).config.output_dir == "runs/first"
    assert parse({}, "--run_name", "second").config.output_dir == "runs/second"
    assert parse({"output_dir": "here"}).config.output_dir == "here"
    assert parse({"run_name": "../me/model v2"}).config.output_dir == "runs/_me_model_v2"
    assert parse({"run_name": ".."}).config.output_dir == "runs/demo"


def test_a_recipe_s_numbers_may_be_written_as_yaml_reads_them(parse):
    _, config, _, _ = parse({"learning_rate": "5e-4", "num_generations": 4, "temperature": 1, "eval_steps": 10})
    assert (config.learning_rate, config.num_generations, config.temperature) == (5e-4, 4, 1.0)


def test_evaluation_takes_as_many_rows_as_training(parse):
    assert parse({"per_device_train_batch_size": 64}).config.per_device_eval_batch_size == 64
    chosen = {"per_device_train_batch_size": 64, "per_device_eval_batch_size": 16}
    assert parse(chosen).config.per_device_eval_batch_size == 16


def test_a_bare_no_is_not_read_as_false(parse):
    _, config, _, _ = parse({"save_strategy": False, "eval_strategy": False})
    assert config.save_strategy == "no"
    assert config.eval_strategy == "no"


def test_lists_mappings_and_nothing(parse):
    train, config, _, _ = parse(
        {
            "reward_funcs": "arithmetic",
            "arithmetic_levels": ["sort-4", "add-2"],
            "model_init_kwargs": {"dtype": "float32"},
            "replay_max_age_steps": None,
            "drop_zero_variance": False,
        }
    )
    assert train.reward_funcs == ["arithmetic"]
    assert train.arithmetic_levels == ["sort-4", "add-2"]
    assert config.model_init_kwargs == {"dtype": "float32"}
    assert config.replay_max_age_steps is None
    assert config.drop_zero_variance is False
    assert parse({}, "--reward_funcs", "arithmetic", "a.b", "--baseline").train.reward_funcs == ["arithmetic", "a.b"]


def test_settings_are_what_was_chosen(parse):
    settings = parse({"seed": 3, "temperature": 1.0}, "--replay_ratio", "0.5", "--baseline").settings
    assert settings["seed"] == 3
    assert settings["replay_ratio"] == 0.5
    assert settings["baseline"] is True
    assert "temperature" not in settings  # at its default
    assert "accelerator_config" not in settings  # derived, not chosen


MISTAKES = [
    ({"lerning_rate": 1e-4}, "unknown field 'lerning_rate'; did you mean 'learning_rate'?"),
    ({"zzz": 1}, r"unknown field 'zzz' \("),
    ({"num_generations": 8.5}, "num_generations is 8.5; give a whole number"),
    ({"num_generations": "many"}, "num_generations is 'many'; give a whole number"),
    ({"learning_rate": "high"}, "learning_rate is 'high'; give a number"),
    ({"learning_rate": [1, 2]}, r"learning_rate is \[1, 2\]; give one value, not a list"),
    ({"seed": {"a": 1}}, "seed is {'a': 1}; give one value, not a mapping"),
    ({"seed": None}, "seed is None; give a value, or remove the line"),
    ({"loss_type": False}, "loss_type is False; YAML reads yes, no, on and off as true and false"),
    ({"bf16": "perhaps"}, "bf16 is 'perhaps'; "),
    ({"allocation": "pilot"}, "allocation is 'pilot'; choose from uniform, pilot_commit, belief"),
    ({"eval_strategy": "often"}, "eval_strategy is 'often'; choose from no, steps, epoch"),
    ({"optim": "adamw"}, "optim is 'adamw'; choose from .*adamw_torch, .*, \\.\\.\\."),
    ({"replay_ratio": -1}, "replay_ratio is -1"),
    ({"num_generations": 7}, r"must be divisible by (num_generations|the number of generations)"),
    ({"arithmetic_train_problems": 0}, "arithmetic_train_problems is 0; it must be more than 0"),
    ({"dataset_test_rows": -1}, "dataset_test_rows is -1; it must be 0 or more"),
    ({"baseline_budget": 0}, "baseline_budget is 0.0; it must be more than 0"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES)
def test_mistakes_in_a_recipe(fields, message, parse):
    with pytest.raises(UsageError, match=message) as error:
        parse(fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lerning_rate", "1e-4"], "unknown flag '--lerning_rate'; did you mean 'learning_rate'?"),
        (["--learn", "1e-4"], "unknown flag '--learn'"),
        (["stray"], "unexpected argument 'stray'"),
        (["--report_to", "wandb", "trackio"], "'trackio' .write --field value; several values of one field"),
        (["--num_generations", "many"], "--num_generations is 'many'; give a whole number"),
        (["--learning-rate", "high"], "--learning_rate is 'high'; give a number"),
        (["--allocation", "pilot"], "--allocation is 'pilot'; choose from uniform, pilot_commit, belief"),
        (["--optim", "adamw"], r"--optim is 'adamw'; choose from .*adamw_torch, .*, \.\.\."),
        (["--baseline", "perhaps"], "--baseline: .*perhaps"),
        (["--seed"], "--seed: expected one argument"),
    ],
)
def test_mistakes_in_flags(flags, message, parse):
    with pytest.raises(UsageError, match=message) as error:
        parse({}, *flags)
    assert "\n" not in str(error.value)


def test_no_field_is_claimed_twice():
    """Our own fields must not shadow TRL's: argparse would raise on building the parser."""
    assert RecipeParser("x").prog == "rollwise train"
