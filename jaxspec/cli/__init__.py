"""The command line: a command has a file of its name, which parses, calls and prints; `main.app` runs them.

- `options`: option types that commands share, the sampling options, drafters and policies by name, a pair on prompts.
- `prompts`: from the command line, files, held-out data. `session`: models and prompts made ready, and decoded.
- `show`, `counts`: text as it grows, what a generation took.
- `compare`: speculative against plain decoding (`generate --compare`). `bench_tables`: what `bench` prints.
- `console`: tables, large numbers.
"""
