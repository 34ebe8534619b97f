"""The training of models and drafters; `online` teaches a draft model in a running job."""

from jaxspec.training.online_distillation import online as online
