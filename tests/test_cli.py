import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rollwise import cli, usage
from rollwise._version import __version__
from rollwise.commands.app import app
from rollwise.commands.errors import errors_to_exit_codes
from rollwise.errors import ConfigError, RewardError, VersionError
from rollwise.usage import UsageError


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a command line in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


def test_version_and_help(run):
    assert run("--version").stdout == f"rollwise {__version__}\n"
    result = run("--help")
    assert result.exit_code == 0
    assert "train" in result.stdout
    assert "pretrain" in result.stdout
    result = run("train", "--help")
    assert result.exit_code == 0
    for word in ("--dataset_name", "--reward_funcs", "--allocation", "--baseline", "--resume_from_checkpoint"):
        assert word in result.stdout


def test_the_command_line_loads_nothing_heavy():
    code = (
        "import sys, rollwise.cli, rollwise.commands.app, rollwise.commands.train, rollwise.commands.pretrain\n"
        "heavy = {'torch', 'trl', 'transformers', 'datasets', 'accelerate', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rollwise_can_be_run_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "rollwise.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout == f"rollwise {__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_remedy_is_one_line(missing, monkeypatch, capsys):
    find_spec = usage.find_spec
    monkeypatch.setattr(usage, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == f"rollwise: this command needs {missing}: pip install 'rollwise[trl]'\n"


def test_training_without_trl_says_what_to_install(run, tmp_path, monkeypatch):
    find_spec = usage.find_spec
    monkeypatch.setattr(usage, "find_spec", lambda name: None if name in ("trl", "torch") else find_spec(name))
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    result = run("train", "recipe.yaml")
    assert result.exit_code == 2
    assert result.stderr == "rollwise: this command needs trl and torch: pip install 'rollwise[trl]'\n"


def test_a_missing_recipe_is_named_with_the_ones_there_are(run, tmp_path):
    (tmp_path / "arithmetic.yaml").write_text("seed: 1\n")
    result = run("train", "arithmetik.yaml")
    assert result.exit_code == 2
    assert result.stderr == "rollwise: no recipe file 'arithmetik.yaml'; there are arithmetic.yaml\n"


def test_the_recipe_comes_first(run):
    result = run("train", "--baseline", "recipe.yaml")
    assert result.exit_code == 2
    assert "the recipe comes first, not '--baseline'" in result.stderr
    assert run("train").exit_code == 2


def test_pretrain_refuses_a_file_as_its_folder(run, tmp_path):
    (tmp_path / "model").write_text("")
    result = run("pretrain", "model")
    assert result.exit_code == 2
    assert result.stderr == "rollwise: output_dir 'model' is a file; name a folder\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such\n  thing"), 2),
        (ConfigError("no such thing"), 2),
        (VersionError("no such thing"), 2),
        (RewardError("no such thing"), 1),
    ],
)
def test_known_causes_end_with_one_line(error, code, capsys):
    with pytest.raises(SystemExit) as exit_, errors_to_exit_codes():
        raise error
    assert exit_.value.code == code
    assert capsys.readouterr().err == "rollwise: no such thing\n"


def test_what_a_library_says_can_be_traced_back(capsys, monkeypatch):
    monkeypatch.delenv("ROLLWISE_TRACEBACK", raising=False)
    with pytest.raises(SystemExit), errors_to_exit_codes():
        raise UsageError("no such thing") from ValueError("no such thing")
    assert capsys.readouterr().err == "rollwise: no such thing (ROLLWISE_TRACEBACK=1 shows where)\n"
    monkeypatch.setenv("ROLLWISE_TRACEBACK", "1")
    with pytest.raises(UsageError), errors_to_exit_codes():
        raise UsageError("no such thing")


def test_ctrl_c_ends_with_130():
    with pytest.raises(SystemExit) as exit_, errors_to_exit_codes():
        raise KeyboardInterrupt
    assert exit_.value.code == 130


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError), errors_to_exit_codes():
        raise ZeroDivisionError
