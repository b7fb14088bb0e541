"""What a run leaves for people: its model card, and its figures where `report_to` sends them."""

import re
from pathlib import Path

import pytest
import tiny

from rollwise.trl import model_card

ROOT = Path(__file__).parents[2]


def rows(card):
    """The cards' tables: first cell -> second."""
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.MULTILINE))


def test_checkpoints_carry_a_card_of_what_was_spent(tmp_path):
    trainer = tiny.trainer(
        tmp_path,
        allocation="pilot_commit",
        pilot_rollouts=3,
        p_lower=0.1,
        replay_ratio=0.5,
        replay_decay_tau_steps=3.0,
        save_strategy="steps",
        save_steps=4,
    )
    trainer.train()
    card = (tmp_path / "README.md").read_text()
    assert card == (tmp_path / "checkpoint-4" / "README.md").read_text()
    assert "# Model Card for" in card, "TRL's own"
    assert "- rollwise\n" in card.partition("---\n\n#")[0]
    found, totals, outcomes = rows(card), trainer.ledger.totals(), trainer.ledger.by_outcome()
    assert found["training steps"] == "4"
    assert found["rollouts generated"] == f"{totals['rollouts_generated']:,}"
    assert found["tokens generated"] == f"{totals['tokens_generated']:,}"
    assert found["rollouts that reached a gradient"].startswith(f"{totals['rollouts_trained']:,} (")
    assert found["rows trained on again, without generating"] == f"{totals['rows_replayed']:,}" != "0"
    left_alone = sum(outcomes[name] for name in ("solved", "too_easy", "too_hard"))
    assert left_alone > 0
    spared = found["rollouts spared: the rest of the groups of prompts left alone"]
    assert spared == f"{left_alone // 3 * 5:,}", "groups of 8, of which 3 are pilots"
    assert found["`allocation`"] == "`'pilot_commit'`"
    assert found["`replay_decay_tau_steps`"] == "`3.0`"
    assert "`p_upper`" not in found, "it is at its default"
    for key in ("kim2026spend", "yoo2026rollout", "ma2026freshness", "shao2024deepseekmath"):
        assert card.count(key) == 1


def test_plain_grpo_cites_no_method_and_spares_nothing(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, solved_prompts="retire")
    trainer.train()
    card = (tmp_path / "README.md").read_text()
    assert "allocation `uniform`, no replay" in card
    assert rows(card)["rollouts generated"] == "16"
    assert "spared" not in card
    assert "2026" not in re.sub(r"(?s)^---.*?---", "", card).replace("Copyright", "")


def test_a_card_made_twice_has_one_section(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=1)
    trainer.train()
    for _ in range(2):
        trainer.create_model_card(model_name="tiny")
    assert (tmp_path / "README.md").read_text().count("## Rollouts") == 1


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        ({}, []),
        ({"allocation": "dynamic_sampling"}, ["yu2025dapo"]),
        ({"allocation": "history_skipping"}, ["zheng2025act"]),
        ({"allocation": "successive_elimination"}, ["xiong2025reinforce"]),
        ({"allocation": "belief", "replay_ratio": 1.0}, ["kim2026spend", "yoo2026rollout"]),
        ({"replay_updates_per_fresh": 1}, ["yoo2026rollout", "ma2026freshness"]),
    ],
)
def test_the_methods_of_a_run_are_cited(settings, keys, tmp_path):
    entries = model_card.citations(tiny.config(tmp_path, **settings))
    assert [re.match(r"@article\{(\w+),", entry)[1] for entry in entries] == keys


@pytest.mark.parametrize("page", ["README.md", "docs/papers.md"])
def test_citations_are_the_same_everywhere(page):
    def entries(text):
        return {
            match[1]: " ".join(match[0].split())
            for match in re.finditer(r"@article\{(\w+),.*?\}\}\n?", text, re.DOTALL)
        }

    ours = entries("\n".join([model_card._PILOT_COMMIT, model_card._REPLAY, model_card._FRESHNESS]) + "\n")
    assert len(ours) == 3
    there = entries((ROOT / page).read_text())
    assert {key: there[key] for key in ours} == ours


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_tensorboard_receives_every_figure(tmp_path, monkeypatch):
    """Offline, through the trainer's logging alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    settings = {"logging_dir": str(tmp_path / "logs")} if "logging_dir" in tiny.config(tmp_path).__dict__ else {}
    trainer = tiny.trainer(tmp_path, report_to="tensorboard", allocation="pilot_commit", replay_ratio=0.5, **settings)
    trainer.train()
    folders = {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}
    assert folders
    scalars = {}
    for folder in folders:
        events = EventAccumulator(str(folder))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars[tag] = {event.step: event.value for event in events.Scalars(tag)}
    logged = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if name.startswith("rollwise/"):
                logged.setdefault(f"train/{name}", {})[entry["step"]] = value
    assert {
        "train/rollwise/rollouts_generated",
        "train/rollwise/useful_share",
        "train/rollwise/buffer_rollouts",
    } <= set(logged)
    for tag, values in logged.items():
        assert scalars[tag] == pytest.approx(values, rel=1e-6), tag
    assert scalars["train/rollwise/rollouts_generated"][4] == trainer.ledger.totals()["rollouts_generated"]
