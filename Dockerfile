# Two images: `docker build --target control-plane .` (balancer, gateway, command line; no torch) and
# `docker build --target worker .` (the ranks). A container runs any `equipoise` command.

FROM python:3.11-slim-bookworm AS built
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY services /src/services
COPY model /src/model
COPY kernels /src/kernels
COPY protos /src/protos
WORKDIR /src
RUN python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir -c constraints.txt '.[kubernetes,tracing]'

FROM built AS built-worker
RUN /opt/venv/bin/pip install --no-cache-dir -c constraints.txt '.[worker,kernels]'

FROM python:3.11-slim-bookworm AS control-plane
# Machine code for any x86-64 of the last ten years; another CPU compiles at its first start.
ARG PLANNER_CPU=x86-64-v3
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CPU_NAME=$PLANNER_CPU
COPY --from=built /opt/venv /opt/venv
RUN NUMBA_CACHE_DIR=/opt/equipoise/compiled python -m equipoise.planning.warm_up
USER 10001:10001
ENTRYPOINT ["equipoise"]

FROM python:3.11-slim-bookworm AS worker
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
COPY --from=built-worker /opt/venv /opt/venv
USER 10001:10001
ENTRYPOINT ["equipoise"]
