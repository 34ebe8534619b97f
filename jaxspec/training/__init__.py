"""How models and drafters are trained; `online` teaches a draft model in a running job."""

from jaxspec.training.online_distillation import online as online
