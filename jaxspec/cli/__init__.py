"""The command line: a command has a file of its name, which parses, calls and prints; `main.app` runs them.

- `options`: option types that commands share, and the sampling options. `names`: what a drafter's, a policy's, a rule's
  or a model's name means. `prompts`: from the command line, files, held-out data.
- `session`, `counts`, `show`, `compare`: of `generate`: models and prompts made ready and decoded; what is printed.
- `workload`, `rows`: of `bench` and `measure`: their options as settings, their rows. `results`: a page of them.
- `console`: tables, large numbers, progress.
"""
