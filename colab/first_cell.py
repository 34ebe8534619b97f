# @title Install jaxspec, and print what it runs on
# Where jaxspec is missing, pip installs it: from a checkout that the notebook lies in or beside,
# from a wheel or zip that was uploaded to this folder, or from this address, which a fork changes
# (`repo_url` in mkdocs.yml).
REPOSITORY = "ADDRESS"

import glob
import importlib.metadata
import os
import shutil
import subprocess
import sys

# A kernel that has loaded one of these cannot go on with another version.
CANNOT_CHANGE = ("numpy", "scipy", "ml_dtypes", "jax", "jaxlib", "flax", "transformers", "psutil")


class Stop(Exception):
    """Ends a cell, and all that were to run after it, with a sentence in place of a traceback."""

    def _render_traceback_(self):  # IPython asks for this
        return [str(self)]


def installed_version(package):
    """The version of a package that is installed now; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_version(package):
    """The version of a package that this kernel has loaded; None if it has not."""
    return getattr(sys.modules.get(package), "__version__", None)


def requirement():
    """What pip is asked for: a checkout, else a file that was uploaded, else the repository, with
    the chip's extra.
    """
    has_tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    chip = "cuda," if shutil.which("nvidia-smi") else "tpu," if has_tpu else ""
    extras = f"[{chip}figures]"
    for folder in (".", "..", *sorted(glob.glob("jaxspec*/"))):
        if os.path.isfile(f"{folder}/pyproject.toml") and os.path.isfile(
            f"{folder}/jaxspec/__init__.py"
        ):
            return folder + extras
    uploaded = [
        file for ending in ("whl", "zip", "tar.gz") for file in glob.glob(f"jaxspec*.{ending}")
    ]
    if uploaded:
        return f"./{max(uploaded, key=os.path.getmtime)}{extras}"
    return f"jaxspec-decoding{extras} @ git+{REPOSITORY}"


def pip_arguments():
    """The requirement, and the NumPy that is here: a kernel that has loaded it cannot go on with
    another.
    """
    numpy = loaded_version("numpy") or installed_version("numpy")
    keeps_numpy = numpy is not None and int(numpy.split(".")[0]) >= 2  # which jaxspec needs
    return [requirement(), *([f"numpy=={numpy}"] if keeps_numpy else [])]


def changed_packages():
    """Says of each package that this kernel has loaded which other version of it is installed
    now.
    """
    importlib.invalidate_caches()
    versions = [
        (package, loaded_version(package), installed_version(package)) for package in CANNOT_CHANGE
    ]
    return [
        f"{package} {now} is installed and this kernel has loaded {loaded}"
        for package, loaded, now in versions
        if None not in (loaded, now) and loaded != now
    ]


if installed_version("jaxspec-decoding") is None:
    arguments = pip_arguments()
    print("pip install", *arguments, "(a minute or two)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        print(pip.stdout + pip.stderr)
        raise Stop("pip did not install jaxspec: its last lines above say why.")
if changed_packages():
    raise Stop(f"Runtime > Restart, then run this cell again: {', '.join(changed_packages())}.")

# PREPARATION
import jax

import jaxspec
from jaxspec.core import programs

programs.keep()  # on disk: what is compiled here, the next kernel need not compile
SMOKE = bool(os.environ.get("JAXSPEC_SMOKE"))  # shorter loops, for tests
device = jax.devices()[0]
print(
    f"jaxspec {jaxspec.__version__}, jax {jax.__version__}, {jax.device_count()} x "
    f"{device.device_kind}"
)
