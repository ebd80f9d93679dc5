"""`make chaos`: a torchrun job on two agents under a seeded plan of real faults, audited from its storage.

`python -m ckptd.testing.chaos --seed 7 --faults 200 --storage file`. The modules, from the ground up: `stub` and
`zygote` start ranks and agents in milliseconds, `job` is the job as the harness sees it, `site` what it runs on,
`plan` which fault comes when, `strikes` and its neighbours carry them out, `checks` says what must hold, `run` is
the run, `report` what is told of it.
"""
