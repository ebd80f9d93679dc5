"""A whole cluster in one process, under virtual time, on a storage that does its worst; one seed replays it exactly.

    python -m ckptd.testing.sim --seed 7                 # one history, with what happened in it
    python -m ckptd.testing.sim --operations 1000000     # as many seeds as that takes

The ledger, the log, the fold, retention and the keeper are the real ones. What talks to them are actors: ranks that
start, vote, load, save and commit in the order in which `ckptd_client` does, services, keepers, people, readers.
Each of their storage calls is a place where another actor may go on, and where a process may die, or stop and wake
up late.

`baton` lets one actor run at a time · `drive` is the storage and `weather` its faults · `truth` checks every record
as it lands · `job`, `saves`, `people` are the actors · `world` puts one seed together · `search` runs many.
"""
