import pytest

from rollwise.files import checkpoint_folders, replacing


def test_the_file_is_there_once_it_is_whole(tmp_path):
    path = tmp_path / "new" / "folder" / "file.txt"
    with replacing(path) as partial:
        partial.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")

    def fail():
        with replacing(path) as partial:
            partial.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"


def test_checkpoints_newest_first_by_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "other-11"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["checkpoint-10", "checkpoint-9"]
    assert checkpoint_folders(tmp_path / "nowhere") == []
