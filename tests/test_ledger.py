"""Promise 4: nothing is double-counted or hidden."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwise import Ledger, Rollout, StateError
from rollwise.ledger import OUTCOMES


def rollouts(number, *, step=0, purpose="pilot", num_tokens=5):
    return [Rollout("p", 1.0, num_tokens=num_tokens, birth_step=step, purpose=purpose) for _ in range(number)]


def nonzero(counts):
    return {key: value for key, value in counts.items() if value}


def test_a_new_ledger_is_all_zero():
    ledger = Ledger()
    assert set(ledger.totals().values()) == {0}
    assert set(ledger.by_outcome()) == set(OUTCOMES)
    assert nonzero(ledger.by_outcome()) == ledger.by_purpose() == {}
    assert ledger.records() == []


def test_what_is_told_is_pending_until_it_is_settled():
    ledger, told = Ledger(), rollouts(5)
    ledger.record(told)
    assert nonzero(ledger.by_outcome()) == {"pending": 5}
    ledger.settle(told[:2], "trained")
    ledger.settle(told[2:3], "too_hard")
    assert nonzero(ledger.by_outcome()) == {"pending": 2, "trained": 2, "too_hard": 1}
    ledger.settle(told[3:], "surplus")
    assert all(counts[-2] > 0 for counts in ledger.state_dict()["generated"])  # what was pending leaves no entry
    ledger.record(rollouts(2))
    assert nonzero(ledger.by_outcome()) == {"pending": 2, "trained": 2, "too_hard": 1, "surplus": 2}
    assert ledger.totals() == {
        "rollouts_generated": 7,
        "rollouts_trained": 2,
        "rollouts_pending": 2,
        "rollouts_wasted": 3,
        "rows_replayed": 0,
        "tokens_generated": 35,
    }


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_every_outcome_but_two_is_waste(outcome):
    ledger, told = Ledger(), rollouts(3)
    ledger.record(told)
    ledger.settle(told, outcome)
    assert nonzero(ledger.by_outcome()) == {outcome: 3}
    assert ledger.totals()["rollouts_wasted"] == (0 if outcome in ("trained", "pending") else 3)
    assert ledger.totals()["rollouts_generated"] == 3
    assert ledger.totals()["tokens_generated"] == 15


def test_padding_is_generated_and_wasted():
    ledger = Ledger()
    ledger.record_padding(4, 3, 21)
    ledger.record_padding(4, 1, 9)
    assert nonzero(ledger.by_outcome()) == ledger.by_purpose() == {"padding": 4}
    assert ledger.totals()["rollouts_wasted"] == ledger.totals()["rollouts_generated"] == 4
    assert ledger.totals()["tokens_generated"] == 30
    assert [r["step"] for r in ledger.records()] == [4]


def test_replayed_rows_cost_no_generation():
    ledger = Ledger()
    ledger.record_replayed(3, rollouts(2, step=1, num_tokens=7))
    ledger.record_replayed(3, rollouts(1, step=2, num_tokens=7))
    totals = ledger.totals()
    assert totals.pop("rows_replayed") == 3
    assert set(totals.values()) == {0}
    assert ledger.records() == [
        {"kind": "replayed", "step": 3, "purpose": "replay", "outcome": "trained", "rollouts": 3, "tokens": 21}
    ]


def test_steps_purposes_and_outcomes_are_kept_apart():
    ledger = Ledger()
    early, late, commits = rollouts(3, step=1), rollouts(2, step=2), rollouts(4, step=2, purpose="commit", num_tokens=2)
    for part in (early, late, commits):
        ledger.record(part)
    ledger.settle(early[:1] + commits, "trained")
    ledger.settle(late, "solved")
    assert ledger.by_purpose() == {"pilot": 5, "commit": 4}
    columns = ("step", "purpose", "outcome", "rollouts", "tokens")
    assert {tuple(record[name] for name in columns) for record in ledger.records()} == {
        (1, "pilot", "pending", 2, 10),
        (1, "pilot", "trained", 1, 5),
        (2, "commit", "trained", 4, 8),
        (2, "pilot", "solved", 2, 10),
    }
    assert {record["kind"] for record in ledger.records()} == {"generated"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["uniform", "pilot", "commit"]),
            st.integers(0, 9),
            st.sampled_from([o for o in OUTCOMES if o != "pending"] + [None]),
        ),
        max_size=40,
    )
)
def test_counts_are_those_of_a_plain_list(events):
    ledger, kept = Ledger(), []
    for step, purpose, num_tokens, outcome in events:
        one = Rollout("p", 0.0, num_tokens=num_tokens, birth_step=step, purpose=purpose)
        ledger.record([one])
        if outcome is not None:
            ledger.settle([one], outcome)
        kept.append((step, purpose, outcome or "pending", num_tokens))
        assert ledger.totals()["rollouts_generated"] == len(kept)
    assert nonzero(ledger.by_outcome()) == Counter(outcome for _, _, outcome, _ in kept)
    assert ledger.by_purpose() == Counter(purpose for _, purpose, _, _ in kept)
    counts, tokens = Counter(), Counter()
    for step, purpose, outcome, num_tokens in kept:
        counts[step, purpose, outcome] += 1
        tokens[step, purpose, outcome] += num_tokens
    records = {(r["step"], r["purpose"], r["outcome"]): (r["rollouts"], r["tokens"]) for r in ledger.records()}
    assert records == {key: (n, tokens[key]) for key, n in counts.items()}
    restored = Ledger()
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored.records() == ledger.records()
    assert restored.totals() == ledger.totals()


# --- state and file ---------------------------------------------------------------------------------------------------


def busy_ledger():
    ledger, told = Ledger(), rollouts(4, step=2)
    ledger.record(told)
    ledger.settle(told[:3], "trained")
    ledger.record_padding(2, 1, 5)
    ledger.record_replayed(3, told[:2])
    return ledger


def test_loading_replaces_what_was_counted_and_counting_goes_on():
    state = busy_ledger().state_dict()
    ledger = Ledger()
    ledger.record(rollouts(100))
    ledger.record_replayed(0, rollouts(100))
    ledger.load_state_dict(state)
    assert ledger.records() == busy_ledger().records()
    ledger.settle(rollouts(1, step=2), "aged_out")
    assert nonzero(ledger.by_outcome()) == {"trained": 3, "aged_out": 1, "padding": 1}
    assert state == busy_ledger().state_dict()  # the state was copied, not shared


def test_a_state_with_an_outcome_of_another_version_is_refused_and_nothing_is_loaded():
    ledger = busy_ledger()
    with pytest.raises(StateError, match="vanished"):
        ledger.load_state_dict({"generated": [[0, "pilot", "vanished", 1, 1]], "replayed": []})
    assert ledger.records() == busy_ledger().records()


@pytest.mark.parametrize("ledger", [busy_ledger(), Ledger()], ids=["busy", "empty"])
def test_the_parquet_file_holds_the_records(ledger, tmp_path):
    path = ledger.save(tmp_path / "new" / "folder" / "ledger.parquet")
    table = pq.read_table(path)
    assert table.to_pylist() == [{name: record[name] for name in table.column_names} for record in ledger.records()]
    assert {field.name: str(field.type) for field in table.schema} == {
        "kind": "string",
        "purpose": "string",
        "outcome": "string",
        "step": "int64",
        "rollouts": "int64",
        "tokens": "int64",
    }
    assert [p.name for p in path.parent.iterdir()] == ["ledger.parquet"]


def test_the_file_sums_to_all_completions(tmp_path):
    frame = pq.read_table(busy_ledger().save(str(tmp_path / "ledger.parquet"))).to_pandas()
    generated = frame[frame.kind == "generated"]
    assert generated.rollouts.sum() == 5
    assert generated.tokens.sum() == 25
    assert frame[frame.kind == "replayed"].rollouts.sum() == 2


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = busy_ledger().save(tmp_path / "ledger.parquet")
    before = path.read_bytes()

    def fails_half_way(table, where, **options):
        with open(where, "wb") as file:
            file.write(b"PAR1 half of")
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", fails_half_way)
    with pytest.raises(OSError, match="no space"):
        Ledger().save(path)
    assert path.read_bytes() == before
