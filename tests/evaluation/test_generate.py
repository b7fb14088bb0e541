import sys
from types import SimpleNamespace

import pytest
from tiny import model, tokenizer

from rollwise.errors import ConfigError
from rollwise.evaluation import generate as generate_module
from rollwise.evaluation.generate import Sampling, TransformersEngine, encode, make_engine
from rollwise.tasks import arithmetic

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}={% if add_generation_prompt %}a{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(folder):
    return TransformersEngine(folder, batch_size=3)


def test_every_prompt_gets_its_samples(engine):
    made = engine.generate(["1+1=", "22+3="], Sampling(samples=4, max_tokens=6), chunk=0)
    assert [len(samples) for samples in made] == [4, 4]
    for completion in (completion for samples in made for completion in samples):
        assert 1 <= completion.num_tokens <= 6
        assert completion.is_finished or completion.num_tokens == 6
        assert "<" not in completion.text


def test_the_same_chunk_gives_the_same_and_another_other_samples(engine):
    sampling = Sampling(samples=8, max_tokens=6)
    first = engine.generate(["1+1="], sampling, chunk=0)
    assert engine.generate(["1+1="], sampling, chunk=0) == first
    assert engine.generate(["1+1="], sampling, chunk=1) != first
    assert engine.generate(["1+1="], Sampling(samples=8, max_tokens=6, seed=1), chunk=0) != first


def test_greedy_does_not_depend_on_padding(engine):
    sampling = Sampling(samples=1, temperature=0.0, max_tokens=6)
    together = engine.generate(["1+1=", "00000001+1="], sampling, chunk=0)
    assert together[0] == engine.generate(["1+1="], sampling, chunk=5)[0]


def test_the_shipped_model_is_right_as_often_as_in_training():
    engine = TransformersEngine(str(arithmetic.model_path()), batch_size=64)
    problems = arithmetic.held_out_problems(32, ["sort-3"])
    made = engine.generate([problem.prompt for problem in problems], Sampling(samples=2, max_tokens=10), chunk=0)
    right = [c.text == p.answer for p, samples in zip(problems, made, strict=True) for c in samples]
    assert sum(right) / len(right) > 0.5
    assert all(completion.is_finished for samples in made for completion in samples)


def test_a_completion_that_does_not_fit_is_refused_before(engine):
    with pytest.raises(ConfigError, match=r"has 4 tokens and max_tokens is 100, .* 64 positions: lower it to 60"):
        engine.check(["1+1="], Sampling(max_tokens=100))
    engine.check(["1+1="], Sampling(max_tokens=60))


def test_a_chat_template_is_used_where_there_is_one():
    plain, chat = tokenizer(), tokenizer()
    chat.chat_template = TEMPLATE
    assert chat.decode(encode(chat, ["1+1"], chat_template=True)[0]) == "1+1=a"
    assert encode(chat, ["1+1"], chat_template=False) == encode(plain, ["1+1"], chat_template=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"temperature": 0.0}, "8 equal samples"),
    ],
)
def test_settings_out_of_bounds_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**settings)


def test_engines_are_chosen_by_name(folder, monkeypatch):
    assert make_engine("transformers", folder).name == "transformers"
    assert make_engine("auto", folder).name == "transformers"
    with pytest.raises(ConfigError, match="unknown engine 'tgi': choose from auto, transformers, vllm"):
        make_engine("tgi", folder)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        make_engine("auto", folder, batch_size=0)
    monkeypatch.setattr(generate_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vllm is not installed"):
        make_engine("vllm", folder)


def test_vllm_is_asked_with_tokens_and_a_seed_for_each_prompt(monkeypatch):
    """What vLLM is given and gives back, played: the real one needs a GPU."""
    asked = {}

    class LLM:
        def __init__(self, **settings):
            asked["llm"] = settings

        def get_tokenizer(self):
            return tokenizer()

        def generate(self, prompts, params, use_tqdm):
            asked["prompts"], asked["params"] = prompts, params
            outputs = [
                SimpleNamespace(text="2", token_ids=(4, 1), finish_reason="stop"),
                SimpleNamespace(text="22", token_ids=(4, 4), finish_reason="length"),
            ]
            return [SimpleNamespace(outputs=outputs) for _ in prompts]

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=lambda **settings: settings)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(generate_module, "find_spec", lambda name: True)
    monkeypatch.setattr(generate_module, "_has_gpu", lambda: True)
    engine = make_engine("auto", "some/model", dtype="bfloat16")
    assert engine.name == "vllm"
    assert asked["llm"] == {"model": "some/model", "dtype": "bfloat16"}
    sampling = Sampling(samples=2, temperature=0.6, top_p=0.9, max_tokens=2)
    engine.check(["1", "2"], sampling)
    made = engine.generate(["1+1=", "1"], sampling, chunk=3)
    assert asked["prompts"][1] == {"prompt_token_ids": [3]}
    assert asked["params"][0] | {"seed": 0} == {"n": 2, "temperature": 0.6, "top_p": 0.9, "max_tokens": 2, "seed": 0}
    assert asked["params"][0]["seed"] != asked["params"][1]["seed"]
    assert [(c.text, c.num_tokens, c.is_finished) for c in made[0]] == [("2", 2, True), ("22", 2, False)]
