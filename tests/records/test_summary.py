import json
import os
from enum import Enum

import pytest
from run_helpers import finished

from rollwise.records.summary import start_summary, versions, without_secrets, write_json


def test_a_summary_holds_the_results_the_costs_and_the_settings():
    summary = json.loads(json.dumps(finished(), allow_nan=False))
    for key, value in {
        "status": "finished",
        "heldout_accuracy_start": 0.2,
        "heldout_accuracy_end": 0.4,
        "heldout_accuracy_best": 0.5,
        "rollouts_generated": 1000,
        "rollouts_trained": 600,
        "rows_replayed": 300,
        "steps": 20,
        "seconds": 72.0,
        "seconds_generation": 18.0,
        "seconds_rollwise": 0.72,
        "seed": 7,
        "settings": {"learning_rate": 1e-4},
    }.items():
        assert summary[key] == value
    assert {"rollwise", "trl", "transformers", "torch", "python"} <= set(summary["versions"])


def test_without_evaluations_the_accuracies_are_null():
    summary = finished(evaluations=[])
    assert summary["heldout_accuracy_start"] is summary["heldout_accuracy_end"] is None


def test_a_run_that_begins_is_marked_so():
    assert start_summary({}, seed=0)["status"] == "running"
    assert finished(status="stopped", stop_reason="all solved")["status"] == "stopped"


def test_versions_name_what_is_installed():
    assert all(version[0].isdigit() for version in versions().values())


class Choice(Enum):
    STEPS = "steps"


def test_secrets_are_taken_out_however_deep():
    settings = {
        "hub_token": "hf_abcdefghijklmnopqrstuvwxyz",
        "model_init_kwargs": {"token": "abc", "dtype": "float32", "more": [{"api_key": "k"}]},
        "generation_kwargs": '{"password": "p", "top_k": 3}',
        "vllm_server_base_url": "http://me:secret@host:8000/v1",
        "hub_model_id": "me/hf_abcdefghijklmnopqrstuvwxyz",
        "max_completion_length": 10,
        "num_tokens": 3,
        "eval_strategy": Choice.STEPS,
        "top_k": None,
        "delta": float("inf"),
        "not_json": "{x",
    }
    clean = without_secrets(settings)
    text = json.dumps(clean, allow_nan=False)
    for secret in ("hf_abc", '"abc"', '"k"', '"p"', "secret"):
        assert secret not in text
    assert clean["model_init_kwargs"]["dtype"] == "float32"
    assert clean["generation_kwargs"]["top_k"] == 3
    assert clean["vllm_server_base_url"] == "http://(removed)@host:8000/v1"
    assert clean["max_completion_length"] == 10
    assert clean["num_tokens"] == 3
    assert clean["eval_strategy"] == "steps"
    assert clean["top_k"] is None
    assert clean["not_json"] == "{x"


def test_an_unset_secret_stays_unset():
    assert without_secrets({"hub_token": None}) == {"hub_token": None}


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"status": "running"})
    with pytest.raises(TypeError):
        write_json(path, {"status": object()})
    with pytest.raises(ValueError):
        write_json(path, {"accuracy": float("nan")})
    assert json.loads(path.read_text()) == {"status": "running"}

    def killed(*paths):
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(OSError, match="killed"):
        write_json(path, {"status": "finished"})
    assert json.loads(path.read_text()) == {"status": "running"}
