"""The protocol and the client over a real S3 server: a run from its first record to a quarantined checkpoint."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ckptd.ledger import Ledger
from ckptd.reading import observe
from ckptd.records import Observer
from ckptd.second import read_in_new_process
from ckptd.storage import init_root, open_storage
from ckptd.storage.base import Storage
from ckptd.wire import BeginRequest, DamageReport, OpenRequest
from ckptd_client import CheckpointClient, incarnation, patience
from tests.client.ranks import on_threads, results
from tests.core.by_hand import RUN, A, B, overwrite, write_save

torch.set_num_threads(1)


@pytest.fixture
def storage(s3_url: str) -> Storage:
    init_root(s3_url)
    return open_storage(s3_url)


def start(ledger: Ledger, attempt: str, *, fallback_of: int | None = None) -> tuple[int, int | None]:
    """The generation, and the step it resumes from."""
    if fallback_of is None:
        ledger.open(RUN, OpenRequest(attempt=attempt, job="job", host="host"))
    answer = ledger.begin(RUN, BeginRequest(attempt=attempt, job="job", world=2, fallback_of=fallback_of))
    return answer.generation, answer.checkpoint.step if answer.checkpoint else None


def test_a_run_with_a_damaged_checkpoint_falls_back(storage: Storage) -> None:
    ledger = Ledger(storage, second_reader=read_in_new_process)
    assert start(ledger, A) == (1, None)
    ledger.ready(RUN, A, 1)
    for step in (5, 10):
        ledger.commit(RUN, write_save(storage, 1, step))
    ledger.commit(RUN, write_save(storage, 1, 15))

    assert start(ledger, B) == (2, 15)
    newest = ledger.checkpoint_at(RUN, 15)
    ref = next(iter(ledger.manifest(newest.manifest).objects()))
    data = bytearray(storage.get(ref.key, ref.size))
    data[20] ^= 1
    overwrite(storage, ref.key, bytes(data))
    found = observe(storage, ref)
    assert found is not None
    report = DamageReport(save=newest.save, damage=found, reader=Observer(host="other", process="pid 1"))
    ledger.report_damage(RUN, report)
    assert start(ledger, B, fallback_of=2) == (3, 10)
    ledger.ready(RUN, B, 3)

    again = Ledger(open_storage(storage.url))  # nothing remembered
    latest = again.latest(RUN)
    assert (latest.answer, latest.checkpoint.step if latest.checkpoint else None) == ("found", 10)
    assert again.runs() == [RUN]


def test_two_ranks_save_and_resume(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTD_URL", "CKPTD_RUN", "CKPTD_TOKEN", "CKPTD_STORAGE", "CKPTD_JOB", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(patience, "FIRST_SECONDS", 0.02)
    monkeypatch.setattr(incarnation, "RETRY_SECONDS", 0.02)
    init_root(s3_url)

    def life(rank: int, store: HashStore, saves: tuple[int, ...]) -> tuple[int, float]:
        state: dict[str, object] = {"weight": torch.zeros(1000), "epoch": 0}
        with CheckpointClient(s3_url, RUN, rank=rank, world_size=2, store=store) as client:
            resumed = client.restore(state)
            weight = state["weight"]
            assert isinstance(weight, torch.Tensor)
            before = float(weight.sum())
            for step in saves:
                weight.fill_(float(step))
                client.save(state, step=step, per_rank={"rank": rank}, wait=True)
            return resumed, before

    for saves, expected in (((1, 2), (0, 0.0)), ((3,), (2, 2000.0)), ((), (3, 3000.0))):
        store = HashStore()
        assert results(on_threads([partial(life, rank, store, saves) for rank in range(2)])) == [expected] * 2
    assert [checkpoint.step for checkpoint in Ledger(open_storage(s3_url)).checkpoints(RUN)] == [1, 2, 3]
