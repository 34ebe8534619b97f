"""Speech to text: waveforms, log-mel features, the rules of Whisper's text, and windows over long
audio.
"""

from jaxspec import optional_imports

__getattr__ = optional_imports.submodules(__name__)
