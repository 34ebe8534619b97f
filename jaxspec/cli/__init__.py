"""The command line: one file per command, `main.app` to run them, `render` for what they print."""
