# Two images: `docker build --target control-plane .` (balancer, gateway, command line; no torch) and
# `docker build --target worker .` (the ranks). A container runs any `equipoise` command. `make images` builds both.

FROM python:3.11-slim-bookworm AS built
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY services /src/services
COPY model /src/model
COPY kernels /src/kernels
COPY protos /src/protos
WORKDIR /src
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir -c constraints.txt '.[kubernetes,tracing]'
# Lists the installed packages for scanners (CycloneDX), from an environment of its own.
RUN python -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
 && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
      -o /opt/sbom.cdx.json /opt/venv/bin/python

FROM built AS built-worker
# PyPI's torch brings gigabytes of CUDA packages; --build-arg TORCH=cpu takes PyTorch's CPU build, or fails.
ARG TORCH=
RUN if [ "$TORCH" = cpu ]; then \
      set -- --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== constraints.txt)+cpu"; \
    fi \
 && /opt/venv/bin/pip install --no-cache-dir -c constraints.txt '.[worker,kernels]' "$@"
RUN /opt/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
      -o /opt/sbom.cdx.json /opt/venv/bin/python

FROM python:3.11-slim-bookworm AS control-plane
# Machine code for any x86-64 of the last ten years; another CPU compiles at its first start.
ARG PLANNER_CPU=x86-64-v3
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CPU_NAME=$PLANNER_CPU
COPY --from=built /opt/venv /opt/venv
COPY --from=built /opt/sbom.cdx.json /opt/equipoise/sbom.cdx.json
RUN NUMBA_CACHE_DIR=/opt/equipoise/compiled python -m equipoise.planning.warm_up
USER 10001:10001
ENTRYPOINT ["equipoise"]

FROM python:3.11-slim-bookworm AS worker
# Triton compiles a launcher for every kernel with the C compiler when the kernel is first used, and
# caches it where the root file system may be written; user 10001 has no home.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton
COPY --from=built-worker /opt/venv /opt/venv
COPY --from=built-worker /opt/sbom.cdx.json /opt/equipoise/sbom.cdx.json
USER 10001:10001
ENTRYPOINT ["equipoise"]
