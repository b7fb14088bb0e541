import pytest

from rollwise.errors import StateError
from rollwise.evaluation.store import SETTINGS, SampleStore


def test_damaged_settings_are_named_with_what_to_do(tmp_path):
    store = SampleStore(tmp_path / "math500")
    store.folder.mkdir()
    (store.folder / SETTINGS).write_text('{"model": ')
    with pytest.raises(StateError, match=r"settings\.json' is damaged \(.*\): delete .*math500', or --overwrite"):
        store.settings()
