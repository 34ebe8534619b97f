"""`python -m jaxspec`, which is the command `jaxspec` where it is not installed."""

from jaxspec.cli.main import app

if __name__ == "__main__":
    app(prog_name="jaxspec")
