# One door to everything. `make help` lists what there is.
PY := .venv/bin/python
STAMP := .venv/.installed
BENCH_STAMP := .venv/.installed-bench

.PHONY: help setup demo bench soak sim chaos nfs test tools lint types check cover image-check format clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: $(STAMP)  ## Make .venv with the pinned dependencies (every other target does it when needed)

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up .venv (pinned dependencies, about 1.3 GB with torch; takes a minute or two)"
	python3 -m venv .venv
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)  ## Train on two nodes, kill a rank, kill a node, resume, compare (STORAGE=s3: on an S3 server)
	@$(PY) -m ckptd_trainer.demo $(if $(STORAGE),--storage $(STORAGE))

bench: $(BENCH_STAMP)  ## Beside peers and the machine's limits, some minutes (FULL=1: all sizes; ONLY=saving: a group)
	$(PY) -m benchmarks $(if $(FULL),--full,--quick) $(if $(ONLY),--only $(ONLY))

$(BENCH_STAMP): $(STAMP)
	.venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $(BENCH_STAMP)

soak: $(STAMP)  ## Processes and services on the same runs, killed now and then (STORAGE=s3 MINUTES=10 SEED=1)
	$(PY) -m ckptd.testing.soak --storage $(or $(STORAGE),file) --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

sim: $(STAMP)  ## Simulated clusters on a failing storage (OPERATIONS=10000000; SEED=7 replays one), and the model, deeper
	$(PY) -m ckptd.testing.sim $(if $(SEED),--seed $(SEED)) $(if $(OPERATIONS),--operations $(OPERATIONS))
	$(PY) -m tests.model --deep
	$(PY) -m tests.model --weakened

chaos: $(STAMP) tools  ## Real faults on a real job (FAULTS=200 SEED=1 STORAGE=s3), then wrong bits and the whole crash sweep
	$(PY) -m ckptd.testing.chaos --faults $(or $(FAULTS),200) --storage $(or $(STORAGE),file) $(if $(SEED),--seed $(SEED))
	$(PY) -m tests.damage.flips --flips 10600 $(if $(SEED),--seed $(SEED))
	$(PY) -m tests.crash.sweep --all

nfs: $(STAMP)  ## A real NFS server and two clients, v3 and v4.2, in User-Mode Linux (as root; two minutes)
	scripts/test-tools nfs
	$(PY) scripts/nfs_check.py

test: tools check  ## Everything that must hold: lint, types, layers, all tests (as root: some mount file systems)
	$(PY) -m pytest -n 2 --dist loadfile

tools:
	@scripts/test-tools

check: lint types

lint: $(STAMP)  ## Style, and which layer may import which
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

types: $(STAMP)  ## mypy, strict
	.venv/bin/mypy

cover: $(STAMP)  ## The tests with line and branch coverage, child processes included
	rm -f .coverage .coverage.*
	$(PY) -m coverage run -m pytest
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report --skip-covered

image-check:  ## Build both images without a container engine and run them (as root, 4 GB in /tmp)
	python3 scripts/image_check.py

format: $(STAMP)  ## Bring the code into the house style
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:  ## Remove what was made, except .venv
	rm -rf demo-output bench-output dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
