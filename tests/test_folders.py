"""Folders are written whole or not at all; checkpoints' tests cover what reading them refuses."""

import pytest

from jaxspec import folders


def test_a_failure_leaves_what_was_there(tmp_path):
    folder = tmp_path / "kept"
    with folders.whole(folder) as beside:
        (beside / "file").write_text("old")
    with pytest.raises(RuntimeError, match="half"), folders.whole(folder) as beside:
        (beside / "file").write_text("new")
        raise RuntimeError("half of it")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (folder / "file").read_text() == "old"


def test_damage_is_named(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("text")
    files = folders.fingerprints(tmp_path)
    assert folders.damage(tmp_path, files) == ""
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("tex")
    (tmp_path / "c").write_text("test")
    assert folders.damage(tmp_path, files).split(" (")[0] == "a is missing, b has 3 bytes, expected 4, c is altered"


def test_only_plain_values_go_into_a_manifest():
    with pytest.raises(ValueError, match=r"about\.a is None: a manifest holds strings"):
        folders.to_toml({"about": {"a": None}})
