"""The README says what is true."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_core_snippet_runs():
    (block,) = [block for block in BLOCKS if "RolloutScheduler" in block]
    names = {"my_reward": lambda prompt_id: float(prompt_id % 3 == 0)}
    exec(block, names)
    assert names["batch"].step == 0


def test_trl_snippet_uses_names_that_exist():
    from rollwise import trl

    (block,) = [block for block in BLOCKS if "rollwise.trl" in block]
    compile(block, "README.md", "exec")
    for name in re.findall(r"^    (\w+)=", block, flags=re.MULTILINE):
        assert name in trl.RollwiseGRPOConfig.__dataclass_fields__


def test_settings_table_lists_every_setting():
    from trl import GRPOConfig

    from rollwise.trl import RollwiseGRPOConfig

    own = set(RollwiseGRPOConfig.__dataclass_fields__) - set(GRPOConfig.__dataclass_fields__) - {"_VALID_DICT_FIELDS"}
    table = README.partition("## Settings")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    listed = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert listed == own


def test_the_table_of_the_headline_is_that_of_its_file():
    results = json.loads((ROOT / "docs" / "results" / "headline.json").read_text())
    path = ROOT / "benchmarks" / "headline_results.py"
    spec = importlib.util.spec_from_file_location("headline_results", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.with_table(README, results) == README
    (line,) = [line for line in README.splitlines() if line.startswith("| belief + replay |")]
    cells = line.strip("| ").split(" | ")[1:]
    for cell, found in zip(cells, results["workloads"].values(), strict=True):
        assert f"{found['methods']['belief_replay']['rollouts_ratio']['mean']:.2f} [" in cell


def test_files_it_links_to_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
