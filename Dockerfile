# epsilonflow in a container. Ledger, owner key and runs live in the volume /home/flow/data: keep it, since a container
# without it would have a budget of its own.
FROM python:3.11-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home flow && mkdir -p /flow /home/flow/data && chown flow: /flow /home/flow/data
USER flow
WORKDIR /flow

COPY --chown=flow pyproject.toml constraints.txt README.md ./
COPY --chown=flow algorithms algorithms
COPY --chown=flow data data
COPY --chown=flow flows flows
COPY --chown=flow tasks tasks
RUN python -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu -c constraints.txt -e '.[postgres]'
COPY --chown=flow . .
RUN test -d .git || (git init -q && git -c user.name=flow -c user.email=flow@localhost commit -q --allow-empty -m image)

ENV PATH=/flow/.venv/bin:$PATH EPSILONFLOW_HOME=/home/flow/data DVC_NO_ANALYTICS=1 DO_NOT_TRACK=1
VOLUME /home/flow/data
ENTRYPOINT ["epsilonflow"]
CMD ["--help"]
