# The software alone, for a person and for a worker's containers; checkout, home and secrets are mounted.
#   docker build -t epsilonflow:0.2.0 .
#   docker run --rm -it -v "$PWD:/checkout" -v epsilonflow-home:/home/epsilonflow/data epsilonflow:0.2.0 epsilonflow run
# Keep the volume: ledger, owner key and runs are in it, and a container without it would have a budget of its own.
# What it may write: /checkout, /home/epsilonflow/data and /tmp. All else may be read-only, and any user id will do.
# The base is named by its digest (of Python 3.11.16), so each build has the same. Renew it with that which
#   docker buildx imagetools inspect python:3.11-slim-bookworm
# prints, or try another by --build-arg BASE=...
ARG BASE=python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84
FROM ${BASE}

# git: a checkout is a repository; Debian has one version of it. libpq comes with psycopg[binary].
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/epsilonflow
COPY pyproject.toml requirements.lock README.md LICENSE ./
# One index, pip's own or the one that you name by --build-arg PIP_INDEX_URL=..., and only files of known content.
ARG PIP_INDEX_URL
RUN python -m pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY epsilonflow ./epsilonflow
COPY flows ./flows
COPY tasks ./tasks
COPY algorithms ./algorithms
COPY data ./data
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation .

RUN useradd --no-create-home --uid 1000 --gid 0 epsilonflow \
    && mkdir -p -m 770 /home/epsilonflow/data \
    && chown epsilonflow:0 /home/epsilonflow/data
USER 1000
ENV HOME=/tmp \
    LOGNAME=epsilonflow \
    EPSILONFLOW_HOME=/home/epsilonflow/data \
    DVC_SITE_CACHE_DIR=/tmp/dvc \
    PGPASSFILE=/run/secrets/pgpass \
    GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/checkout \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    DO_NOT_TRACK=1 \
    DVC_NO_ANALYTICS=1
WORKDIR /checkout
ENTRYPOINT []
CMD ["epsilonflow", "--help"]
