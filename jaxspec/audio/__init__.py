"""Speech to text: waveforms, log-mel features, rules of Whisper's text, windows over long audio."""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
