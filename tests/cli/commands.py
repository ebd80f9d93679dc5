"""Calling the command line in this process, on a new storage of either kind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptd import layout
from ckptd.cli import main as cli
from ckptd.storage import init_root
from ckptd.testing.seaweed import SeaweedProcess

Output = pytest.CaptureFixture[str]


def call(*arguments: str) -> int:
    """The command line in this process; its exit code."""
    before = sys.argv
    sys.argv = ["ckptd", *arguments]
    try:
        cli.run()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def rows(text: str) -> list[list[str]]:
    """What is printed where no terminal is, cell by cell."""
    return [line.split("\t") for line in text.splitlines()]


@contextmanager
def new_storage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an initialised storage of the kind in the fixture's parameter, `folder` or `s3`."""
    with pytest.MonkeyPatch.context() as patch:
        url = f"file://{tmp_path_factory.mktemp('drive')}/root"
        if request.param == "s3":
            seaweed: SeaweedProcess = request.getfixturevalue("seaweed")
            url = seaweed.url(f"test-{layout.new_nonce()}/root")
            for name, value in seaweed.env.items():
                patch.setenv(name, value)
        init_root(url)
        yield url
