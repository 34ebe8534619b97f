"""The command line. Each command has a module of its name, which parses, calls and prints;
`main.app` runs them.

- `options`: option types that commands share, lists of values, groups of options. `signals`: Ctrl-C
  and kill.
- `names`: models, drafters, policies and rules by their names; `old_names`: drafters as earlier
  versions spelt them; `prompts`: sources of prompts.
- `pair`: a target with its drafter, and the options of commands that generate. `entries`: the input
  of `chat`.
- `show`: the output of `generate`, and its comparison with plain decoding.
- `console`: tables, JSON, large numbers, progress.
"""
