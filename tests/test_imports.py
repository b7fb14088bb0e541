"""The core needs numpy alone, and its public names are there and documented."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rollwise
from rollwise import Replay
from rollwise.allocation import ALLOCATIONS

HEAVY = ("torch", "transformers", "trl", "pyarrow", "pandas", "datasets", "accelerate", "peft", "ray", "rich", "typer")
CORE = (
    "rollwise",
    "rollwise.scheduler",
    "rollwise.rollout",
    "rollwise.advantage",
    "rollwise.ledger",
    "rollwise.storage",
    "rollwise.errors",
    "rollwise.allocation.belief",
    "rollwise.allocation.dynamic_sampling",
    "rollwise.allocation.history_skipping",
    "rollwise.allocation.pilot_commit",
    "rollwise.allocation.prompt_pool",
    "rollwise.allocation.successive_elimination",
    "rollwise.allocation.uniform",
    "rollwise.evaluation.measures",
    "rollwise.evaluation.results",
    "rollwise.replay.buffer",
    "rollwise.replay.sampling",
)


def python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_core_loads_nothing_heavy():
    code = f"import importlib, sys\nfor name in {CORE}: importlib.import_module(name)\n"
    assert python(code + f"print([name for name in {HEAVY} if name in sys.modules])") == "[]"


def test_the_core_runs_where_only_numpy_is_installed():
    """Every third package but numpy is made impossible to import; then a few steps are played."""
    assert (
        python(
            """
import importlib.abc, sys

class OnlyNumpy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "rollwise"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, OnlyNumpy())
import random
from rollwise import PilotCommit, Replay, Rollout, RolloutScheduler
allocation = PilotCommit(train_prompts=2, pilot_rollouts=4, commit_rollouts=4, survivor_selection="max_variance")
scheduler = RolloutScheduler(range(30), allocation=allocation, replay=Replay(warmup_steps=0, decay_tau_steps=3.0))
rows = 0
for _ in range(5):
    while requests := scheduler.ask():
        scheduler.tell([Rollout(r.prompt_id, random.randint(0, 1), num_tokens=1) for r in requests
                        for _ in range(r.num_rollouts)])
    rows += len(scheduler.batch().rows)
scheduler.load_state_dict(scheduler.state_dict())
scheduler.metrics(), scheduler.ledger.records()
try:
    import torch
except ModuleNotFoundError:
    print(rows > 0)
"""
        )
        == "True"
    )


@pytest.mark.parametrize("name", rollwise.__all__)
def test_every_public_name_exists_and_is_documented(name):
    value = getattr(rollwise, name)
    if name == "__version__":
        assert value[0].isdigit()
        return
    assert inspect.isclass(value)
    assert value.__module__.startswith("rollwise.")
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "the docstring that dataclass makes up is no documentation"
    for member, attribute in vars(value).items():
        if not member.startswith("_") and (inspect.isfunction(attribute) or isinstance(attribute, property)):
            assert attribute.__doc__, f"{name}.{member} has no docstring"


def test_the_public_names_are_pinned():
    assert sorted(rollwise.__all__) == rollwise.__all__
    imported = {
        name for name, value in vars(rollwise).items() if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert imported == set(rollwise.__all__) - {"__version__"}


@pytest.mark.parametrize("settings", [Replay, *ALLOCATIONS.values()])
def test_every_setting_is_documented_and_read_somewhere(settings):
    """No dead option: each field is read outside of the check of its bounds."""
    read = set()
    for path in Path(rollwise.__file__).parent.rglob("*.py"):
        if path.parent.name not in ("allocation", "replay", "rollwise"):
            continue
        tree = ast.parse(path.read_text())
        checks = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__post_init__"]
        skipped = {id(node) for check in checks for node in ast.walk(check)}
        read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and id(n) not in skipped}
    for name in settings.__dataclass_fields__:
        assert name in read, f"{settings.__name__}.{name} is never read"
        documented = inspect.cleandoc(settings.__doc__)  # Python 3.13 has taken the indent away already
        assert f"\n    {name}: " in documented, f"{settings.__name__}.{name} is not in the docstring"
