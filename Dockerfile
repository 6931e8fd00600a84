# One image for SuperLink, SuperNodes and the apps' processes: deploy/compose.yaml says which is which.
#   docker build -t ravan-flwr .
#   docker build -t ravan-flwr --build-arg TORCH_INDEX=ADDRESS .    # of PyTorch's wheels for CPUs
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
# Where torch comes from. Empty: the index that pip is configured for, whose wheels are for CUDA
# as a rule. PyTorch's page "Get started" gives the address of its wheels for CPUs, a tenth as
# large, and for each version of CUDA.
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
# What changes seldom comes first, so that a change of the code does not install torch again,
# whose version is that of constraints.txt.
COPY constraints.txt ./
# hadolint ignore=DL3013
RUN pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY ravan_flwr ravan_flwr
RUN pip install --constraint constraints.txt ".[privacy,quantize]"

FROM python:${PYTHON}-slim-bookworm
# The user must be able to read the secrets, which belong to the user who made them.
ARG UID=1000
RUN useradd --uid "$UID" --home-dir /var/lib/ravan-flwr --create-home --shell /usr/sbin/nologin ravan
COPY --from=build /opt/venv /opt/venv
# The app's source, for `flwr run /app NAME`.
COPY --from=build /app /app
COPY deploy/health.py /app/deploy/health.py
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/var/lib/ravan-flwr \
    FLWR_HOME=/var/lib/ravan-flwr \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1 \
    PYTHONUNBUFFERED=1
USER $UID
WORKDIR /var/lib/ravan-flwr
# HEALTH_URL and HEALTH_CA say where; without them it is a SuperNode's own address. A SuperNode's check waits for its
# connection to HEALTH_SUPERLINK.
HEALTHCHECK --interval=30s --timeout=90s --start-period=60s CMD ["python", "/app/deploy/health.py"]
CMD ["ravan-flwr", "--help"]
