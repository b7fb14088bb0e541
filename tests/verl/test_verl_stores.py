"""Where stored rows live. Ray and TransferQueue are replaced by a few lines here; `real/` has them."""

import gc
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from rollwise import Replay, Rollout, RolloutScheduler, StateError, Uniform
from rollwise.verl import stores
from rollwise.verl.rows import Place
from rollwise.verl.stores import DriverStore, Handle, ShardedStore


class FakeQueue(types.ModuleType):
    """What has been generated, by key, and what has been written to train on."""

    def __init__(self):
        super().__init__("rollwise.verl.queue")
        self.generated, self.trained, self.connections = {}, {}, 0

    def connect(self):
        self.connections += 1

    def read(self, sessions):
        return [np_rows([self.generated.pop(key) for key in keys]) for keys in sessions]

    def write(self, rollouts, places):
        keys, tags = [], []
        for arrays, place in zip(rollouts, places, strict=True):
            for i, key in enumerate(place.keys(len(arrays["response_lengths"]))):
                self.trained[key] = arrays["response_ids"].tolist()
                keys.append(key)
                tags.append({"row": i, "version": place.version})
        return keys, tags

    def settle_log_probs(self, rollouts, places, *, replaces_old, clip):
        assert (replaces_old, clip) == (True, (0.8, 1.2))
        return np.array(
            [
                [place.age_steps, arrays["response_ids"][0], 0, 0, 0, 0, 0]
                for arrays, place in zip(rollouts, places, strict=True)
            ],
            dtype=float,
        )


def np_rows(rows):
    return {
        "response_lengths": np.array([len(row) for row in rows], dtype=np.int32),
        "response_ids": np.concatenate([np.array(row, dtype=np.int32) for row in rows]),
    }


class FakeRay(types.ModuleType):
    """Actors whose calls run at once."""

    def __init__(self):
        super().__init__("ray")
        self.actors = []

    def remote(self, actor_class):
        def build(*args):
            actor = actor_class(*args)
            self.actors.append(actor)
            return types.SimpleNamespace(
                **{
                    name: types.SimpleNamespace(remote=getattr(actor, name))
                    for name in dir(actor)
                    if not name.startswith("_")
                }
            )

        builder = types.SimpleNamespace(remote=build)
        return types.SimpleNamespace(options=lambda **options: builder)

    def get(self, results):
        return results

    def put(self, value):
        return value


@pytest.fixture
def queue(monkeypatch):
    fake = FakeQueue()
    monkeypatch.setattr(stores, "_queue", lambda: fake)
    return fake


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


def generated(queue, count, first=0, rows=1):
    """Rollouts as the trainer makes them, and the keys of their rows."""
    rollouts, sessions = [], []
    for i in range(first, first + count):
        keys = [f"u{i}_0_{row}" for row in range(rows)]
        queue.generated |= {key: [i, row, 7] for row, key in enumerate(keys)}
        rollouts.append(Rollout(i, i % 2, num_tokens=3 * rows, nbytes=100))
        sessions.append(keys)
    return rollouts, sessions


def places(rollouts, age=0):
    return [Place(f"g{rollout.prompt_id}", 0, 5, age, 1.0) for rollout in rollouts]


@pytest.mark.parametrize("num_shards", [None, 1, 3])
def test_what_was_generated_comes_back_in_order(queue, ray, num_shards):
    store = DriverStore() if num_shards is None else ShardedStore(num_shards)
    rollouts, sessions = generated(queue, 7, rows=2)
    store.take(rollouts, sessions)
    assert not queue.generated, "the rows have left verl's partition"
    chosen = [rollouts[i] for i in (5, 0, 3, 6)]
    keys, tags = store.write(chosen, places(chosen))
    assert keys == ["g5_0_0", "g5_0_1", "g0_0_0", "g0_0_1", "g3_0_0", "g3_0_1", "g6_0_0", "g6_0_1"]
    assert [tag["row"] for tag in tags] == [0, 1] * 4
    assert queue.trained["g3_0_0"] == [3, 0, 7, 3, 1, 7]
    entries = store.settle_log_probs(chosen, places(chosen, age=2), replaces_old=True, clip=(0.8, 1.2))
    assert entries[:, :2].tolist() == [[2, 5], [2, 0], [2, 3], [2, 6]]


def test_rows_are_spread_evenly_and_the_driver_holds_none(queue, ray):
    store = ShardedStore(4)
    rollouts, sessions = generated(queue, 40)
    store.take(rollouts, sessions)
    assert store.nbytes() == [10 * 16] * 4
    assert all(isinstance(rollout.payload, Handle) for rollout in rollouts)
    assert queue.connections == 4


@pytest.mark.parametrize("num_shards", [None, 1, 3])
def test_bytes_of_images_are_added_to_a_rollouts(queue, ray, monkeypatch, num_shards):
    def read(sessions, _read=queue.read):
        images = {"media.pixel_values": np.zeros(10, dtype=np.float32)}
        return [arrays | (images if arrays["response_ids"][0] % 2 else {}) for arrays in _read(sessions)]

    monkeypatch.setattr(queue, "read", read)
    rollouts, sessions = generated(queue, 7)
    (DriverStore() if num_shards is None else ShardedStore(num_shards)).take(rollouts, sessions)
    assert [rollout.nbytes for rollout in rollouts] == [100, 140, 100, 140, 100, 140, 100]


def test_rows_of_rollouts_that_are_let_go_are_forgotten(queue, ray):
    store = ShardedStore(2)
    rollouts, sessions = generated(queue, 10)
    store.take(rollouts, sessions)
    del rollouts[:6]
    gc.collect()
    assert sum(store.nbytes()) == 4 * 16
    store.write(rollouts, places(rollouts))  # the others are still there


def scheduler():
    return RolloutScheduler(
        range(8),
        allocation=Uniform(train_prompts=4, num_rollouts=2),
        replay=Replay(ratio=1.0, warmup_steps=0, epsilon=1.0),
        seed=3,
    )


def play(scheduler, queue, store, steps):
    """Rows of each step's batch, as they reach the queue."""
    batches = []
    for _ in range(steps):
        while requests := scheduler.ask():
            rollouts, sessions = generated(
                queue, sum(r.num_rollouts for r in requests), first=100 * (scheduler.step + 1)
            )
            ids = [request.prompt_id for request in requests for _ in range(request.num_rollouts)]
            for rollout, prompt_id in zip(rollouts, ids, strict=True):
                rollout.prompt_id = prompt_id
            store.take(rollouts, sessions)
            scheduler.tell(rollouts)
        chosen = [row.rollout for row in scheduler.batch().rows]
        keys, _ = store.write(chosen, [Place(f"b{i}", 0, 0, 0, 1.0) for i in range(len(chosen))])
        batches.append([queue.trained[key] for key in keys])
    return batches


@pytest.mark.parametrize(("before", "after"), [(None, None), (None, 3), (3, None), (3, 3), (3, 2), (2, 5)])
def test_a_run_goes_on_exactly_with_another_number_of_shards_or_another_store(queue, ray, tmp_path, before, after):
    def store(num_shards):
        return DriverStore() if num_shards is None else ShardedStore(num_shards)

    whole = play(scheduler(), queue, DriverStore(), 6)
    first, first_store = scheduler(), store(before)
    assert play(first, queue, first_store, 3) == whole[:3]
    first_store.save(tmp_path, first.state_dict())
    second, second_store = scheduler(), store(after)
    second.load_state_dict(second_store.load(tmp_path))
    assert play(second, queue, second_store, 3) == whole[3:]
    assert len({tuple(row) for batch in whole[3:] for row in batch}) > 10


def test_a_checkpoint_that_lacks_a_shard_is_refused(queue, ray, tmp_path):
    run, store = scheduler(), ShardedStore(3)
    play(run, queue, store, 2)
    store.save(tmp_path, run.state_dict())
    next(tmp_path.glob("*-00001-of-00003*")).unlink()
    with pytest.raises(StateError, match="saving was interrupted"):
        ShardedStore(3).load(tmp_path)


BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "verl_bytes.py"
#: What docs/scaling.md states, in bytes a rollout.
DRIVER_BYTES_PER_ROLLOUT = 1_000


def test_the_driver_needs_less_than_its_stated_bound_for_a_hundred_thousand_rollouts():
    """With shards the driver holds scalars, a handle and the buffer's entries; none of it grows with the tokens."""
    per_rollout = runpy.run_path(str(BENCHMARK))["driver_bytes"](100_000)
    assert 300 < per_rollout < DRIVER_BYTES_PER_ROLLOUT
