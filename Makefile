# Two commands: `make demo` trains a model, `make test` checks everything. Both set up what they need in $(VENV).
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
AREAL_VENV ?= .venv-areal
VERL_VENV ?= .venv-verl
BIN := $(VENV)/bin
SEED ?= 0
JOBS ?= 2
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup mooncake sglang areal verl test-sglang demo test test-all conformance selfcheck mutants kills chaos lint figures clean help

help:
	@echo "make demo       a tiny model learns to sort digits, on this CPU, in a few minutes (SEED=0 ARGS='--set rollout.n=4')"
	@echo "make test       the tests that run in CI        make test-all   the slow ones too"
	@echo "make conformance  one set of tests over the embedded engine, or with ENGINE=sglang over a real SGLang server"
	@echo "make selfcheck  every layout and switch of the trainer against plain torch, with the errors measured"
	@echo "make mutants    small breakages, one at a time, each of which a named test must notice (JOBS=2)"
	@echo "make kills      engines killed, stopped and cut off at random while a run goes on (N=180 SEED=0; ENGINE=sglang N=20)"
	@echo "make chaos      every process killed and stopped at every transition of the ledger, and at random (N=300 SEED=0; PART=3 alone)"
	@echo "make sglang     a real SGLang server for this CPU, in an environment of its own   make test-sglang   its tests"
	@echo "make mooncake   the store of many hosts, with the one system library it needs (MOONCAKE=mooncake-cuda on a machine with CUDA)"
	@echo "make lint       ruff and mypy                   make figures    the benchmarks, quickly"

setup: $(VENV)/.ready

# Python 3.11 or newer is needed; torch is the CPU or the CUDA build, as the package index serves it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Headrace needs Python 3.11 or newer; install it, or say where: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing Headrace into $(VENV): 1.8 GB (more where torch brings CUDA), one to ten minutes, started at $$(date +%T)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[trainer,demo,dev]'
	@touch $@

# The wheel for this machine (one of the two extras), and libibverbs1, without which it cannot be loaded.
MOONCAKE ?= mooncake
ASK_MOONCAKE = $(BIN)/python -P -c "from store.mooncake_client import installed; print(installed())"
mooncake: $(VENV)/.mooncake
	@echo "Mooncake $$($(ASK_MOONCAKE)) can be used"

$(VENV)/.mooncake: $(VENV)/.ready store/mooncake_libraries.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(MOONCAKE)]'
	@$(ASK_MOONCAKE) >/dev/null 2>&1 || sh store/mooncake_libraries.sh $(VENV)/lib/mooncake-libraries
	@$(ASK_MOONCAKE) >/dev/null
	@touch $@

sglang: $(SGLANG_VENV)/.ready
	@echo "SGLang is in $(SGLANG_VENV); a run takes it with rollout.engine: sglang"

# The pins of SGLang and those of the trainer do not meet, so it lives apart. Torch and triton are most of the 2.6 GB.
$(SGLANG_VENV)/.ready: rollout/sglang/requirements.txt rollout/sglang/requirements-nodeps.txt
	@test -n "$(PYTHON)" || { echo "Headrace needs Python 3.11 or newer; install it, or say where: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "installing SGLang into $(SGLANG_VENV): 2.6 GB, one to ten minutes, started at $$(date +%T)"
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r rollout/sglang/requirements.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r rollout/sglang/requirements-nodeps.txt
	@echo "checking, at $$(date +%T): can the server be imported?"
	@PYTHONPATH=rollout/sglang/shims SGLANG_USE_CPU_ENGINE=1 $(SGLANG_VENV)/bin/python -P -W ignore -c \
	  "import sglang.srt.entrypoints.http_server, torch; print('sglang', sglang.__version__, 'with torch', torch.__version__)"
	@touch $@

# The peer of benchmarks.driver, 1.8 GB, most of it torch.
areal: $(AREAL_VENV)/.ready

$(AREAL_VENV)/.ready: benchmarks/areal-requirements.txt
	@test -n "$(PYTHON)" || { echo "AReaL needs Python 3.11 or newer; install it, or say where: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(AREAL_VENV)
	$(AREAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/areal-requirements.txt
	$(AREAL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps areal==1.0.4
	@$(AREAL_VENV)/bin/python -P -W ignore -c "import areal.engine.sglang_remote, areal.workflow.rlvr; print('areal', areal.__version__)"
	@touch $@

# The peer of benchmarks.plan, 1.5 GB, most of it torch.
verl: $(VERL_VENV)/.ready

$(VERL_VENV)/.ready: benchmarks/verl-requirements.txt
	@test -n "$(PYTHON)" || { echo "verl needs Python 3.11 or newer; install it, or say where: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/verl-requirements.txt
	$(VERL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	@$(VERL_VENV)/bin/python -P -W ignore -c "import verl.utils.seqlen_balancing; print('verl', verl.__version__)"
	@touch $@

demo: setup
	$(BIN)/python -P examples/sort_digits/demo.py --seed $(SEED) $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-sglang: setup sglang
	$(BIN)/python -m pytest -m sglang $(ARGS)

test-all: setup
	$(BIN)/python -m pytest $(ARGS)

# The same tests over both engines: ENGINE=embedded, or ENGINE=sglang for the real server on this machine's CPU.
ENGINE ?= embedded
conformance: setup
	ENGINE=$(ENGINE) $(BIN)/python -m pytest tests/conformance $(ARGS)

selfcheck: setup
	$(BIN)/python -m pytest -s tests/trainer/test_layouts.py tests/trainer/test_objectives.py tests/trainer/test_moe.py tests/trainer/test_switches.py tests/trainer/test_resharding.py $(ARGS)

mutants: setup
	$(BIN)/python -P tests/mutants.py --jobs $(JOBS) $(ARGS)

# Afterwards every row is scored again with the weights it names.
KILLS_WITH_embedded := not sglang
KILLS_WITH_sglang := sglang
kills: setup
	N=$(or $(N),180) SEED=$(SEED) $(BIN)/python -m pytest -s -m "$(KILLS_WITH_$(ENGINE))" tests/test_engine_kills.py $(ARGS)

# In parts of 25 kills, each a run of its own. What a failed part did is printed; PART= with the same N and SEED repeats it.
chaos: setup
	N=$(or $(N),300) SEED=$(SEED) $(if $(PART),PART=$(PART)) $(BIN)/python -m pytest -s tests/test_chaos.py $(if $(PART),,tests/test_large_numbers.py) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

figures: setup
	$(BIN)/python -m benchmarks.overlap --quick
	$(BIN)/python -m benchmarks.start --quick
	$(BIN)/python -m benchmarks.trainer --quick
	$(BIN)/python -m benchmarks.client --quick
	$(BIN)/python -m benchmarks.recovery --quick
	$(BIN)/python -m benchmarks.push --quick
	$(BIN)/python -m benchmarks.handover --quick
	$(BIN)/python -m benchmarks.bound --quick
	$(BIN)/python -m benchmarks.ledger --quick
	$(BIN)/python -m benchmarks.plan --quick

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(VERL_VENV) dist runs demo_summary.json
