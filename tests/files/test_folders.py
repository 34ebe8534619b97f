"""Folders are written whole or not at all; checkpoints' tests cover what reading them refuses."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxspec
from jaxspec import files
from jaxspec.drafters.lookups import datastore
from jaxspec.files import folders
from jaxspec.weights import huggingface
from jaxspec.weights.orbax import CheckpointError


def test_a_failure_leaves_what_was_there(tmp_path):
    folder = tmp_path / "kept"
    with folders.whole(folder) as beside:
        (beside / "file").write_text("old")
    with pytest.raises(RuntimeError, match="half"), folders.whole(folder) as beside:
        (beside / "file").write_text("new")
        raise RuntimeError("half of it")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (folder / "file").read_text() == "old"


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    for error in (
        OSError(errno.ENOSPC, "of some library"),
        ValueError("RESOURCE_EXHAUSTED: No space left on device"),
    ):
        with (
            pytest.raises(OSError, match="the disk is full, and nothing was written"),
            folders.whole(tmp_path / "new"),
        ):
            raise error
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    model = jaxspec.load("debian-t5-small")
    with pytest.raises(
        CheckpointError, match=r"new would take \d+\.\d MB of disk, and .* has 1\.0 kB left"
    ):
        huggingface.save(model, tmp_path / "new")
    assert not list(tmp_path.iterdir())


LOCKED = """
import os, sys
from pathlib import Path
from jaxspec.files import folders

with folders.locked(Path(sys.argv[1]), "another training run"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(tmp_path):
    command = [sys.executable, "-c", LOCKED, str(tmp_path)]
    environment = {"PYTHONPATH": str(Path(jaxspec.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        words = f"another training run is using this folder .process {other.pid}."
        with pytest.raises(OSError, match=words), folders.locked(tmp_path, "another training run"):
            pass
        other.kill()
    with folders.locked(tmp_path, "another training run"):
        pass


KILLED = """
import os, sys
from pathlib import Path
from jaxspec import files
from jaxspec.drafters.lookups import datastore
from jaxspec.files import folders

left = int(sys.argv[2])

def killer(event, arguments):
    global left
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
        left -= 1
        if left == 0:
            os._exit(9)

sys.addaudithook(killer)
with folders.whole(Path(sys.argv[1])) as beside:
    (beside / "file").write_text("new")
"""


@pytest.mark.slow
def test_a_kill_leaves_the_old_or_the_new(tmp_path):
    """A process is killed before each change of the file system that replacing a folder takes."""
    for step in itertools.count(1):
        folder = tmp_path / str(step) / "kept"
        folder.mkdir(parents=True)
        (folder / "file").write_text("old")
        command = [sys.executable, "-c", KILLED, str(folder), str(step)]
        environment = {"PYTHONPATH": str(Path(jaxspec.__file__).parents[1])}
        code = subprocess.run(command, env=environment, check=False).returncode
        assert code in (0, 9)
        folders.recover(folder)
        assert [path.name for path in folder.iterdir()] == ["file"]
        content = (folder / "file").read_text()
        if code == 0:
            break
        assert content in ("old", "new")
        with folders.whole(folder) as beside:
            (beside / "file").write_text("newer")
        assert (folder / "file").read_text() == "newer"
        assert not (folder.parent / ".kept.jaxspec-old").exists()
    assert step > 4 and content == "new"
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]


KILLED_WRITING = """
import os, sys
from pathlib import Path
from jaxspec import files
from jaxspec.files import folders

print("begun", flush=True)
with getattr({"folder": folders, "file": files}[sys.argv[2]], "whole")(Path(sys.argv[1])) as beside:
    print("made", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_a_killed_process_left_unfinished_goes_with_the_next_write(tmp_path, kind):
    """A living process's unfinished files stay."""
    path, writing = tmp_path / "st[o]re", {"folder": folders.whole, "file": files.whole}[kind]
    command, environment = (
        [sys.executable, "-c", KILLED_WRITING],
        {"PYTHONPATH": str(Path(jaxspec.__file__).parents[1])},
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

    def unfinished():
        return [left for left in tmp_path.iterdir() if left.name.startswith(".st[o]re.")]

    def write():
        for left in unfinished():
            os.utime(left, (0, 0))  # none is so young that its process may not have locked it yet
        with writing(path) as beside:
            (beside / "part" if kind == "folder" else beside).write_text("text")

    with subprocess.Popen([*command, str(path), kind], env=environment, **pipes) as other:
        assert other.stdout.read(11) == b"begun\nmade\n"
        write()
        assert len(unfinished()) == 1
        other.kill()
    assert len(unfinished()) == 1
    (tmp_path / ".else.1.partial").mkdir()
    write()
    assert {left.name for left in tmp_path.iterdir()} == {"st[o]re", ".else.1.partial"}


def test_where_nothing_can_be_locked_a_day_is_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "fcntl", None)
    old, young = (tmp_path / f".store.{name}.partial" for name in ("1", "2"))
    for left in (old, young):
        left.mkdir()
        (left / "file").touch()
    for path in (old, old / "file", young):
        os.utime(path, (0, 0))
    with folders.whole(tmp_path / "store") as beside:
        (beside / "file").touch()
    assert {path.name for path in tmp_path.iterdir()} == {"store", young.name}


def test_readers_find_what_a_kill_left_aside(tmp_path):
    folder = tmp_path / "store"
    datastore.save(folder, datastore.build([[1, 0]], vocab_size=2), {})
    old = tmp_path / ".store.jaxspec-old"
    folder.rename(old)
    assert datastore.load(folder).vocab_size == 2
    folder.rename(old)
    assert "exists: give overwrite" in folders.occupied(folder, "datastore", overwrite=False)
    old.mkdir()
    assert datastore.load(folder).vocab_size == 2
    assert old.exists()  # reading deletes nothing


def test_the_folder_one_is_in(tmp_path, monkeypatch):
    folder = tmp_path / "store"
    datastore.save(folder, datastore.build([[1, 0]], vocab_size=2), {})
    monkeypatch.chdir(folder)
    assert datastore.load(".").vocab_size == 2


def test_damage_is_named(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("text")
    files = folders.fingerprints(tmp_path)
    assert folders.damage(tmp_path, files) == ""
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("tex")
    (tmp_path / "c").write_text("test")
    assert (
        folders.damage(tmp_path, files).split(" (")[0]
        == "a is missing, b has 3 bytes, expected 4, c is altered"
    )


def test_only_plain_values_go_into_a_manifest():
    with pytest.raises(ValueError, match=r"a manifest holds strings.*NoneType"):
        folders.to_toml({"about": {"a": None}})
