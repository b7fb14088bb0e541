import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise.errors import ConfigError
from rollwise.tasks.arithmetic import (
    CHARACTERS,
    DEFAULT_LEVELS,
    MAX_COMPLETION_TOKENS,
    TASKS,
    build_tokenizer,
    exact_match_reward,
    generate_problems,
    held_out_problems,
    is_held_out,
    load_dataset,
    model_path,
    num_prompts,
    parse_level,
)

ROOMY_LEVELS = [f"{task}-{k}" for task in TASKS for k in range(2, 9)]


def solve(prompt):
    """Answer a prompt by another route than the module's."""
    if prompt[0] == "S":
        digits = prompt[1:-1]
        return "".join(str(d) * digits.count(str(d)) for d in range(10))
    if prompt[0] == "M":
        digits = [int(c) for c in prompt[1:-1]]
        return "".join(str(sum(digits[: i + 1]) % 10) for i in range(len(digits)))
    first, second = prompt[:-1].split("+")
    return "".join(reversed(str(int(first) + int(second))))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), level=st.sampled_from(ROOMY_LEVELS), split=st.sampled_from([None, "train", "test"]))
def test_problems_are_solved_right_and_belong_to_their_level(seed, level, split):
    for problem in generate_problems(5, seed=seed, levels=[level], split=split):
        assert problem.answer == solve(problem.prompt)
        assert (problem.level, problem.task) == (level, level.rsplit("-", 1)[0])
        digits = parse_level(level)[1]
        operand = problem.prompt.rstrip("=").lstrip("SM").split("+")[0]
        assert len(operand) == digits
        assert len(problem.answer) in ({digits, digits + 1} if problem.task == "add" else {digits})
        assert len(problem.answer) + 1 <= MAX_COMPLETION_TOKENS
        assert split is None or is_held_out(problem.prompt) == (split == "test")


def test_same_seed_same_problems_and_another_seed_other_problems():
    assert generate_problems(300, seed=5) == generate_problems(300, seed=5)
    assert generate_problems(300, seed=5) != generate_problems(300, seed=6)


def test_problems_do_not_change_between_versions():
    # The shipped model and published figures rest on these streams.
    assert [p.prompt for p in generate_problems(6, seed=0, levels=["sort-4", "running_sum-5", "add-3"])] == [
        "M67013=",
        "S6311=",
        "453+446=",
        "S6890=",
        "571+804=",
        "M33936=",
    ]


def test_problems_are_different_and_levels_equal():
    problems = generate_problems(1600, seed=1)
    assert len({p.prompt for p in problems}) == 1600
    assert Counter(p.level for p in problems) == dict.fromkeys(DEFAULT_LEVELS, 100)


def test_a_level_named_twice_gets_twice_the_problems():
    problems = generate_problems(30, seed=1, levels=["sort-4", "add-3", "sort-4"])
    assert Counter(p.level for p in problems) == {"sort-4": 20, "add-3": 10}
    assert len({p.prompt for p in problems}) == 30


def test_remainder_goes_to_the_first_levels():
    problems = generate_problems(8, seed=1, levels=["sort-4", "add-3", "add-2"])
    assert Counter(p.level for p in problems) == {"sort-4": 3, "add-3": 3, "add-2": 2}
    assert generate_problems(0, seed=1) == []


@pytest.mark.parametrize("level", ["sort-2", "running_sum-2", "add-1"])
def test_a_whole_level_can_be_drawn_but_not_one_more(level):
    assert num_prompts(level) == 100
    problems = generate_problems(100, seed=3, levels=[level])
    assert len({p.prompt for p in problems}) == 100
    with pytest.raises(ConfigError, match=rf"{level}.*exhausted.*101 problems wanted, 100 prompts"):
        generate_problems(101, seed=3, levels=[level])


def test_excluded_prompts_are_not_drawn_and_count_as_gone():
    some = {p.prompt for p in generate_problems(60, seed=3, levels=["sort-2"])}
    rest = {p.prompt for p in generate_problems(40, seed=3, levels=["sort-2"], exclude=some)}
    assert len(rest) == 40
    assert not rest & some
    with pytest.raises(ValueError, match="exhausted"):
        generate_problems(41, seed=3, levels=["sort-2"], exclude=some)


def test_num_prompts_of_addition_counts_pairs_of_operands():
    assert num_prompts("add-3") == 900 * 900
    assert num_prompts("sort-6") == 10**6


@pytest.mark.parametrize("level", ["sort", "sort-0", "sort-9", "multiply-3", "sort-4 ", "sort--4"])
def test_unknown_levels_are_named(level):
    with pytest.raises(ConfigError, match="unknown level"):
        generate_problems(1, seed=0, levels=[level])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_problems": -1}, "num_problems is -1"),
        ({"num_problems": 1, "levels": []}, "levels is empty"),
        ({"num_problems": 1, "split": "valid"}, "split is 'valid'"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ConfigError, match=message):
        generate_problems(seed=0, **arguments)


def test_dataset_has_disjoint_splits_and_one_test_split_for_every_seed():
    first, second = load_dataset(num_train=4000, seed=0), load_dataset(num_train=4000, seed=1)
    assert first["train"].column_names == ["prompt", "answer", "task", "level"]
    for data in (first, second):
        train, test = set(data["train"]["prompt"]), set(data["test"]["prompt"])
        assert (len(train), len(test)) == (4000, 256)
        assert not train & test
    assert first["test"].to_dict() == second["test"].to_dict()
    assert first["train"].to_dict() != second["train"].to_dict()
    assert Counter(first["test"]["level"]) == dict.fromkeys(DEFAULT_LEVELS, 16)
    assert list(first["test"]["prompt"]) == [p.prompt for p in held_out_problems()]


def test_reward_is_one_for_the_answer_alone():
    completions = ["0235", "0253", "0235 ", " 0235", "", "02355", "0235=", "235"]
    rewards = exact_match_reward(completions=completions, answer=["0235"] * 8, prompts=["S5302="] * 8, level=["x"] * 8)
    assert rewards == [1.0] + [0.0] * 7
    with pytest.raises(ValueError, match="2 completions but 1 answers"):
        exact_match_reward(["1", "2"], ["1"])


def test_tokenizer_round_trip():
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 32
    assert (tokenizer.padding_side, tokenizer.pad_token_id) == ("left", 0)
    ids = tokenizer(text=[CHARACTERS, "4+7="])["input_ids"]  # how TRL tokenizes prompts
    assert ids[0][0] == ids[1][0] == tokenizer.bos_token_id
    assert [len(row) for row in ids] == [1 + len(CHARACTERS), 5]
    assert tokenizer.batch_decode(ids, skip_special_tokens=True) == [CHARACTERS, "4+7="]
    assert tokenizer.batch_decode([[*ids[1][1:], tokenizer.eos_token_id, 0, 0]], skip_special_tokens=True) == ["4+7="]


def test_unknown_characters_become_one_unknown_token_each():
    tokenizer = build_tokenizer()
    ids = tokenizer("S5xé\n2=")["input_ids"]
    assert ids.count(tokenizer.unk_token_id) == 3
    assert tokenizer.decode(ids, skip_special_tokens=True) == "S52="


def test_tokenizer_pads_on_the_left():
    batch = build_tokenizer()(["S12=", "S12345678="], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 11)
    assert batch["attention_mask"][0].tolist() == [0] * 6 + [1] * 5
    assert set(batch) == {"input_ids", "attention_mask"}


def test_shipped_tokenizer_is_the_built_one():
    from transformers import AutoTokenizer

    shipped, built = AutoTokenizer.from_pretrained(model_path()), build_tokenizer()
    assert shipped.get_vocab() == built.get_vocab()
    texts = [p.prompt for p in generate_problems(50, seed=0)] + [CHARACTERS, "S5xé2="]
    assert shipped(text=texts)["input_ids"] == built(text=texts)["input_ids"]
    assert (shipped.padding_side, shipped.eos_token_id, shipped.bos_token_id) == ("left", 2, 1)


def test_shipped_model_is_small():
    files = {f.name: f.stat().st_size for f in model_path().iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "pretrain.json"} <= set(
        files
    )
    assert sum(files.values()) <= 1_500_000


def test_module_imports_without_the_heavy_libraries():
    code = (
        "import sys; import rollwise.tasks.arithmetic as a; a.generate_problems(3, seed=0); a.model_path();"
        "print(*[m for m in ('torch', 'transformers', 'tokenizers', 'datasets', 'trl') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
