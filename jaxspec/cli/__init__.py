"""The command line: a command has a file of its name, which parses, calls and prints; `main.app` runs them.

- `options`: option types that commands share, and the sampling options. `lists`: values separated by commas. `names`:
  what a policy's, a rule's or a model's name means. `drafter_names`: a drafter's. `prompts`: from the command line,
  files, held-out data.
- `session`, `decoding`: of `generate`: models and prompts made ready; decoded. `counts`, `show`, `exchange`, `compare`,
  `beams`: what is printed of them.
- `workload`, `rows`: of `bench` and `measure`: their options as settings, their rows. `results`: a page of them.
- `tree_plan`, `cascade_plan`: of `plan`. `verify_tables`: of `verify`.
- `startup`: what happens before a command. `console`: tables, JSON, large numbers, progress.
"""
