"""Speech to text: waveforms, log-mel features, the rules of Whisper's text, and windows over long audio."""
