"""`python -m ckptd`: the command line."""

from ckptd.cli.main import run

if __name__ == "__main__":
    run()
