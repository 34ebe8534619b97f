"""The command line: a command has a file of its name, which parses, calls and prints; `main.app`
runs them.

- `options`: option types that commands share, lists of values, groups of options. `signals`: Ctrl-C
  and kill.
- `names`: models, policies and rules by their names; `drafter_names`: drafters; `prompts`: where
  prompts come from.
- `pair`: a target with its drafter, and the options of commands that generate. `entries`: what is
  typed into `chat`.
- `show`: what `generate` prints, and how it compares with plain decoding.
- `console`: tables, JSON, large numbers, progress.
"""
