# The two commands of a newcomer: `make serve` and `make test`. Each does all the set-up it needs.
.DEFAULT_GOAL := help
.PHONY: help install serve test test-fast clients store-test applications families fuzz schemas test-engines test-vllm test-sglang hostile first-hour faults helm-test accuracy walk browser-test compose-test image lint format typecheck bench trace-request docs size loadtest up down clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
# Directory of Helm's library, with which `make helm-test` renders the chart.
HELM   := .cache/helm
# Passwords of the compose stack's Redis, search process and PostgreSQL.
PASSWORDS := REDIS_GATEWAY_PASSWORD REDIS_WORKER_PASSWORD VLM_SEARCH__TOKEN POSTGRES_PASSWORD
# Tests start hundreds of processes, which start quickly only with cached bytecode; a shell may disable the cache.
unexport PYTHONDONTWRITEBYTECODE
# pip's options for torch. An index of CPU builds saves gigabytes of CUDA on a laptop.
TORCH_ARGS ?=

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; say which with: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH_ARGS) torch torchvision
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --editable '.[torch,traces,search,store,oidc]' --group dev
	touch $(STAMP)

install: $(STAMP)  ## set up .venv with everything

serve: $(STAMP)  ## start Redis, a gateway on 127.0.0.1:8000 and a worker for each built-in model; ARGS: options of vlm serve
	$(BIN)/vlm serve $(or $(ARGS),--also shapes-clip)

# Three processes, because tests mostly wait; each runs one test file at a time. With ARGS, one process runs the tests.
test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest $(or $(ARGS),-n 3 --dist loadfile --no-loadscope-reorder)

# Gateway, queue, worker and scheduling: no torch, no whole fleet, no media, no fuzzing.
FAST := tests/contract/test_call_queue.py tests/contract/test_surface.py tests/deploy tests/engines/core \
	tests/engines/mock tests/gateway tests/meta tests/shared tests/worker
SLOW := tests/worker/node tests/worker/prepare tests/gateway/test_fuzz.py tests/deploy/test_exit_codes.py \
	tests/meta/test_dependencies.py
test-fast: $(STAMP)  ## run the quick tests, without torch or a whole fleet: a minute and a half on two cores
	$(BIN)/python -m pytest $(FAST) $(addprefix --ignore=,$(SLOW)) $(or $(ARGS),-n 3 --dist loadfile --no-loadscope-reorder)

families: $(STAMP)  ## test every model family in every way of computing tokens, and check the table of docs/models.md
	TESTS_LONG=1 $(BIN)/python -m pytest tests/engines/torch_backend/models \
		tests/engines/torch_backend/test_equivalence.py tests/engines/torch_backend/ops \
		tests/engines/torch_backend/lora tests/engines/torch_backend/loading tests/engines/packages tests/contract \
		tests/e2e/test_transformers_models.py tests/e2e/test_photos.py $(ARGS)

clients: $(STAMP)  ## run published clients (SDKs, LiteLLM, Claude Code, Codex ...), llm-comply and the HTTP tests of vLLM; ARGS=--write writes docs/clients.md
	$(BIN)/python -m tests.clients.run $(ARGS)

fuzz: $(STAMP)  ## send thousands of requests made from the OpenAPI document, and thousands of damaged images and frames
	FUZZ_EXAMPLES=250 $(BIN)/python -m pytest tests/gateway/test_fuzz.py tests/gateway/api/chat/test_streams.py \
		tests/worker/prepare/test_decoder_pool.py -s $(ARGS)

schemas: $(STAMP)  ## check the grammars of the 11,305 schemas of MaskBench (MASKBENCH=a checkout; else cloned); takes minutes
	$(BIN)/python -m tests.schemas.run $(ARGS)

test-engines: $(STAMP)  ## build llama-server once (20 minutes), download the wheels of vLLM and SGLang, and test engines behind HTTP
	$(BIN)/python -m tests.engines.upstream.llama
	$(BIN)/python -m tests.engines.upstream.test_wheels
	$(BIN)/python -m pytest tests/engines/upstream tests/contract/test_engine.py $(ARGS)

test-vllm: $(STAMP)  ## install vLLM for CPUs into a separate environment (3 GB), and test it as the engine of a fleet
	$(BIN)/python -m tests.engines.upstream.vllm $(TORCH_ARGS)
	TESTS_LONG=1 $(BIN)/python -m pytest tests/engines/upstream/test_servers.py \
	  tests/contract/test_engine.py tests/faults/test_upstream_long.py -k vllm $(ARGS)

test-sglang: $(STAMP)  ## install SGLang for CPUs into a separate environment (1 GB), and test it behind the fleet
	$(BIN)/python -m tests.engines.upstream.sglang
	TESTS_LONG=1 $(BIN)/python -m pytest tests/engines/upstream/test_servers.py tests/contract/test_engine.py \
	  tests/faults/test_upstream_long.py -k sglang $(ARGS)

hostile: $(STAMP)  ## send every attack of docs/security.md to real processes
	TESTS_LONG=1 $(BIN)/python -m pytest tests/hostile tests/engines/text/test_template_rendering.py $(ARGS)

browser-test: $(STAMP)  ## use the chat page in a headless chromium; screenshots in .cache/screenshots
	test -d .cache/axe || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target .cache/axe axe-playwright-python==0.1.8
	TESTS_LONG=1 $(BIN)/python -m pytest tests/browser $(ARGS)

first-hour: $(STAMP)  ## run the commands of a new user from the checkout, and installed from the wheel, by pipx and by uv
	TESTS_LONG=1 TORCH_ARGS='$(TORCH_ARGS)' $(BIN)/python -m pytest tests/e2e/test_first_hour.py $(ARGS)

faults: $(HELM)  ## inject every fault of docs/reliability.md into real processes; takes minutes
	TESTS_LONG=1 PYTHONPATH=$(HELM) $(BIN)/python -m pytest tests/faults tests/shared/queue/test_queue_model.py \
		tests/contract/test_call_queue.py tests/gateway/test_confirmed_writes.py tests/search/test_postgres.py \
		tests/config/test_helm.py tests/config/test_sentinel_script.py $(ARGS)
	test -d .cache/ray/ray || $(BIN)/pip install --quiet --disable-pip-version-check --target .cache/ray 'ray>=2.50'
	TESTS_LONG=1 PYTHONPATH=.cache/ray $(BIN)/python -m pytest tests/faults/test_ray_long.py $(ARGS)

$(HELM): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ helm-python-sdk==0.2.2
	touch $@

helm-test: $(HELM)  ## render and check the Helm chart with Helm's library, installed separately (75 MB)
	PYTHONPATH=$(HELM) $(BIN)/python -m pytest tests/config/test_helm.py $(ARGS)

accuracy: $(STAMP)  ## measure the accuracy of the built-in models: 6,000 questions in fp32, bf16, int8 and int4, and searches of 1,000 images; takes minutes
	TESTS_LONG=1 ACCURACY_SCENES=1000 CLIP_SCENES=1000 $(BIN)/python -m pytest -s tests/e2e/test_accuracy.py \
		tests/e2e/test_goals.py tests/e2e/test_shapes_clip.py $(ARGS)

walk: $(STAMP)  ## embed 20,000 texts with the built-in model, serve them, and search with curl
	WALK_TEXTS=20000 $(BIN)/python -m pytest -s tests/search/test_walk.py $(ARGS)

compose-test: $(STAMP)  ## start the compose stack on a docker engine, scale it, stop it under load; takes minutes
	COMPOSE_TEST=1 $(BIN)/python -m pytest -s tests/e2e/test_compose*.py $(ARGS)

applications: $(STAMP)  ## run applications: the examples on the built-in model, and sessions whose processes are killed; takes a minute
	TESTS_LONG=1 $(BIN)/python -m pytest tests/engines/application tests/integration/test_applications.py $(ARGS)

store-test: $(STAMP)  ## test packages and images in a bucket of moto, an S3-compatible server, installed separately
	test -x .cache/moto/bin/moto_server || { $(PYTHON) -m venv .cache/moto && .cache/moto/bin/pip install --quiet 'moto[server]>=5.1'; }
	MOTO_SERVER=.cache/moto/bin/moto_server $(BIN)/python -m pytest tests/shared/packages tests/shared/blobs \
		tests/integration/test_large_media.py $(ARGS)

lint: $(STAMP)  ## check format, lint, types and import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)  ## format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## measure gateway, queue and worker, compared with a bare FastAPI endpoint
	$(BIN)/vlm bench gateway $(ARGS)

trace-request: $(STAMP)  ## print the source files that a streamed chat request runs; ARGS="--engine torch --image"
	$(BIN)/python -m tests.trace_request $(ARGS)

docs: $(STAMP)  ## write the generated tables of the docs; ARGS=--numbers: sizes too
	$(BIN)/python -m tests.docs_tables $(ARGS)

size:  ## count the lines and files of product, training and benchmarks, tests and docs
	@$(PYTHON) -m tests.size

loadtest: $(STAMP)  ## load a fleet on the mock engine for half a minute, and write .cache/loadtest.html
	mkdir -p .cache
	$(BIN)/vlm loadtest --json .cache/loadtest.json --html .cache/loadtest.html $(ARGS)

CPU_TORCH := --index-url https://download.pytorch.org/whl/cpu
image:  ## build the image vlm-fleet:cpu, for `docker run vlm-fleet:cpu serve`; DEVICE=cuda: vlm-fleet:cuda
	docker build -f config/Dockerfile -t vlm-fleet:$(or $(DEVICE),cpu) --build-arg ENGINE=torch \
		--build-arg TORCH_ARGS='$(or $(TORCH_ARGS),$(if $(filter cuda,$(DEVICE)),,$(CPU_TORCH)))' .

up: .env  ## start the compose stack: Redis, a gateway and the built-in model `shapes` on the CPU
	docker compose up --build --detach --wait

.env:  ## create the passwords of the compose stack
	(umask 077; $(PYTHON) -c "import secrets; [print(f'{n}={secrets.token_hex(16)}') for n in '$(PASSWORDS)'.split()]" > $@)

down:  ## stop the compose stack
	docker compose down

clean:  ## remove what was installed and cached
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
