"""The command line: `main.app` runs the commands, and each command has a file of its name.

What the commands share, from prompts to print:

- `prompts`: where prompts come from. `session`: models and prompts made ready, and decoded.
- `rounds`, `counts`, `show`: what decoding did, as a trace, as statistics, and as text that grows.
  `jaxspec.trace` says what became of a round's guesses.
- `compare`, `verdict`: speculative against plain decoding, measured and put into words (`generate --compare`).
- `speeds`, `timing`, `memory`, `shapes`, `results`: what `bench` measures, on what, and its tables.
- `cells`, `ledger`: what `measure` measures, and what is kept of a run that was interrupted.
- `tables`: the look of a table, and how large numbers are put.
"""
