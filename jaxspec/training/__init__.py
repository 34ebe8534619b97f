"""The training of models and drafters; `online` teaches a draft model in a running job."""

from jaxspec import optional_imports
from jaxspec.training.online_distillation import online as online

__getattr__ = optional_imports.submodules(__name__)
