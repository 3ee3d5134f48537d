# The software alone, for a person and for a worker's containers; checkout, home and secrets are mounted.
#   docker build -t epsilonflow:0.2.0 .
#   docker run --rm -it -v "$PWD:/checkout" -v epsilonflow-home:/home/epsilonflow/data epsilonflow:0.2.0 epsilonflow run
# Keep the volume: ledger, owner key and runs are in it, and a container without it would have a budget of its own.
FROM python:3.11-slim-bookworm

# git: a checkout is a repository; Debian has one version of it. libpq comes with psycopg[binary].
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/epsilonflow
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY epsilonflow ./epsilonflow
COPY flows ./flows
COPY tasks ./tasks
COPY algorithms ./algorithms
COPY data ./data
# For a CPU, which takes far less room; for a GPU: --build-arg TORCH_INDEX=https://pypi.org/simple
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python -m pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c constraints.txt '.[postgres]'

RUN useradd --create-home --uid 1000 epsilonflow \
    && mkdir -m 700 /home/epsilonflow/data \
    && chown epsilonflow: /home/epsilonflow/data
USER 1000
ENV EPSILONFLOW_HOME=/home/epsilonflow/data \
    PGPASSFILE=/run/secrets/pgpass \
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/checkout \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    DO_NOT_TRACK=1 \
    DVC_NO_ANALYTICS=1
WORKDIR /checkout
ENTRYPOINT []
CMD ["epsilonflow", "--help"]
