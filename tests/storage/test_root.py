"""URLs, markers, and making a root."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptd import layout
from ckptd.errors import CkptdError, Corrupt, Invalid, NotFound, NotInitialised
from ckptd.storage import init_root, open_storage
from ckptd.storage.local import LocalStorage
from ckptd.storage.memory import MemoryStorage, shared
from ckptd.testing.storage_contract import together


def test_init_then_open(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/root"
    uuid = init_root(url)
    marker = json.loads((tmp_path / "root" / layout.ROOT_MARKER).read_bytes())
    assert marker == {"format": 1, "storage_uuid": uuid}
    assert open_storage(url).check_root() == uuid


def test_T4_a_second_init_changes_nothing(tmp_path: Path) -> None:
    marker = tmp_path / layout.ROOT_MARKER
    uuid = init_root(str(tmp_path))
    before = (marker.read_bytes(), marker.stat().st_ino)
    assert init_root(f"file://{tmp_path}?publish=lock") == uuid
    assert (marker.read_bytes(), marker.stat().st_ino) == before


def test_the_parent_of_a_new_root_must_exist(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="does not exist"):
        init_root(f"file://{tmp_path}/not/mounted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("query", ["", "?publish=lock"])
def test_T4_racing_inits_end_with_one_uuid(tmp_path: Path, query: str) -> None:
    for round_ in range(8):
        url = f"file://{tmp_path}/root{round_}{query}"
        uuids: list[str] = []

        def init(url: str = url, uuids: list[str] = uuids) -> None:
            uuids.append(init_root(url))

        assert together([init] * 8) == [None] * 8
        assert set(uuids) == {open_storage(url).check_root()}
        assert len(uuids) == 8


def test_racing_inits_of_two_processes(tmp_path: Path) -> None:
    program = "import sys; from ckptd.storage import init_root; print(init_root(sys.stdin.readline().strip()))"
    racers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(f"file://{tmp_path}/root\n")
        racer.stdin.flush()
    uuids = {racer.communicate(timeout=60)[0].strip() for racer in racers}
    assert uuids == {open_storage(f"{tmp_path}/root").check_root()}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ('{"format":2,"storage_uuid":"u"}', Invalid, "format 2.*knows format 1"),
        ('{"format":true,"storage_uuid":"u"}', Corrupt, "number as format"),
        ('{"storage_uuid":"u"}', Corrupt, "number as format"),
        ('{"format":1}', Corrupt, "storage_uuid"),
        ('{"format":1,"storage_uuid":7}', Corrupt, "storage_uuid"),
        ("[]", Corrupt, "JSON object"),
        ("", Corrupt, "not JSON"),
        ("\x00\xff", Corrupt, "not JSON"),
    ],
)
def test_a_marker_that_is_not_ours(tmp_path: Path, text: str, kind: type[CkptdError], says: str) -> None:
    (tmp_path / layout.ROOT_MARKER).write_bytes(text.encode("latin-1"))
    for call in (open_storage, init_root):
        with pytest.raises(kind, match=says):
            call(str(tmp_path))
    assert (tmp_path / layout.ROOT_MARKER).read_bytes() == text.encode("latin-1")


def test_a_later_version_may_add_keys_to_the_marker(tmp_path: Path) -> None:
    (tmp_path / layout.ROOT_MARKER).write_text('{"format":1,"storage_uuid":"u","note":"new"}')
    assert open_storage(str(tmp_path)).check_root() == "u"


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("file://{}/a", "file://{}/a"),
        ("file://{}//a/", "file://{}/a"),
        ("{}/a/.", "file://{}/a"),
        ("{}/a?publish=link", "file://{}/a"),
        ("file://{}/a/?publish=lock", "file://{}/a?publish=lock"),
    ],
)
def test_the_url_of_a_storage_opens_it_again(tmp_path: Path, url: str, normal: str) -> None:
    init_root(f"{tmp_path}/a")
    storage = open_storage(url.format(tmp_path))
    assert storage.url == normal.format(tmp_path)
    again = open_storage(storage.url)
    assert (again.url, again.check_root()) == (storage.url, storage.check_root())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("relative/path", "absolute"),
        ("", "absolute"),
        ("file://host/path", "absolute"),
        ("file://relative", "absolute"),
        ("file:///a/../b", "without"),
        ("file:///a?publish=hope", "publish=lock"),
        ("/a?", "publish=lock"),
        ("s3://", "a bucket"),
        ("gs://", "a bucket"),
        ("gs://Bucket/prefix", "a bucket"),
        ("gs://bucket/a b", "prefix"),
        ("gs://bucket/a#b", "prefix"),
        ("gs://bucket/a/../b", "plain names"),
        ("abfs://container/prefix?publish=lock", "deadline_seconds"),
        ("az://container/prefix?deadline_seconds=0", "deadline_seconds"),
        ("abfs://container@account.dfs.core.windows.net/prefix", "container"),
        ("gcs://bucket/prefix", "not known whether they create an object only where none is"),
        ("local:///tmp/root", "not known whether they create"),
        ("sftp://host/root", "not known whether they create"),
        ("hf://datasets/one", "not known whether they create"),
        ("webdav://host/root", "not known whether they create"),
        ("memory://", "name"),
        ("memory://a/b", "name"),
        ("memory://a?publish=lock", "name"),
    ],
)
def test_urls_that_are_refused(url: str, says: str) -> None:
    for call in (open_storage, init_root):
        with pytest.raises(Invalid, match=says) as caught:
            call(url)
        assert caught.value.fields["field"] == "url"


def test_T3_a_root_without_marker_is_not_opened(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}", f"file://{tmp_path}/missing", "memory://test-root-unmarked"):
        with pytest.raises(NotInitialised) as caught:
            open_storage(url)
        assert "a drive that is not mounted" in caught.value.message
        assert f"ckptd init {url}" in caught.value.do
    assert list(tmp_path.iterdir()) == []


def test_a_memory_storage_is_found_by_its_name() -> None:
    uuid = init_root("memory://test-root-named")
    assert init_root("memory://test-root-named") == uuid
    storage = open_storage("memory://test-root-named")
    storage.put("runs/a/log/1", [b"x"], 1)
    assert open_storage(storage.url).get("runs/a/log/1", 1) == b"x"
    assert shared("test-root-named") is storage


def test_memory_storages_of_one_test_are_apart() -> None:
    one, two = MemoryStorage(), MemoryStorage()
    one.put("runs/a/log/1", [b"x"], 1)
    assert two.list("runs") == []
    assert one.check_root() != two.check_root()
    assert open_storage(one.url) is one


def test_an_unmarked_memory_storage_gives_no_answers() -> None:
    storage = MemoryStorage(marked=False)
    calls: list[Callable[[], object]] = [
        lambda: storage.put("runs/a/log/1", [b"x"], 1),
        lambda: storage.get("runs/a/log/1", 1),
        lambda: storage.list("runs"),
        lambda: storage.delete("runs/a/log/1"),
    ]
    for call in calls:
        with pytest.raises(NotInitialised):
            call()
    storage.initialise()
    with pytest.raises(NotFound):
        storage.get("runs/a/log/1", 1)


def test_an_initialised_root_is_not_moved_by_its_url_spelling(tmp_path: Path) -> None:
    uuid = init_root(str(tmp_path))
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)  # the root itself may be a link; below it none is followed
    assert LocalStorage(link).check_root() == uuid
