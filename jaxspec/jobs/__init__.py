"""Jobs: any number of prompts, in slots that are refilled. `many` is the host's side, `slots` the device's."""

from jaxspec.jobs.many import Completion, Progress, generate_many

__all__ = ["Completion", "Progress", "generate_many"]
