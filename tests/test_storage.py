"""Promises 3 and 8: a state file is whole or refused by name, and reading one never runs code."""

import copy
import dataclasses
import math
import os
import subprocess
import sys

import numpy as np
import pandas
import pyarrow as pa
import pytest
from core_helpers import coin, pilot_commit, play_step

from rollwise import Replay, Rollout, RolloutScheduler, StateError, storage
from rollwise.scheduler import STATE_FORMAT
from rollwise.storage import load_state, save_state

FIELDS = ("prompt_id", "reward", "num_tokens", "num_loss_tokens", "nbytes", "owner", "purpose", "birth_step")
FROZEN = ("advantage", "group_mean", "group_std")


def state_of(rollouts, **more):
    """A scheduler's state that holds `rollouts`; what else is in it is a scheduler's business."""
    return RolloutScheduler(["a", "b"]).state_dict() | {"rollouts": rollouts, "num_stored": len(rollouts)} | more


def one(prompt_id="a", **fields):
    defaults = {"reward": 1.0, "purpose": "pilot", "birth_step": 3, "num_tokens": 4, "owner": 0}
    return Rollout(prompt_id, **(defaults | fields))


def played_state(num_steps=3):
    scheduler = RolloutScheduler(
        [f"p{i}" for i in range(6)], allocation=pilot_commit(), replay=Replay(ratio=1.0, warmup_steps=0)
    )
    for _ in range(num_steps):
        play_step(scheduler, coin(0.5), payload=True)
    return scheduler.state_dict()


def assert_same_rollouts(got, expected):
    assert len(got) == len(expected)
    for mine, other in zip(got, expected, strict=True):
        for name in FIELDS:
            value = getattr(mine, name)
            assert (value, type(value)) == (getattr(other, name), type(getattr(other, name)))
        for name in FROZEN:
            assert getattr(mine, name) == pytest.approx(getattr(other, name), rel=0, abs=0, nan_ok=True)
        assert (mine.payload is None) == (other.payload is None)
        for name in other.payload or {}:
            assert mine.payload[name].dtype == other.payload[name].dtype
            assert mine.payload[name].tolist() == other.payload[name].tolist()
        assert set(mine.payload or {}) == set(other.payload or {})


def without_rollouts(state):
    return {key: value for key, value in state.items() if key != "rollouts"}


# --- round trip -------------------------------------------------------------------------------------------------------


def test_a_played_state_comes_back_whole(tmp_path):
    state = played_state()
    assert len(state["rollouts"]) > 40
    assert {r.purpose for r in state["rollouts"]} == {"pilot", "commit"}
    assert any(math.isnan(r.advantage) for r in state["rollouts"]), "survivors wait without an advantage"
    path = save_state(tmp_path / "new" / "folder", state)
    assert path.is_file()
    loaded = load_state(path.parent)
    assert without_rollouts(loaded) == without_rollouts(state)
    assert_same_rollouts(loaded["rollouts"], state["rollouts"])


def test_every_field_of_a_rollout_comes_back(tmp_path):
    values = {"prompt_id": "a", "purpose": "commit", "owner": 0, "payload": {"x": np.arange(3)}}
    for i, field in enumerate(dataclasses.fields(Rollout)):
        if field.name not in values:
            values[field.name] = i + 0.5 if field.type == "float" else i
    save_state(tmp_path, state_of([Rollout(**values)]))
    loaded = dataclasses.asdict(load_state(tmp_path)["rollouts"][0])
    assert loaded.pop("payload")["x"].tolist() == values.pop("payload")["x"].tolist()
    assert loaded == values


def test_the_path_may_be_text(tmp_path):
    save_state(str(tmp_path), state_of([one()]))
    assert len(load_state(str(tmp_path))["rollouts"]) == 1


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64", "uint8", "bool", "float16"])
def test_arrays_keep_their_dtype_and_lengths(tmp_path, dtype):
    lengths = [3, 0, 1, 5]
    rollouts = [one(payload={"x": np.arange(n).astype(dtype)}) for n in lengths]
    save_state(tmp_path, state_of(rollouts))
    loaded = [r.payload["x"] for r in load_state(tmp_path)["rollouts"]]
    assert [len(x) for x in loaded] == lengths
    for got, rollout in zip(loaded, rollouts, strict=True):
        assert got.dtype == np.dtype(dtype)
        assert got.tolist() == rollout.payload["x"].tolist()
        assert got.flags.writeable
        assert got.flags.owndata, "a view would keep every row of the file in memory"


def test_arrays_that_are_views_or_strided(tmp_path):
    base = np.arange(20, dtype=np.int32)
    save_state(tmp_path, state_of([one(payload={"x": base[::3]}), one(payload={"x": base[5:8]})]))
    loaded = [r.payload["x"].tolist() for r in load_state(tmp_path)["rollouts"]]
    assert loaded == [[0, 3, 6, 9, 12, 15, 18], [5, 6, 7]]


def test_rollouts_with_different_payload_names_or_none(tmp_path):
    rollouts = [
        one(payload={"x": np.ones(2, dtype=np.int32)}),
        one(payload=None),
        one(payload={"y": np.zeros(3, dtype=np.float32)}),
        one(payload={"x": np.zeros(0, dtype=np.int32), "y": np.ones(1, dtype=np.float32)}),
    ]
    save_state(tmp_path, state_of(rollouts))
    assert_same_rollouts(load_state(tmp_path)["rollouts"], rollouts)


@pytest.mark.parametrize("ids", [["a", "b"], ["1", "2"], ["", "é\n\0 日本"], [1, 2], [0, -(2**62)]])
def test_prompt_ids_keep_their_type(tmp_path, ids):
    save_state(tmp_path, state_of([one(i) for i in ids]))
    loaded = [r.prompt_id for r in load_state(tmp_path)["rollouts"]]
    assert loaded == ids
    assert {type(i) for i in loaded} == {type(ids[0])}


def test_numbers_keep_every_bit(tmp_path):
    values = [0.1, 1 / 3, -0.0, 5e-324, 1.7e308, math.nan, math.inf, -math.inf, np.nextafter(1, 2)]
    save_state(tmp_path, state_of([one(reward=v, advantage=v, group_mean=v, group_std=v) for v in values]))
    for rollout, value in zip(load_state(tmp_path)["rollouts"], values, strict=True):
        for name in ("reward", *FROZEN):
            assert np.float64(getattr(rollout, name)).tobytes() == np.float64(value).tobytes()


@pytest.mark.parametrize("num_loss_tokens", [None, 0, 3])
def test_no_count_of_loss_tokens_is_not_a_count_of_zero(tmp_path, num_loss_tokens):
    save_state(tmp_path, state_of([one(num_loss_tokens=num_loss_tokens), one(num_loss_tokens=2)]))
    assert load_state(tmp_path)["rollouts"][0].num_loss_tokens == num_loss_tokens


def test_numpy_scalars_are_saved_as_plain_ones(tmp_path):
    rollout = one(np.int64(5), reward=np.float32(0.5), num_tokens=np.int64(4), birth_step=np.int32(3))
    save_state(tmp_path, state_of([rollout]))
    assert_same_rollouts(load_state(tmp_path)["rollouts"], [one(5, reward=0.5, num_tokens=4, birth_step=3)])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_empty_state(tmp_path, rank):
    state = RolloutScheduler(["a"]).state_dict()
    for writer in (0, 1):
        save_state(tmp_path, state, rank=writer, world_size=2)
    assert load_state(tmp_path, rank=rank, world_size=2) == state
    fresh = RolloutScheduler(["a"])
    fresh.load_state_dict(load_state(tmp_path))
    assert fresh.step == -1


@pytest.mark.parametrize(
    "payload",
    [
        {"x": np.zeros((2, 2))},
        {"x": 3},
        [np.zeros(2)],
        "text",
        {"x": np.array([object()])},
        {7: np.zeros(2)},
        {"x": np.zeros(2, dtype=np.dtype(np.int32).newbyteorder())},
        {"x": np.zeros(2, dtype=np.complex128)},
    ],
    ids=["matrix", "scalar", "list", "text", "objects", "number for a name", "other byte order", "complex"],
)
def test_a_payload_that_cannot_be_saved_is_refused_and_the_old_file_stays(tmp_path, payload):
    path = save_state(tmp_path, state_of([one()]))
    before = path.read_bytes()
    with pytest.raises(StateError, match=r"payload.*prompt 'bad'.*one-dimensional numpy arrays"):
        save_state(tmp_path, state_of([one(), one("bad", payload=payload)]))
    assert path.read_bytes() == before


def test_arrays_of_one_name_must_agree_in_dtype(tmp_path):
    """One column has one type: a silent cast would bring other arrays back than were saved."""
    rollouts = [one(payload={"x": np.zeros(2, dtype=np.int32)}), one(payload={"x": np.zeros(2, dtype=np.int64)})]
    with pytest.raises(StateError, match=r"'x'.*int32.*int64"):
        save_state(tmp_path, state_of(rollouts))


def test_a_large_state_is_written_in_parts(tmp_path, monkeypatch):
    """The file is the same to whoever reads it, wherever its parts end."""
    monkeypatch.setattr(storage, "_PART_BYTES", 60)
    rollouts = [one(i, owner=i % 3, payload={"x": np.arange(i % 7, dtype=np.int32)}) for i in range(40)]
    rollouts += [one(40, payload={"y": np.ones(50)}), one(41), one(42, payload={"x": np.arange(30, dtype=np.int32)})]
    save_shards(tmp_path, rollouts, 3)
    num_parts = []
    for path in sorted(tmp_path.iterdir()):
        with pa.memory_map(str(path)) as source:
            num_parts.append(pa.ipc.open_file(source).num_record_batches)
    assert min(num_parts) > 1
    assert len(set(num_parts)) > 1, "parts of processes need not end at the same rows"
    loaded = load_state(tmp_path)["rollouts"]
    for rollout in rollouts:
        rollout.owner = 0
    assert_same_rollouts(loaded, rollouts)


def test_payloads_may_hold_the_text_of_the_seal(tmp_path):
    texts = [b'"rollwise_crc32": "00000000"', b'"rollwise_crc32": "12345678"']
    save_state(tmp_path, state_of([one(payload={"x": np.frombuffer(text, dtype=np.uint8)}) for text in texts]))
    assert [rollout.payload["x"].tobytes() for rollout in load_state(tmp_path)["rollouts"]] == texts


# --- several processes ------------------------------------------------------------------------------------------------


def dealt(num_rollouts, world_size):
    return [
        one(i, owner=i // 2 % world_size, payload={"x": np.full(i % 4, i, dtype=np.int32)}) for i in range(num_rollouts)
    ]


def save_shards(folder, rollouts, world_size):
    """As in a real run: each process has the scalars of all rollouts and the payloads of its own."""
    for rank in range(world_size):
        shard = copy.deepcopy(rollouts)
        for rollout in shard:
            if rollout.owner != rank:
                rollout.payload = None
        save_state(folder, state_of(shard), rank=rank, world_size=world_size)


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 2, 3])
def test_every_payload_ends_up_with_exactly_one_process(tmp_path, saved, now):
    rollouts = dealt(11, saved)
    save_shards(tmp_path, rollouts, saved)
    holders = dict.fromkeys(range(11), 0)
    owners = []
    for rank in range(now):
        loaded = load_state(tmp_path, rank=rank, world_size=now)["rollouts"]
        owners.append([r.owner for r in loaded])
        assert [r.prompt_id for r in loaded] == list(range(11))
        for rollout in loaded:
            assert (rollout.payload is not None) == (rollout.owner == rank)
            if rollout.payload is not None:
                holders[rollout.prompt_id] += 1
                assert rollout.payload["x"].tolist() == [rollout.prompt_id] * (rollout.prompt_id % 4)
    assert set(holders.values()) == {1}
    assert all(one == owners[0] for one in owners), "every process must know who holds what"
    if now == saved:
        assert owners[0] == [r.owner for r in rollouts]
    counts = np.bincount(owners[0], minlength=now)
    assert counts.max() - counts.min() <= 1


def test_a_payload_is_its_owners_even_if_others_hold_a_copy(tmp_path):
    for rank in range(2):
        rollouts = [one(i, owner=i % 2, payload={"x": np.array([i, rank])}) for i in range(4)]
        save_state(tmp_path, state_of(rollouts), rank=rank, world_size=2)
    for loaded in load_state(tmp_path)["rollouts"]:
        assert loaded.payload["x"].tolist() == [loaded.prompt_id, loaded.prompt_id % 2]


def test_shards_of_one_save_may_hold_nan(tmp_path):
    state = state_of([one("a", reward=math.nan), one("b", advantage=-math.nan)], note={"mean": math.nan})
    for rank in range(2):
        save_state(tmp_path, state, rank=rank, world_size=2)
    assert math.isnan(load_state(tmp_path)["note"]["mean"])


@pytest.mark.parametrize(("saved", "now"), [(2, 3), (3, 2), (2, 1)])
def test_images_keep_their_shapes_on_another_number_of_processes(tmp_path, saved, now):
    """As the TRL adapter stores them: flat, without the zeros at the end, the shape beside; text rows have neither."""
    shapes = [(4, 12), None, (2, 3, 4), (6, 12), None, (1, 3, 4), (2, 12)]
    rollouts = []
    for i, shape in enumerate(shapes):
        payload = {"prompt_ids": np.arange(i + 1, dtype=np.int32)}
        if shape is not None:
            payload["pixel_values"] = np.arange(1, math.prod(shape) - i, dtype=np.float32)
            payload["pixel_values.shape"] = np.array(shape, dtype=np.int64)
        rollouts.append(one(i, owner=i % saved, payload=payload))
    save_shards(tmp_path, rollouts, saved)
    found = []
    for rank in range(now):
        loaded = [r for r in load_state(tmp_path, rank=rank, world_size=now)["rollouts"] if r.payload is not None]
        for rollout in loaded:
            expected = rollouts[rollout.prompt_id].payload
            assert rollout.payload.keys() == expected.keys()
            for name, array in expected.items():
                assert rollout.payload[name].dtype == array.dtype
                assert rollout.payload[name].tolist() == array.tolist()
        found += [rollout.prompt_id for rollout in loaded]
    assert sorted(found) == list(range(len(shapes)))


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_shard_is_named(tmp_path, missing):
    save_shards(tmp_path, dealt(6, 3), 3)
    (tmp_path / f"rollwise-{missing:05d}-of-00003.arrow").unlink()
    there = sorted({0, 1, 2} - {missing})
    for now in (1, 3):
        with pytest.raises(StateError) as caught:
            load_state(tmp_path, world_size=now)
        assert str(tmp_path) in str(caught.value)
        assert str(there) in str(caught.value)


def test_saving_again_with_other_processes_replaces_the_old_shards(tmp_path):
    """A run resumed with fewer processes comes past the same step again, and saves into the same folder."""
    for world_size in (3, 1, 2):
        rollouts = dealt(5 + world_size, world_size)
        save_shards(tmp_path, rollouts, world_size)
        loaded = load_state(tmp_path)["rollouts"]
        assert [r.payload["x"].tolist() for r in loaded] == [r.payload["x"].tolist() for r in rollouts]


@pytest.mark.parametrize(
    "other",
    [
        {"step": 9},
        {"rollouts": []},
        {"dry_prompts": 77},
        {"rollouts": [one("a", reward=0.0), one("b")]},
        {"rollouts": [one("a"), one("b", birth_step=1)]},
    ],
    ids=["step", "count", "decisions", "rewards", "births"],
)
def test_shards_of_different_saves_are_refused(tmp_path, other):
    state = state_of([one("a"), one("b")])
    save_state(tmp_path, state, rank=0, world_size=2)
    path = save_state(tmp_path, state | other, rank=1, world_size=2)
    with pytest.raises(StateError) as caught:
        load_state(tmp_path)
    assert str(path) in str(caught.value)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_no_file_no_folder(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StateError) as caught:
            load_state(folder)
        assert str(folder) in str(caught.value)


def test_unfinished_and_foreign_names_are_not_state(tmp_path):
    for name in ("rollwise-00000-of-00001.arrow.partial", "rollwise-notes.txt", "rollwise-0-of-1.arrow"):
        (tmp_path / name).write_bytes(b"half")
    with pytest.raises(StateError, match="holds no rollwise state"):
        load_state(tmp_path)
    save_state(tmp_path, state_of([one()]))
    assert len(load_state(tmp_path)["rollouts"]) == 1


@pytest.mark.parametrize("keep", [0, 1, 8, 200, 0.25, 0.5, 0.9, -11, -10, -1])
def test_a_truncated_file_is_refused_by_name(tmp_path, keep):
    path = save_state(tmp_path, played_state())
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(StateError) as caught:
        load_state(tmp_path)
    assert str(path) in str(caught.value)
    assert "earlier checkpoint" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\0" * 5000, b"ARROW1" * 400, b"not arrow", b"\x80\x04]\x94."])
def test_garbage_is_refused_by_name(tmp_path, data):
    path = tmp_path / "rollwise-00000-of-00001.arrow"
    path.write_bytes(data)
    with pytest.raises(StateError) as caught:
        load_state(tmp_path)
    assert str(path) in str(caught.value)


def test_any_flipped_bit_is_refused_by_name(tmp_path):
    """Never a crash of the process (Arrow follows damaged offsets), another error, or a state that was not saved."""
    state = played_state(2)
    path = save_state(tmp_path, state)
    data = path.read_bytes()
    generator = np.random.default_rng(0)
    for position in generator.choice(len(data), size=300, replace=False):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(StateError) as caught:
            load_state(tmp_path)
        assert str(path) in str(caught.value)
    path.write_bytes(data)
    assert_same_rollouts(load_state(tmp_path)["rollouts"], state["rollouts"])


CHANGES = {
    "metadata lost": lambda table: table.replace_schema_metadata(None),
    "metadata replaced": lambda table: table.replace_schema_metadata({b"rollwise": b"{}"}),
    "column lost": lambda table: table.drop_columns(["owner"]),
    "row lost": lambda table: table.slice(1),
    "column added": lambda table: table.append_column("payload.y", table.column("reward")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_another_program_wrote_is_refused_by_name(tmp_path, change):
    path = save_state(tmp_path, state_of([one(), one("b", payload={"x": np.ones(2)})]))
    with pa.OSFile(str(path), "rb") as source:
        table = pa.ipc.open_file(source).read_all()
    table = CHANGES[change](table)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(StateError) as caught:
        load_state(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("other_format", [0, STATE_FORMAT + 1, "2.1"])
def test_a_file_of_another_format_says_which_version_to_use(tmp_path, other_format):
    path = save_state(tmp_path, state_of([one()], format=other_format))
    with pytest.raises(
        StateError, match=f"format {other_format!r}, this version reads {STATE_FORMAT}; use the version"
    ) as caught:
        load_state(tmp_path)
    assert str(path) in str(caught.value)


# --- writing ----------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    path = save_state(tmp_path, state_of([one("old")]))
    before = path.read_bytes()
    new_file = pa.ipc.new_file

    class FailsHalfWay:
        def __init__(self, sink, schema):
            self._sink, self._writer = sink, new_file(sink, schema)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

        def write_batch(self, batch):
            self._sink.write(b"half of it")
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", FailsHalfWay)
    with pytest.raises(OSError, match="No space"):
        save_state(tmp_path, state_of([one("new")] * 50))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [r.prompt_id for r in load_state(tmp_path)["rollouts"]] == ["old"]
    save_state(tmp_path, state_of([one("new")]))  # what the failed write left behind is in nobody's way
    assert [r.prompt_id for r in load_state(tmp_path)["rollouts"]] == ["new"]


def test_the_file_is_complete_before_it_takes_its_name(tmp_path, monkeypatch):
    events = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: events.append("fsync") or fsync(fd))

    def checked_replace(source, target):
        with pa.OSFile(str(source), "rb") as file:
            assert pa.ipc.open_file(file).read_all().num_rows == 1
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "replace", checked_replace)
    path = save_state(tmp_path, state_of([one()]))
    assert events[:2] == ["fsync", "replace"]
    assert list(tmp_path.iterdir()) == [path]


def test_other_programs_can_read_it(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_PART_BYTES", 500)
    state = played_state()
    frame = pandas.read_feather(save_state(tmp_path, state))
    assert frame["prompt_id"].tolist() == [r.prompt_id for r in state["rollouts"]]
    assert frame["reward"].tolist() == [r.reward for r in state["rollouts"]]
    ids = [r.payload["ids"].tolist() for r in state["rollouts"]]
    assert [x.tolist() for x in frame["payload.ids"]] == ids


READ_UNDER_AUDIT = """
import sys
import numpy, pyarrow
import rollwise.storage
seen = []
def refuse(event, args):
    watched = ("exec", "compile", "import", "os.system", "subprocess.Popen")
    if seen and (event.startswith("pickle.") or event in watched):
        seen.append((event, repr(args)[:100]))
folder = sys.argv[1]
rollwise.storage.load_state(folder)   # lazy imports of numpy and pyarrow happen here
sys.addaudithook(refuse)
seen.append("on")
assert rollwise.storage.load_state(folder)["rollouts"]
print(seen[1:])
"""


def test_reading_runs_nothing(tmp_path):
    """Python's own audit events: no unpickling, no compiling, no executing, no importing while a file is read."""
    save_state(tmp_path, played_state())
    result = subprocess.run(
        [sys.executable, "-c", READ_UNDER_AUDIT, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
