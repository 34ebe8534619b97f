"""The environment of a measurement: all that a number depends on is named, and what is missing is
None.
"""

import importlib.metadata
import shutil
import subprocess
import sys
import types

import jax

import jaxspec
from jaxspec.analysis import environment


def test_the_environment_names_what_a_number_depends_on():
    machine = environment.current()
    assert machine.jax == jax.__version__ and machine.jaxspec == jaxspec.__version__
    assert machine.device and machine.cpus >= 1 and machine.command


def test_a_line_names_the_device_the_cores_and_the_versions():
    machine = environment.current()
    said = environment.line(machine)
    assert (
        said.startswith(f"{machine.cpu}, ")
        and f"jax {jax.__version__}, jaxlib {machine.jaxlib}" in said
    )
    gpu = machine._replace(device="NVIDIA H200", devices=1, cpus=1)
    assert environment.line(gpu).startswith("NVIDIA H200, 1 CPU · jax ")
    assert environment.line(gpu._replace(devices=8)).startswith("8 × NVIDIA H200, 1 CPU · jax ")


def test_the_environment_names_flags_and_what_else_was_imported(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    for name in ("torch", "transformers"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    installed = {"jaxlib": "0.10.2"}

    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    machine = environment.current()
    assert (machine.xla_flags, machine.torch, machine.transformers, machine.cuda_plugin) == (
        None,
        None,
        None,
        None,
    )
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.9.0+cpu"))
    monkeypatch.setitem(sys.modules, "transformers", None)  # one that cannot be imported
    installed["jax-cuda12-plugin"] = "0.10.2"
    machine = environment.current()
    assert (machine.xla_flags, machine.torch, machine.cuda_plugin) == (
        "--xla_dump_to=here",
        "2.9.0+cpu",
        "0.10.2",
    )
    assert machine.transformers is None


def test_the_commit_of_a_checkout(tmp_path, monkeypatch):
    environment._commit.cache_clear()
    assert environment._commit(tmp_path / "installed") is None
    if shutil.which("git"):
        checkout = tmp_path / "checkout"
        for command in (
            "init -q",
            "add file",
            "-c user.name=a -c user.email=b commit -q --no-gpg-sign -m c",
        ):
            checkout.mkdir(exist_ok=True)
            (checkout / "file").write_text("1")
            subprocess.run(["git", "-C", str(checkout), *command.split()], check=True)
        head = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True
        )
        assert environment._commit(checkout) == head.stdout[:12]
        (checkout / "file").write_text("2")
        environment._commit.cache_clear()
        assert environment._commit(checkout) == head.stdout[:12] + "-dirty"
    (tmp_path / "damaged" / ".git").mkdir(parents=True)
    assert environment._commit(tmp_path / "damaged") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "without git" / ".git").mkdir(parents=True)
    assert environment._commit(tmp_path / "without git") is None
    environment._commit.cache_clear()
