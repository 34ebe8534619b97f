"""Jobs: any number of prompts in slots that are refilled. `many` is for the host, `slots` for
devices.
"""

from jaxspec import optional_imports
from jaxspec.jobs.many import generate_many
from jaxspec.jobs.results import Completion, Progress

__all__ = ["Completion", "Progress", "generate_many"]

__getattr__ = optional_imports.submodules(__name__)
