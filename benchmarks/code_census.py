"""Counts what a reader of the package has to read: tokens, how dense they are, types, signatures,
docstrings.

    python -m benchmarks.code_census [CHECKOUT] [--round] [--floors]      seconds

`--round` traces one greedy round. `--floors` draws the packages: each imports only from floors
below its own.

The checkout may be an older one: nothing of it is imported unless `--round` is given. Counts are of
`jaxspec/` alone.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Local names that hold nothing; tests/test_style.py refuses them.
VAGUE = {
    "found",
    "made",
    "own",
    "one",
    "some",
    "each",
    "given",
    "taken",
    "about",
    "known",
    "here",
    "there",
    "asked",
}
VAGUE |= {
    "whole",
    "what",
    "who",
    "ours",
    "theirs",
    "said",
    "odd",
    "held",
    "had",
    "has",
    "have",
    "wanted",
    "place",
}
VAGUE |= {
    "again",
    "near",
    "meant",
    "nothing",
    "every",
    "kind",
    "at",
    "most",
    "left",
    "other",
    "ahead",
    "rest",
    "part",
}
NO_VERB = re.compile(r"(Of|That|As|Those|All|Raises:?)\b")

# Run in the checkout that is counted: which files does one greedy round of two models pass through,
# and which the whole call that it is part of? Networks are left out: the models are tables.
TRACED_ROUND = """
import sys
import jax, jax.numpy as jnp, jaxspec
from jaxspec.decode import loop
from jaxspec.nets import adapters

table = jnp.eye(5, k=1) + jnp.eye(5, k=-4)
lm = adapters.from_function(lambda params, tokens: params[tokens], vocab_size=5)
target, draft = jaxspec.Model(lm, 9 * table), jaxspec.Model(lm, 3 * table)
prompt = jaxspec.Prompt(jnp.array([[1, 2]]), jnp.array([2]))
files = {"call": set(), "round": set()}
inside = ["call"]


def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event == "call" and "/jaxspec/" in name and "/nets/" not in name:
        for part in inside:
            files[part].add(name)


def traced_step(weights, state):
    inside.append("round")
    try:
        return step(weights, state)
    finally:
        inside.pop()


sys.setprofile(note)
prepared = jaxspec.prepare(target, prompt, drafter=draft, gamma=2, max_new_tokens=4, temperature=0.0, eos_ids=())
step = prepared.decoder.step
loop.run(prepared._replace(decoder=prepared.decoder._replace(step=traced_step)))
sys.setprofile(None)
for part, names in files.items():
    for name in sorted(names):
        print(part, name.split("/jaxspec/")[-1], sum(1 for _ in open(name)))
"""


class Lines(NamedTuple):
    """Lines of a file or a package by what they hold; blank lines and comments are in `total`
    only.
    """

    files: int = 0
    total: int = 0
    code: int = 0
    docstrings: int = 0
    imports: int = 0
    types: int = 0


def docstring_nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """The documented nodes of a file, each with its docstring."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
        ):
            first = node.body[0]
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node, value


def count_lines(source: str, tree: ast.Module) -> Lines:
    """The lines of one file, by kind."""
    kinds: dict[int, str] = {}
    for number, line in enumerate(source.splitlines(), 1):
        stripped = line.strip()
        kinds[number] = "other" if not stripped or stripped.startswith("#") else "code"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds |= dict.fromkeys(
                range(node.lineno, (node.end_lineno or node.lineno) + 1), "imports"
            )
    for _, docstring in docstring_nodes(tree):
        kinds |= dict.fromkeys(
            range(docstring.lineno, (docstring.end_lineno or 0) + 1), "docstrings"
        )
    counts = Counter(kinds.values())
    types = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return Lines(1, len(kinds), counts["code"], counts["docstrings"], counts["imports"], types)


class Density(NamedTuple):
    """Tokens of a file or a package, and how densely they are written.

    Tokens leave out docstrings, comments, line ends and indentation. They do not depend on where
    lines are broken, so they measure how much there is to read; lines measure how it is laid out.
    """

    code_lines: int = 0  # lines with a token
    tokens: int = 0
    conditionals: int = 0  # a if b else c
    tuple_assignments: int = 0  # a, b = x, y
    walruses: int = 0
    unpacked_tuples: int = 0  # f(*(a, b)), which takes the arguments' names away

    def __add__(self, other: Density) -> Density:
        return Density(*(count + more for count, more in zip(self, other, strict=True)))

    def per_thousand(self, count: int) -> float:
        """Returns a count for each 1,000 tokens."""
        return 1000 * count / max(self.tokens, 1)


LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def is_tuple_assignment(node: ast.AST) -> bool:
    """Says whether a statement assigns a written tuple to a written tuple."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def unpacks_a_tuple(node: ast.AST) -> bool:
    """Says whether a call unpacks a tuple that is written in the call."""
    return isinstance(node, ast.Call) and any(
        isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
        for argument in node.args
    )


def density(source: str) -> Density:
    """Counts the tokens of one file and its dense forms.

    >>> density("def f(x):\\n    'Adds.'\\n    return (x + 1 if x else 2)  # why")
    Density(code_lines=2, tokens=16, conditionals=1, tuple_assignments=0, walruses=0, unpacked_tuples=0)
    """
    tree = ast.parse(source)
    documentation = {
        line
        for _, docstring in docstring_nodes(tree)
        for line in range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
    }
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT and token.start[0] not in documentation
    ]
    nodes = list(ast.walk(tree))
    return Density(
        code_lines=len(
            {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
        ),
        tokens=len(tokens),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        tuple_assignments=sum(is_tuple_assignment(node) for node in nodes),
        walruses=sum(isinstance(node, ast.NamedExpr) for node in nodes),
        unpacked_tuples=sum(unpacks_a_tuple(node) for node in nodes),
    )


def densities(package: Path) -> dict[str, Density]:
    """Counts each folder of a package; "(root)" are the modules beside the folders."""
    by_folder: dict[str, Density] = defaultdict(Density)
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "(root)"
        by_folder[name] += density(path.read_text(encoding="utf-8"))
    return by_folder


def print_densities(package: Path) -> None:
    """Prints tokens and dense forms of each folder, the largest first."""
    by_folder = densities(package)
    titles = ("tokens", "a code line", "if-else", "a, b = x, y", ":=", "f(*(a, b))")
    print(f"\n{'per 1,000 tokens':<22}" + "".join(f"{title:>13}" for title in titles))
    rows = sorted(by_folder.items(), key=lambda item: -item[1].tokens)
    for name, counts in [*rows, ("all", sum(by_folder.values(), Density()))]:
        rates = map(
            counts.per_thousand, (counts.conditionals, counts.tuple_assignments, counts.walruses)
        )
        print(
            f"{name:<22}{counts.tokens:>13,}{counts.tokens / max(counts.code_lines, 1):>13.1f}"
            + "".join(f"{rate:>13.2f}" for rate in rates)
            + f"{counts.unpacked_tuples:>13}"
        )


def bindings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Local names that a file binds, with their lines: assignments, loop variables, arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def signatures(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The number of parameters of each function of a file, with its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            yield sum(argument.arg not in ("self", "cls") for argument in arguments), node.name


def concepts(source: str, tree: ast.Module) -> tuple[set[str], set[str]]:
    """Types and helpers of the package that a file uses: what a reader must know beforehand."""
    modules, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxspec":
            for alias in node.names:
                local = alias.asname or alias.name
                (
                    names
                    if re.search(rf"\b{local}\.\w", source) is None or local[0].isupper()
                    else modules
                ).add(local)
    for module in modules:
        names |= {f"{module}.{name}" for name in re.findall(rf"\b{module}\.(\w+)", source)}
    types = {name for name in names if name.split(".")[-1][0].isupper()}
    return types, names - types


def arrows(package: Path) -> set[tuple[str, str]]:
    """Pairs of packages, or of modules beside them, of which the first imports the second.

    The front doors, `jaxspec` itself and `jaxspec.drafters`, hand on names when these are asked
    for: they are left out.
    """
    files = {
        (".".join(path.relative_to(package.parent).with_suffix("").parts)): path
        for path in package.rglob("*.py")
    }
    found = set()
    for name, path in files.items():
        if name in ("jaxspec.__init__", "jaxspec.drafters.__init__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found |= {
                (name.split(".")[1], x.split(".")[1]) for x in imported if x.startswith("jaxspec.")
            }
    names = {name.split(".")[1] for name in files}
    return {(above, below) for above, below in found if above != below and below in names}


def floors(pairs: set[tuple[str, str]]) -> list[list[str]]:
    """Sorts packages into floors, the lowest first; packages that import each other end up together
    on the last one.

    >>> floors({("cli", "decode"), ("decode", "core"), ("cli", "core")})
    [['core'], ['decode'], ['cli']]
    """
    remaining, built = {name for pair in pairs for name in pair}, []
    while remaining:
        ready = {
            name
            for name in remaining
            if not any(above == name and below in remaining for above, below in pairs)
        }
        built.append(sorted(ready or remaining))
        remaining -= ready or remaining
    return built


def main() -> None:
    """Prints the counts of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1]
    )
    parser.add_argument(
        "--round", action="store_true", help="also trace one greedy round (imports the checkout)"
    )
    parser.add_argument(
        "--floors", action="store_true", help="also draw which packages import which"
    )
    parser.add_argument("--lines", action="store_true", help="also list the docstrings")
    options = parser.parse_args()
    package = options.checkout / "jaxspec"
    by_package: dict[str, Lines] = defaultdict(Lines)
    vague, bound, first_lines, documented = Counter(), 0, [], 0
    widest: list[tuple[int, str]] = []
    mentions = 0
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        parts = path.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "(root)"
        by_package[name] = Lines(
            *(a + b for a, b in zip(by_package[name], count_lines(source, tree), strict=True))
        )
        for local, _ in bindings(tree):
            bound += 1
            vague[local] += local in VAGUE
        for _, docstring in docstring_nodes(tree):
            documented += 1
            if NO_VERB.match(docstring.value.strip()):
                first_lines.append(
                    f"{path.relative_to(options.checkout)}:{docstring.lineno}: "
                    f"{docstring.value[:60]}"
                )
        widest += [
            (count, f"{path.relative_to(options.checkout)} {function}")
            for count, function in signatures(tree)
        ]
        mentions += re.search(r"mtp", source, re.IGNORECASE) is not None
    print(f"{'package':<22}" + "".join(f"{field:>12}" for field in Lines._fields))
    for name, lines in sorted(by_package.items(), key=lambda item: -item[1].total):
        print(f"{name:<22}" + "".join(f"{count:>12,}" for count in lines))
    total = Lines(*(sum(column) for column in zip(*by_package.values(), strict=True)))
    print(f"{'all':<22}" + "".join(f"{count:>12,}" for count in total))
    print_densities(package)
    wide = sum(count >= 7 for count, _ in widest)
    share = 100 * wide / len(widest)
    print(
        f"\nfunctions with 7 parameters or more: {wide} of {len(widest)} ({share:.1f} %); the "
        "widest:"
    )
    for count, name in sorted(widest, reverse=True)[:5]:
        print(f"  {count:>3} {name}")
    vague_total = sum(vague.values())
    print(
        f"vague local names: {vague_total} of {bound} bindings ({1000 * vague_total / bound:.1f} "
        "of 1,000)"
    )
    print("  " + ", ".join(f"{name} {count}" for name, count in vague.most_common(12) if count))
    print(
        f"docstrings that begin with Of, That, As, Those, All or Raises: {len(first_lines)} of "
        f"{documented}"
    )
    print("".join(f"  {line}\n" for line in first_lines if options.lines), end="")
    print(f"files that name MTP, one kind of draft head: {mentions}")
    speculative = package / "decode" / "speculative.py"
    source = speculative.read_text(encoding="utf-8")
    types, helpers = concepts(source, ast.parse(source))
    print(f"decode/speculative.py: {len(types)} types and {len(helpers)} helpers to know")
    if options.floors:
        pairs = arrows(package)
        built = floors(pairs)
        print(
            f"{sum(map(len, built))} packages and modules, {len(pairs)} arrows, {len(built)} "
            "floors:"
        )
        print(
            "".join(
                f"  {number:>2} {', '.join(names)}\n"
                for number, names in reversed([*enumerate(built)])
            ),
            end="",
        )
    if options.round:
        command = [sys.executable, "-c", TRACED_ROUND]
        environment = {**os.environ, "PYTHONPATH": str(options.checkout)}
        run = subprocess.run(
            command,
            cwd=options.checkout,
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        for part in ("call", "round"):
            rows = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith(part)]
            lines = sum(int(count) for _, count in rows)
            print(f"one greedy {part} passes through {len(rows)} files, {lines:,} lines:")
            print("  " + ", ".join(name for name, _ in rows))


if __name__ == "__main__":
    main()
