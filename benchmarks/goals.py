"""What the benchmarks must show, as data. A figure is a median, and each ratio is of one interleaved run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """`figure` names what a group yields, `at` says for which size or number of ranks. At most `limit` is good."""

    figure: str
    group: str
    text: str
    limit: float
    at: str = ""
    unit: str = "x"


GOALS = (
    Goal("save/raw", "saving", "durable save / raw write+fsync", 0.85, "1 GB"),
    Goal("save/raw", "saving", "durable save / raw write+fsync", 0.85, "3 GB"),
    Goal("save/torch", "saving", "durable save / torch.save+fsync", 0.5, "3 GB"),
    Goal("save/dcp", "saving", "durable save / dcp.save", 0.5, "3 GB"),
    Goal("stall/memcpy", "stalls", "async stall / one memcpy into warm buffers", 1.15, "1 GB"),
    Goal("first stall/memcpy", "stalls", "first async stall after prepare() / one memcpy", 1.5, "1 GB"),
    Goal("durable/dcp", "stalls", "async time to durable / DCP async (thread)", 0.4, "1 GB"),
    Goal("step, median", "training", "training step while saving / alone, median step", 1.12, "1 GB"),
    Goal("step, worst", "training", "training step while saving / alone, worst step", 1.6, "1 GB"),
    Goal("memory", "memory", "peak extra memory of async saving / state size", 1.05, "50 saves"),
    Goal("memory growth", "memory", "the same, last ten saves beyond the first ten", 0.02, "50 saves"),
    Goal("load/raw, warm", "loading", "verified load into live state / raw pread, warm", 1.35, "1 GB"),
    Goal("load/raw, cold", "loading", "verified load into live state / raw pread, cold", 1.0, "1 GB"),
    Goal("load/torch, warm", "loading", "the same / torch.load(weights_only)+copy, warm", 0.35, "1 GB"),
    Goal("load/torch, cold", "loading", "the same / torch.load(weights_only)+copy, cold", 0.6, "1 GB"),
    Goal("load/dcp, warm", "loading", "the same / dcp.load, warm", 0.35, "1 GB"),
    Goal("load/dcp, cold", "loading", "the same / dcp.load, cold", 0.6, "1 GB"),
    Goal("restore bytes", "ranks", "bytes read by all ranks' restore / state size, cold", 1.05, "2 ranks"),
    Goal("restore bytes", "ranks", "bytes read by all ranks' restore / state size, cold", 1.05, "4 ranks"),
    Goal("restore wall", "ranks", "restore / best of {read once + broadcast, every rank reads}", 1.2, "2 ranks"),
    Goal("restore wall", "ranks", "restore / best of {read once + broadcast, every rank reads}", 1.2, "4 ranks"),
    Goal("parallel save", "ranks", 'parallel save / "each rank writes its share"', 1.25, "2 ranks"),
    Goal("s3 put, CPU", "s3", "S3 payload up: client CPU / obstore's put", 1.25),
    Goal("s3 put, wall", "s3", "S3 payload up: seconds / obstore's put", 1.1),
    Goal("s3 get, CPU", "s3", "S3 payload down: client CPU / obstore's get", 1.25),
    Goal("s3 get, wall", "s3", "S3 payload down: seconds / obstore's get", 1.1),
    Goal("commit", "metadata", "commit beyond the payload's own fsync, local disk", 20.0, unit="ms"),
    Goal("latest", "runs", "`latest`, 10 and 10,000 checkpoints: slower / faster", 1.2, "10,000 checkpoints"),
    Goal("replay", "runs", "log replay with a snapshot", 1.0, "100,000 records", unit="s"),
    Goal("crowd, seconds", "crowd", "all ranks join at once, service on one core", 10.0, "10,000 ranks", unit="s"),
    Goal("crowd, errors", "crowd", "the same, ranks without an answer", 0.0, "10,000 ranks", unit=""),
    Goal("crowd, memory", "crowd", "the same, memory of the service", 512.0, "10,000 ranks", unit="MB"),
    Goal("restart", "restart", "kill to first new step beyond torchrun's own restart", 1.0, "4 ranks", "s"),
)
FIGURES = frozenset(goal.figure for goal in GOALS)
